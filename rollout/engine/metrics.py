"""What an engine counts. Outputs only: nothing reads them back to steer."""

from __future__ import annotations

from dataclasses import dataclass

from rollout.engine.active import Active


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineMetrics:
    """One reading. Counts and seconds are since the engine was made; `kv_used_frac`, running and waiting are of now.

    `busy_s` is the time spent in steps; `batch_occupancy_frac` the mean share of `max_batch_size` that a step computed.
    """

    num_steps: int
    num_requests: int
    num_finished: int
    num_cancelled: int
    num_preemptions: int
    num_prompt_tokens: int
    num_cached_tokens: int
    num_computed_tokens: int
    num_sampled_tokens: int
    busy_s: float
    tokens_per_s: float
    batch_occupancy_frac: float
    prefix_hit_frac: float
    mean_queue_s: float
    kv_used_frac: float
    num_running: int
    num_waiting: int


@dataclass(slots=True)
class Counters:
    """The running sums behind `EngineMetrics`."""

    num_steps: int = 0
    num_requests: int = 0
    num_started: int = 0
    num_finished: int = 0
    num_cancelled: int = 0
    num_preemptions: int = 0
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_computed_tokens: int = 0
    num_sampled_tokens: int = 0
    num_rows: int = 0
    busy_s: float = 0.0
    queue_s: float = 0.0

    def started(self, active: Active, now_s: float) -> None:
        """A request left the queue for the first time; its prompt and what of it is cached are known."""
        self.num_started += 1
        self.queue_s += now_s - active.arrived_s
        self.num_prompt_tokens += active.num_prompt
        self.num_cached_tokens += active.num_computed

    def reading(self, *, max_batch_size: int, kv_used_frac: float, num_running: int, num_waiting: int) -> EngineMetrics:
        """The sums and what follows from them."""
        return EngineMetrics(
            num_steps=self.num_steps,
            num_requests=self.num_requests,
            num_finished=self.num_finished,
            num_cancelled=self.num_cancelled,
            num_preemptions=self.num_preemptions,
            num_prompt_tokens=self.num_prompt_tokens,
            num_cached_tokens=self.num_cached_tokens,
            num_computed_tokens=self.num_computed_tokens,
            num_sampled_tokens=self.num_sampled_tokens,
            busy_s=self.busy_s,
            tokens_per_s=_ratio(self.num_sampled_tokens, self.busy_s),
            batch_occupancy_frac=_ratio(self.num_rows, self.num_steps * max_batch_size),
            prefix_hit_frac=_ratio(self.num_cached_tokens, self.num_prompt_tokens),
            mean_queue_s=_ratio(self.queue_s, self.num_started),
            kv_used_frac=kv_used_frac,
            num_running=num_running,
            num_waiting=num_waiting,
        )


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else 0.0

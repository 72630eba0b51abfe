"""Settings of the rollout workers (values in `conf/`, defaults here only)."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True, kw_only=True)
class RolloutConfig:
    """How episodes are sampled.

    A round asks for `prompts_per_round` tasks, `group_size` episodes each. `num_workers` 0 means one for each usable
    CPU, at most 4; `threads_per_worker` 0 shares the usable CPUs out evenly. `max_retries` bounds how often an episode
    that infrastructure broke is run again before it is masked; below `min_valid_frac` of unmasked episodes the round
    fails by name.
    """

    num_workers: int = 0
    threads_per_worker: int = 0
    prompts_per_round: int = 24
    group_size: int = 8
    temperature: float = 1.0
    max_retries: int = 2
    min_valid_frac: float = 0.5
    round_deadline_s: float = 600.0

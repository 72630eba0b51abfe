"""Turns what happened in a round into metrics, and shows them: metrics.jsonl, W&B, the progress display.

Metrics are outputs: nothing here is read back to steer.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np

from rl.advantage import Credit
from rl.evaluate import Evaluation, is_passed
from rl.learner.update_report import UpdateReport
from rl.metrics import MetricsLog, eval_metrics, stage_time
from rl.parity import ParityReport
from rl.progress import Progress
from rl.publish import Published
from rl.still import StillWatch
from rl.tracking import Tracker
from rollout.types import ScoredGroup, SpanOrigin, StopReason, Trajectory

_OF_LOGPROBS = {"parity/mean_abs_nats", "parity/max_abs_nats"}


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundFacts:
    """Everything that one round produced."""

    groups: Sequence[ScoredGroup]
    credit: Credit
    parity: ParityReport
    update: UpdateReport | None
    published: Published
    lr: float
    learner_version: int
    load_balance_coef: float
    router_z_coef: float
    num_resampled: int
    punishments: Sequence[float]


@dataclass(slots=True)
class Recorder:
    """Writes one row a round. Without `compares_logprobs` it says that the gate compared none."""

    log: MetricsLog
    tracker: Tracker
    progress: Progress
    still: StillWatch = field(default_factory=lambda: StillWatch(0))
    compares_logprobs: bool = True
    _times_s: dict[str, float] = field(default_factory=dict[str, float])
    _round_started_s: float = 0.0

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Show and time a stage of the round."""
        self.progress.stage(name)
        started = time.monotonic()
        if not self._times_s:
            self._round_started_s = started
        yield
        self._times_s[name] = self._times_s.get(name, 0.0) + time.monotonic() - started

    def record(self, number: int, facts: RoundFacts, evaluations: Sequence[Evaluation]) -> None:
        """Write round `number`."""
        values = round_metrics(facts, self._times_s.get("rollout", 0.0)) | self._times()
        for evaluation in evaluations:
            values |= evaluation_metrics(evaluation)
        if not self.compares_logprobs:
            values = {name: value for name, value in values.items() if name not in _OF_LOGPROBS}
        self._write(number, values)
        if facts.update is not None and (warning := self.still.observe(facts.published.codes_changed)):
            self.progress.say(warning)
        held_out = next((e.after_repair.rate for e in evaluations if e.after_repair.rate is not None), None)
        self.progress.advance(
            reward=values.get("reward/total"),
            pass_rate=values["pass_rate/train"],
            tokens_per_s=values["tokens_per_s"],
            parity=values.get("parity/mean_abs_nats", "not compared"),
            held_out=None if held_out is None else f"{held_out:.1%}",
        )

    def record_start(self, evaluations: Sequence[Evaluation], warm_start_loss: float | None = None) -> None:
        """Write round 0: the start, before reinforcement learning. `warm_start_loss` is `None` for a given model."""
        values = self._times()
        if warm_start_loss is not None:
            values["loss/warm_start"] = warm_start_loss
        for evaluation in evaluations:
            values |= evaluation_metrics(evaluation)
        self._write(0, values)

    def _times(self) -> dict[str, float]:
        values = {stage_time(name): seconds for name, seconds in self._times_s.items()}
        values["time/round_s"] = time.monotonic() - self._round_started_s
        self._times_s = {}
        return values

    def _write(self, number: int, values: Mapping[str, float]) -> None:
        self.log.write(number, values)
        self.tracker.log(number, values)


def evaluation_metrics(evaluation: Evaluation) -> dict[str, float]:
    """The row entries of a held-out evaluation."""
    rates = eval_metrics(evaluation.decoding.value, passed=evaluation.after_repair, first_turn=evaluation.first_turn)
    return rates | {"eval/num_tasks": float(len(evaluation.tasks))}


def round_metrics(facts: RoundFacts, rollout_s: float) -> dict[str, float]:
    """The metrics of a round; what was not measured (no update) is left out."""
    scored = [each for group in facts.groups for each in group.scored]
    trajectories = [each.trajectory for each in scored]
    valid = [each for each in scored if each.total is not None]
    solved = [each.trajectory for each in valid if is_passed(each.trajectory)]
    judged = [turn for trajectory in trajectories for turn in trajectory.evidence.turns]
    num_sampled = sum(trajectory.num_sampled_tokens for trajectory in trajectories)
    values = {
        **_reward_terms(facts.groups),
        "pass_rate/train": len(solved) / len(valid) if valid else 0.0,
        "pass_rate/first_turn": sum(t.num_turns == 1 for t in solved) / len(valid) if valid else 0.0,
        "entropy": facts.parity.entropy,
        "parity/mean_abs_nats": facts.parity.mean_abs_nats,
        "parity/max_abs_nats": facts.parity.max_abs_nats,
        "parity/flipped_routes": float(facts.parity.num_flipped),
        "parity/flipped_tokens": float(facts.parity.num_flipped_tokens),
        **_staleness(trajectories, facts.learner_version),
        "groups/total": float(len(facts.groups)),
        "groups/no_variance_frac": facts.credit.no_variance_frac,
        "groups/resampled": float(facts.num_resampled),
        "episodes/total": float(len(scored)),
        "episodes/overlong_punishment": float(np.mean(facts.punishments)),
        "episodes/masked": float(facts.credit.num_masked),
        "episodes/truncated": float(sum(t.stop not in (None, StopReason.TERMINATED) for t in trajectories)),
        "episodes/tampered": float(sum(t.evidence.tampered for t in trajectories)),
        "episodes/mean_turns": float(np.mean([t.num_turns for t in trajectories])),
        "episodes/violations": float(sum(any(turn.violations for turn in t.evidence.turns) for t in trajectories)),
        "calls/total": float(sum(turn.num_calls for turn in judged)),
        "calls/failed": float(sum(turn.num_call_errors for turn in judged)),
        "tokens/sampled": float(num_sampled),
        "tokens_per_s": num_sampled / rollout_s if rollout_s else 0.0,
        "lr": facts.lr,
        "codes_changed_frac": facts.published.codes_changed_frac,
        "scales_changed_frac": facts.published.scales_changed_frac,
        "publish/bytes": float(facts.published.num_bytes),
        "publish/bits_per_expert_param": facts.published.bits_per_expert_param,
    }
    values |= {f"codes_changed/layer_{layer}": frac for layer, frac in facts.published.codes_changed_by_layer.items()}
    if facts.credit.explained_variance is not None:
        values["value/explained_variance"] = facts.credit.explained_variance
    return values | _update_metrics(facts)


def _reward_terms(groups: Sequence[ScoredGroup]) -> dict[str, float]:
    """Mean score of every named node over the trajectories where it is not masked."""
    scores: defaultdict[str, list[float]] = defaultdict(list)
    for group in groups:
        for each in group.scored:
            for node in each.reward.walk():
                if node.score is not None:
                    scores[node.name].append(node.score)
    return {f"reward/{name}": float(np.mean(values)) for name, values in scores.items()}


def _staleness(trajectories: Sequence[Trajectory], learner_version: int) -> dict[str, float]:
    """Versions between sampling and learning: the mean of the sampled tokens, and the largest."""
    total = count = largest = 0
    for trajectory in trajectories:
        for segment in trajectory.segments:
            for span in segment.spans():
                if span.origin is SpanOrigin.SAMPLED and span.sampled_by is not None:
                    versions = learner_version - span.sampled_by.weight_version
                    largest = max(largest, versions)
                    total += versions * len(span.ids)
                    count += len(span.ids)
    return {"staleness/mean": total / count if count else 0.0, "staleness/max": float(largest)}


def _update_metrics(facts: RoundFacts) -> dict[str, float]:
    update = facts.update
    if update is None:
        return {}
    losses = {
        "loss/policy": update.policy_loss,
        "loss/balance": facts.load_balance_coef * update.balance_loss,
        "loss/router_z": facts.router_z_coef * update.router_z_loss,
        **update.terms,
    }
    memory = {} if update.peak_bytes is None else {"memory/peak_bytes": float(update.peak_bytes)}
    return {
        **losses,
        "loss/total": sum(losses.values()),
        "clip_frac": update.clip_frac,
        "advantage/std": float(np.concatenate([s.advantages_R for s in facts.credit.samples if s.trained]).std()),
        "kl/behavior_policy": update.kl_behavior_policy,
        "grad_norm": update.grad_norm,
        "tokens/trained": float(update.num_tokens),
        "expert_load/max_frac": float(update.expert_load_LE.max()),
        "expert_load/min_frac": float(update.expert_load_LE.min()),
        "experts/dead": float((update.expert_load_LE == 0).sum()),
        **memory,
        **update.rank_loads,
        **update.watched,
    }

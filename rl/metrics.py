"""The metrics of a run: their names, and the log that holds one row a round.

`metrics.jsonl` is the record of a run: one JSON object a line, on disk before the next round begins, each round once
even if the run was killed and resumed. Everything that shows metrics (W&B, the terminal, the report) is fed the same
values, and nothing in the training loop reads them back to steer.

Round 0 is the state before reinforcement learning (held-out evaluation, warm start); rounds 1, 2, ... are the updates.
"""

from __future__ import annotations

import difflib
import json
import logging
import math
import os
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from rl.statistics import PassRate

logger = logging.getLogger(__name__)

METRICS_FILE = "metrics.jsonl"
"""Name of the log in a run's folder."""


class MetricsError(ValueError):
    """A metric name, value or round that the log does not accept, or a log that cannot be read."""


class Direction(StrEnum):
    """Which way is better; `NEITHER` for a quantity to watch."""

    HIGHER = "higher"
    LOWER = "lower"
    NEITHER = "neither"


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricInfo:
    """What a metric is. `unit` is empty for a plain number."""

    name: str
    description: str
    unit: str = ""
    direction: Direction = Direction.NEITHER


def _info(name: str, unit: str, direction: Direction, description: str) -> MetricInfo:
    return MetricInfo(name=name, unit=unit, direction=direction, description=description)


_HIGHER, _LOWER, _NEITHER = Direction.HIGHER, Direction.LOWER, Direction.NEITHER

METRICS: Mapping[str, MetricInfo] = {
    info.name: info
    for info in (
        _info("reward/total", "", _HIGHER, "Mean root of the reward tree over the round's unmasked trajectories"),
        _info("pass_rate/train", "frac", _HIGHER, "Training trajectories that pass all hidden checks at the end"),
        _info("pass_rate/first_turn", "frac", _HIGHER, "Training trajectories that pass all hidden checks at once"),
        _info("eval/greedy", "frac", _HIGHER, "Held-out pass rate after repair, greedy decoding"),
        _info("eval/greedy_low", "frac", _NEITHER, "Lower bound of the 95 % interval of eval/greedy"),
        _info("eval/greedy_high", "frac", _NEITHER, "Upper bound of the 95 % interval of eval/greedy"),
        _info("eval/greedy_first_turn", "frac", _HIGHER, "Held-out pass rate of the first answer, greedy decoding"),
        _info("eval/sampled", "frac", _HIGHER, "Held-out pass rate after repair, sampled decoding"),
        _info("eval/sampled_low", "frac", _NEITHER, "Lower bound of the 95 % interval of eval/sampled"),
        _info("eval/sampled_high", "frac", _NEITHER, "Upper bound of the 95 % interval of eval/sampled"),
        _info("eval/sampled_first_turn", "frac", _HIGHER, "Held-out pass rate of the first answer, sampled decoding"),
        _info("eval/num_tasks", "tasks", _NEITHER, "Held-out tasks of this round's evaluation"),
        _info("entropy", "nats", _NEITHER, "Mean entropy of the policy over sampled tokens"),
        _info("kl/behavior_policy", "nats", _NEITHER, "Estimated KL(behavior || policy) a token after the update"),
        _info("kl/reference_policy", "nats", _NEITHER, "Estimated KL(policy || reference) a token"),
        _info("clip_frac", "frac", _NEITHER, "Trained tokens whose probability ratio was clipped"),
        _info("ratio/mean", "", _NEITHER, "Mean probability ratio policy / proximal over trained tokens"),
        _info("importance/mean", "", _NEITHER, "Mean applied weight proximal / behavior over trained tokens"),
        _info("importance/cut_frac", "frac", _LOWER, "Trained tokens whose weight proximal / behavior the cap changed"),
        _info("advantage/std", "", _NEITHER, "Standard deviation of the advantages over trained tokens"),
        _info("grad_norm", "", _NEITHER, "Global gradient norm before clipping, mean over the round's steps"),
        _info("lr", "", _NEITHER, "Learning rate of the round's last step"),
        _info("loss/total", "", _NEITHER, "Sum of the weighted losses"),
        _info("loss/policy", "", _NEITHER, "Policy loss"),
        _info("loss/kl", "", _NEITHER, "Weighted KL penalty against the reference"),
        _info("loss/entropy", "", _NEITHER, "Weighted entropy bonus (negative: it is subtracted)"),
        _info("loss/value", "", _LOWER, "Value loss"),
        _info("value/explained_variance", "frac", _HIGHER, "Share of the returns' variance that the critic explains"),
        _info("loss/balance", "", _LOWER, "Weighted load-balancing loss; its minimum is at an even load"),
        _info("loss/router_z", "", _LOWER, "Weighted router z-loss"),
        _info("loss/warm_start", "nats", _LOWER, "Cross entropy of the last supervised step of the warm start"),
        _info("expert_load/max_frac", "frac", _LOWER, "Largest share of routed tokens on one expert, worst layer"),
        _info("expert_load/min_frac", "frac", _HIGHER, "Smallest share of routed tokens on one expert, worst layer"),
        _info("experts/dead", "experts", _LOWER, "Experts that no token of the round chose, summed over layers"),
        _info("expert_load/rank_max_over_mean", "", _LOWER, "Choices of the heaviest rank over the mean, layers' mean"),
        _info("expert_load/rank_max_over_mean_contiguous", "", _NEITHER, "The same, were all experts in their order"),
        _info("codes_changed_frac", "frac", _NEITHER, "MXFP4 codes (4 bits) that differ from the previous version"),
        _info("scales_changed_frac", "frac", _NEITHER, "MXFP4 block scales that differ from the previous version"),
        _info("publish/bytes", "bytes", _LOWER, "Bytes of the published weights that travelled to one rollout worker"),
        _info("publish/bits_per_expert_param", "bits", _LOWER, "Bits that travelled for one expert parameter"),
        _info("parity/mean_abs_nats", "nats", _LOWER, "Mean |behavior - learner| logprob before the update"),
        _info("parity/max_abs_nats", "nats", _LOWER, "Largest |behavior - learner| logprob before the update"),
        _info("parity/flipped_routes", "contexts", _LOWER, "Contexts where sampler and learner begin to route apart"),
        _info("parity/flipped_tokens", "tokens", _LOWER, "Tokens whose experts differ between sampler and learner"),
        _info("staleness/mean", "versions", _LOWER, "Mean weight versions from sampling to learning, a sampled token"),
        _info("staleness/max", "versions", _LOWER, "Largest number of weight versions from sampling to learning"),
        _info("tokens_per_s", "tokens/s", _HIGHER, "Sampled tokens a second of rollout time"),
        _info("tokens/sampled", "tokens", _NEITHER, "Tokens sampled in the round"),
        _info("tokens/trained", "tokens", _NEITHER, "Tokens with a loss in the round"),
        _info("groups/no_variance_frac", "frac", _LOWER, "Groups whose rewards are all equal: they carry no gradient"),
        _info("groups/total", "groups", _NEITHER, "Groups of the round"),
        _info("groups/resampled", "groups", _LOWER, "Groups sampled for others of the round that had no variance"),
        _info("episodes/total", "episodes", _NEITHER, "Episodes of the round"),
        _info("episodes/masked", "episodes", _LOWER, "Episodes left out of training because infrastructure failed"),
        _info("episodes/truncated", "episodes", _LOWER, "Episodes cut by a limit on tokens, turns or context"),
        _info("episodes/overlong_punishment", "", _HIGHER, "Mean punishment of overlong answers (0 or below)"),
        _info("episodes/tampered", "episodes", _LOWER, "Episodes that broke the grader's protocol; they score 0"),
        _info("episodes/mean_turns", "turns", _NEITHER, "Mean turns an episode"),
        _info("episodes/violations", "episodes", _LOWER, "Episodes in which something forbidden was done; unsolved"),
        _info("calls/total", "calls", _NEITHER, "Tool calls of the round, by the turns that the environments judged"),
        _info("calls/failed", "calls", _LOWER, "Tool calls that were malformed, unknown, invalid, or failed"),
        _info("time/round_s", "s", _LOWER, "Wall time of the whole round, stages and what lies between them"),
        _info("memory/peak_bytes", "bytes", _LOWER, "Peak resident memory of a learner rank until now, largest rank"),
    )
}  # fmt: skip
"""Every metric of the framework itself."""

PREFIXES: Mapping[str, MetricInfo] = {
    info.name: info
    for info in (
        _info("reward/", "", _HIGHER, "Mean score of one named node of the reward tree"),
        _info("time/", "s", _LOWER, "Wall time of one stage of the round; the name ends in _s"),
        _info("codes_changed/", "frac", _NEITHER, "MXFP4 codes of one layer that differ from the previous version"),
        _info("custom/", "", _NEITHER, "A metric of a user's own environment, reward or algorithm"),
    )
}
"""Families whose members are named at run time. Any other unknown name is an error, so that no typo is silent."""


def metric_info(name: str) -> MetricInfo:
    """What the metric of this name is.

    Raises:
        MetricsError: the name is in neither `METRICS` nor a family of `PREFIXES`.
    """
    if name in METRICS:
        return METRICS[name]
    for prefix, family in PREFIXES.items():
        if name.startswith(prefix) and len(name) > len(prefix):
            if prefix == "time/" and not name.endswith("_s"):
                raise MetricsError(f"{name}: a time names its unit, got no suffix _s; log seconds as {name}_s")
            return _info(name, family.unit, family.direction, f"{family.description}: {name[len(prefix) :]}")
    near = difflib.get_close_matches(name, METRICS, n=1)
    remedy = f"did you mean {near[0]}?" if near else f"declare it in rl.metrics or log it as custom/{name}"
    raise MetricsError(f"{name}: unknown metric, got a name outside the table; {remedy}")


def stage_time(stage: str) -> str:
    """The metric that holds the wall time of one stage: `time/<stage>_s`."""
    return f"time/{stage}_s"


def eval_metrics(decoding: str, *, passed: PassRate, first_turn: PassRate) -> dict[str, float]:
    """The row entries of one held-out evaluation. `decoding` is "greedy" or "sampled"; no trials give no entries."""
    if passed.rate is None or first_turn.rate is None:
        return {}
    name = f"eval/{decoding}"
    values = {name: passed.rate, f"{name}_low": passed.low, f"{name}_high": passed.high}
    return values | {f"{name}_first_turn": first_turn.rate}


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricsRow:
    """One round as read back. A value is `None` where it was NaN or infinite."""

    round: int
    values: Mapping[str, float | None]


def read_metrics(path: Path) -> tuple[MetricsRow, ...]:
    """All rows of a log, in order; none if the file does not exist.

    A torn last line (the process was killed in mid-write) is left out.

    Raises:
        MetricsError: any other line is not a row, or the rounds do not grow.
    """
    if not path.exists():
        return ()
    lines = path.read_bytes().split(b"\n")
    rows: list[MetricsRow] = []
    for index, line in enumerate(lines):
        if not line and index == len(lines) - 1:
            break
        try:
            record = json.loads(line)
            number = record.pop("round")
        except (ValueError, AttributeError, TypeError, KeyError) as error:
            if index == len(lines) - 1:
                logger.warning("%s: left out a torn last line (%d bytes)", path, len(line))
                break
            raise MetricsError(
                f"{path}: line {index + 1} is not a row of metrics, got {line[:60]!r}; "
                "restore the file or remove the line"
            ) from error
        if rows and number <= rows[-1].round:
            raise MetricsError(
                f"{path}: rounds must grow, got {number} after {rows[-1].round} in line {index + 1}; "
                "two runs have written to one folder, so give each its own run.name"
            )
        rows.append(MetricsRow(round=number, values=record))
    return tuple(rows)


class MetricsLog:
    """Appends one row a round to `path`; a row is on disk when `write` returns.

    `resume_round` is the round that a resumed run does next: rows at or after it come from work that the checkpoint
    does not hold, so they are cut off (the file is replaced atomically). `None` starts a new log.

    Raises:
        MetricsError: `path` already holds rows and no `resume_round` is given.
    """

    def __init__(self, path: Path, *, resume_round: int | None = None) -> None:
        self.path = path
        self.num_not_finite: Counter[str] = Counter()
        """NaN and infinite values written as null, by metric."""
        path.parent.mkdir(parents=True, exist_ok=True)
        rows = read_metrics(path)
        if resume_round is None:
            if rows:
                raise MetricsError(
                    f"{path}: a new run needs an empty log, got {len(rows)} rows; "
                    "resume that run or choose another run.name"
                )
            kept: tuple[MetricsRow, ...] = ()
        else:
            kept = tuple(row for row in rows if row.round < resume_round)
            if len(kept) < len(rows):
                logger.info("%s: cut %d rows at or after round %d", path, len(rows) - len(kept), resume_round)
        _replace(path, kept)
        self.last_round: int | None = kept[-1].round if kept else None
        self._file = path.open("ab")

    def write(self, round: int, values: Mapping[str, Any]) -> None:
        """Append the row of `round`. Values are numbers (Python, NumPy or 0-d tensors); order is kept.

        Raises:
            MetricsError: the round does not grow, a name is unknown, or a value is no number.
        """
        if self.last_round is not None and round <= self.last_round:
            raise MetricsError(f"round: must grow, got {round} after {self.last_round}; write each round once")
        row = MetricsRow(round=round, values={name: self._checked(name, value) for name, value in values.items()})
        self._file.write(_line(row))
        self._file.flush()
        os.fsync(self._file.fileno())
        self.last_round = round

    def close(self) -> None:
        """Close the file; nothing is pending."""
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _checked(self, name: str, value: object) -> float | None:
        metric_info(name)
        try:
            number = value if type(value) is int else float(value)  # type: ignore[arg-type]
        except (TypeError, ValueError) as error:
            raise MetricsError(
                f"{name}: a metric is a number, got {value!r}; leave out what was not measured"
            ) from error
        if math.isfinite(number):
            return number
        self.num_not_finite[name] += 1
        logger.warning("%s: %s written as null (%d so far in this run)", name, number, self.num_not_finite[name])
        return None


def _line(row: MetricsRow) -> bytes:
    return json.dumps({"round": row.round, **row.values}, allow_nan=False).encode() + b"\n"


def _replace(path: Path, rows: Iterable[MetricsRow]) -> None:
    partial = path.with_name(path.name + ".partial")
    with partial.open("wb") as file:
        file.writelines(_line(row) for row in rows)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)

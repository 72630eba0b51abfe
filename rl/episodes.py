"""The valid episodes of a round as samples that no credit was assigned to yet: what the parity gate compares.

A masked episode (infrastructure failed, or its reward did) is left out here, before any baseline is taken: it is never
a reward of 0.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from rl.batch import TrainSample, sample_from_segment
from rl.scores import SampleScores
from rollout.types import ScoredGroup, ScoredTrajectory, SpanOrigin, Trajectory, Turn

_ROUNDING = 1e-9
"""Of a share times a count: 9 of 10 are enough when the share is 0.9."""


class TooFewValidError(RuntimeError):
    """So many episodes were masked that the round cannot be trusted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Episode:
    """A valid episode and its samples, one a segment with sampled tokens, in their order; none is trained on yet."""

    scored: ScoredTrajectory
    samples: tuple[TrainSample, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Episodes:
    """The valid episodes of a round, by group; `num_masked` were left out."""

    groups: tuple[tuple[Episode, ...], ...]
    num_masked: int

    @property
    def samples(self) -> tuple[TrainSample, ...]:
        """All samples in their order."""
        return tuple(sample for group in self.groups for episode in group for sample in episode.samples)

    def with_scores(self, scores: Mapping[str, SampleScores]) -> Episodes:
        """The same with the learner's scores, by the key of the sample."""

        def scored(episode: Episode) -> Episode:
            samples = tuple(replace(sample, scores=scores.get(sample.key)) for sample in episode.samples)
            return replace(episode, samples=samples)

        return replace(self, groups=tuple(tuple(map(scored, group)) for group in self.groups))


def valid_episodes(groups: Sequence[ScoredGroup], *, min_valid_frac: float) -> Episodes:
    """The episodes with a reward. Raises TooFewValidError when fewer than `min_valid_frac` of all have one."""
    valid = tuple(
        tuple(_episode(f"{index:04d}", scored) for scored in group.scored if scored.total is not None)
        for index, group in enumerate(groups)
    )
    num_episodes, num_valid = sum(len(group.scored) for group in groups), sum(map(len, valid))
    if num_valid < min_valid_frac * num_episodes - _ROUNDING:
        raise TooFewValidError(
            f"rollout.min_valid_frac: at least {min_valid_frac:.0%} of the episodes must be valid, got "
            f"{num_valid} of {num_episodes} ({_first_mask(groups)}); fix the cause and run again"
        )
    return Episodes(groups=valid, num_masked=num_episodes - num_valid)


def turn_lengths(trajectory: Trajectory) -> list[int]:
    """Sampled tokens of each turn, over all segments."""
    return [_num_sampled(turn) for segment in trajectory.segments for turn in segment.turns]


def _num_sampled(turn: Turn) -> int:
    return sum(len(span.ids) for span in turn.spans if span.origin is SpanOrigin.SAMPLED)


def _episode(prefix: str, scored: ScoredTrajectory) -> Episode:
    trajectory = scored.trajectory
    samples = tuple(
        sample_from_segment(
            segment, key=f"{prefix}/{trajectory.sample_index:04d}/{number}", advantage=0.0, trained=False
        )
        for number, segment in enumerate(trajectory.segments)
        if segment.turns
    )
    return Episode(scored=scored, samples=samples)


def _first_mask(groups: Sequence[ScoredGroup]) -> str:
    reasons = (s.reward.masked for group in groups for s in group.scored if s.reward.masked is not None)
    lines = next(reasons, "").strip().splitlines()
    return f"first reason: {lines[-1] if lines else 'none given'}"

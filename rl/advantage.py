"""Credit: from judged groups to training samples.

A masked episode (infrastructure failed, or its reward did) leaves the group before the baseline is taken: it is never
a reward of 0. A group without variance teaches nothing: its samples stay for the parity gate, are not trained on, and
are counted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from rl.algorithms.base import Algorithm
from rl.algorithms.config import Aggregation
from rl.batch import TrainSample, sample_from_segment
from rollout.types import ScoredGroup, ScoredTrajectory

_ROUNDING = 1e-9
"""Of a share times a count: 9 of 10 are enough when the share is 0.9."""


class TooFewValidError(RuntimeError):
    """So many episodes were masked that the round cannot be trusted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Credit:
    """The samples of a round. `num_masked` episodes were left out, `no_variance_frac` of the groups teach nothing."""

    samples: tuple[TrainSample, ...]
    num_masked: int
    no_variance_frac: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Weighing:
    """How the losses of a minibatch's tokens are added up; `length_unit` belongs to `episode_sum`."""

    aggregation: Aggregation
    length_unit: int

    def token(self, num_episode_tokens: int) -> tuple[float, float]:
        """Weight and mass (`TrainSample`) of each trainable token of an episode that has so many."""
        if self.aggregation is Aggregation.token_mean:
            return 1.0, 1.0
        share = 1.0 / num_episode_tokens
        return (1.0 / self.length_unit if self.aggregation is Aggregation.episode_sum else share), share


def assign_credit(
    groups: Sequence[ScoredGroup],
    algorithm: Algorithm,
    weighing: Weighing,
    *,
    min_valid_frac: float,
    permute_key: tuple[int, ...] | None,
) -> Credit:
    """Advantages and weights for every valid episode of `groups`.

    `permute_key`, when given, shuffles the rewards within each group (seeded by it): the control in which there is
    nothing to learn. Raises TooFewValidError when fewer than `min_valid_frac` of the episodes are valid.
    """
    valid = [[scored for scored in group.scored if scored.total is not None] for group in groups]
    rewards = [np.array([scored.total for scored in group], dtype=np.float64) for group in valid]
    if permute_key is not None:
        rewards = [np.random.default_rng((*permute_key, i)).permutation(one_G) for i, one_G in enumerate(rewards)]
    advantages = algorithm.advantages(rewards)
    samples: list[TrainSample] = []
    for index, (group, advantages_G) in enumerate(zip(valid, advantages, strict=True)):
        for position, scored in enumerate(group):
            advantage = None if advantages_G is None else float(advantages_G[position])
            samples += _samples(f"{index:04d}", scored, advantage, weighing)
    num_episodes = sum(len(group.scored) for group in groups)
    num_masked = num_episodes - sum(map(len, valid))
    num_flat = sum(advantages_G is None for advantages_G in advantages)
    if num_episodes - num_masked < min_valid_frac * num_episodes - _ROUNDING:
        raise TooFewValidError(
            f"rollout.min_valid_frac: at least {min_valid_frac:.0%} of the episodes must be valid, got "
            f"{num_episodes - num_masked} of {num_episodes} ({_first_mask(groups)}); fix the cause and run again"
        )
    return Credit(
        samples=tuple(samples), num_masked=num_masked, no_variance_frac=num_flat / len(groups) if groups else 0.0
    )


def _samples(prefix: str, scored: ScoredTrajectory, advantage: float | None, weighing: Weighing) -> list[TrainSample]:
    """One sample a segment that has sampled tokens; all segments of an episode share its advantage."""
    trajectory = scored.trajectory
    token_weight, token_mass = weighing.token(trajectory.num_sampled_tokens or 1)  # a silent one has nothing to weigh
    return [
        sample_from_segment(
            segment,
            key=f"{prefix}/{trajectory.sample_index:04d}/{number}",
            advantage=advantage or 0.0,
            trained=advantage is not None,
            token_weight=token_weight,
            token_mass=token_mass,
        )
        for number, segment in enumerate(trajectory.segments)
        if segment.turns
    ]


def _first_mask(groups: Sequence[ScoredGroup]) -> str:
    reasons = (s.reward.masked for group in groups for s in group.scored if s.reward.masked is not None)
    lines = next(reasons, "").strip().splitlines()
    return f"first reason: {lines[-1] if lines else 'none given'}"

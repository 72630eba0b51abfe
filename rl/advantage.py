"""Credit: from judged groups to training samples, in two steps with the parity gate's pass between them.

    judged groups -> valid_episodes -> samples -> PARITY (scores) -> assign_credit -> samples with advantages

A masked episode (infrastructure failed, or its reward did) leaves the group before the baseline is taken: it is never
a reward of 0. A group without variance teaches nothing: its samples stay for the parity gate, are not trained on, and
are counted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from rl.algorithms.base import Algorithm, Rewards
from rl.algorithms.config import Aggregation, KlEstimator
from rl.algorithms.kl import kl_estimate
from rl.algorithms.overlong import Overlong
from rl.algorithms.rewards import centered
from rl.batch import TrainSample, sample_from_segment
from rl.scores import SampleScores, Stream
from rollout.types import ScoredGroup, ScoredTrajectory, SpanOrigin, Trajectory, Turn

_ROUNDING = 1e-9
"""Of a share times a count: 9 of 10 are enough when the share is 0.9."""


class TooFewValidError(RuntimeError):
    """So many episodes were masked that the round cannot be trusted."""


class CreditError(RuntimeError):
    """Credit that needs what the learner was not asked for."""


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
        """All samples in their order: what the parity gate compares."""
        return tuple(sample for group in self.groups for episode in group for sample in episode.samples)


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


@dataclass(frozen=True, slots=True, kw_only=True)
class KlReward:
    """A KL penalty in the reward: `coef` times the estimate is taken off the reward of each token."""

    coef: float
    estimator: KlEstimator

    def of(self, scores: SampleScores) -> Stream:
        """What is added to the reward of each trainable token, fp32 [R]. Raises CreditError without a reference."""
        if scores.reference_logprobs_R is None:
            raise CreditError(
                "algorithm.kl_in: reward needs the reference's logprobs, got scores without them; the learner must "
                "hold a reference"
            )
        policy_R, reference_R = map(torch.from_numpy, (scores.proximal_logprobs_R, scores.reference_logprobs_R))
        return kl_estimate(policy_R, reference_R, self.estimator).mul(-self.coef).numpy()


@dataclass(frozen=True, slots=True, kw_only=True)
class Shaping:
    """What changes the rewards before credit is assigned; `None`: nothing does."""

    kl: KlReward | None = None
    overlong: Overlong | None = None

    def outcome(self, scored: ScoredTrajectory) -> float:
        """The reward of a valid episode: the root of its tree, and the punishment of its longest answer."""
        assert scored.total is not None  # it is valid
        return scored.total + self.punishment(scored.trajectory)

    def punishment(self, trajectory: Trajectory) -> float:
        """0 or below, for the longest answer."""
        return 0.0 if self.overlong is None else self.overlong.of(max(turn_lengths(trajectory), default=0))


def turn_lengths(trajectory: Trajectory) -> list[int]:
    """Sampled tokens of each turn, over all segments."""
    return [_num_sampled(turn) for segment in trajectory.segments for turn in segment.turns]


def has_variance(group: ScoredGroup, shaping: Shaping) -> bool:
    """Whether the outcomes of a judged group differ (the KL penalty, which no one knows yet, left out)."""
    outcomes = [shaping.outcome(scored) for scored in group.scored if scored.total is not None]
    return centered(np.array(outcomes, dtype=np.float64)) is not None


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


def assign_credit(
    episodes: Episodes,
    algorithm: Algorithm,
    weighing: Weighing,
    *,
    scores: Mapping[str, SampleScores],
    shaping: Shaping,
    permute_key: tuple[int, ...] | None,
) -> Credit:
    """Advantages and weights for every valid episode; `scores` are the learner's, by the key of the sample.

    An episode is one action here, so what `shaping` adds to its tokens is added up (as in RLOO, arXiv 2402.14740).
    `permute_key`, when given, shuffles the rewards within each group (seeded by it): the control in which there is
    nothing to learn.
    """
    groups = [tuple(_scored(episode, scores) for episode in group) for group in episodes.groups]
    rewards = [group_rewards(group, shaping) for group in groups]
    if permute_key is not None:
        rewards = [np.random.default_rng((*permute_key, i)).permutation(one_G) for i, one_G in enumerate(rewards)]
    advantages = algorithm.advantages(rewards)
    samples: list[TrainSample] = []
    for group, advantages_G in zip(groups, advantages, strict=True):
        for position, episode in enumerate(group):
            advantage = None if advantages_G is None else float(advantages_G[position])
            samples += _credited(episode, advantage, weighing)
    num_flat = sum(advantages_G is None for advantages_G in advantages)
    return Credit(
        samples=tuple(samples),
        num_masked=episodes.num_masked,
        no_variance_frac=num_flat / len(groups) if groups else 0.0,
    )


def group_rewards(group: Sequence[Episode], shaping: Shaping) -> Rewards:
    """The reward of each episode of a group, float64 [G]."""
    rewards_G = np.array([shaping.outcome(episode.scored) for episode in group], dtype=np.float64)
    if shaping.kl is not None:
        kl = shaping.kl
        rewards_G += [sum(kl.of(_scores_of(s)).sum(dtype=np.float64) for s in one.samples) for one in group]
    return rewards_G


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


def _num_sampled(turn: Turn) -> int:
    return sum(len(span.ids) for span in turn.spans if span.origin is SpanOrigin.SAMPLED)


def _scored(episode: Episode, scores: Mapping[str, SampleScores]) -> Episode:
    return replace(episode, samples=tuple(replace(sample, scores=scores.get(sample.key)) for sample in episode.samples))


def _scores_of(sample: TrainSample) -> SampleScores:
    if sample.scores is None:
        raise CreditError(
            f"sample {sample.key}: its credit needs the learner's scores, got none; run the parity gate on it first"
        )
    return sample.scores


def _credited(episode: Episode, advantage: float | None, weighing: Weighing) -> list[TrainSample]:
    """The samples of an episode, which share its advantage."""
    num_tokens = episode.scored.trajectory.num_sampled_tokens or 1  # a silent one has nothing to weigh
    token_weight, token_mass = weighing.token(num_tokens)
    return [
        replace(
            sample,
            advantages_R=np.full(len(sample.targets_R), advantage or 0.0, dtype=np.float32),
            trained=advantage is not None,
            token_weight=token_weight,
            token_mass=token_mass,
        )
        for sample in episode.samples
    ]


def _first_mask(groups: Sequence[ScoredGroup]) -> str:
    reasons = (s.reward.masked for group in groups for s in group.scored if s.reward.masked is not None)
    lines = next(reasons, "").strip().splitlines()
    return f"first reason: {lines[-1] if lines else 'none given'}"

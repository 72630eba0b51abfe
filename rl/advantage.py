"""Credit: from valid episodes and the learner's scores of them to training samples.

    judged groups -> rl.episodes -> samples -> PARITY (scores) -> assign_credit -> samples with advantages

There are two kinds. An algorithm that compares the episodes of a group gives each one advantage, shared by its tokens;
a group without variance teaches nothing: its samples stay for the parity gate, are not trained on, and are counted. An
algorithm with a critic gives each token its own, from the rewards of the tokens and the critic's values.

Shapes: G episodes of a group, N sampled tokens of an episode over all of its segments.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from rl.algorithms.base import Algorithm, CriticAlgorithm, Rewards
from rl.algorithms.config import Aggregation
from rl.algorithms.gae import EpisodeStreams, Floats, TokenCredit
from rl.algorithms.rewards import centered
from rl.batch import TrainSample
from rl.episodes import Episode, Episodes, turn_lengths
from rl.scores import SampleScores
from rl.shaping import ScoresError, Shaping, scores_of
from rollout.types import ScoredGroup


@dataclass(frozen=True, slots=True, kw_only=True)
class Credit:
    """The samples of a round. `num_masked` episodes were left out, `no_variance_frac` of the groups teach nothing.

    `explained_variance` is the share of the variance of the returns that the critic's values explain (1 - Var(R - V) /
    Var(R)); `None` without a critic, or where all returns are equal.
    """

    samples: tuple[TrainSample, ...]
    num_masked: int
    no_variance_frac: float
    explained_variance: float | None = None


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


def has_variance(group: ScoredGroup, shaping: Shaping) -> bool:
    """Whether the outcomes of a judged group differ (the KL penalty, which no one knows yet, left out)."""
    outcomes = [shaping.outcome(scored) for scored in group.scored if scored.total is not None]
    return centered(np.array(outcomes, dtype=np.float64)) is not None


def assign_credit(
    episodes: Episodes,
    algorithm: Algorithm | CriticAlgorithm,
    weighing: Weighing,
    *,
    scores: Mapping[str, SampleScores],
    shaping: Shaping,
    permute_key: tuple[int, ...] | None,
) -> Credit:
    """Advantages and weights for every valid episode; `scores` are the learner's, by the key of the sample.

    `permute_key`, when given, shuffles the rewards within each group (seeded by it): the control in which there is
    nothing to learn.
    """
    scored = episodes.with_scores(scores)
    if isinstance(algorithm, CriticAlgorithm):
        return _token_credit(scored, algorithm, weighing, shaping, permute_key)
    return _episode_credit(scored, algorithm, weighing, shaping, permute_key)


def _episode_credit(
    episodes: Episodes,
    algorithm: Algorithm,
    weighing: Weighing,
    shaping: Shaping,
    permute_key: tuple[int, ...] | None,
) -> Credit:
    """One advantage an episode, which counts as one action: the rewards of its tokens are added up (as in RLOO)."""
    groups = episodes.groups
    rewards = [np.array([shaping.episode_reward(one) for one in group], dtype=np.float64) for group in groups]
    advantages = algorithm.advantages(_permuted(rewards, permute_key))
    samples: list[TrainSample] = []
    for group, advantages_G in zip(groups, advantages, strict=True):
        for position, episode in enumerate(group):
            advantage = None if advantages_G is None else float(advantages_G[position])
            for sample in _weighed(episode, weighing):
                advantages_R = np.full(len(sample.targets_R), advantage or 0.0, dtype=np.float32)
                samples.append(replace(sample, advantages_R=advantages_R, trained=advantage is not None))
    num_flat = sum(advantages_G is None for advantages_G in advantages)
    return Credit(
        samples=tuple(samples),
        num_masked=episodes.num_masked,
        no_variance_frac=num_flat / len(groups) if groups else 0.0,
    )


def _token_credit(
    episodes: Episodes,
    algorithm: CriticAlgorithm,
    weighing: Weighing,
    shaping: Shaping,
    permute_key: tuple[int, ...] | None,
) -> Credit:
    """One advantage a token; every episode teaches."""
    outcomes = [np.array([shaping.outcome(one.scored) for one in group], dtype=np.float64) for group in episodes.groups]
    permuted = np.concatenate([np.zeros(0), *_permuted(outcomes, permute_key)])
    everyone = [episode for group in episodes.groups for episode in group]
    speaking = [(episode, index) for index, episode in enumerate(everyone) if episode.samples]
    streams = [
        EpisodeStreams(
            rewards_N=shaping.token_rewards(episode, None if permute_key is None else float(permuted[index])),
            values_N=_values(episode),
            turn_N=_turns(episode),
        )
        for episode, index in speaking
    ]
    credits_ = algorithm.token_credit(streams)
    samples: list[TrainSample] = []
    for (episode, _), credit in zip(speaking, credits_, strict=True):
        samples += _with_token_credit(_weighed(episode, weighing), credit)
    return Credit(
        samples=tuple(samples),
        num_masked=episodes.num_masked,
        no_variance_frac=0.0,
        explained_variance=_explained_variance(streams, credits_),
    )


def _permuted(rewards: list[Rewards], key: tuple[int, ...] | None) -> list[Rewards]:
    if key is None:
        return rewards
    return [np.random.default_rng((*key, index)).permutation(one_G) for index, one_G in enumerate(rewards)]


def _weighed(episode: Episode, weighing: Weighing) -> list[TrainSample]:
    num_tokens = episode.scored.trajectory.num_sampled_tokens or 1  # a silent one has nothing to weigh
    token_weight, token_mass = weighing.token(num_tokens)
    return [replace(sample, token_weight=token_weight, token_mass=token_mass) for sample in episode.samples]


def _values(episode: Episode) -> Floats:
    parts: list[Floats] = []
    for sample in episode.samples:
        values_R = scores_of(sample).values_R
        if values_R is None:
            raise ScoresError(
                f"sample {sample.key}: its credit needs the values of a critic, got scores without them; the learner "
                "must have a value head"
            )
        parts.append(values_R.astype(np.float64))
    return np.concatenate(parts)


def _turns(episode: Episode) -> np.ndarray:
    lengths = turn_lengths(episode.scored.trajectory)
    return np.arange(len(lengths)).repeat(lengths)


def _with_token_credit(samples: Sequence[TrainSample], credit: TokenCredit) -> list[TrainSample]:
    """Cut an episode's credit into its samples."""
    cuts = np.cumsum([len(sample.targets_R) for sample in samples])[:-1]
    advantages = np.split(credit.advantages_N.astype(np.float32), cuts)
    returns = np.split(credit.returns_N.astype(np.float32), cuts)
    return [
        replace(sample, advantages_R=advantages_R, returns_R=returns_R, trained=True)
        for sample, advantages_R, returns_R in zip(samples, advantages, returns, strict=True)
    ]


def _explained_variance(streams: Sequence[EpisodeStreams], credits_: Sequence[TokenCredit]) -> float | None:
    returns = np.concatenate([np.zeros(0), *(credit.returns_N for credit in credits_)])
    values = np.concatenate([np.zeros(0), *(one.values_N for one in streams)])
    variance = returns.var() if len(returns) else 0.0
    return float(1 - (returns - values).var() / variance) if variance > 0 else None

"""The rewards that credit is assigned from: the reward tree's, and what the configuration adds to them.

    of an episode   the root of its tree + the punishment of its longest answer + the KL penalty of all its tokens
    of a token      the same, each part where it belongs: a turn's reward and a punishment at the turn's last token, the
                    KL penalty at each token

Shapes: R trainable tokens of a sample, N sampled tokens of an episode over all of its segments.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from rewards.base import per_turn
from rl.algorithms.config import KlEstimator
from rl.algorithms.gae import Floats
from rl.algorithms.kl import kl_estimate
from rl.algorithms.overlong import Overlong
from rl.batch import TrainSample
from rl.episodes import Episode, turn_lengths
from rl.scores import SampleScores
from rollout.types import ScoredTrajectory, Trajectory


class ScoresError(RuntimeError):
    """Credit that needs what the learner was not asked for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KlReward:
    """A KL penalty in the reward: `coef` times the estimate is taken off the reward of each token."""

    coef: float
    estimator: KlEstimator

    def of(self, sample: TrainSample) -> Floats:
        """What is added to the reward of each trainable token, float64 [R]. Raises ScoresError without a reference."""
        scores = scores_of(sample)
        if scores.reference_logprobs_R is None:
            raise ScoresError(
                "algorithm.kl_in: reward needs the reference's logprobs, got scores without them; the learner must "
                "hold a reference"
            )
        policy_R, reference_R = map(torch.from_numpy, (scores.proximal_logprobs_R, scores.reference_logprobs_R))
        return -self.coef * kl_estimate(policy_R, reference_R, self.estimator).double().numpy()


@dataclass(frozen=True, slots=True, kw_only=True)
class Shaping:
    """What is added to the rewards; `None`: nothing is."""

    kl: KlReward | None = None
    overlong: Overlong | None = None

    def outcome(self, scored: ScoredTrajectory) -> float:
        """The reward of a valid episode as far as it is known before the learner sees it: without the KL penalty."""
        assert scored.total is not None  # it is valid
        return scored.total + self.punishment(scored.trajectory)

    def punishment(self, trajectory: Trajectory) -> float:
        """0 or below, for the longest answer."""
        return 0.0 if self.overlong is None else self.overlong.of(max(turn_lengths(trajectory), default=0))

    def episode_reward(self, episode: Episode) -> float:
        """The whole reward of an episode."""
        return self.outcome(episode.scored) + float(self.kl_penalties(episode).sum())

    def token_rewards(self, episode: Episode, outcome: float | None = None) -> Floats:
        """The reward of each token, float64 [N] (N > 0); they sum to the episode's.

        `outcome`, when given, stands for all but the KL penalty, at the last token. A turn without a token of its own
        gives its reward to the last one before it.
        """
        rewards_N = self.kl_penalties(episode)
        lengths = turn_lengths(episode.scored.trajectory)
        last_N = np.maximum(np.cumsum(lengths) - 1, 0)
        if outcome is not None:
            rewards_N[-1] += outcome
            return rewards_N
        np.add.at(rewards_N, last_N, per_turn(episode.scored.reward, len(lengths)))
        rewards_N[last_N[int(np.argmax(lengths))]] += self.punishment(episode.scored.trajectory)
        return rewards_N

    def kl_penalties(self, episode: Episode) -> Floats:
        """The KL penalty of each token, float64 [N]; zeros without one."""
        parts = [np.zeros(len(s.targets_R)) if self.kl is None else self.kl.of(s) for s in episode.samples]
        return np.concatenate([np.zeros(0), *parts])


def scores_of(sample: TrainSample) -> SampleScores:
    """The scores of a sample. Raises ScoresError without."""
    if sample.scores is None:
        raise ScoresError(
            f"sample {sample.key}: its credit needs the learner's scores, got none; run the parity gate on it first"
        )
    return sample.scores

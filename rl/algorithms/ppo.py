"""PPO (Schulman et al. 2017, arXiv 1707.06347) with a value head on the policy's trunk.

    policy    -min(r A, clip(r, 1 - low, 1 + high) A)                                                  (eq. 7)
    critic    value_coef max((V - R)^2, (V_old + clip(V - V_old, -value_clip, value_clip) - R)^2) / 2

A and R come from `rl.algorithms.gae`, with the values of the start of the round. The critic is the baseline, so one
episode a prompt is enough, and a group of equal rewards still teaches. With `whiten`, the advantages of all trained
tokens of the round have mean 0 and variance 1 (returns are left as they are).

Differs from the paper: the loss of the critic is clipped like the ratio is (as in OpenAI's baselines; `value_clip` of 0
is the paper's); the entropy bonus is the configuration's (`rl.algorithms.objective`).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from rl.algorithms.base import AlgorithmError, CriticStreams, TokenLoss, TokenStreams
from rl.algorithms.config import Credit
from rl.algorithms.gae import EpisodeStreams, TokenCredit, estimate
from rl.algorithms.rewards import NO_VARIANCE
from rl.algorithms.surrogate import Clip, ratio


class Ppo:
    """Advantages from a critic, clipped importance ratio."""

    def __init__(
        self,
        *,
        clip: Clip,
        gamma: float,
        gae_lambda: float,
        credit: Credit,
        whiten: bool,
        value_coef: float,
        value_clip: float,
    ):
        self._clip = clip
        self._gamma, self._lambda, self._credit, self._whiten = gamma, gae_lambda, credit, whiten
        self._value_coef, self._value_clip = value_coef, value_clip

    def token_credit(self, episodes: Sequence[EpisodeStreams]) -> list[TokenCredit]:
        """Advantages and returns of every episode of a round.

        Raises AlgorithmError where a reward or a value is not finite.
        """
        for streams in episodes:
            if not (np.isfinite(streams.rewards_N).all() and np.isfinite(streams.values_N).all()):
                raise AlgorithmError(
                    f"ppo: rewards and values must be finite, got rewards {streams.rewards_N.tolist()}; mask the "
                    "broken ones"
                )
        credits_ = [
            estimate(streams, gamma=self._gamma, gae_lambda=self._lambda, credit=self._credit) for streams in episodes
        ]
        return _whitened(credits_) if self._whiten and credits_ else credits_

    def token_loss(self, streams: TokenStreams) -> TokenLoss:
        """The policy's loss, and the critic's as `loss/value`. Raises AlgorithmError without values."""
        if streams.critic is None:
            raise AlgorithmError(
                "ppo: needs the values of every token, got streams without; the learner must have a value head, and "
                "credit must be assigned after the parity gate of the round"
            )
        policy = self._clip.surrogate(ratio(streams), streams.advantages_R)
        value_R = self._value_coef * self._value_loss(streams.critic)
        return TokenLoss(loss_R=policy.loss_R, clipped_R=policy.clipped_R, terms={"loss/value": value_R})

    def _value_loss(self, critic: CriticStreams) -> torch.Tensor:
        error_R = (critic.values_R - critic.returns_R).square()
        if self._value_clip:
            moved_R = (critic.values_R - critic.old_values_R).clamp(-self._value_clip, self._value_clip)
            error_R = torch.maximum(error_R, (critic.old_values_R + moved_R - critic.returns_R).square())
        return error_R / 2


def _whitened(credits_: Sequence[TokenCredit]) -> list[TokenCredit]:
    """Advantages in units of the round's standard deviation; where all are equal they become 0."""
    all_N = np.concatenate([one.advantages_N for one in credits_])
    mean, deviation = (all_N.mean(), all_N.std()) if len(all_N) else (0.0, 0.0)
    scale = 1.0 / deviation if deviation >= NO_VARIANCE else 0.0
    return [TokenCredit(advantages_N=(one.advantages_N - mean) * scale, returns_N=one.returns_N) for one in credits_]

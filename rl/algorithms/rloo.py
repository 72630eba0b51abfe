"""RLOO: REINFORCE with a leave-one-out baseline (Ahmadian et al. 2024, arXiv 2402.14740).

    A_i = r_i - mean(r_j, j != i) = G / (G - 1) (r_i - mean(r))        loss = -(pi / behavior) A

The baseline of an episode does not depend on it, so it adds no bias. Nothing is clipped: on the samples of the
current policy the ratio is 1 and the gradient is that of REINFORCE; in later steps of a round it is the plain
importance weight of each token.

Differs from the paper: the paper's ratio is 1 throughout (one step for each sample); groups without variance, whose
advantage is 0, are left out of the mean; sums over an episode are divided by the constant `algorithm.length_unit`;
there is no KL term in the reward.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from rl.algorithms.base import Rewards, TokenLoss, TokenStreams
from rl.algorithms.rewards import centered, checked
from rl.algorithms.surrogate import ratio


class Rloo:
    """Leave-one-out advantages, importance-weighted policy gradient."""

    def advantages(self, rewards: Sequence[Rewards]) -> list[Rewards | None]:
        """Reward minus the mean of the group's others."""
        return [_without_own(rewards_G) for rewards_G in checked("rloo", rewards)]

    def token_loss(self, streams: TokenStreams) -> TokenLoss:
        """-r A, r = exp(policy - behavior)."""
        loss_R = -ratio(streams) * streams.advantages_R
        return TokenLoss(loss_R=loss_R, clipped_R=torch.zeros_like(loss_R, dtype=torch.bool))


def _without_own(rewards_G: Rewards) -> Rewards | None:
    centered_G = centered(rewards_G)
    return None if centered_G is None else centered_G * len(centered_G) / (len(centered_G) - 1)

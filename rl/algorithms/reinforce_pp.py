"""REINFORCE++ (Hu et al. 2025, arXiv 2501.03262): advantages normalised over the whole round instead of the group.

    REINFORCE++            A_i = (r_i - mean(round)) / std(round)
    with group baseline    A_i = (r_i - mean(group)) / std(round), std of the numerators over the round
    loss                   -min(r A, clip(r, 1 - low, 1 + high) A)

A small group's standard deviation is a poor estimate and correlated with its numerator; the round's is neither. Without
a baseline of the group one episode a prompt is enough, and a group of equal rewards still teaches.

Differs from the paper: there is no KL term in the reward; with group baseline, groups without variance are left out of
the round's statistics, as their episodes are of the loss.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from rl.algorithms.base import Rewards, TokenLoss, TokenStreams
from rl.algorithms.rewards import NO_VARIANCE, centered, checked
from rl.algorithms.surrogate import Clip, ratio


class ReinforcePP:
    """Round-normalised advantages, clipped importance ratio."""

    def __init__(self, *, clip: Clip, group_baseline: bool):
        self._clip = clip
        self._group_baseline = group_baseline

    def advantages(self, rewards: Sequence[Rewards]) -> list[Rewards | None]:
        """Rewards, minus their baseline, in units of the round's standard deviation."""
        groups = checked("reinforce_pp_baseline" if self._group_baseline else "reinforce_pp", rewards)
        if self._group_baseline:
            deviations = [centered(rewards_G) for rewards_G in groups]
        else:
            mean = np.concatenate(groups).mean() if sum(map(len, groups)) else 0.0
            deviations = [rewards_G - mean if len(rewards_G) else None for rewards_G in groups]
        all_N = np.concatenate([np.zeros(0), *(one_G for one_G in deviations if one_G is not None)])
        if not len(all_N) or np.abs(all_N).max() < NO_VARIANCE:
            return [None] * len(groups)
        return [None if one_G is None else one_G / all_N.std() for one_G in deviations]

    def token_loss(self, streams: TokenStreams) -> TokenLoss:
        """-min(r A, clip(r) A), r = exp(policy - behavior)."""
        return self._clip.surrogate(ratio(streams), streams.advantages_R)

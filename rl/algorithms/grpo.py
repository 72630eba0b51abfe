"""GRPO (Shao et al. 2024, arXiv 2402.03300, eq. 3) with the clip-higher of DAPO (Yu et al. 2025, arXiv 2503.14476,
eq. 10).

    A_i = r_i - mean(r), divided by std(r) with `normalize`        loss = -min(r A, clip(r, 1 - low, 1 + high) A)

Differs from the paper: the advantage is not divided by the group's standard deviation unless `normalize` says so, which
removes the bias towards groups of low variance (Liu et al. 2025, arXiv 2503.20783); the loss is averaged over all
tokens of the minibatch (`aggregation=episode_mean` is the paper's); there is no KL term; groups without variance are
left out.
"""  # noqa: D205

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from rl.algorithms.base import Rewards, TokenLoss, TokenStreams
from rl.algorithms.rewards import centered, checked
from rl.algorithms.surrogate import Clip, ratio


class Grpo:
    """Group-relative advantages, clipped importance ratio."""

    name: ClassVar[str] = "grpo"
    """What messages call it."""

    def __init__(self, *, clip: Clip, normalize: bool):
        self._clip = clip
        self._normalize = normalize

    def advantages(self, rewards: Sequence[Rewards]) -> list[Rewards | None]:
        """Reward minus the group's mean (and divided by its standard deviation with `normalize`)."""
        return [self._relative(rewards_G) for rewards_G in checked(self.name, rewards)]

    def _relative(self, rewards_G: Rewards) -> Rewards | None:
        centered_G = centered(rewards_G)
        return centered_G / centered_G.std() if self._normalize and centered_G is not None else centered_G

    def token_loss(self, streams: TokenStreams) -> TokenLoss:
        """-min(r A, clip(r) A), r = exp(policy - behavior)."""
        return self._clip.surrogate(ratio(streams), streams.advantages_R)

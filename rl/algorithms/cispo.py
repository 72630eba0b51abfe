"""CISPO (MiniMax 2025, arXiv 2506.13585, eq. 4 and 5): the importance weight is clipped, not the update.

    loss = -stop_gradient(clip(r, 1 - low, 1 + high)) A log pi

PPO's clip takes a token whose ratio left the interval out of the gradient. Those are often the rare tokens at which a
chain of thought turns; here they keep a gradient, with a bounded weight.

The paper sets no lower bound: `clip_low` of 1 is none. Its upper one is a knob.

Differs from the paper: the advantage is not divided by the group's standard deviation.
"""

from __future__ import annotations

from collections.abc import Sequence

from rl.algorithms.base import AlgorithmError, Rewards, TokenLoss, TokenStreams
from rl.algorithms.rewards import centered, checked
from rl.algorithms.surrogate import ratio


class Cispo:
    """Group-relative advantages, policy gradient with a clipped importance weight."""

    def __init__(self, *, clip_low: float, clip_high: float):
        if not 0 < clip_low <= 1 or not clip_high > 0:
            raise AlgorithmError(
                f"algorithm.clip_low: cispo needs 0 < clip_low <= 1 and clip_high > 0, got {clip_low} and {clip_high}; "
                "1 sets no lower bound, which is usual"
            )
        self._low, self._high = 1 - clip_low, 1 + clip_high

    def advantages(self, rewards: Sequence[Rewards]) -> list[Rewards | None]:
        """Reward minus the group's mean."""
        return [centered(rewards_G) for rewards_G in checked("cispo", rewards)]

    def token_loss(self, streams: TokenStreams) -> TokenLoss:
        """-clip(r) A log pi, r = exp(policy - behavior) without gradient."""
        ratio_R = ratio(streams).detach()
        weight_R = ratio_R.clamp(self._low, self._high)
        loss_R = -weight_R * streams.advantages_R * streams.policy_logprobs_R
        return TokenLoss(loss_R=loss_R, clipped_R=weight_R != ratio_R)

"""GRPO (Shao et al. 2024, arXiv 2402.03300, eq. 3) with clip-higher and the token-level loss of DAPO (Yu et al. 2025,
arXiv 2503.14476, eq. 8).

Differs from the paper: the advantage is not divided by the group's standard deviation unless `normalize` says so, which
removes the bias towards groups of low variance (Liu et al. 2025, arXiv 2503.20783); there is no KL term; the loss is
averaged over all tokens of the minibatch rather than first within each answer; groups without variance are left out.

Shapes: G episodes of a group, R trainable tokens.
"""  # noqa: D205

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from rl.algorithms.base import AlgorithmError, TokenLoss

_NO_VARIANCE = 1e-6
"""Rewards closer than this to their mean count as equal: sums of weighted terms carry rounding."""


class Grpo:
    """Group-relative advantages, clipped importance ratio."""

    def __init__(self, *, clip_low: float, clip_high: float, normalize: bool):
        if not 0 < clip_low < 1 or clip_high <= 0:
            raise AlgorithmError(
                f"algorithm.clip_low: needs 0 < clip_low < 1 and clip_high > 0, got {clip_low} and {clip_high}; "
                "0.2 and 0.28 are usual"
            )
        self._low, self._high = 1 - clip_low, 1 + clip_high
        self._normalize = normalize

    def advantages(self, rewards_G: npt.NDArray[np.float64]) -> npt.NDArray[np.float64] | None:
        """Reward minus the group's mean (and divided by its standard deviation with `normalize`)."""
        if not np.isfinite(rewards_G).all():
            raise AlgorithmError(f"grpo: rewards must be finite, got {rewards_G.tolist()}; mask the broken ones")
        centered_G = rewards_G - rewards_G.mean() if len(rewards_G) else rewards_G
        if len(centered_G) < 2 or np.abs(centered_G).max() < _NO_VARIANCE:
            return None
        return centered_G / centered_G.std() if self._normalize else centered_G

    def token_loss(
        self, policy_logprobs_R: torch.Tensor, behavior_logprobs_R: torch.Tensor, advantages_R: torch.Tensor
    ) -> TokenLoss:
        """-min(r A, clip(r) A), r = exp(policy - behavior)."""
        ratio_R = (policy_logprobs_R - behavior_logprobs_R).exp()
        clipped_ratio_R = ratio_R.clamp(self._low, self._high)
        unclipped_R, clipped_R = ratio_R * advantages_R, clipped_ratio_R * advantages_R
        return TokenLoss(loss_R=-torch.minimum(unclipped_R, clipped_R), clipped_R=clipped_R < unclipped_R)

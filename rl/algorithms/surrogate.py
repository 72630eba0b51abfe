"""The clipped surrogate of PPO (Schulman et al. 2017, arXiv 1707.06347, eq. 7), which several algorithms share.

Shapes: R trainable tokens, S sequences they belong to.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from rl.algorithms.base import AlgorithmError, TokenLoss, TokenStreams


@dataclass(frozen=True, slots=True)
class Clip:
    """The interval `1 - low .. 1 + high` of a ratio."""

    low: float
    high: float

    def __post_init__(self) -> None:
        if not 0 < self.low < 1 or not self.high > 0:
            raise AlgorithmError(
                f"algorithm.clip_low: needs 0 < clip_low < 1 and clip_high > 0, got {self.low} and {self.high}; "
                "0.2 and 0.28 are usual"
            )

    def surrogate(self, ratio_R: torch.Tensor, advantages_R: torch.Tensor) -> TokenLoss:
        """-min(r A, clip(r) A); a token counts as clipped where its gradient is cut off."""
        clipped_ratio_R = ratio_R.clamp(1 - self.low, 1 + self.high)
        unclipped_R, clipped_R = ratio_R * advantages_R, clipped_ratio_R * advantages_R
        return TokenLoss(loss_R=-torch.minimum(unclipped_R, clipped_R), clipped_R=clipped_R < unclipped_R)


def sequence_sums(values_R: torch.Tensor, sequence_R: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The sum of each sequence's values, and how many there are (int64), both [S]."""
    count_S = torch.bincount(sequence_R)
    return values_R.new_zeros(len(count_S)).index_add_(0, sequence_R, values_R), count_S


def ratio(streams: TokenStreams) -> torch.Tensor:
    """The probability of each token now, divided by that at which it was sampled."""
    return (streams.policy_logprobs_R - streams.behavior_logprobs_R).exp()

"""What an algorithm is: advantages from the rewards of a group, and a loss for each trainable token.

The learner is algorithm-blind: it computes logprobs, asks for the loss of each token, and averages over the tokens.

Shapes: G episodes of a group, R trainable tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch


class AlgorithmError(ValueError):
    """Rewards or settings that an algorithm is not defined for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLoss:
    """Losses (fp32, to be averaged by the learner) and whether the ratio of the token was clipped."""

    loss_R: torch.Tensor
    clipped_R: torch.Tensor


class Algorithm(Protocol):
    """A policy-gradient algorithm."""

    def advantages(self, rewards_G: npt.NDArray[np.float64]) -> npt.NDArray[np.float64] | None:
        """The advantage of each episode of a group; `None` when the group teaches nothing (no variance)."""
        ...

    def token_loss(
        self, policy_logprobs_R: torch.Tensor, behavior_logprobs_R: torch.Tensor, advantages_R: torch.Tensor
    ) -> TokenLoss:
        """The loss of each trainable token; gradients flow through `policy_logprobs_R` alone."""
        ...

"""What an algorithm is: advantages from the rewards of a round, and a loss for each trainable token.

The learner is algorithm-blind: it computes logprobs, asks for the loss of each token, and adds them up with the weights
that `rl.algorithms.config.Aggregation` gave them. The logprobs are those of the published weights at the temperature of
sampling, so at the first step of a round every ratio is exactly 1.

Shapes: G episodes of a group, R trainable tokens, S sequences they belong to.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

Rewards = npt.NDArray[np.float64]


class AlgorithmError(ValueError):
    """Rewards or settings that an algorithm is not defined for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenStreams:
    """The trainable tokens of a micro-batch, whole sequences only; all fp32 but `sequence_R`.

    `policy_logprobs_R` carries the gradient; `behavior_logprobs_R` is what the sampler recorded. `sequence_R` (int64)
    numbers the sequence of each token from 0, without gaps.
    """

    policy_logprobs_R: torch.Tensor
    behavior_logprobs_R: torch.Tensor
    advantages_R: torch.Tensor
    sequence_R: torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLoss:
    """Losses (fp32, to be added up by the learner) and whether the ratio of the token was clipped."""

    loss_R: torch.Tensor
    clipped_R: torch.Tensor


class Algorithm(Protocol):
    """A policy-gradient algorithm."""

    def advantages(self, rewards: Sequence[Rewards]) -> Sequence[Rewards | None]:
        """The advantages of each group of a round, from its rewards [G]; `None` for one that teaches nothing."""
        ...

    def token_loss(self, streams: TokenStreams) -> TokenLoss:
        """The loss of each trainable token; gradients flow through `policy_logprobs_R` alone."""
        ...

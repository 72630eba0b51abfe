"""What an algorithm is: advantages from the rewards of a round, and a loss for each trainable token.

The learner is algorithm-blind: it computes streams, asks for the loss of each token, and adds them up with the weights
that `rl.algorithms.config.Aggregation` gave them. The logprobs are those of the published weights at the temperature of
sampling, so at the first step of a round every ratio is exactly 1.

Shapes: G episodes of a group, R trainable tokens, S sequences they belong to.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt
import torch

from rl.algorithms.gae import EpisodeStreams, TokenCredit

Rewards = npt.NDArray[np.float64]


class AlgorithmError(ValueError):
    """Rewards or settings that an algorithm is not defined for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CriticStreams:
    """The critic's values of the trainable tokens, now (with gradient) and at the start of the round; their targets."""

    values_R: torch.Tensor
    old_values_R: torch.Tensor
    returns_R: torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenStreams:
    """The trainable tokens of a micro-batch, whole sequences only; all fp32 but `sequence_R`.

    `policy_logprobs_R` carries the gradient; `behavior_logprobs_R` is what the sampler recorded. `sequence_R` (int64)
    numbers the sequence of each token from 0, without gaps. `proximal_logprobs_R` are the learner's at the start of the
    round, `reference_logprobs_R` the frozen reference's, `critic` the value head's; `None` where the learner has none.
    `entropies` computes the entropy (nats, with gradient) of the distribution of each token: nothing is computed, and
    no graph built, for a loss that does not call it.
    """

    policy_logprobs_R: torch.Tensor
    behavior_logprobs_R: torch.Tensor
    advantages_R: torch.Tensor
    sequence_R: torch.Tensor
    proximal_logprobs_R: torch.Tensor | None = None
    reference_logprobs_R: torch.Tensor | None = None
    entropies: Callable[[], torch.Tensor] | None = None
    critic: CriticStreams | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLoss:
    """Losses (fp32, to be added up by the learner) and whether the ratio of the token was clipped.

    `terms` are further losses, weighted already, by the metric that shows their sum (`loss/kl`): the loss of a token is
    `loss_R` plus all of them. `watched` are values without gradient whose mean over the trained tokens is logged, by
    metric.
    """

    loss_R: torch.Tensor
    clipped_R: torch.Tensor
    terms: Mapping[str, torch.Tensor] = field(default_factory=dict[str, torch.Tensor])
    watched: Mapping[str, torch.Tensor] = field(default_factory=dict[str, torch.Tensor])

    def total(self) -> torch.Tensor:
        """The whole loss of each token, fp32 [R]."""
        return sum(self.terms.values(), start=self.loss_R)


class Loss(Protocol):
    """What the learner asks for."""

    def token_loss(self, streams: TokenStreams) -> TokenLoss:
        """The loss of each trainable token; gradients flow through the policy's streams alone."""
        ...


class Algorithm(Loss, Protocol):
    """A policy-gradient algorithm whose credit is one advantage an episode."""

    def advantages(self, rewards: Sequence[Rewards]) -> Sequence[Rewards | None]:
        """The advantages of each group of a round, from its rewards [G]; `None` for one that teaches nothing."""
        ...


@runtime_checkable
class CriticAlgorithm(Loss, Protocol):
    """A policy-gradient algorithm whose credit is one advantage a token, from the values of a critic."""

    def token_credit(self, episodes: Sequence[EpisodeStreams]) -> Sequence[TokenCredit]:
        """Advantages and returns of the episodes of a round."""
        ...

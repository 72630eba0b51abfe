"""From a packed batch and what the policy makes of it to the streams that a loss reads.

Shapes: R trainable tokens.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from model import logprobs
from model.kernels.dispatch import Kernels
from rl.algorithms.base import CriticStreams, TokenStreams
from rl.batch import Batch
from rl.learner.policy import PolicyOutput


def token_streams(
    batch: Batch,
    logprobs_R: torch.Tensor,
    entropies: Callable[[], torch.Tensor],
    values_R: torch.Tensor | None,
) -> TokenStreams:
    """The streams of a micro-batch; `entropies` runs when a loss asks for it, `values_R` are the value head's."""
    critic = None
    if values_R is not None and batch.old_values_R is not None and batch.returns_R is not None:
        critic = CriticStreams(values_R=values_R, old_values_R=batch.old_values_R, returns_R=batch.returns_R)
    return TokenStreams(
        policy_logprobs_R=logprobs_R,
        behavior_logprobs_R=batch.behavior_logprobs_R,
        advantages_R=batch.advantages_R,
        sequence_R=batch.sequence_R,
        proximal_logprobs_R=batch.proximal_logprobs_R,
        reference_logprobs_R=batch.reference_logprobs_R,
        entropies=entropies,
        critic=critic,
    )


def batch_logprobs(out: PolicyOutput, batch: Batch, kernels: Kernels) -> torch.Tensor:
    """Logprob of each trainable token at the temperature it was sampled at, as the behavior logprobs are; fp32 [R]."""
    return logprobs.logprobs(out.unembedding, out.hidden_RD, batch.target_ids_R, batch.temperatures_R, kernels)


def row_entropies(out: PolicyOutput, batch: Batch, kernels: Kernels) -> torch.Tensor:
    """Entropies of softmax(logits / temperature) in nats, fp32 [R]; differentiable."""
    return logprobs.entropies(out.unembedding, out.hidden_RD, batch.target_ids_R, batch.temperatures_R, kernels)


def logprobs_and_entropies(out: PolicyOutput, batch: Batch, kernels: Kernels) -> tuple[torch.Tensor, torch.Tensor]:
    """Both from one projection, without gradient; the entropies in float64 [R]."""
    return logprobs.with_entropies(out.unembedding, out.hidden_RD, batch.target_ids_R, batch.temperatures_R, kernels)

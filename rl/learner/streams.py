"""From a packed batch and what the policy makes of it to the streams that a loss reads.

Shapes: R trainable tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from rl.algorithms.base import CriticStreams, TokenStreams
from rl.batch import Batch


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


def row_entropies(logits_RV: torch.Tensor, temperatures_R: torch.Tensor) -> torch.Tensor:
    """Entropies of softmax(logits / temperature) in nats [R], in the logits' dtype (fp32); differentiable in them."""
    logprobs_RV = torch.log_softmax(logits_RV / temperatures_R.unsqueeze(-1), -1)
    return -(logprobs_RV.exp() * logprobs_RV).sum(-1)

"""Logprobs by torch's own log_softmax: every device, and the last bits depend on the number of rows.

Shapes: R rows, V vocabulary.
"""

from __future__ import annotations

import torch


def logprobs(logits_RV: torch.Tensor, ids_R: torch.Tensor, temperature: torch.Tensor | float = 1.0) -> torch.Tensor:
    """As `cpu.Logprobs`: fp32 [R], differentiable in the logits."""
    return _log_softmax(logits_RV, temperature).gather(-1, ids_R.unsqueeze(-1)).squeeze(-1)


def with_entropies(
    logits_RV: torch.Tensor, ids_R: torch.Tensor, temperature: torch.Tensor | float = 1.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `cpu.Logprobs.with_entropies`: fp32 [R] and float64 [R]."""
    logprobs_RV = _log_softmax(logits_RV.detach(), temperature)
    entropies_R = -(logprobs_RV.exp() * logprobs_RV).sum(-1, dtype=torch.float64)
    return logprobs_RV.gather(-1, ids_R.unsqueeze(-1)).squeeze(-1), entropies_R


def _log_softmax(logits_RV: torch.Tensor, temperature: torch.Tensor | float) -> torch.Tensor:
    temperatures_R = torch.as_tensor(temperature, dtype=torch.float32, device=logits_RV.device).expand(len(logits_RV))
    return torch.log_softmax(logits_RV.float() / temperatures_R.unsqueeze(-1), dim=-1)

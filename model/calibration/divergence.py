"""How far a changed network's next-token distributions are from the source's.

Shapes: T tokens, D model dim, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from model.layers import project_logits

_CHUNK_VALUES = 1 << 22
"""Logits that exist at once for each network: 32 MiB in fp64."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Divergence:
    """KL(source || changed) in nats a token over all tokens, and the next-token loss (nats) before and after.

    `top1_agreement` is the share of tokens whose most probable successor is the same.
    """

    kl_mean: float
    kl_max: float
    source_loss: float
    loss: float
    top1_agreement: float


def divergences(
    output_VD: torch.Tensor, source_TD: torch.Tensor, changed: Sequence[torch.Tensor], targets_T: torch.Tensor
) -> list[Divergence]:
    """Compare final hidden states, fp32 [T, D], that share one output projection.

    Softmaxes and sums are fp64, so equal hidden states give exactly 0 and the smallest KL is that of fp32 logits.
    `targets_T` is the next token, or -1 where there is none.
    """
    kl_NT, loss_NT = torch.empty(2, len(changed), len(targets_T), dtype=torch.float64)
    same_NT = torch.empty(len(changed), len(targets_T), dtype=torch.bool)
    source_loss_T = torch.empty(len(targets_T), dtype=torch.float64)
    step = max(1, _CHUNK_VALUES // len(output_VD))
    for start in range(0, len(targets_T), step):
        rows = slice(start, start + step)
        target_T1 = targets_T[rows].clamp_min(0).unsqueeze(-1)
        source_TV = _log_probabilities(source_TD[rows], output_VD)
        source_loss_T[rows] = -source_TV.gather(-1, target_T1).squeeze(-1)
        probability_TV = source_TV.exp()
        for number, hidden_TD in enumerate(changed):
            changed_TV = _log_probabilities(hidden_TD[rows], output_VD)
            loss_NT[number, rows] = -changed_TV.gather(-1, target_T1).squeeze(-1)
            same_NT[number, rows] = changed_TV.argmax(-1) == source_TV.argmax(-1)
            kl_NT[number, rows] = changed_TV.neg_().add_(source_TV).mul_(probability_TV).sum(-1)
    kl_NT.clamp_min_(0.0)  # below 0 by rounding only (Gibbs' inequality)
    has_target_T = targets_T >= 0
    return [
        Divergence(
            kl_mean=float(kl_T.mean()),
            kl_max=float(kl_T.max()),
            source_loss=float(source_loss_T[has_target_T].mean()),
            loss=float(loss_T[has_target_T].mean()),
            top1_agreement=float(same_T.double().mean()),
        )
        for kl_T, loss_T, same_T in zip(kl_NT, loss_NT, same_NT, strict=True)
    ]


def _log_probabilities(hidden_TD: torch.Tensor, output_VD: torch.Tensor) -> torch.Tensor:
    """fp64 [T, V]."""
    return project_logits(hidden_TD, output_VD).double().log_softmax(-1)

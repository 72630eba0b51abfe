"""Router losses over real tokens, as sums that micro-batches can add up exactly.

    load balancing   E * sum over e of f_e * P_e    Switch Transformer (Fedus et al. 2022, eq. 4-6), top-K as in GShard
    router z-loss    mean of logsumexp(logits)^2    ST-MoE (Zoph et al. 2022, eq. 5)
    sequence-wise    the first for each sequence by itself, then the mean (DeepSeek-V3, arXiv 2412.19437, eq. 17-20)
    selection bias   b_e + speed * sign(mean load - load of e), no loss at all (DeepSeek-V3, section 2.1.2)

f_e is the share of dispatched (token, rank) choices that went to expert e, so it sums to 1 for any K, and P_e the mean
over tokens of the softmax over *all* experts; for a router of sigmoids, of each one's share of their sum (DeepSeek-V3,
eq. 19). With f and P uniform the first loss is 1. Both are averaged over layers.

Invariant: the loss of a batch does not depend on how it is packed or cut. A product of two means is not a sum over
micro-batches, so the dispatch counts of the whole batch (`DispatchTotals`, no gradient) come first; given those, the
losses of the micro-batches add up to that of the batch, and so do their gradients. Masked tokens count nowhere.

The sequence-wise form needs no counts from elsewhere, because no micro-batch cuts a sequence.

Differs from the papers: f comes from the experts that were used (which may be replayed), not from the router's argmax.

Shapes: T packed tokens, L layers, E experts, K experts a token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from model.config import RouterScores


class RouterLossError(ValueError):
    """Totals that no loss can be normalised by."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DispatchTotals:
    """What a loss is normalised by, over all micro-batches and ranks: int64 choices [L, E], and real tokens."""

    counts_LE: torch.Tensor
    num_tokens: int

    def __add__(self, other: DispatchTotals) -> DispatchTotals:
        return DispatchTotals(counts_LE=self.counts_LE + other.counts_LE, num_tokens=self.num_tokens + other.num_tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterSums:
    """fp32 sums with gradient over the real tokens of a micro-batch: probabilities [L, E] and logsumexp^2 [L]."""

    probability_LE: torch.Tensor
    z_squared_L: torch.Tensor


def dispatch_totals(routes_TLK: torch.Tensor, mask_T: torch.Tensor, num_experts: int) -> DispatchTotals:
    """Count the choices of the tokens where the bool mask is set. Add the results of all micro-batches."""
    real_TLK = routes_TLK[mask_T].long()
    counts = [torch.bincount(layer.reshape(-1), minlength=num_experts) for layer in real_TLK.unbind(1)]
    return DispatchTotals(counts_LE=torch.stack(counts), num_tokens=len(real_TLK))


def router_sums(
    router_logits_TE: Sequence[torch.Tensor], mask_T: torch.Tensor, scores: RouterScores = RouterScores.softmax
) -> RouterSums:
    """Sums over the tokens where the bool mask is set, for each layer's fp32 logits."""
    probabilities, z_squares = [], []
    for logits_TE in router_logits_TE:
        real_TE = logits_TE.float()[mask_T]
        probabilities.append(_probabilities(real_TE, scores).sum(0))
        z_squares.append(real_TE.logsumexp(-1).square().sum())
    return RouterSums(probability_LE=torch.stack(probabilities), z_squared_L=torch.stack(z_squares))


def _probabilities(logits_TE: torch.Tensor, scores: RouterScores) -> torch.Tensor:
    if scores is RouterScores.softmax:
        return logits_TE.softmax(-1)
    sigmoids_TE = logits_TE.sigmoid()
    return sigmoids_TE / sigmoids_TE.sum(-1, keepdim=True)


def load_balancing_loss(sums: RouterSums, totals: DispatchTotals) -> torch.Tensor:
    """This micro-batch's part of the load-balancing loss of the batch that `totals` counts (scalar, fp32)."""
    _require_tokens(totals)
    num_experts = totals.counts_LE.shape[1]
    frac_LE = totals.counts_LE.float() / totals.counts_LE.sum(-1, keepdim=True)
    return num_experts * (frac_LE * sums.probability_LE).sum(-1).mean() / totals.num_tokens


def sequence_balance_loss(
    router_logits_TE: Sequence[torch.Tensor],
    routes_TLK: torch.Tensor,
    cu_seqlens: torch.Tensor,
    scores: RouterScores = RouterScores.softmax,
) -> torch.Tensor:
    """The sum of the sequence-wise losses of packed sequences (scalar, fp32): divide by the batch's sequences."""
    lengths_S = cu_seqlens.diff().long()
    sequence_T = torch.arange(len(lengths_S), device=lengths_S.device).repeat_interleave(lengths_S)
    losses: list[torch.Tensor] = []
    for layer, logits_TE in enumerate(router_logits_TE):
        num_experts = logits_TE.shape[1]
        probability_SE = logits_TE.new_zeros(len(lengths_S), num_experts, dtype=torch.float32).index_add(
            0, sequence_T, _probabilities(logits_TE.float(), scores)
        )
        cell_TK = sequence_T.unsqueeze(-1) * num_experts + routes_TLK[:, layer].long()
        counts_SE = torch.bincount(cell_TK.reshape(-1), minlength=probability_SE.numel()).view_as(probability_SE)
        frac_SE = counts_SE / counts_SE.sum(-1, keepdim=True)
        losses.append(num_experts * (frac_SE * probability_SE / lengths_S.unsqueeze(-1)).sum())
    return torch.stack(losses).mean()


@torch.no_grad()
def update_selection_bias(bias_E: torch.Tensor, counts_E: torch.Tensor, speed: float) -> None:
    """Raise the bias of the experts that were chosen less than the mean, lower that of the others, in place."""
    counts_E = counts_E.double()
    bias_E.add_((counts_E.mean() - counts_E).sign().to(bias_E.dtype), alpha=speed)


def router_z_loss(sums: RouterSums, totals: DispatchTotals) -> torch.Tensor:
    """This micro-batch's part of the z-loss of the batch that `totals` counts (scalar, fp32)."""
    _require_tokens(totals)
    return sums.z_squared_L.mean() / totals.num_tokens


def _require_tokens(totals: DispatchTotals) -> None:
    if totals.num_tokens < 1:
        raise RouterLossError(
            f"router losses: the batch must have a real token, got {totals.num_tokens}; skip a batch that is all masked"
        )

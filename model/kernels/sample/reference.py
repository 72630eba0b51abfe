"""The definition of sampling, in the integer weights of `logprob/reference.py`: temperature, top-k, top-p, min-p.

Tokens are ranked by their weight e^(z - max z) at the row's temperature, of equals the smaller id first.

    top-k   the first k ranks (0: all)
    top-p   of these, the shortest prefix of ranks whose weights sum to at least p of theirs (1: all)
    min-p   of these, the ones whose weight is at least p of the largest (0: all)

The first rank always stays. With S the integer sum of the kept weights and u the row's uniform number, the chosen token
is the first in order of ids whose cumulative sum exceeds min(floor(u S), S - 1). Temperature 0 takes the first rank;
its logprob is that of temperature 1 without any cut.

This is the order of transformers' warpers. vLLM applies min-p before top-k and top-p, which is the same unless top-p
and min-p are both set. Differs from both in ties: they keep every token that equals the last one kept by top-k.

A row that is not finite gets id 0 and NaN (`logprob/reference.py` says when). Sums are exact, so an implementation may
add and search in any order and has to find the same ids.

Shapes: N rows, V vocabulary.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from model.kernels.logprob.reference import Weights, logprob, weigh


class Sampled(NamedTuple):
    """Next tokens, int64 [N], and their logprobs, fp32 [N]."""

    ids_N: torch.Tensor
    logprobs_N: torch.Tensor
    """Under the distribution that was sampled from: at the row's temperature, over the kept tokens."""
    model_logprobs_N: torch.Tensor
    """At temperature 1, over the whole vocabulary."""


def sample(
    logits_NV: torch.Tensor,
    temperatures_N: torch.Tensor,
    uniforms_N: torch.Tensor,
    *,
    top_k_N: torch.Tensor | None = None,
    top_p_N: torch.Tensor | None = None,
    min_p_N: torch.Tensor | None = None,
) -> Sampled:
    """Choose a token of each row.

    Args:
        logits_NV: fp32.
        temperatures_N: fp32, at least 0.
        uniforms_N: float64 in [0, 1).
        top_k_N: int64, 0 keeps all.
        top_p_N: float64 in (0, 1], 1 keeps all.
        min_p_N: fp32 in [0, 1], 0 keeps all.
    """
    logits_NV = logits_NV.float()
    greedy_N = temperatures_N == 0
    model = weigh(logits_NV, torch.ones(len(logits_NV)))
    weights = weigh(logits_NV, torch.where(greedy_N, 1.0, temperatures_N.float()))
    order_NV = weights.weights_RV.sort(dim=-1, descending=True, stable=True).indices
    kept_NV = _kept(weights, order_NV, top_k_N, top_p_N, min_p_N) | greedy_N.unsqueeze(-1)
    counts_NV = weights.counts_RV.masked_fill(~kept_NV, 0)
    sums_N = counts_NV.sum(-1)
    targets_N = (uniforms_N * sums_N.double()).long().clamp_min(0).minimum(sums_N - 1)
    ids_N = torch.searchsorted(counts_NV.cumsum(-1), targets_N.unsqueeze(-1), right=True).squeeze(-1)
    largest_NV = logits_NV == logits_NV.amax(-1, keepdim=True)
    ids_N = torch.where(greedy_N, largest_NV.byte().sort(dim=-1, descending=True, stable=True).indices[:, 0], ids_N)
    ids_N = torch.where(weights.finite_R & model.finite_R, ids_N, 0)

    def at_ids(weights: Weights, sums_N: torch.Tensor) -> torch.Tensor:
        return logprob(weights.distances_RV.gather(-1, ids_N.unsqueeze(-1)).squeeze(-1), sums_N, weights.finite_R)

    return Sampled(ids_N, at_ids(weights, sums_N), at_ids(model, model.counts_RV.sum(-1)))


def _kept(
    weights: Weights,
    order_NV: torch.Tensor,
    top_k_N: torch.Tensor | None,
    top_p_N: torch.Tensor | None,
    min_p_N: torch.Tensor | None,
) -> torch.Tensor:
    """Which tokens may be chosen, bool [N, V]."""
    num_rows, vocabulary = order_NV.shape
    kept_NV = torch.ones(num_rows, vocabulary, dtype=torch.bool)  # by rank
    counts_NV = weights.counts_RV.gather(-1, order_NV)
    if top_k_N is not None:
        kept_NV = torch.arange(vocabulary) < torch.where(top_k_N > 0, top_k_N, vocabulary).unsqueeze(-1)
    if top_p_N is not None:
        counts_NV = counts_NV.masked_fill(~kept_NV, 0)
        sums_N = counts_NV.sum(-1)
        enough_N = (top_p_N.double() * sums_N.double()).ceil().long().clamp_min(1).minimum(sums_N)
        before_NV = counts_NV.cumsum(-1) - counts_NV
        kept_NV = kept_NV & ((before_NV < enough_N.unsqueeze(-1)) | (top_p_N >= 1).unsqueeze(-1))
    if min_p_N is not None:
        least_N1 = min_p_N.float().clamp_max(1.0).unsqueeze(-1)
        kept_NV = kept_NV & (weights.weights_RV.gather(-1, order_NV) >= least_N1)
    return torch.zeros_like(kept_NV).scatter(-1, order_NV, kept_NV)

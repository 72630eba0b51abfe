"""The definition of logprobs: log_softmax(logits / temperature) at given ids, with sums that no order changes.

    z = logits / temperature, rounded to fp32          d = z - max z
    w = e^d in fp32, by products and sums that each round once, so that every machine gives the same bits
    n = w 2^44 rounded to an integer, ties to even; N = the integer sum of n over the vocabulary (below 2^18 tokens)
    logprob = d - log(N 2^-44) in float64, rounded to fp32

An integer sum is exact, so a row's logprobs depend on its logits and its temperature alone, and a sampler that walks
the vocabulary in another order still has the same distribution. What is cut off is below 2^-45 of the largest weight a
token, 2^-27 of the sum at most. Differs from `torch.log_softmax` by rounding only. A row with a logit that is not
finite, or whose largest logit is not finite after the division, has NaN.

Shapes: R rows, V vocabulary.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

FRACTION_BITS = 44
"""Of a weight as an integer."""

_LOWEST = -87.0
_COEFFICIENTS = (1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1)


class Weights(NamedTuple):
    """Of each token: the distance from the largest scaled logit, its exponential, and that as an integer."""

    distances_RV: torch.Tensor
    """fp32, at most 0."""
    weights_RV: torch.Tensor
    """fp32, in (0, 1]."""
    counts_RV: torch.Tensor
    """int64, 2^44 for the largest."""
    finite_R: torch.Tensor
    """bool; the others are arbitrary where it is false."""


def weigh(logits_RV: torch.Tensor, temperatures_R: torch.Tensor) -> Weights:
    """The softmax of fp32 logits before its division."""
    scaled_RV = logits_RV / temperatures_R.unsqueeze(-1)
    top_R1 = scaled_RV.amax(-1, keepdim=True)
    finite_R = logits_RV.isfinite().all(-1) & top_R1.squeeze(-1).isfinite()
    distances_RV = torch.where(finite_R.unsqueeze(-1), scaled_RV - top_R1, 0.0)
    weights_RV = _exp(distances_RV)
    return Weights(distances_RV, weights_RV, _integers(weights_RV), finite_R)


def logprobs(logits_RV: torch.Tensor, ids_R: torch.Tensor, temperatures_R: torch.Tensor) -> torch.Tensor:
    """fp32 [R], of int64 ids under fp32 logits and positive fp32 temperatures."""
    weights = weigh(logits_RV.float(), temperatures_R.float())
    distances_R = weights.distances_RV.gather(-1, ids_R.unsqueeze(-1)).squeeze(-1)
    return logprob(distances_R, weights.counts_RV.sum(-1), weights.finite_R)


def entropies(logits_RV: torch.Tensor, temperatures_R: torch.Tensor) -> torch.Tensor:
    """Nats, float64 [R]: log of the sum of weights, minus the mean of d; its terms w d are summed as integers, too."""
    weights = weigh(logits_RV.float(), temperatures_R.float())
    sums_R = weights.counts_RV.sum(-1).double()
    terms_RV = _integers(weights.weights_RV * -weights.distances_RV.clamp_min(_LOWEST))
    return torch.where(weights.finite_R, _logarithm(sums_R) + terms_RV.sum(-1).double() / sums_R, torch.nan)


def logprob(distances_R: torch.Tensor, sums_R: torch.Tensor, finite_R: torch.Tensor) -> torch.Tensor:
    """fp32 [R], from distances and integer sums of weights; NaN where not finite."""
    return torch.where(finite_R, distances_R.double() - _logarithm(sums_R.double()), torch.nan).float()


def _logarithm(sums_R: torch.Tensor) -> torch.Tensor:
    return (sums_R * 2.0**-FRACTION_BITS).log()


def _integers(weights_RV: torch.Tensor) -> torch.Tensor:
    return (weights_RV.double() * 2.0**FRACTION_BITS).round().long()


def _exp(distances_RV: torch.Tensor) -> torch.Tensor:
    """e^x = 2^n e^r with r = x - n ln 2 (ln 2 in two parts) and Cephes' polynomial, to 2 units in the last place."""
    x_RV = distances_RV.clamp_min(_LOWEST)
    n_RV = (x_RV * 1.44269504088896341).round()
    r_RV = (x_RV - n_RV * 0.693359375) - n_RV * -2.12194440e-4
    p_RV = torch.full_like(r_RV, _COEFFICIENTS[0])
    for coefficient in _COEFFICIENTS[1:]:
        p_RV = p_RV * r_RV + coefficient
    p_RV = (p_RV * (r_RV * r_RV) + r_RV) + 1.0
    return p_RV * ((n_RV.int() + 127) << 23).view(torch.float32)

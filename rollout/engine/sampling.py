"""Choosing the next token.

A counter random number for each (seed, position): what is sampled depends on the request alone and never on the batch
it ran in.

Shapes: N rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from rollout.types import SampleRequest

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_A = np.uint64(0xBF58476D1CE4E5B9)
_MIX_B = np.uint64(0x94D049BB133111EB)


class Choice(NamedTuple):
    """int64 ids and their natural logprobs: of the distribution sampled from, and of the model's own.

    The model's own is over all tokens, at temperature 1.
    """

    ids_N: torch.Tensor
    logprobs_N: torch.Tensor
    model_logprobs_N: torch.Tensor


class Rows:
    """The sampling parameters of a batch as arrays, put together once for each set of requests."""

    def __init__(self, requests: Sequence[SampleRequest]):
        params = [request.params for request in requests]
        self.seeds_N = np.array([request.seed for request in requests], dtype=np.uint64)
        self.temperatures_N = torch.tensor([each.temperature for each in params])
        self.top_k_N = torch.tensor([each.top_k for each in params])
        self.top_p_N = torch.tensor([each.top_p for each in params], dtype=torch.float64)
        self.min_p_N = torch.tensor([each.min_p for each in params])
        self.is_cut = any(each.is_cut for each in params)
        self.is_model = all(each.temperature in (0.0, 1.0) and not each.is_cut for each in params)
        """Whether every row's distribution is the model's own."""

    def choose(self, logits_NV: torch.Tensor, positions_N: np.ndarray) -> Choice:
        """The next token of each row, where its sequence has `positions_N` tokens."""
        uniforms_N = torch.from_numpy(counter_uniform(self.seeds_N, positions_N))
        kept_NV = None
        if self.is_cut:
            scaled_NV = logits_NV.float() / _divisors(self.temperatures_N)
            kept_NV = kept(scaled_NV, top_k_N=self.top_k_N, top_p_N=self.top_p_N, min_p_N=self.min_p_N)
        ids_N, logprobs_N = choose(logits_NV, self.temperatures_N, uniforms_N, kept_NV)
        if self.is_model:
            return Choice(ids_N, logprobs_N, logprobs_N)
        model_NV = torch.log_softmax(logits_NV.float(), dim=-1)
        return Choice(ids_N, logprobs_N, model_NV.gather(1, ids_N[:, None])[:, 0])


def counter_uniform(seeds_N: np.ndarray, positions_N: np.ndarray) -> np.ndarray:
    """Uniform numbers in [0, 1), float64 [N], one for each (seed, position).

    SplitMix64 (Steele, Lea and Flood 2014) applied to the seed, then to the result plus the position: a stateless
    generator, so a preempted or re-batched request draws the same numbers again.
    """
    with np.errstate(over="ignore"):
        mixed = _splitmix64(_splitmix64(seeds_N.astype(np.uint64)) + positions_N.astype(np.uint64))
    return (mixed >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _splitmix64(state: np.ndarray) -> np.ndarray:
    z = state + _GOLDEN
    z = (z ^ (z >> np.uint64(30))) * _MIX_A
    z = (z ^ (z >> np.uint64(27))) * _MIX_B
    return z ^ (z >> np.uint64(31))


def kept(
    scaled_NV: torch.Tensor, *, top_k_N: torch.Tensor, top_p_N: torch.Tensor, min_p_N: torch.Tensor
) -> torch.Tensor:
    """Which tokens may be sampled, bool [N, V], from fp32 logits over temperature.

    The k likeliest (0: all; of equals the ones with smaller ids); of those the fewest likeliest that together have at
    least `top_p` of their probability; of those the ones with at least `min_p` times the largest probability. The
    likeliest token always stays.
    """
    order_NV = scaled_NV.sort(dim=-1, descending=True, stable=True).indices
    sorted_NV = scaled_NV.gather(1, order_NV)
    rank_V = torch.arange(scaled_NV.shape[-1])
    limits_N = torch.where(top_k_N > 0, top_k_N, scaled_NV.shape[-1])
    probabilities_NV = torch.softmax(sorted_NV.masked_fill(rank_V >= limits_N[:, None], -torch.inf).double(), dim=-1)
    before_NV = probabilities_NV.cumsum(-1) - probabilities_NV
    stays_NV = (rank_V < limits_N[:, None]) & ((before_NV < top_p_N[:, None]) | (top_p_N[:, None] >= 1.0))
    stays_NV &= probabilities_NV >= min_p_N[:, None] * probabilities_NV[:, :1]
    stays_NV[:, 0] = True
    return torch.zeros_like(stays_NV).scatter_(1, order_NV, stays_NV)


def choose(
    logits_NV: torch.Tensor,
    temperatures_N: torch.Tensor,
    uniforms_N: torch.Tensor,
    kept_NV: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The chosen ids (int64 [N]) and their natural logprobs (fp32 [N]) under the distribution sampled from.

    Temperature 0 takes the largest logit and reports its logprob at temperature 1. Otherwise the inverse of the
    cumulative distribution (accumulated in float64) is read at the row's uniform number. `kept_NV` (`None`: all) says
    which tokens take part.
    """
    scaled_NV = logits_NV.float() / _divisors(temperatures_N)
    if kept_NV is not None:
        scaled_NV = scaled_NV.masked_fill(~kept_NV, -torch.inf)
    logprobs_NV = torch.log_softmax(scaled_NV, dim=-1)
    cumulative_NV = logprobs_NV.double().exp().cumsum(-1)
    # Scaling by the last entry keeps a uniform number next to 1 inside the vocabulary when the sum rounds below 1.
    targets_N = uniforms_N * cumulative_NV[:, -1]
    sampled_N = torch.searchsorted(cumulative_NV, targets_N[:, None], right=True)[:, 0]
    last = logits_NV.shape[-1] - 1
    if kept_NV is not None:  # a number next to 1 stays among the kept tokens, too
        last = logits_NV.shape[-1] - 1 - kept_NV.flip(-1).int().argmax(-1)
        sampled_N = torch.minimum(sampled_N, last)
    ids_N = torch.where(temperatures_N == 0, logits_NV.argmax(-1), sampled_N.clamp(max=logits_NV.shape[-1] - 1))
    return ids_N, logprobs_NV.gather(1, ids_N[:, None])[:, 0]


def _divisors(temperatures_N: torch.Tensor) -> torch.Tensor:
    """What logits are divided by, [N, 1]; greedy rows by 1."""
    return torch.where(temperatures_N == 0, torch.ones_like(temperatures_N), temperatures_N)[:, None]

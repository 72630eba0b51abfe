"""Choosing the next token.

A counter random number for each (seed, position): what is sampled depends on the request alone and never on the batch
it ran in.

Shapes: N rows, V vocabulary.
"""

from __future__ import annotations

import numpy as np
import torch

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_A = np.uint64(0xBF58476D1CE4E5B9)
_MIX_B = np.uint64(0x94D049BB133111EB)


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


def choose(
    logits_NV: torch.Tensor, temperatures_N: torch.Tensor, uniforms_N: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The chosen ids (int64 [N]) and their natural logprobs (fp32 [N]) under the distribution sampled from.

    Temperature 0 takes the largest logit and reports its logprob at temperature 1. Otherwise the inverse of the
    cumulative distribution (accumulated in float64) is read at the row's uniform number.
    """
    greedy_N = temperatures_N == 0
    scale_N = torch.where(greedy_N, torch.ones_like(temperatures_N), temperatures_N)
    logprobs_NV = torch.log_softmax(logits_NV.float() / scale_N[:, None], dim=-1)
    cumulative_NV = logprobs_NV.double().exp().cumsum(-1)
    # Scaling by the last entry keeps a uniform number next to 1 inside the vocabulary when the sum rounds below 1.
    targets_N = uniforms_N * cumulative_NV[:, -1]
    sampled_N = torch.searchsorted(cumulative_NV, targets_N[:, None], right=True)[:, 0]
    ids_N = torch.where(greedy_N, logits_NV.argmax(-1), sampled_N.clamp(max=logits_NV.shape[-1] - 1))
    return ids_N, logprobs_NV.gather(1, ids_N[:, None])[:, 0]

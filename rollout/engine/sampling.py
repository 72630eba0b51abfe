"""What chooses the next token of each row: its parameters, and a counter random number for each (seed, position).

So what is sampled depends on the request alone and never on the batch it ran in. `model/kernels/sample/reference.py`
defines the choice.

Shapes: N rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

import numpy as np
import torch

from model.kernels.sample.reference import Sampled
from rollout.types import SampleRequest

Sample: TypeAlias = Callable[..., Sampled]
"""`model.kernels.sample.reference.sample`, or a kernel of it."""

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_A = np.uint64(0xBF58476D1CE4E5B9)
_MIX_B = np.uint64(0x94D049BB133111EB)


class Rows:
    """The sampling parameters of a batch as arrays, put together once for each set of requests."""

    def __init__(self, requests: Sequence[SampleRequest]):
        params = [request.params for request in requests]
        self._keys_N = _splitmix64(np.array([request.seed for request in requests], dtype=np.uint64))
        self._temperatures_N = torch.tensor([each.temperature for each in params])
        # A cut that no row asks for costs nothing.
        self._cuts: dict[str, torch.Tensor] = {}
        if any(each.top_k for each in params):
            self._cuts["top_k_N"] = torch.tensor([each.top_k for each in params])
        if any(each.top_p < 1 for each in params):
            self._cuts["top_p_N"] = torch.tensor([each.top_p for each in params], dtype=torch.float64)
        if any(each.min_p for each in params):
            self._cuts["min_p_N"] = torch.tensor([each.min_p for each in params])

    def choose(self, sample: Sample, logits_NV: torch.Tensor, positions_N: np.ndarray) -> Sampled:
        """The next token of each row, where its sequence has `positions_N` tokens; `sample` is the kernel."""
        uniforms_N = torch.from_numpy(_uniform(self._keys_N, positions_N))
        return sample(logits_NV, self._temperatures_N, uniforms_N, **self._cuts)


def counter_uniform(seeds_N: np.ndarray, positions_N: np.ndarray) -> np.ndarray:
    """Uniform numbers in [0, 1), float64 [N], one for each (seed, position).

    SplitMix64 (Steele, Lea and Flood 2014) applied to the seed, then to the result plus the position: a stateless
    generator, so a preempted or re-batched request draws the same numbers again.
    """
    return _uniform(_splitmix64(seeds_N.astype(np.uint64)), positions_N)


def _uniform(keys_N: np.ndarray, positions_N: np.ndarray) -> np.ndarray:
    mixed = _splitmix64(keys_N + positions_N.astype(np.uint64))
    return (mixed >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _splitmix64(state: np.ndarray) -> np.ndarray:
    z = state + _GOLDEN
    z = (z ^ (z >> np.uint64(30))) * _MIX_A
    z = (z ^ (z >> np.uint64(27))) * _MIX_B
    return z ^ (z >> np.uint64(31))

"""Sampling on a CPU: the ids of `reference.sample`, and logprobs of the same bits as `logprob.cpu`.

Shapes: N rows, V vocabulary.
"""

from __future__ import annotations

import ctypes
from pathlib import Path

import torch

from model.kernels.cpu.build import KernelError
from model.kernels.cpu.isa import Isa, load
from model.kernels.logprob.cpu import MAX_VOCABULARY
from model.kernels.sample.reference import Sampled

_SOURCE = Path(__file__).with_name("cpu.cpp")


class Sample:
    """The kernel of one instruction set. What a row gets depends on that row and its parameters alone."""

    def __init__(self, isa: Isa) -> None:
        self._run = load(_SOURCE, isa).sample
        self._run.argtypes = [ctypes.c_void_p] * 9 + [ctypes.c_int64] * 2
        self._run.restype = None

    def __call__(
        self,
        logits_NV: torch.Tensor,
        temperatures_N: torch.Tensor,
        uniforms_N: torch.Tensor,
        *,
        top_k_N: torch.Tensor | None = None,
        top_p_N: torch.Tensor | None = None,
        min_p_N: torch.Tensor | None = None,
    ) -> Sampled:
        """As `reference.sample`.

        Raises:
            KernelError: Shapes that do not belong together, or too large a vocabulary.
        """
        if logits_NV.ndim != 2 or not 0 < logits_NV.shape[1] <= MAX_VOCABULARY:
            raise KernelError(
                f"sample: need logits [N, V] with V of 1 to {MAX_VOCABULARY}, got {tuple(logits_NV.shape)}; "
                "pass one row for each token to choose"
            )
        num_rows, vocabulary = logits_NV.shape
        operands = [
            logits_NV.detach().float().contiguous(),
            _row_values("temperatures", temperatures_N, num_rows, torch.float32),
            _row_values("uniforms", uniforms_N, num_rows, torch.float64),
            _row_values("top_k", top_k_N, num_rows, torch.int64),
            _row_values("top_p", top_p_N, num_rows, torch.float64),
            _row_values("min_p", min_p_N, num_rows, torch.float32),
        ]
        sampled = Sampled(torch.empty(num_rows, dtype=torch.int64), torch.empty(num_rows), torch.empty(num_rows))
        pointers = [None if tensor is None else tensor.data_ptr() for tensor in (*operands, *sampled)]
        self._run(*pointers, num_rows, vocabulary)
        return sampled


def _row_values(name: str, tensor: torch.Tensor | None, num_rows: int, dtype: torch.dtype) -> torch.Tensor | None:
    if tensor is None:
        return None
    if tensor.shape != (num_rows,):
        raise KernelError(f"sample: need {name} of shape ({num_rows},), got {tuple(tensor.shape)}; pass one a row")
    return tensor.to(dtype).contiguous()

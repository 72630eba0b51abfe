"""Logprobs on a CPU: sampler and learner call the same function, so what they call a token's logprob is one number.

Shapes: R rows, V vocabulary.
"""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import torch

from model.kernels.cpu.build import KernelError
from model.kernels.cpu.isa import Isa, load

_SOURCE = Path(__file__).with_name("cpu.cpp")
MAX_VOCABULARY = 2**18
"""Weights that an int64 sum holds."""


class Logprobs:
    """The kernel of one instruction set."""

    def __init__(self, isa: Isa) -> None:
        library = load(_SOURCE, isa)
        self._forward, self._backward = library.logprobs, library.logprobs_backward
        self._forward.argtypes = self._backward.argtypes = [ctypes.c_void_p] * 5 + [ctypes.c_int64] * 2
        self._forward.restype = self._backward.restype = None

    def __call__(
        self, logits_RV: torch.Tensor, ids_R: torch.Tensor, temperature: torch.Tensor | float = 1.0
    ) -> torch.Tensor:
        """As `reference.logprobs`, fp32 [R]; the temperature is one number or one a row. Differentiable in the logits.

        Raises:
            KernelError: Shapes that do not belong together, an id outside the vocabulary, or too large a vocabulary.
        """
        operands = _operands(logits_RV, ids_R, temperature)
        if torch.is_grad_enabled() and logits_RV.requires_grad:
            return _Logprobs.apply(*operands, self)  # pyright: ignore[reportReturnType]
        return self.forward(*operands)

    def with_entropies(
        self, logits_RV: torch.Tensor, ids_R: torch.Tensor, temperature: torch.Tensor | float = 1.0
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The same, without gradient, and the entropies of the rows in nats, float64 [R] (`reference.entropies`)."""
        logits_RV, ids_R, temperatures_R = _operands(logits_RV.detach(), ids_R, temperature)
        entropies_R = torch.empty(len(ids_R), dtype=torch.float64)
        return self.forward(logits_RV, ids_R, temperatures_R, entropies_R), entropies_R

    def forward(
        self,
        logits_RV: torch.Tensor,
        ids_R: torch.Tensor,
        temperatures_R: torch.Tensor,
        entropies_R: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Contiguous fp32, int64, fp32 operands; no gradient. Fills `entropies_R` if given."""
        out_R = torch.empty(len(ids_R))
        self._forward(
            logits_RV.data_ptr(), ids_R.data_ptr(), temperatures_R.data_ptr(), out_R.data_ptr(),
            None if entropies_R is None else entropies_R.data_ptr(), *logits_RV.shape,
        )  # fmt: skip
        return out_R

    def backward(
        self, logits_RV: torch.Tensor, ids_R: torch.Tensor, temperatures_R: torch.Tensor, grad_R: torch.Tensor
    ) -> torch.Tensor:
        """(onehot(id) - softmax(logits / temperature)) * grad / temperature, fp32 [R, V]."""
        grad_RV = torch.empty_like(logits_RV)
        self._backward(
            logits_RV.data_ptr(), ids_R.data_ptr(), temperatures_R.data_ptr(), grad_R.data_ptr(), grad_RV.data_ptr(),
            *logits_RV.shape,
        )  # fmt: skip
        return grad_RV


class _Logprobs(torch.autograd.Function):
    """Both directions by the kernel; nothing of size [R, V] is kept but the logits."""

    @staticmethod
    def forward(
        ctx: Any, logits_RV: torch.Tensor, ids_R: torch.Tensor, temperatures_R: torch.Tensor, kernel: Logprobs
    ) -> torch.Tensor:
        ctx.save_for_backward(logits_RV, ids_R, temperatures_R)
        ctx.kernel = kernel
        return kernel.forward(logits_RV, ids_R, temperatures_R)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return ctx.kernel.backward(*ctx.saved_tensors, grads[0].contiguous()), None, None, None


def _operands(
    logits_RV: torch.Tensor, ids_R: torch.Tensor, temperature: torch.Tensor | float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    if logits_RV.ndim != 2 or ids_R.shape != logits_RV.shape[:1] or not 0 < logits_RV.shape[1] <= MAX_VOCABULARY:
        raise KernelError(
            f"logprobs: need logits [R, V] with V of 1 to {MAX_VOCABULARY} and ids [R], "
            f"got {tuple(logits_RV.shape)} and {tuple(ids_R.shape)}; pass one row for each id"
        )
    if len(ids_R) and not 0 <= int(ids_R.min()) <= int(ids_R.max()) < logits_RV.shape[1]:
        raise KernelError(
            f"logprobs: ids must be in [0, {logits_RV.shape[1]}), got {int(ids_R.min())} to {int(ids_R.max())}; "
            "pass ids of this vocabulary"
        )
    temperatures_R = torch.as_tensor(temperature, dtype=torch.float32).expand(len(ids_R)).contiguous()
    return logits_RV.float().contiguous(), ids_R.long().contiguous(), temperatures_R

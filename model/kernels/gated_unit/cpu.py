"""The gate on a CPU: `reference.gated_unit` with a row's bits independent of the other rows and of the threads.

Shapes: T rows, F values.
"""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from model.kernels.cpu.isa import Isa, load

_SOURCE = Path(__file__).with_name("cpu.cpp")


class GatedUnit:
    """The kernel of one instruction set."""

    def __init__(self, isa: Isa) -> None:
        self._run = load(_SOURCE, isa).gated_unit
        self._run.argtypes = [ctypes.c_void_p] * 2 + [ctypes.c_int64] * 2 + [ctypes.c_int32]
        self._run.restype = None

    def __call__(self, h_T2F: torch.Tensor) -> torch.Tensor:
        """As `reference.gated_unit` (fp32 or bf16), differentiable."""
        if torch.is_grad_enabled() and h_T2F.requires_grad:
            return _GatedUnit.apply(h_T2F, self)  # pyright: ignore[reportReturnType]
        return self.forward(h_T2F)

    def forward(self, h_T2F: torch.Tensor) -> torch.Tensor:
        """Without gradient."""
        h_T2F = h_T2F.contiguous()
        rows, width = h_T2F.shape[0], h_T2F.shape[1] // 2
        y_TF = h_T2F.new_empty(rows, width)
        self._run(h_T2F.data_ptr(), y_TF.data_ptr(), rows, width, h_T2F.dtype == torch.bfloat16)
        return y_TF


class _GatedUnit(torch.autograd.Function):
    """The kernel forward; backward in torch, in fp32."""

    @staticmethod
    def forward(ctx: Any, h_T2F: torch.Tensor, kernel: GatedUnit) -> torch.Tensor:
        ctx.save_for_backward(h_T2F)
        return kernel.forward(h_T2F)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (h_T2F,) = ctx.saved_tensors
        gate_TF, up_TF = h_T2F.float().chunk(2, dim=-1)
        grad_TF = grads[0].float()
        grad_gate_TF = torch.ops.aten.silu_backward(grad_TF * up_TF, gate_TF)
        return torch.cat([grad_gate_TF, grad_TF * F.silu(gate_TF)], dim=-1).to(h_T2F.dtype), None

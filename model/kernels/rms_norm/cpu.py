"""RMSNorm on a CPU: `reference.rms_norm` with a row's bits independent of the other rows and of the threads.

Shapes: T rows, D values of a row.
"""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import torch

from model.kernels.cpu.isa import Isa, load

_SOURCE = Path(__file__).with_name("cpu.cpp")


class RmsNorm:
    """The kernel of one instruction set."""

    def __init__(self, isa: Isa) -> None:
        self._run = load(_SOURCE, isa).rms_norm
        self._run.argtypes = [ctypes.c_void_p] * 3 + [ctypes.c_int64] * 2 + [ctypes.c_float]
        self._run.restype = None

    def __call__(self, x_TD: torch.Tensor, weight_D: torch.Tensor, eps: float) -> torch.Tensor:
        """As `reference.rms_norm`, differentiable."""
        x_TD, weight_D = x_TD.float(), weight_D.float()
        if torch.is_grad_enabled() and (x_TD.requires_grad or weight_D.requires_grad):
            return _RmsNorm.apply(x_TD, weight_D, eps, self)  # pyright: ignore[reportReturnType]
        return self.forward(x_TD, weight_D, eps)

    def forward(self, x_TD: torch.Tensor, weight_D: torch.Tensor, eps: float) -> torch.Tensor:
        """fp32 in and out, no gradient."""
        x_TD, weight_D = x_TD.contiguous(), weight_D.contiguous()
        y_TD = torch.empty_like(x_TD)
        dim = x_TD.shape[-1]
        self._run(x_TD.data_ptr(), weight_D.data_ptr(), y_TD.data_ptr(), x_TD.numel() // dim, dim, eps)
        return y_TD


class _RmsNorm(torch.autograd.Function):
    """The kernel forward; backward in torch."""

    @staticmethod
    def forward(ctx: Any, x_TD: torch.Tensor, weight_D: torch.Tensor, eps: float, kernel: RmsNorm) -> torch.Tensor:
        ctx.save_for_backward(x_TD, weight_D)
        ctx.eps = eps
        return kernel.forward(x_TD, weight_D, eps)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (grad_TD,) = grads
        x_TD, weight_D = ctx.saved_tensors
        inverse_T1 = torch.linalg.vecdot(x_TD, x_TD).div_(x_TD.shape[-1]).add_(ctx.eps).rsqrt_().unsqueeze(-1)
        normed_TD = x_TD * inverse_T1
        product_TD = grad_TD * normed_TD
        grad_weight_D = product_TD.sum(tuple(range(grad_TD.ndim - 1)))
        along_T1 = torch.mv(product_TD.view(-1, len(weight_D)), weight_D).div_(len(weight_D)).view_as(inverse_T1)
        grad_x_TD = (grad_TD * weight_D).addcmul_(normed_TD, along_T1, value=-1.0).mul_(inverse_T1)
        return grad_x_TD, grad_weight_D, None, None

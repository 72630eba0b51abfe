"""Head norm and rotation on a CPU: `reference.rotary`, a token's bits independent of the others and of the threads.

Shapes: T tokens, H heads, d head dim, h rotated pairs of a head.
"""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import torch

from model.kernels.cpu.build import KernelError
from model.kernels.cpu.isa import Isa, load

_SOURCE = Path(__file__).with_name("cpu.cpp")
_FLOATS = (torch.float32, torch.bfloat16)


class _Call(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("x", "by", "weight", "y")),
        *((name, ctypes.c_int64) for name in ("tokens", "heads", "dim", "pairs", "row_stride", "head_stride")),
        *((name, ctypes.c_int64) for name in ("together", "in_bf16", "out_bf16")),
        ("eps", ctypes.c_float),
    )


class Rotary:
    """The kernel of one instruction set."""

    def __init__(self, isa: Isa) -> None:
        self._run = load(_SOURCE, isa).rotary
        self._run.argtypes = [ctypes.POINTER(_Call)]
        self._run.restype = None

    def __call__(
        self,
        x_THd: torch.Tensor,
        by_T1h: torch.Tensor,
        weight: torch.Tensor | None = None,
        eps: float = 0.0,
        *,
        together: bool = False,
        out_dtype: torch.dtype | None = None,
    ) -> torch.Tensor:
        """As `reference.rotary`, fp32 or bf16 in and out, differentiable in `x_THd` and `weight`.

        Raises:
            KernelError: A dtype or shape does not fit.
        """
        out_dtype = out_dtype or x_THd.dtype
        if weight is not None:
            weight = weight.float()
        tokens, heads, dim = x_THd.shape
        num_weights = None if weight is None else len(weight)
        if (
            x_THd.dtype not in _FLOATS
            or out_dtype not in _FLOATS
            or by_T1h.dtype != torch.complex64
            or by_T1h.shape[:-1] != (tokens, 1)
            or 2 * by_T1h.shape[-1] > dim
            or num_weights not in (None, heads * dim if together else dim)
        ):
            raise KernelError(
                f"rotary: must be fp32 or bf16 [T, H, d], turns complex64 [T, 1, h] and a weight that fits them, got "
                f"{x_THd.dtype} {[*x_THd.shape]}, {by_T1h.dtype} {[*by_T1h.shape]} and {num_weights} weights to "
                f"{out_dtype}; pass what the model's layers make"
            )
        if torch.is_grad_enabled() and (x_THd.requires_grad or (weight is not None and weight.requires_grad)):
            return _Rotary.apply(x_THd, by_T1h, weight, eps, together, out_dtype, self)  # pyright: ignore[reportReturnType]
        return self.forward(x_THd, by_T1h, weight, eps, together, out_dtype)

    def forward(
        self,
        x_THd: torch.Tensor,
        by_T1h: torch.Tensor,
        weight: torch.Tensor | None,
        eps: float,
        together: bool,
        out_dtype: torch.dtype,
    ) -> torch.Tensor:
        """No gradient, and operands that fit."""
        if x_THd.stride(-1) != 1:
            x_THd = x_THd.contiguous()
        by_T1h = by_T1h.resolve_conj().contiguous()
        weight = None if weight is None else weight.contiguous()
        y_THd = x_THd.new_empty(x_THd.shape, dtype=out_dtype)
        self._run(
            _Call(
                x=x_THd.data_ptr(),
                by=by_T1h.data_ptr(),
                weight=None if weight is None else weight.data_ptr(),
                y=y_THd.data_ptr(),
                tokens=x_THd.shape[0],
                heads=x_THd.shape[1],
                dim=x_THd.shape[2],
                pairs=by_T1h.shape[-1],
                row_stride=x_THd.stride(0),
                head_stride=x_THd.stride(1),
                together=together,
                in_bf16=x_THd.dtype == torch.bfloat16,
                out_bf16=out_dtype == torch.bfloat16,
                eps=eps,
            )
        )
        return y_THd


class _Rotary(torch.autograd.Function):
    """The kernel forward; backward in torch: turned back, then the norm's."""

    @staticmethod
    def forward(
        ctx: Any,
        x_THd: torch.Tensor,
        by_T1h: torch.Tensor,
        weight: torch.Tensor | None,
        eps: float,
        together: bool,
        out_dtype: torch.dtype,
        kernel: Rotary,
    ) -> torch.Tensor:
        ctx.save_for_backward(x_THd, by_T1h, weight)
        ctx.eps = eps
        return kernel.forward(x_THd, by_T1h, weight, eps, together, out_dtype)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x_THd, by_T1h, weight = ctx.saved_tensors
        rotated, rest = grads[0].float().tensor_split([2 * by_T1h.shape[-1]], dim=-1)
        pairs_THh = torch.view_as_complex(rotated.unflatten(-1, (-1, 2)).contiguous())
        turned_back = torch.view_as_real(pairs_THh * by_T1h.conj()).flatten(-2)
        grad_THd = turned_back if rest.shape[-1] == 0 else torch.cat([turned_back, rest], dim=-1)
        grad_weight = None
        if weight is not None:
            x, grad = x_THd.float().reshape(-1, len(weight)), grad_THd.reshape(-1, len(weight))
            inverse = torch.linalg.vecdot(x, x).div_(len(weight)).add_(ctx.eps).rsqrt_().unsqueeze(-1)
            normed = x * inverse
            product = grad * normed
            grad_weight = product.sum(0)
            along = torch.mv(product, weight).div_(len(weight)).unsqueeze(-1)
            grad_THd = (grad * weight).addcmul_(normed, along, value=-1.0).mul_(inverse).view(x_THd.shape)
        return grad_THd.to(x_THd.dtype), None, grad_weight, None, None, None, None

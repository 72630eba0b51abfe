"""Dense products on a CPU: `reference.linear` with a row's bits independent of the other rows and of the threads.

A weight is packed once into the layout of `../cpu/gemm.h` and used many times. The forward reads the packed bytes; the
gradient flows through `weight`, a tensor of the same values (the straight-through view), in torch.

Shapes: T rows, I inputs, O outputs, G groups, S strips of sixteen outputs, B blocks of 32 inputs.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from model.kernels.cpu.build import KernelError
from model.kernels.cpu.isa import Isa, load

_SOURCE = Path(__file__).with_name("cpu.cpp")
_BLOCK, _STRIP = 32, 16
_FP32, _BF16 = torch.float32, torch.bfloat16


@dataclass(frozen=True, slots=True, eq=False)
class PackedLinear:
    """One weight, or one for each of G groups of inputs, as strips."""

    tiles_GSBW: torch.Tensor
    """bf16 [G, S, B, 512]; zeros where O or I does not fill a strip or a block."""
    out_features: int
    in_features: int
    groups: int
    num_bytes: int

    def weight(self) -> torch.Tensor:
        """The bf16 weight [G, O, I]."""
        tiles = self.tiles_GSBW.view(torch.int32).unflatten(-1, (_STRIP, _STRIP))
        weight_GOI = tiles.permute(0, 1, 4, 2, 3).flatten(3).flatten(1, 2).contiguous().view(_BF16)
        return weight_GOI[:, : self.out_features, : self.in_features]

    def split(self) -> list[PackedLinear]:
        """Each group's weight as one of its own, in the same memory."""
        size = self.num_bytes // self.groups
        return [
            PackedLinear(tiles_SBW.unsqueeze(0), self.out_features, self.in_features, 1, size)
            for tiles_SBW in self.tiles_GSBW.unbind(0)
        ]


class Linear:
    """The kernel of one instruction set."""

    def __init__(self, isa: Isa) -> None:
        pointer, count, flag = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32
        self._run = load(_SOURCE, isa).linear
        self._run.argtypes = [pointer, count, count, flag, count, pointer, pointer, pointer, flag, count, count, count]
        self._run.restype = None
        self.backward_dtype = _BF16 if isa is Isa.AMX else _FP32
        """What the backward of bf16 rows multiplies in: without AMX, torch's bf16 products are the slower ones."""

    def pack(self, weight: torch.Tensor) -> PackedLinear:
        """Pack [O, I], or [G, O, I] for groups, in bf16 or in fp32 values that bf16 holds.

        Raises:
            KernelError: Another shape or dtype, or a value that is not one of bf16.
        """
        if weight.ndim not in (2, 3) or 0 in weight.shape or weight.dtype not in (_FP32, _BF16):
            raise KernelError(
                f"linear: a weight must be [O, I] or [G, O, I] in fp32 or bf16, got {list(weight.shape)} in "
                f"{weight.dtype}; convert it before it is packed"
            )
        weight_GOI = weight.detach() if weight.ndim == 3 else weight.detach().unsqueeze(0)
        if weight.dtype == _FP32:
            bits_GOI = weight_GOI.contiguous().view(torch.int32)
            if (bits_GOI & 0xFFFF).any():
                raise KernelError(
                    "linear: an fp32 weight must hold values of bf16, got one with more bits; pack the published view"
                )
            weight_GOI = (bits_GOI >> 16).to(torch.int16).view(_BF16)
        groups, outputs, inputs = weight_GOI.shape
        padded_GOI = F.pad(weight_GOI, (0, -inputs % _BLOCK, 0, -outputs % _STRIP)).contiguous()
        pairs = padded_GOI.view(torch.int32).view(groups, -1, _STRIP, padded_GOI.shape[2] // _BLOCK, _STRIP)
        tiles_GSBW = pairs.permute(0, 1, 3, 4, 2).contiguous().flatten(3).view(_BF16)
        return PackedLinear(
            tiles_GSBW=tiles_GSBW,
            out_features=outputs,
            in_features=inputs,
            groups=groups,
            num_bytes=tiles_GSBW.numel() * tiles_GSBW.element_size(),
        )

    def __call__(
        self,
        x: torch.Tensor,
        packed: PackedLinear,
        bias: torch.Tensor | None = None,
        *,
        weight: torch.Tensor | None = None,
        out_dtype: torch.dtype | None = None,
    ) -> torch.Tensor:
        """`reference.linear` of each row, differentiable.

        Args:
            x: [..., I], or [T, G, I] for G groups (row t of group g meets weight g); fp32 or bf16. The last axis is
                read where it lies if it is contiguous, whatever the stride of the rows.
            packed: The weight, from `pack`.
            bias: [O], or [G, O]; added in fp32.
            weight: What takes the gradient of the weight, with its values and the shape given to `pack`; `None`: the
                weight takes none, and the gradient of `x` reads the packed one.
            out_dtype: fp32 or bf16; `None`: that of `x`.

        Returns:
            [..., O], or [T, G, O]; accumulated in fp32 and rounded once.
        """
        dtype = x.dtype if out_dtype is None else out_dtype
        if torch.is_grad_enabled() and (
            x.requires_grad
            or (weight is not None and weight.requires_grad)
            or (bias is not None and bias.requires_grad)
        ):
            return _Linear.apply(x, weight, bias, packed, dtype, self)  # pyright: ignore[reportReturnType]
        return self.forward(x, packed, bias, dtype)

    def forward(
        self, x: torch.Tensor, packed: PackedLinear, bias: torch.Tensor | None, dtype: torch.dtype
    ) -> torch.Tensor:
        """Without gradient."""
        shape, inputs, groups = x.shape, packed.in_features, packed.groups
        if shape[-1] != inputs or (groups > 1 and (len(shape) != 3 or shape[1] != groups)):
            expected = f"[T, {groups}, {inputs}]" if groups > 1 else f"[..., {inputs}]"
            raise KernelError(f"linear: rows must be {expected}, got {list(shape)}; give the weight's own inputs")
        if x.dtype not in _IS_BF16 or dtype not in _IS_BF16:
            raise KernelError(f"linear: rows and result must be fp32 or bf16, got {x.dtype} and {dtype}; convert them")
        if groups == 1 and len(shape) != 2:
            x = x.reshape(-1, inputs)
        strides = x.stride()
        if strides[-1] != 1:
            x = x.contiguous()
            strides = x.stride()
        bias_pointer = None
        if bias is not None:
            if bias.numel() != groups * packed.out_features:
                raise KernelError(
                    f"linear: a bias must have {groups * packed.out_features} values, got {bias.numel()}; give one of "
                    f"each output"
                )
            if bias.dtype != _FP32 or not bias.is_contiguous():
                bias = bias.float().contiguous()
            bias_pointer = bias.data_ptr()
        y = x.new_empty((*shape[:-1], packed.out_features), dtype=dtype)
        if rows := len(x):
            self._run(
                x.data_ptr(),
                strides[0],
                strides[-2],
                _IS_BF16[x.dtype],
                rows,
                packed.tiles_GSBW.data_ptr(),
                bias_pointer,
                y.data_ptr(),
                _IS_BF16[dtype],
                inputs,
                packed.out_features,
                groups,
            )
        return y


_IS_BF16 = {_FP32: False, _BF16: True}


class _Linear(torch.autograd.Function):
    """The kernel forward; backward in torch."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        packed: PackedLinear,
        dtype: torch.dtype,
        kernel: Linear,
    ) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.packed = packed
        ctx.bias = None if bias is None else (bias.shape, bias.dtype)
        ctx.wide = x.dtype if x.dtype == _FP32 else kernel.backward_dtype
        return kernel.forward(x, packed, bias, dtype)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        groups = ctx.packed.groups
        rows_GTO = grads[0].reshape(-1, groups, ctx.packed.out_features).transpose(0, 1)
        grad_x = grad_weight = grad_bias = None
        if ctx.needs_input_grad[0]:
            used = ctx.packed.weight() if weight is None else weight
            used_GOI = used.to(ctx.wide).view(groups, ctx.packed.out_features, -1)
            grad_x = _products(rows_GTO.to(ctx.wide), used_GOI).transpose(0, 1).reshape(x.shape).to(x.dtype)
        if weight is not None and ctx.needs_input_grad[1]:
            x_GTI = x.reshape(-1, groups, x.shape[-1]).transpose(0, 1).to(ctx.wide)
            grad_weight = _products(rows_GTO.to(ctx.wide).mT, x_GTI).view(weight.shape).to(weight.dtype)
        if ctx.needs_input_grad[2]:
            shape, dtype = ctx.bias
            grad_bias = rows_GTO.sum(1, dtype=_FP32).view(shape).to(dtype)
        return grad_x, grad_weight, grad_bias, None, None, None


def _products(left_GMN: torch.Tensor, right_GNK: torch.Tensor) -> torch.Tensor:
    """[G, M, K]; a single product goes to the call that is fast for one."""
    if len(left_GMN) == 1:
        return torch.mm(left_GMN[0], right_GNK[0]).unsqueeze(0)
    return torch.bmm(left_GMN, right_GNK)

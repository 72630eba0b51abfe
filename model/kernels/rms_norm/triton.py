"""RMSNorm on a GPU, in Triton, alone or after an addition: a row is read once and stays in registers.

A program has one row, so its bits depend on that row alone. Sums are fp32. The interpreter shows all of it but speed.

Shapes: T rows, D values of a row, at most 16384.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from model.kernels.cpu.build import KernelError
from model.kernels.gpu.aot import AotSpec
from model.kernels.gpu.interpret import round_to
from model.kernels.gpu.launch import launch

MAX_DIM = 16384
"""A row of fp32 values fills half of the registers of a program of 16 warps."""


@triton.jit
def _rms_norm_kernel(
    x_ptr,
    y_ptr,
    weight_ptr,
    sum_ptr,
    out_ptr,
    x_stride,
    y_stride,
    eps,
    DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    ADD: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, WIDTH)
    ok = d < DIM
    x = tl.load(x_ptr + row * x_stride + d, mask=ok, other=0.0).to(tl.float32)
    if ADD:
        x += tl.load(y_ptr + row * y_stride + d, mask=ok, other=0.0).to(tl.float32)
        total = round_to(x, sum_ptr)
        tl.store(sum_ptr + row * DIM + d, total, mask=ok)
        x = total.to(tl.float32)
    inverse = tl.rsqrt(tl.sum(x * x, 0) / DIM + eps)
    weight = tl.load(weight_ptr + d, mask=ok, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * DIM + d, round_to(x * inverse * weight, out_ptr), mask=ok)


def rms_norm(
    x_TD: torch.Tensor, weight_D: torch.Tensor, eps: float, *, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """As `reference.rms_norm`, rounded to `dtype` (fp32 or bf16) where the next product takes it; no gradient."""
    return _run(x_TD, None, weight_D, eps, dtype)[1]


def add_rms_norm(
    x_TD: torch.Tensor, y_TD: torch.Tensor, weight_D: torch.Tensor, eps: float, *, dtype: torch.dtype = torch.float32
) -> tuple[torch.Tensor, torch.Tensor]:
    """The residual stream x + y in the dtype of `x_TD`, and `rms_norm` of it; one pass over both."""
    return _run(x_TD, y_TD, weight_D, eps, dtype)


def _run(
    x_TD: torch.Tensor, y_TD: torch.Tensor | None, weight_D: torch.Tensor, eps: float, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    shape, dim = x_TD.shape, x_TD.shape[-1]
    if dim > MAX_DIM:
        raise KernelError(f"rms_norm: rows must have at most {MAX_DIM} values, got {dim}; use the reference")
    x, y = _rows(x_TD), None if y_TD is None else _rows(y_TD)
    out = x.new_empty(x.shape, dtype=dtype)
    total = out if y is None else torch.empty_like(x, memory_format=torch.contiguous_format)
    width = triton.next_power_of_2(dim)
    launch(
        _rms_norm_kernel,
        (len(x),),
        x,
        x if y is None else y,
        weight_D,
        total,
        out,
        x.stride(0),
        x.stride(0) if y is None else y.stride(0),
        eps,
        DIM=dim,
        WIDTH=width,
        ADD=y is not None,
        num_warps=_warps(width),
    )
    return total.view(shape), out.view(shape)


def _rows(x: torch.Tensor) -> torch.Tensor:
    x = x.reshape(-1, x.shape[-1])
    return x if x.stride(-1) == 1 else x.contiguous()


def _warps(width: int) -> int:
    return max(1, min(16, width // 512))


def _spec(name: str, x: str, y: str, out: str, dim: int, **kw: Any) -> AotSpec:
    width = triton.next_power_of_2(dim)
    return AotSpec(
        name=name,
        kernel=_rms_norm_kernel,
        signature={
            "x_ptr": x,
            "y_ptr": y,
            "weight_ptr": "*bf16",
            "sum_ptr": x,
            "out_ptr": out,
            "x_stride": "i32",
            "y_stride": "i32",
            "eps": "fp32",
        },
        constexprs={"DIM": dim, "WIDTH": width, "ADD": name.startswith("add")},
        num_warps=_warps(width),
        features=["wide_load"],
        **kw,
    )


AOT = [
    _spec("rms_norm_2880", "*fp32", "*fp32", "*bf16", 2880, max_registers=64),
    _spec("add_rms_norm_2880", "*fp32", "*bf16", "*bf16", 2880, max_registers=64),
    _spec("add_rms_norm_16384", "*fp32", "*fp32", "*fp32", 16384, max_registers=96),
]

"""Head norm and rotation on a GPU, in Triton; for cached attention fused with the writing of keys and values.

`rotary` is `reference.rotary`. `rotate_and_write` reads a token's fused projection once: queries are normed, rotated
and returned, keys the same and stored in their pages, values stored. It gives the bits of `rotary` and
`attention.triton_pages.write` one after the other: keys are rounded to the projection's dtype before they are stored.

The interpreter shows the arithmetic; it cannot show that the loads are wide, which the compiled code does.

Shapes: T tokens, H query heads, G key-value heads, d head dim, h rotated pairs of a head, C = (H + 2 G) d.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from model.kernels.attention.reference import Pages
from model.kernels.attention.triton_pages import FP8, INT8, PLAIN, kind_of, storage, store_heads
from model.kernels.cpu.build import KernelError
from model.kernels.gpu.aot import AotSpec
from model.kernels.gpu.interpret import round_to
from model.kernels.gpu.launch import launch

_TILE = 1024
"""Most values of a program, unless one norm spans more."""


@triton.jit
def _norm(x, weight, eps, NUM: tl.constexpr, TOGETHER: tl.constexpr):
    """RMSNorm of each row of [heads, d], or of all of them together, over `NUM` values; others are 0."""
    squares = tl.sum(x * x, 1)
    if TOGETHER:
        squares = tl.zeros_like(squares) + tl.sum(squares, 0)
    return x * tl.rsqrt(squares / NUM + eps)[:, None] * weight


@triton.jit
def _rotate(x, by_ptr, PAIRS: tl.constexpr, HEADS: tl.constexpr, WIDTH: tl.constexpr):
    """Turn adjacent pairs of [heads, d]; pairs after the first `PAIRS` are turned by nothing."""
    pair = tl.arange(0, WIDTH // 2)
    cosine = tl.load(by_ptr + 2 * pair, mask=pair < PAIRS, other=1.0)[None, :]
    sine = tl.load(by_ptr + 2 * pair + 1, mask=pair < PAIRS, other=0.0)[None, :]
    real, imaginary = tl.split(tl.reshape(x, (HEADS, WIDTH // 2, 2)))
    turned = tl.join(real * cosine - imaginary * sine, real * sine + imaginary * cosine)
    return tl.reshape(turned, (HEADS, WIDTH))


@triton.jit
def _rotary_kernel(
    x_ptr,
    by_ptr,
    weight_ptr,
    out_ptr,
    num_heads,
    x_stride,
    x_head_stride,
    by_stride,
    eps,
    DIM: tl.constexpr,
    PAIRS: tl.constexpr,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    NORM_OVER: tl.constexpr,
    TOGETHER: tl.constexpr,
):
    """`HEADS` heads of one token; `NORM_OVER` values share a norm, 0 without one."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    d = tl.arange(0, WIDTH)
    ok = (head < num_heads)[:, None] & (d < DIM)[None, :]
    at = x_ptr + token * x_stride + head.to(tl.int64)[:, None] * x_head_stride + d[None, :]
    x = tl.load(at, mask=ok, other=0.0).to(tl.float32)
    if NORM_OVER:
        weight_at = weight_ptr + d[None, :] + (head * DIM if TOGETHER else head * 0)[:, None]
        x = _norm(x, tl.load(weight_at, mask=ok, other=0.0).to(tl.float32), eps, NORM_OVER, TOGETHER)
    x = _rotate(x, by_ptr + token * by_stride, PAIRS, HEADS, WIDTH)
    tl.store(out_ptr + (token * num_heads + head[:, None]) * DIM + d[None, :], round_to(x, out_ptr), mask=ok)


@triton.jit
def _rotate_and_write_kernel(
    x_ptr,
    by_ptr,
    q_weight_ptr,
    k_weight_ptr,
    slots_ptr,
    out_ptr,
    key_ptr,
    key_scale_ptr,
    value_ptr,
    value_scale_ptr,
    num_heads,
    num_kv_heads,
    x_stride,
    by_stride,
    key_stride,
    key_head_stride,
    key_scale_stride,
    key_scale_head_stride,
    value_stride,
    value_head_stride,
    value_scale_stride,
    value_scale_head_stride,
    eps,
    DIM: tl.constexpr,
    PAIRS: tl.constexpr,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    HAS_NORM: tl.constexpr,
    KEY_KIND: tl.constexpr,
    VALUE_KIND: tl.constexpr,
):
    """`HEADS` heads of one token, all queries, all keys or all values."""
    token = tl.program_id(0).to(tl.int64)
    q_blocks = tl.cdiv(num_heads, HEADS)
    kv_blocks = tl.cdiv(num_kv_heads, HEADS)
    block = tl.program_id(1)
    is_query = block < q_blocks
    is_value = block >= q_blocks + kv_blocks
    first = tl.where(is_query, 0, tl.where(is_value, num_heads + num_kv_heads, num_heads))
    block -= tl.where(is_query, 0, tl.where(is_value, q_blocks + kv_blocks, q_blocks))
    head = block * HEADS + tl.arange(0, HEADS)
    head_ok = head < tl.where(is_query, num_heads, num_kv_heads)
    d = tl.arange(0, WIDTH)
    d_ok = d < DIM
    ok = head_ok[:, None] & d_ok[None, :]
    x = tl.load(x_ptr + token * x_stride + ((first + head) * DIM)[:, None] + d[None, :], mask=ok, other=0.0)
    x = x.to(tl.float32)
    slot = tl.load(slots_ptr + token).to(tl.int64)
    if is_value:
        row = value_ptr + slot * value_stride
        scale = value_scale_ptr + slot * value_scale_stride
        store_heads(x, row, scale, head, head_ok, value_head_stride, value_scale_head_stride, d, d_ok, VALUE_KIND)
    else:
        if HAS_NORM:
            weight_ptr = q_weight_ptr if is_query else k_weight_ptr
            weight = tl.load(weight_ptr + d, mask=d_ok, other=0.0).to(tl.float32)[None, :]
            x = _norm(x, weight, eps, DIM, False)  # pyright: ignore[reportArgumentType]
        turned = round_to(_rotate(x, by_ptr + token * by_stride, PAIRS, HEADS, WIDTH), x_ptr)
        if is_query:
            tl.store(out_ptr + (token * num_heads + head[:, None]) * DIM + d[None, :], turned, mask=ok)
        else:
            row = key_ptr + slot * key_stride
            scale = key_scale_ptr + slot * key_scale_stride
            key = turned.to(tl.float32)
            store_heads(key, row, scale, head, head_ok, key_head_stride, key_scale_head_stride, d, d_ok, KEY_KIND)


def rotary(
    x_THd: torch.Tensor,
    by_T1h: torch.Tensor,
    weight: torch.Tensor | None = None,
    eps: float = 0.0,
    *,
    together: bool = False,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """As `reference.rotary`, fp32 or bf16 in and out; no gradient."""
    num_tokens, num_heads, dim = x_THd.shape
    x_THd = x_THd if x_THd.stride(-1) == 1 else x_THd.contiguous()
    by = _turns(by_T1h)
    out_THd = x_THd.new_empty(x_THd.shape, dtype=out_dtype or x_THd.dtype)
    spans = together and weight is not None
    heads, width = _tile(num_heads, dim)
    heads = triton.next_power_of_2(num_heads) if spans else heads
    launch(
        _rotary_kernel,
        (num_tokens, triton.cdiv(num_heads, heads)),
        x_THd,
        by,
        out_THd if weight is None else weight,
        out_THd,
        num_heads,
        *x_THd.stride()[:2],
        by.stride(0),
        eps,
        DIM=dim,
        PAIRS=by_T1h.shape[-1],
        HEADS=heads,
        WIDTH=width,
        NORM_OVER=0 if weight is None else len(weight),
        TOGETHER=spans,
        num_warps=_warps(heads * width),
    )
    return out_THd


def rotate_and_write(
    qkv_TC: torch.Tensor,
    by_T1h: torch.Tensor,
    keys: Pages,
    values: Pages,
    slots_T: torch.Tensor,
    *,
    num_heads: int,
    q_weight_d: torch.Tensor | None = None,
    k_weight_d: torch.Tensor | None = None,
    eps: float = 0.0,
) -> torch.Tensor:
    """Store new keys and values in their slots and return the queries, [T, H, d] in the dtype of `qkv_TC`.

    Raises:
        KernelError: The projection is not H + 2 G heads, or only one of the norms is given.
    """
    num_tokens, columns = qkv_TC.shape
    num_kv_heads, dim = keys.rows_SGd.shape[1:]
    if columns != (num_heads + 2 * num_kv_heads) * dim or values.rows_SGd.shape[1:] != keys.rows_SGd.shape[1:]:
        raise KernelError(
            f"rotary: the projection must have {num_heads} + 2 * {num_kv_heads} heads of {dim}, got {columns} columns "
            f"and values {[*values.rows_SGd.shape]}; write keys and values on their own"
        )
    if (q_weight_d is None) != (k_weight_d is None):
        raise KernelError("rotary: both norms or none must be given, got one; norm queries and keys alike")
    kinds = kind_of(keys), kind_of(values)
    key_rows, key_scales = storage(keys)
    value_rows, value_scales = storage(values)
    qkv_TC = qkv_TC if qkv_TC.stride(-1) == 1 else qkv_TC.contiguous()
    by = _turns(by_T1h)
    out_THd = qkv_TC.new_empty(num_tokens, num_heads, dim)
    heads, width = _tile(num_heads, dim)
    launch(
        _rotate_and_write_kernel,
        (num_tokens, triton.cdiv(num_heads, heads) + 2 * triton.cdiv(num_kv_heads, heads)),
        qkv_TC,
        by,
        out_THd if q_weight_d is None else q_weight_d,
        out_THd if k_weight_d is None else k_weight_d,
        slots_T,
        out_THd,
        key_rows,
        key_scales,
        value_rows,
        value_scales,
        num_heads,
        num_kv_heads,
        qkv_TC.stride(0),
        by.stride(0),
        *key_rows.stride()[:2],
        *key_scales.stride()[:2],
        *value_rows.stride()[:2],
        *value_scales.stride()[:2],
        eps,
        DIM=dim,
        PAIRS=by_T1h.shape[-1],
        HEADS=heads,
        WIDTH=width,
        HAS_NORM=q_weight_d is not None,
        KEY_KIND=kinds[0],
        VALUE_KIND=kinds[1],
        num_warps=_warps(heads * width),
    )
    return out_THd


def _turns(by_T1h: torch.Tensor) -> torch.Tensor:
    """Cosine and sine beside each other, fp32 [T, 1, h, 2], contiguous in a token."""
    return torch.view_as_real(by_T1h.resolve_conj().contiguous())


def _tile(num_heads: int, dim: int) -> tuple[int, int]:
    width = triton.next_power_of_2(dim)
    return min(triton.next_power_of_2(num_heads), max(1, _TILE // width)), width


def _warps(num_values: int) -> int:
    """Sixteen values a thread: wide loads on warps of 32 threads and of 64."""
    return max(1, min(16, num_values // 512))


_INTEGERS = ["num_heads", "num_kv_heads", "x_stride", "x_head_stride", "by_stride"]
_INTEGERS += [f"{w}{s}{h}_stride" for w in ("key", "value") for s in ("", "_scale") for h in ("", "_head")]
_TYPES = dict.fromkeys(_INTEGERS, "i32") | {"by_ptr": "*fp32", "slots_ptr": "*i64", "eps": "fp32"}
_TYPES |= {"key_scale_ptr": "*fp32", "value_scale_ptr": "*fp32"}
_NARROW = ["num_heads", "num_kv_heads", *(name for name in _INTEGERS if "scale" in name)]


def _spec(name: str, kernel: Any, constexprs: dict[str, Any], pages: str = "*bf16") -> AotSpec:
    names = [arg for arg in kernel.arg_names if arg not in constexprs]
    pointers = {"key_ptr": pages, "value_ptr": pages}
    return AotSpec(
        name=name,
        kernel=kernel,
        signature={arg: _TYPES.get(arg) or pointers.get(arg, "*bf16") for arg in names},
        constexprs=constexprs,
        unaligned=[arg for arg in _NARROW if arg in names],
        num_warps=_warps(_TILE),
        max_registers=64,
        features=["wide_load"],
    )


def _writing(name: str, pages: str, kind: int, *, norm: bool) -> AotSpec:
    return _spec(
        name, _rotate_and_write_kernel, _HEADS | {"HAS_NORM": norm, "KEY_KIND": kind, "VALUE_KIND": kind}, pages
    )


_HEADS = {"DIM": 64, "PAIRS": 32, "HEADS": 16, "WIDTH": 64}
AOT = [
    _spec("rotary", _rotary_kernel, _HEADS | {"NORM_OVER": 0, "TOGETHER": False}),
    _spec("rotary_norm", _rotary_kernel, _HEADS | {"NORM_OVER": 64, "TOGETHER": False}),
    _spec("rotary_norm_together", _rotary_kernel, _HEADS | {"NORM_OVER": 1024, "TOGETHER": True}),
    _writing("rotate_and_write", "*bf16", PLAIN.value, norm=False),
    _writing("rotate_and_write_norm_int8", "*i8", INT8.value, norm=True),
    _writing("rotate_and_write_fp8", "*u8", FP8.value, norm=False),
]

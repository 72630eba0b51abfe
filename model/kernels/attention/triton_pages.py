"""Keys and values in pages as Triton reads and writes them: fp32, bf16, or bytes with a scale a slot and head.

float8_e4m3fn is handled as bytes, with integer arithmetic: sm_80 has no conversion for it, and the interpreter rounds
it differently. So every target stores the bytes that `reference.write` stores.

Shapes: T tokens, S slots, G key-value heads, d values of a head.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from model.kernels.attention.reference import Pages
from model.kernels.cpu.build import KernelError
from model.kernels.gpu.aot import AotSpec
from model.kernels.gpu.interpret import round_to
from model.kernels.gpu.launch import launch

PLAIN: tl.constexpr = tl.constexpr(0)
INT8: tl.constexpr = tl.constexpr(1)
FP8: tl.constexpr = tl.constexpr(2)

_KINDS = {
    torch.float32: PLAIN.value,
    torch.bfloat16: PLAIN.value,
    torch.int8: INT8.value,
    torch.float8_e4m3fn: FP8.value,
}


def kind_of(pages: Pages) -> int:
    """How the values of these pages are stored.

    Raises:
        KernelError: A dtype that pages do not have, a scale that is missing, or rows that are not contiguous.
    """
    rows, scales = pages
    kind = _KINDS.get(rows.dtype)
    if kind is None or (scales is None) != (kind == PLAIN.value) or rows.stride(-1) != 1:
        raise KernelError(
            "pages: must be fp32 or bf16, or int8 or float8_e4m3fn with scales, and contiguous in a head, "
            f"got {rows.dtype} {'without' if scales is None else 'with'} scales and strides {rows.stride()}; "
            "make them with the cache"
        )
    return kind


def storage(pages: Pages) -> tuple[torch.Tensor, torch.Tensor]:
    """What a kernel is given: fp8 as bytes, and the rows themselves (which it does not read) where no scales are."""
    rows, scales = pages
    rows = rows.view(torch.uint8) if rows.dtype == torch.float8_e4m3fn else rows
    return rows, rows if scales is None else scales


@triton.jit
def widen(stored, KIND: tl.constexpr, DTYPE: tl.constexpr):
    """Stored values, not yet multiplied by their scale, in the dtype of a product: exact from int8 and fp8 to bf16."""
    if KIND == FP8:
        byte = stored.to(tl.uint16)
        half = ((byte & 0x80) << 8) | ((byte & 0x7F) << 7)  # fp16 with the exponent too small by 8
        value = half.to(tl.float16, bitcast=True).to(tl.float32) * 256.0
        return tl.where((byte & 0x7F) == 0x7F, float("nan"), value).to(DTYPE)
    elif KIND == INT8:
        return stored.to(tl.float32).to(DTYPE)
    elif stored.dtype == DTYPE:
        return stored
    else:
        return stored.to(tl.float32).to(DTYPE)


@triton.jit
def store_heads(x, row_ptr, scale_ptr, head, head_ok, head_stride, scale_stride, d, d_ok, KIND: tl.constexpr):
    """Store fp32 [heads, d] of one token at its slot, as `reference.write` does.

    Args:
        x: Zero where `d_ok` is false.
        row_ptr: First value of the slot.
        scale_ptr: Scale of the slot's first head; not read where `KIND` is plain.
        head: Indices of the heads.
        head_ok: Which of them exist.
        head_stride: Between heads of a slot.
        scale_stride: The same for scales.
        d: Indices in a head.
        d_ok: Which of them exist.
        KIND: How pages store values.
    """
    at = row_ptr + head.to(tl.int64)[:, None] * head_stride + d[None, :]
    ok = head_ok[:, None] & d_ok[None, :]
    if KIND == PLAIN:
        tl.store(at, round_to(x, row_ptr), mask=ok)
    else:
        largest = 127.0 if KIND == INT8 else 448.0
        amax = tl.max(tl.abs(x), 1)
        scale = tl.where(amax > 0, tl.div_rn(amax, tl.zeros_like(amax) + largest), 1.0)  # pyright: ignore
        scaled = tl.div_rn(x, tl.broadcast_to(scale[:, None], x.shape))
        if KIND == INT8:
            # Adding 1.5 * 2^23 rounds to an integer, ties to even, and leaves it in the low bits.
            code = ((scaled + 12582912.0).to(tl.int32, bitcast=True) - 0x4B400000).to(tl.int8)
        else:
            code = _to_e4m3(scaled)
        tl.store(at, code, mask=ok)
        tl.store(scale_ptr + head.to(tl.int64) * scale_stride, scale, mask=head_ok)


@triton.jit
def _to_e4m3(x):
    """The byte of the nearest float8_e4m3fn, ties to even; at most 448 in magnitude."""
    bits = x.to(tl.uint32, bitcast=True)
    size = bits & 0x7FFFFFFF
    normal = ((size + 0x7FFFF + ((size >> 20) & 1)) >> 20) - (120 << 3)
    small = (tl.abs(x) * 512.0 + 8388608.0).to(tl.uint32, bitcast=True) - 0x4B000000  # multiples of 2^-9
    code = tl.minimum(tl.where(tl.abs(x) < 0.015625, small, normal), 0x7E)
    code = tl.where(x == x, code, 0x7F)
    return (code | ((bits >> 24) & 0x80)).to(tl.uint8)


@triton.jit
def _write_kernel(
    x_ptr,
    slots_ptr,
    rows_ptr,
    scales_ptr,
    num_heads,
    x_stride,
    x_head_stride,
    slot_stride,
    head_stride,
    scale_slot_stride,
    scale_head_stride,
    DIM: tl.constexpr,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    KIND: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    head_ok = head < num_heads
    d = tl.arange(0, WIDTH)
    d_ok = d < DIM
    at = x_ptr + token * x_stride + head.to(tl.int64)[:, None] * x_head_stride + d[None, :]
    x = tl.load(at, mask=head_ok[:, None] & d_ok[None, :], other=0.0).to(tl.float32)
    slot = tl.load(slots_ptr + token).to(tl.int64)
    store_heads(
        x,
        rows_ptr + slot * slot_stride,
        scales_ptr + slot * scale_slot_stride,
        head,
        head_ok,
        head_stride,
        scale_head_stride,
        d,
        d_ok,
        KIND,
    )


def write(pages: Pages, slots_T: torch.Tensor, x_TGd: torch.Tensor) -> None:
    """As `reference.write`, byte for byte."""
    kind = kind_of(pages)
    rows, scales = storage(pages)
    x_TGd = x_TGd if x_TGd.stride(-1) == 1 else x_TGd.contiguous()
    num_tokens, num_heads, dim = x_TGd.shape
    heads = min(8, triton.next_power_of_2(num_heads))
    launch(
        _write_kernel,
        (num_tokens, triton.cdiv(num_heads, heads)),
        x_TGd,
        slots_T,
        rows,
        scales,
        num_heads,
        *x_TGd.stride()[:2],
        *rows.stride()[:2],
        *scales.stride()[:2],
        DIM=dim,
        HEADS=heads,
        WIDTH=triton.next_power_of_2(dim),
        KIND=kind,
        num_warps=4,
    )


_INTEGERS = dict.fromkeys(
    [
        "num_heads",
        "x_stride",
        "x_head_stride",
        "slot_stride",
        "head_stride",
        "scale_slot_stride",
        "scale_head_stride",
    ],
    "i32",
)
AOT = [
    AotSpec(
        name=f"write_{name}",
        kernel=_write_kernel,
        signature={"x_ptr": "*bf16", "slots_ptr": "*i64", "rows_ptr": rows, "scales_ptr": "*fp32", **_INTEGERS},
        constexprs={"DIM": 64, "HEADS": 8, "WIDTH": 64, "KIND": kind},
        unaligned=["num_heads", "scale_slot_stride", "scale_head_stride"],
        max_registers=64,
    )
    for name, rows, kind in (("bf16", "*bf16", PLAIN.value), ("int8", "*i8", INT8.value), ("fp8", "*u8", FP8.value))
]

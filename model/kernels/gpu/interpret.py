"""Arithmetic that means the same on a GPU and in Triton's interpreter (`TRITON_INTERPRET=1`), which runs on a CPU.

The interpreter keeps bf16 as 16-bit integers: it computes nonsense with them and cuts fp32 off instead of rounding it.
So kernels load bf16, compute in fp32, and go through `to_bf16` and `dot`, whose other branch is for the interpreter.

Invariant: whatever a kernel computes apart from `dot` of bf16 operands runs the same instructions in both. What the
interpreter therefore cannot show is the matrix instructions on bf16, and races: it runs one program after the other.

The choice is made when Triton is first imported, for the whole process; `tests/numerics/triton` starts one of its own.
"""

from __future__ import annotations

import triton
import triton.knobs
import triton.language as tl

INTERPRET: tl.constexpr = tl.constexpr(triton.knobs.runtime.interpret)
"""Whether kernels of this process run in the interpreter, on CPU tensors."""


@triton.jit
def to_bf16(x):
    """Fp32 to bf16, rounded to nearest even; NaN stays NaN."""
    if INTERPRET:
        bits = x.to(tl.uint32, bitcast=True)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        rounded = tl.where(x == x, rounded, 0x7FC0)
        return rounded.to(tl.uint16).to(tl.bfloat16, bitcast=True)
    else:
        return x.to(tl.bfloat16)


@triton.jit
def dot(a, b, acc):
    """Acc + a @ b with an fp32 accumulator; operands of one dtype, bf16 or fp32, and fp32 is not cut to tf32.

    The interpreter would multiply with BLAS, some of which add a row's products in an order that depends on where in
    the tile the row stands; a matrix instruction does not, so here they are added in the order of `k`.
    """
    if INTERPRET:
        return acc + tl.sum(a.to(tl.float32)[:, :, None] * b.to(tl.float32)[None, :, :], 1)
    else:
        return tl.dot(a, b, acc, input_precision="ieee")


@triton.jit
def round_to(x, like):
    """Fp32 in the dtype of the elements `like` points to: bf16 (rounded) or fp32 (as it is)."""
    if like.dtype.element_ty == tl.bfloat16:
        return to_bf16(x)
    else:
        return x

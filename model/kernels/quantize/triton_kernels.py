"""The kernel of `triton.py`: MXFP4 from fp32 or bf16 by the arithmetic of `model.mxfp4`, BLOCKS blocks a program.

Names and constants are those of `model.mxfp4` and `model.mxfp4_rounding`, which explain them.
"""

# Triton's tensors are typed for its compiler alone.
# pyright: reportArgumentType=false, reportCallIssue=false, reportAttributeAccessIssue=false, reportOperatorIssue=false

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _mix64(z):
    """SplitMix64's finalizer, uint64."""
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB
    return z ^ (z >> 31)


@triton.jit
def _fractions(pair, key):
    """Uniform integers below 2^28 for the elements [blocks, 32], from the indices [blocks, 16] of pairs of elements."""
    word = _mix64((pair + 1).to(tl.uint64) * 0x9E3779B97F4A7C15 + key.to(tl.uint64))
    even, odd = word & 0x0FFFFFFF, (word >> 32) & 0x0FFFFFFF
    return tl.join(even, odd).reshape(pair.shape[0], 32).to(tl.int32)


@triton.jit
def _nearest(scaled, binade):
    """Unsigned codes of scaled magnitudes, ties to the even one; `binade` holds the exponent's bits, of 1 or more."""
    anchor = binade + (22 << 23)
    rounded = (scaled + anchor.to(tl.float32, bitcast=True)).to(tl.int32, bitcast=True) - anchor
    return rounded + ((binade - 0x3F800000) >> 22)


@triton.jit
def _stochastic(scaled, binade, fractions):
    """Unsigned codes: the whole part of the magnitude in steps plus a random fraction."""
    step = binade - 0x3F800000
    fixed = (scaled * (0x3F800000 + (29 << 23) - step).to(tl.float32, bitcast=True)).to(tl.int32)
    return ((fixed + fractions) >> 28) + (step >> 22)


@triton.jit
def quantize_kernel(
    w_ptr,
    previous_blocks_ptr,
    previous_scales_ptr,
    blocks_ptr,
    scales_ptr,
    changed_ptr,
    largest_ptr,
    num_blocks,
    first_block,
    key,
    CARRY: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    KEEP: tl.constexpr,
    COMPARE: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """Codes and scale bytes; with COMPARE whether a block's bytes differ from the previous ones.

    With KEEP a previous scale byte stays where it brings the largest magnitude into `HYSTERESIS`. `largest` is the
    largest magnitude of each program's blocks, as its fp32 bits.
    """
    program = tl.program_id(0).to(tl.int64)
    block = program * BLOCKS + tl.arange(0, BLOCKS)
    is_block = block < num_blocks
    at = block[:, None] * 32 + tl.arange(0, 32)[None, :]
    bits = tl.load(w_ptr + at, mask=is_block[:, None], other=0.0).to(tl.float32).to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    largest = tl.max(magnitude, 1)
    tl.store(largest_ptr + program, tl.max(largest, 0))

    scale = tl.minimum(tl.maximum(((largest + CARRY) >> 23) - 2, 0), 252)
    if KEEP:
        previous = tl.load(previous_scales_ptr + block, mask=is_block, other=0).to(tl.int32)
        usable = tl.minimum(previous, 252)
        brought = largest.to(tl.float32, bitcast=True) * ((254 - usable) << 23).to(tl.float32, bitcast=True)
        scale = tl.where((brought >= 3.25) & (brought < 7.5) & (usable == previous), usable, scale)

    inverse = ((254 - scale) << 23).to(tl.float32, bitcast=True)
    scaled = magnitude.to(tl.float32, bitcast=True) * inverse[:, None]
    binade = tl.maximum(scaled.to(tl.int32, bitcast=True), 0x3F800000) & 0x7F800000
    if STOCHASTIC:
        pair = (first_block + block)[:, None] * 16 + tl.arange(0, 16)[None, :]
        code = _stochastic(scaled, binade, _fractions(pair, key))
    else:
        code = _nearest(scaled, binade)
    code = tl.minimum(code, 7)
    code = tl.where(code == 0, 0, code | ((bits >> 28) & 8))  # no negative zero is written
    even, odd = code.reshape(BLOCKS, 16, 2).split()
    packed = (even | (odd << 4)).to(tl.uint8)
    byte = block[:, None] * 16 + tl.arange(0, 16)[None, :]
    tl.store(blocks_ptr + byte, packed, mask=is_block[:, None])
    tl.store(scales_ptr + block, scale.to(tl.uint8), mask=is_block)
    if COMPARE:
        before = tl.load(previous_blocks_ptr + byte, mask=is_block[:, None], other=0)
        before_scale = tl.load(previous_scales_ptr + block, mask=is_block, other=0).to(tl.int32)
        differs = tl.max((before != packed).to(tl.int32), 1) | (before_scale != scale).to(tl.int32)
        tl.store(changed_ptr + block, differs.to(tl.uint8), mask=is_block)

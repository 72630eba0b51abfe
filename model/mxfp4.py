"""MXFP4: four-bit floats (E2M1) in blocks of 32 with one power-of-two scale (E8M0) a block; 4.25 bits a value.

Invariant: `quantize` is a function of the fp32 bits and of its options alone (exact integer arithmetic, one canonical
encoding for each value, the same bytes in any chunking and on any number of threads), and with rule EVEN or FLOOR,
round to nearest and no previous scales `quantize(dequantize(quantize(w))) == quantize(w)` byte for byte (random
rounding and a kept scale can leave 5 as a block's largest code: then the values are equal). There is no other
quantizer in the project: the learner's forward, the published snapshot and the sampler all read what this module
writes.

Layout (that of the gpt-oss checkpoints; others are in `mxfp4_layouts`): byte b of a block holds element 2b in its low
nibble and 2b+1 in its high nibble, so a block is 16 bytes, and its scale byte lies in a separate tensor.

    code   0   1    2   3    4   5   6   7    +8: the same with a minus sign (8 is -0: read as such, never written)
    value  0   .5   1   1.5  2   3   4   6    times 2^(scale byte - 127)

Scale: with u the fp32 bits of the block's largest magnitude, byte = ((u + C) >> 23) - 2, kept within 0..252. The
rules differ in the carry C, and so in where they bring the largest magnitude:

    rule    C          range     beyond 6    its own output again
    EVEN    0x200000   [3.5, 7)  saturates   the same bytes (the largest code is 6 or 7, which pins the scale)
    FLOOR   0          [4, 8)    saturates   the same bytes (likewise); the rule of OCP MX v1.0, section 6.3
    RCEIL   0x3FFFFF   (3, 6]    nothing     the same values; a block whose largest code is 5 gets the next smaller byte

EVEN is the default because it has no jump at the largest code, where trained masters lie: under RCEIL one ulp above 6
moves the block to a grid twice as coarse. Elements are rounded to nearest with ties to the even code, or at random
(`mxfp4_rounding`). A block of zeros gets scale byte 0.

Choices where implementations differ: a NaN, an infinity or a magnitude from 1.75 * 2^127 on (EVEN would round it to
2^128) is an error under every rule, and bytes 253 to 255 are never written (RCEIL would ask for 253 above
1.5 * 2^127; with 252 the value read back is the same); on reading, byte 255 is NaN (OCP MX v1.0, section 5.4.1) and
bytes 253 and 254 overflow to infinity where fp32 does; byte 0 is 2^-127, a subnormal, exact unless the process flushes
those.

Shapes: K values along the last axis, N blocks.
"""

from __future__ import annotations

import math
from enum import StrEnum
from functools import cache

import torch

from model.mxfp4_rounding import Rounding, Scratch, random_fractions, round_nearest, round_stochastic

FORMAT_VERSION = 1
"""Of the bytes that this module writes and of how it reads them; it stands in checkpoint and snapshot metadata."""

BLOCK = 32
"""Values in a block."""

BLOCK_BYTES = BLOCK // 2

E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
"""The value of each code before scaling."""

LIMIT = 1.75 * 2.0**127
"""Magnitudes that can be quantized lie below this."""

HYSTERESIS = (3.25, 7.5)
"""A previous scale is kept while it brings the block's largest magnitude into this half-open range."""

_MAGNITUDE = 0x7FFFFFFF
_TOO_LARGE = 0x7F600000
_LARGEST_SCALE = 252
"""The largest scale byte with which every code is finite in fp32."""
_CHUNK_BLOCKS = 4096
"""Blocks quantized at once on a CPU: the scratch tensors (512 KiB each) then stay in the second-level cache."""


class MXFP4Error(ValueError):
    """A tensor that MXFP4 cannot hold, bytes that are not MXFP4, or options that do not belong together."""


class ScaleRule(StrEnum):
    """How a block's scale byte follows from its largest magnitude (table in the module's docstring)."""

    EVEN = "even"
    FLOOR = "floor"
    RCEIL = "rceil"

    @property
    def carry(self) -> int:
        """What is added to the magnitude's fp32 bits before the exponent is cut out."""
        return {ScaleRule.EVEN: 0x200000, ScaleRule.FLOOR: 0, ScaleRule.RCEIL: 0x3FFFFF}[self]


def quantize(
    w: torch.Tensor,
    *,
    rule: ScaleRule = ScaleRule.EVEN,
    rounding: Rounding = Rounding.NEAREST_EVEN,
    seed: int | None = None,
    first_block: int = 0,
    previous_scales: torch.Tensor | None = None,
    name: str = "tensor",
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize along the last axis.

    Args:
        w: Floating point, [..., K] with K a multiple of 32. Read as fp32.
        rule: Scale rule.
        rounding: Rounding of the elements.
        seed: In [0, 2^63); given exactly when rounding is stochastic. The random number of an element follows from the
            seed and from its index in the tensor, so tensors and rounds that should differ need seeds of their own.
        first_block: Index of `w`'s first block in the whole tensor when `w` is a shard of it: the shards are then
            rounded as the whole would be. Only stochastic rounding reads it.
        previous_scales: uint8 [..., K/32]; a block keeps its byte from here (0 to 252) while that brings its largest
            magnitude into `HYSTERESIS`. A kept scale need not be the one that `rule` gives for the decoded values.
        name: What the tensor is called in an error.

    Returns:
        blocks, uint8 [..., K/32, 16], and scales, uint8 [..., K/32].

    Raises:
        MXFP4Error: K is not a multiple of 32, a value is NaN, infinite or at least `LIMIT`, the previous scales are of
            another shape, or the seed does not fit the rounding.
    """
    if w.ndim == 0 or w.shape[-1] % BLOCK or not w.is_floating_point():
        raise MXFP4Error(
            f"{name}: MXFP4 needs floating point and a last axis that is a multiple of {BLOCK}, "
            f"got {w.dtype} of shape {tuple(w.shape)}; pad the weight when the model is defined"
        )
    lead = (*w.shape[:-1], w.shape[-1] // BLOCK)
    _check_options(name, lead, rounding, seed, first_block, previous_scales)
    w_NK = w.detach().to(torch.float32).contiguous().view(math.prod(lead), BLOCK)
    previous_N = None if previous_scales is None else previous_scales.to(w.device).reshape(len(w_NK))
    blocks = torch.empty(len(w_NK), BLOCK_BYTES, dtype=torch.uint8, device=w.device)
    scales = torch.empty(len(w_NK), dtype=torch.uint8, device=w.device)
    step = _CHUNK_BLOCKS if w.device.type == "cpu" else max(1, len(w_NK))
    scratch = Scratch(min(step, len(w_NK)), BLOCK, w.device)
    for start in range(0, len(w_NK), step):
        rows = slice(start, start + step)
        bits = w_NK[rows].view(torch.int32)
        if len(bits) < len(scratch.magnitude):  # the last chunk
            scratch = Scratch(len(bits), BLOCK, w.device)
        amax_N = torch.bitwise_and(bits, _MAGNITUDE, out=scratch.magnitude).amax(-1)
        if int(amax_N.max()) >= _TOO_LARGE:
            bad = w_NK[~(w_NK.abs() < LIMIT)]
            raise MXFP4Error(
                f"{name}: every magnitude must be below {LIMIT:.4g}, got {bad[0].item()} and {bad.numel() - 1} more of "
                f"{w_NK.numel()} values; find the step that produced them"
            )
        scale_N = _scale_bytes(amax_N, rule, None if previous_N is None else previous_N[rows])
        scales[rows] = scale_N
        # Exact, by a power of two: a product that is not normal is far below the first tie and rounds to code 0.
        scratch.magnitude.view(torch.float32).mul_(_inverse_scales(scale_N).unsqueeze(-1))
        if seed is None:
            round_nearest(scratch)
        else:
            first_pair = (first_block + start) * BLOCK_BYTES
            fractions = random_fractions(seed, first_pair, len(bits) * BLOCK_BYTES, w.device)
            round_stochastic(scratch, fractions.view(-1, BLOCK))
        _pack(bits, scratch, blocks[rows])
    return blocks.view(*lead, BLOCK_BYTES), scales.view(lead)


def _check_options(
    name: str,
    lead: tuple[int, ...],
    rounding: Rounding,
    seed: int | None,
    first_block: int,
    previous_scales: torch.Tensor | None,
) -> None:
    if (seed is None) is (rounding is Rounding.STOCHASTIC) or not 0 <= (seed or 0) < 2**63:
        raise MXFP4Error(
            f"{name}: a seed in [0, 2^63) belongs to stochastic rounding, and only to it, "
            f"got rounding {rounding} and seed {seed}; give both or neither"
        )
    if first_block < 0:
        raise MXFP4Error(f"{name}: first_block must be at least 0, got {first_block}; count from the whole tensor")
    if previous_scales is not None and (previous_scales.dtype != torch.uint8 or previous_scales.shape != lead):
        raise MXFP4Error(
            f"{name}: previous_scales must be uint8 of shape {lead}, got {previous_scales.dtype} of shape "
            f"{tuple(previous_scales.shape)}; pass the scales of the same tensor's last quantize call"
        )


def _inverse_scales(scale_N: torch.Tensor) -> torch.Tensor:
    """2^(127 - scale byte), fp32, of int32 scale bytes in 0..253: normal numbers all of them."""
    return ((254 - scale_N) << 23).view(torch.float32)


def _scale_bytes(amax_N: torch.Tensor, rule: ScaleRule, previous_N: torch.Tensor | None) -> torch.Tensor:
    """Scale bytes, int32, of blocks whose largest magnitudes have the int32 bits `amax_N`."""
    scale_N = (((amax_N + rule.carry) >> 23) - 2).clamp_(0, _LARGEST_SCALE)
    if previous_N is None:
        return scale_N
    usable_N = previous_N.to(torch.int32).clamp_max_(_LARGEST_SCALE)
    scaled_N = amax_N.view(torch.float32) * _inverse_scales(usable_N)
    keep_N = (scaled_N >= HYSTERESIS[0]) & (scaled_N < HYSTERESIS[1]) & (usable_N == previous_N)
    return torch.where(keep_N, usable_N, scale_N)


def _pack(bits: torch.Tensor, scratch: Scratch, blocks_out: torch.Tensor) -> None:
    """Join the codes in `rounded` with the signs of `bits`, two to a byte."""
    rounded, code, sign, carry = scratch.rounded, scratch.code, scratch.sign, scratch.carry
    code.copy_(rounded)
    torch.bitwise_right_shift(bits, 28, out=rounded)
    sign.copy_(rounded)
    torch.add(code, 7, out=carry)  # bit 3 is set exactly when the code is not 0: no negative zero is written
    sign.bitwise_and_(carry).bitwise_and_(8)
    code.bitwise_or_(sign)
    pairs = code.view(torch.int16)  # little endian: the even element is the low byte
    blocks_out.copy_(pairs | (pairs >> 4))


def check_packed(where: str, blocks: torch.Tensor, scales: torch.Tensor) -> None:
    """Check that two tensors are the packed form of one weight.

    Raises:
        MXFP4Error: They are not uint8 [..., K/32, 16] and uint8 [..., K/32].
    """
    if blocks.dtype != torch.uint8 or scales.dtype != torch.uint8 or blocks.shape != (*scales.shape, BLOCK_BYTES):
        raise MXFP4Error(
            f"{where}: blocks must be uint8 [..., K/32, {BLOCK_BYTES}] and scales uint8 [..., K/32], "
            f"got {blocks.dtype} {tuple(blocks.shape)} and {scales.dtype} {tuple(scales.shape)}; "
            "pass both tensors of one weight"
        )


def dequantize(blocks: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Decode to [..., K] in fp32 or bf16 (both hold every MXFP4 value exactly, up to overflow at scale byte 254).

    Raises:
        MXFP4Error: Shapes or dtypes that do not belong together.
    """
    if dtype not in (torch.float32, torch.bfloat16):
        raise MXFP4Error(f"dequantize: the target must be float32 or bfloat16, got {dtype}; cast afterwards")
    check_packed("dequantize", blocks, scales)
    pair_table, scale_table = _tables(dtype, blocks.device)
    pairs = pair_table.index_select(0, blocks.reshape(-1).to(torch.int32))
    values = pairs.view(dtype).view(scales.numel(), BLOCK)
    values.mul_(scale_table.index_select(0, scales.reshape(-1).to(torch.int32)).unsqueeze(-1))
    return values.view(*scales.shape[:-1], scales.shape[-1] * BLOCK)


@cache
def _tables(dtype: torch.dtype, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Both values of a byte, as one integer that holds two of `dtype`, and the scale of a scale byte (255 is NaN)."""
    value = torch.tensor(E2M1_VALUES)
    byte = torch.arange(256)
    pair = torch.stack([value[byte & 15], value[byte >> 4]], -1).to(dtype)
    exponent = torch.arange(256, dtype=torch.int32)
    scale = (exponent << 23).view(torch.float32).clone()
    scale[0] = 2.0**-127
    scale[255] = torch.nan
    integer = torch.int64 if dtype == torch.float32 else torch.int32
    return pair.view(integer).view(-1).to(device), scale.to(dtype).to(device)

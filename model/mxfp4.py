"""MXFP4: four-bit floats (E2M1) in blocks of 32 with one power-of-two scale (E8M0) a block; 4.25 bits a value.

Invariant: `quantize` is a function of the fp32 bits alone (exact integer arithmetic, one canonical encoding for each
value) and `quantize(dequantize(quantize(w))) == quantize(w)` byte for byte. There is no other quantizer in the
project: the learner's forward, the published snapshot and the sampler all read what this module writes.

Layout (that of the gpt-oss checkpoints): byte b of a block holds element 2b in its low nibble and 2b+1 in its high
nibble, so a block is 16 bytes, and its scale byte lies in a separate tensor.

    code   0   1    2   3    4   5   6   7    +8: the same with a minus sign (8 is -0 and is never written)
    value  0   .5   1   1.5  2   3   4   6    times 2^(scale byte - 127)

Scale rule EVEN: with u the bits of the block's largest magnitude, byte = ((u + 0x200000) >> 23) - 2, at least 0: the
largest magnitude is brought into [3.5, 7), and what exceeds 6 saturates. Among the usual rules EVEN (and FLOOR)
reproduce their own output's bytes, and EVEN has no jump at the largest code, where trained masters lie.
Element rule: round to nearest, ties to the even code. A block of zeros gets scale byte 0.

Choices where implementations differ: a NaN, an infinity or a magnitude from 1.75 * 2^127 on (it would round to 2^128)
is an error, so bytes 253 to 255 are never written; on reading, byte 255 is NaN (OCP MX v1.0, section 5.4.1) and bytes
253 and 254 overflow to infinity where fp32 does; byte 0 is 2^-127, a subnormal, exact unless the process flushes those.

Shapes: K values along the last axis, N blocks.
"""

from __future__ import annotations

import math
from functools import cache

import torch

BLOCK = 32
"""Values in a block."""

BLOCK_BYTES = BLOCK // 2

E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
"""The value of each code before scaling."""

LIMIT = 1.75 * 2.0**127
"""Magnitudes that can be quantized lie below this."""

_MAGNITUDE = 0x7FFFFFFF
_EXPONENT = 0x7F800000
_TOO_LARGE = 0x7F600000
_ONE = 0x3F800000
_EVEN_CARRY = 0x200000
_CHUNK_BLOCKS = 4096
"""Blocks quantized at once on a CPU: the scratch tensors (512 KiB each) then stay in the second-level cache."""


class MXFP4Error(ValueError):
    """A tensor that MXFP4 cannot hold, or bytes that are not MXFP4."""


def quantize(w: torch.Tensor, *, name: str = "tensor") -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize along the last axis.

    Args:
        w: Floating point, [..., K] with K a multiple of 32. Read as fp32.
        name: What the tensor is called in an error.

    Returns:
        blocks, uint8 [..., K/32, 16], and scales, uint8 [..., K/32].

    Raises:
        MXFP4Error: K is not a multiple of 32, or a value is NaN, infinite or at least `LIMIT`.
    """
    if w.ndim == 0 or w.shape[-1] % BLOCK or not w.is_floating_point():
        raise MXFP4Error(
            f"{name}: MXFP4 needs floating point and a last axis that is a multiple of {BLOCK}, "
            f"got {w.dtype} of shape {tuple(w.shape)}; pad the weight when the model is defined"
        )
    lead = (*w.shape[:-1], w.shape[-1] // BLOCK)
    w_NK = w.detach().to(torch.float32).contiguous().view(math.prod(lead), BLOCK)
    blocks = torch.empty(len(w_NK), BLOCK_BYTES, dtype=torch.uint8, device=w.device)
    scales = torch.empty(len(w_NK), dtype=torch.uint8, device=w.device)
    step = _CHUNK_BLOCKS if w.device.type == "cpu" else max(1, len(w_NK))
    scratch = _Scratch(min(step, len(w_NK)), w.device)
    for start in range(0, len(w_NK), step):
        rows = slice(start, start + step)
        if not _quantize_chunk(w_NK[rows], blocks[rows], scales[rows], scratch):
            bad = w_NK[~(w_NK.abs() < LIMIT)]
            raise MXFP4Error(
                f"{name}: every magnitude must be below {LIMIT:.4g}, got {bad[0].item()} and {bad.numel() - 1} more of "
                f"{w_NK.numel()} values; find the step that produced them"
            )
    return blocks.view(*lead, BLOCK_BYTES), scales.view(lead)


class _Scratch:
    """Work tensors of `_quantize_chunk`, allocated once a call."""

    def __init__(self, num_blocks: int, device: torch.device) -> None:
        self.magnitude = torch.empty(num_blocks, BLOCK, dtype=torch.int32, device=device)
        self.anchor = torch.empty_like(self.magnitude)
        self.rounded = torch.empty_like(self.magnitude)
        self.code = torch.empty(num_blocks, BLOCK, dtype=torch.uint8, device=device)
        self.sign = torch.empty_like(self.code)
        self.carry = torch.empty_like(self.code)


def _quantize_chunk(w_NK: torch.Tensor, blocks_out: torch.Tensor, scales_out: torch.Tensor, scratch: _Scratch) -> bool:
    """Quantize contiguous fp32 blocks in about twenty elementwise passes; False when a value is not finite.

    Rounding: in the binade j of a scaled magnitude a (j = 0 below 2, 1 below 4, 2 below 8) the codes are spaced
    2^j / 2 apart. Adding the anchor 2^(22 + j), whose last bit is worth just that, makes the hardware round a to
    nearest even in units of the spacing, and the unit count k appears in the low bits of the sum. The code is k + 2 j.
    """
    num = len(w_NK)
    bits = w_NK.view(torch.int32)
    magnitude, anchor, rounded = scratch.magnitude[:num], scratch.anchor[:num], scratch.rounded[:num]
    code, sign, carry = scratch.code[:num], scratch.sign[:num], scratch.carry[:num]

    torch.bitwise_and(bits, _MAGNITUDE, out=magnitude)
    amax_N = magnitude.amax(-1)
    if int(amax_N.max()) >= _TOO_LARGE:
        return False
    exponent_N = (((amax_N + _EVEN_CARRY) >> 23) - 2).clamp_min_(0)
    scales_out.copy_(exponent_N)
    inverse_N1 = ((254 - exponent_N) << 23).view(torch.float32).unsqueeze(-1)

    magnitude_f = magnitude.view(torch.float32)
    magnitude_f.mul_(inverse_N1)  # exact: a power of two, and the products are normal unless they round to code 0
    torch.clamp_min(magnitude, _ONE, out=anchor)
    anchor.bitwise_and_(_EXPONENT).add_(22 << 23)
    torch.add(magnitude_f, anchor.view(torch.float32), out=rounded.view(torch.float32))
    rounded.sub_(anchor)
    anchor.bitwise_right_shift_(22)  # 2 (149 + j)
    rounded.add_(anchor).sub_(2 * 149).clamp_max_(7)

    code.copy_(rounded)
    torch.bitwise_right_shift(bits, 28, out=rounded)
    sign.copy_(rounded)
    torch.add(code, 7, out=carry)  # bit 3 is set exactly when the code is not 0: no negative zero is written
    sign.bitwise_and_(carry).bitwise_and_(8)
    code.bitwise_or_(sign)
    pairs = code.view(torch.int16)  # little endian: the even element is the low byte
    blocks_out.copy_(pairs | (pairs >> 4))
    return True


def dequantize(blocks: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Decode to [..., K] in fp32 or bf16 (both hold every MXFP4 value exactly, up to overflow at scale byte 254).

    Raises:
        MXFP4Error: Shapes or dtypes that do not belong together.
    """
    if dtype not in (torch.float32, torch.bfloat16):
        raise MXFP4Error(f"dequantize: the target must be float32 or bfloat16, got {dtype}; cast afterwards")
    if blocks.dtype != torch.uint8 or scales.dtype != torch.uint8 or blocks.shape != (*scales.shape, BLOCK_BYTES):
        raise MXFP4Error(
            f"dequantize: blocks must be uint8 [..., K/32, {BLOCK_BYTES}] and scales uint8 [..., K/32], "
            f"got {blocks.dtype} {tuple(blocks.shape)} and {scales.dtype} {tuple(scales.shape)}; "
            "pass both tensors of one quantize call"
        )
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

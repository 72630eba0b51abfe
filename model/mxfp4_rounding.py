"""The element step of the MXFP4 quantizer: scaled magnitudes to unsigned E2M1 codes, nearest or at random.

Invariant: an element's code is a function of its scaled magnitude alone, or of that and of (seed, index) when rounding
is stochastic: never of the chunk, of the device or of the number of threads.

In the binade j of a scaled magnitude a (j = 0 below 2, 1 below 4, 2 below 8) the codes are spaced 2^j / 2 apart. With
k = a / spacing rounded to an integer, the code is k + 2 j, at most 7.

Shapes: K values of a block, N blocks of a chunk.
"""

from __future__ import annotations

from enum import StrEnum

import torch

_EXPONENT = 0x7F800000
_ONE = 0x3F800000
_RANDOM_BITS = 28
"""Fraction bits of stochastic rounding: a magnitude is below 4 steps of its binade, and the sum with a random
fraction below one step must fit 31 bits."""


class Rounding(StrEnum):
    """How a scaled magnitude between two codes is rounded.

    NEAREST_EVEN takes the nearer one, and the even code in a tie. STOCHASTIC takes the upper one with a probability
    equal to the distance from the lower one in steps, cut to 28 bits; the expected value is the value itself to within
    2^-28 steps. Either saturates beyond 6, so what lies there is biased towards zero: only RCEIL has nothing there.
    A value on the grid is never moved.
    """

    NEAREST_EVEN = "nearest_even"
    STOCHASTIC = "stochastic"


class Scratch:
    """Work tensors of a chunk, [N, K] each, reused from chunk to chunk.

    A rounding step reads the scaled magnitudes (fp32 bits, below 8) in `magnitude` and leaves the unsigned codes in
    `rounded`, int32; it may overwrite `magnitude` and `anchor`.
    """

    def __init__(self, num_blocks: int, block: int, device: torch.device) -> None:
        self.magnitude = torch.empty(num_blocks, block, dtype=torch.int32, device=device)
        self.anchor = torch.empty_like(self.magnitude)
        self.rounded = torch.empty_like(self.magnitude)
        self.code = torch.empty(num_blocks, block, dtype=torch.uint8, device=device)
        self.sign = torch.empty_like(self.code)
        self.carry = torch.empty_like(self.code)


def round_nearest(scratch: Scratch) -> None:
    """Nearest code, ties to the even one.

    Adding the anchor 2^(22 + j), whose last bit is worth the spacing, makes the hardware round a to nearest even in
    units of it, and k appears in the low bits of the sum. The parity of a code is that of its k.
    """
    magnitude, anchor, rounded = scratch.magnitude, scratch.anchor, scratch.rounded
    torch.clamp_min(magnitude, _ONE, out=anchor)
    anchor.bitwise_and_(_EXPONENT).add_(22 << 23)
    torch.add(magnitude.view(torch.float32), anchor.view(torch.float32), out=rounded.view(torch.float32))
    rounded.sub_(anchor)
    anchor.bitwise_right_shift_(22)  # 2 (149 + j)
    rounded.add_(anchor).sub_(2 * 149).clamp_max_(7)


def round_stochastic(scratch: Scratch, fractions_NK: torch.Tensor) -> None:
    """Random rounding: k is the whole part of a / spacing plus a random fraction (`random_fractions`).

    The sum is taken in fixed point with 28 fraction bits, which hold a / spacing exactly from 2^-5 on and cut it below.
    """
    magnitude, anchor, rounded = scratch.magnitude, scratch.anchor, scratch.rounded
    torch.clamp_min(magnitude, _ONE, out=anchor)
    anchor.bitwise_and_(_EXPONENT).sub_(_ONE)  # j << 23
    torch.sub(_ONE + ((_RANDOM_BITS + 1) << 23), anchor, out=rounded)  # 2^28 / spacing
    magnitude.view(torch.float32).mul_(rounded.view(torch.float32))
    rounded.copy_(magnitude.view(torch.float32))
    rounded.add_(fractions_NK).bitwise_right_shift_(_RANDOM_BITS)
    anchor.bitwise_right_shift_(22)  # 2 j
    rounded.add_(anchor).clamp_max_(7)


def random_fractions(seed: int, first_pair: int, num_pairs: int, device: torch.device) -> torch.Tensor:
    """Uniform integers below 2^28, int32 [2 num_pairs]: a counter generator, a pure function of seed and index.

    SplitMix64 (Steele, Lea and Flood 2014) whose state is the mixed seed plus the index of a pair of elements times
    the golden gamma; the low half of the 64-bit number serves the even element, the high half the odd one.
    """
    key = _mix64(torch.tensor([seed], dtype=torch.int64, device=device))
    index = torch.arange(first_pair + 1, first_pair + 1 + num_pairs, dtype=torch.int64, device=device)
    words = _mix64(index.mul_(_signed64(0x9E3779B97F4A7C15)).add_(key))
    return words.view(torch.int32).bitwise_and_((1 << _RANDOM_BITS) - 1)


def _mix64(z: torch.Tensor) -> torch.Tensor:
    """SplitMix64's finalizer on int64, wrapping; in place. Right shifts are arithmetic, hence the masks."""
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        z.bitwise_xor_((z >> shift).bitwise_and_((1 << (64 - shift)) - 1)).mul_(_signed64(factor))
    return z.bitwise_xor_((z >> 31).bitwise_and_((1 << 33) - 1))


def _signed64(unsigned: int) -> int:
    return unsigned - (unsigned >> 63 << 64)

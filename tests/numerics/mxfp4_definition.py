"""What MXFP4 means, one value at a time in exact rational arithmetic; no torch."""

import struct
from bisect import bisect_left
from fractions import Fraction

from model.mxfp4 import ScaleRule
from model.mxfp4_rounding import Rounding

MAGNITUDES = [Fraction(v) for v in (0, 0.5, 1, 1.5, 2, 3, 4, 6)]
RULES = list(ScaleRule)
MASK64 = 2**64 - 1


def bits_of(value: float) -> int:
    return struct.unpack("<I", struct.pack("<f", value))[0]


def float_of(bits: int) -> float:
    return struct.unpack("<f", struct.pack("<I", bits))[0]


def next_up(value: float) -> float:
    return float_of(bits_of(value) + 1)


def next_down(value: float) -> float:
    return float_of(bits_of(value) - 1)


def scale_byte(block: list[float], rule: ScaleRule, previous: int | None = None) -> int:
    """From the range that each rule promises for the largest magnitude, and not from its bits."""
    amax = max(abs(Fraction(v)) for v in block)
    if previous is not None and previous <= 252 and Fraction(13, 4) <= amax / power(previous) < Fraction(15, 2):
        return previous
    fits = {
        ScaleRule.EVEN: lambda scaled: scaled < 7,
        ScaleRule.FLOOR: lambda scaled: scaled < 8,
        ScaleRule.RCEIL: lambda scaled: scaled <= 6,
    }[rule]
    return bisect_left(range(252), True, key=lambda byte: fits(amax / power(byte)))


def power(byte: int) -> Fraction:
    return Fraction(2) ** (byte - 127)


def nearest_code(scaled: Fraction) -> int:
    return min(range(8), key=lambda code: (abs(MAGNITUDES[code] - scaled), code % 2))


def random_code(scaled: Fraction, fraction: int) -> int:
    """The lower code, or the upper one when the distance from the lower one (28 bits) and `fraction` carry."""
    lower = max(code for code in range(8) if MAGNITUDES[code] <= scaled)
    if lower == 7:
        return 7
    distance = (scaled - MAGNITUDES[lower]) / (MAGNITUDES[lower + 1] - MAGNITUDES[lower])
    return lower + (int(distance * 2**28) + fraction >= 2**28)


def random_fraction(seed: int, element: int) -> int:
    """28 bits of SplitMix64: the low half of a pair's number for the even element, the high half for the odd one."""
    word = mix64((mix64(seed) + (element // 2 + 1) * 0x9E3779B97F4A7C15) & MASK64)
    return (word >> 32 * (element % 2)) % 2**28


def mix64(z: int) -> int:
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 & MASK64
    z = (z ^ z >> 27) * 0x94D049BB133111EB & MASK64
    return z ^ z >> 31


def quantize_block(
    block: list[float],
    rule: ScaleRule = ScaleRule.EVEN,
    *,
    previous: int | None = None,
    rounding: Rounding = Rounding.NEAREST_EVEN,
    seed: int = 0,
    index: int = 0,
) -> tuple[list[int], int]:
    """Codes and scale byte of the block with that index in its tensor."""
    scale = scale_byte(block, rule, previous)
    codes = []
    for position, value in enumerate(block):
        scaled = abs(Fraction(value)) / power(scale)
        if rounding is Rounding.STOCHASTIC:
            code = random_code(scaled, random_fraction(seed, 32 * index + position))
        else:
            code = nearest_code(scaled)
        codes.append(code + 8 if value < 0 and code else code)
    return codes, scale

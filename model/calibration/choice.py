"""Which expert tensors stay in bf16: the best use of a budget of bits, under an additive model of the damage.

The model is of first order: the KL of a mixture is the sum of the KLs of its quantized tensors, each measured alone. It
leaves out how errors meet in later layers, so the mixture itself is measured afterwards (`Calibration.mixture`).

Expert tensors have two sizes: gate and up together, and down. Among tensors of one size the most damaging are kept
first, so the best choice keeps the k worst of one size and as many of the other as then fit; trying every k is exact.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from model.calibration.measure import TensorResult
from model.calibration.tokens import CalibrationError
from model.mxfp4 import BLOCK

MXFP4_BITS = 4 + 8 / BLOCK
"""A code, and the block's share of a scale byte."""

BF16_BITS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """The tensors to keep in bf16, the most damaging first; `bits` a value on average over all expert tensors."""

    kept: tuple[str, ...]
    bits: float
    predicted_kl: float


def extra_bits(tensor: TensorResult, tensors: Sequence[TensorResult]) -> float:
    """What keeping one tensor in bf16 adds to the average bits a value of all `tensors`."""
    return tensor.num_values * (BF16_BITS - MXFP4_BITS) / sum(each.num_values for each in tensors)


def check_bits(bits: float) -> None:
    """Check a budget before anything is measured.

    Raises:
        CalibrationError: It is less than MXFP4 for all tensors, or more than bf16 for all.
    """
    if not MXFP4_BITS <= bits <= BF16_BITS:
        raise CalibrationError(
            f"--bits: must be {MXFP4_BITS} (all tensors in MXFP4) to {BF16_BITS} (all in bf16), got {bits}; "
            "choose a budget between"
        )


def keep_worst(tensors: Sequence[TensorResult], count: int) -> Choice:
    """Keep the `count` most damaging tensors.

    Raises:
        CalibrationError: There are fewer tensors, or `count` is negative.
    """
    if not 0 <= count <= len(tensors):
        raise CalibrationError(f"--keep: must be 0 to {len(tensors)} expert tensors, got {count}; keep fewer")
    return _choice(tensors, _worst_first(tensors)[:count])


def keep_within(tensors: Sequence[TensorResult], bits: float) -> Choice:
    """Keep what lowers the predicted KL most within `bits` a value; tensors without damage are not kept.

    Raises:
        CalibrationError: The budget is out of range.
    """
    check_bits(bits)
    sizes = {tensor.num_values for tensor in tensors}
    large, small = max(sizes), min(sizes)
    worth_keeping = _worst_first(tensor for tensor in tensors if tensor.kl > 0)
    larges = [tensor for tensor in worth_keeping if tensor.num_values == large]
    smalls = [tensor for tensor in worth_keeping if tensor.num_values != large]
    room = (bits - MXFP4_BITS) / (BF16_BITS - MXFP4_BITS) * sum(tensor.num_values for tensor in tensors)
    room += 1e-6  # a budget that a mixture meets exactly must not fail by its own rounding
    best = _choice(tensors, [])
    for num_large in range(min(len(larges), int(room // large)) + 1):
        num_small = int((room - num_large * large) // small)
        candidate = _choice(tensors, [*larges[:num_large], *smalls[:num_small]])
        best = min(best, candidate, key=lambda choice: (choice.predicted_kl, choice.bits))
    return best


def _worst_first(tensors: Iterable[TensorResult]) -> list[TensorResult]:
    return sorted(tensors, key=lambda tensor: -tensor.kl)


def _choice(tensors: Sequence[TensorResult], kept: Sequence[TensorResult]) -> Choice:
    names = {tensor.name for tensor in kept}
    return Choice(
        kept=tuple(tensor.name for tensor in _worst_first(kept)),
        bits=MXFP4_BITS + sum(extra_bits(tensor, tensors) for tensor in kept),
        predicted_kl=sum(tensor.kl for tensor in tensors if tensor.name not in names),
    )

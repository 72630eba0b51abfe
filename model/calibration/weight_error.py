"""How far MXFP4 moves the weights of one tensor, as a whole and expert by expert.

Shapes: E experts, O output rows, K input columns.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from model.mxfp4 import ScaleRule, dequantize, quantize

_LARGEST_CODES = 0x77
"""A byte of two elements with the largest code."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightError:
    """Relative RMS error ||quantized - weight|| / ||weight||, and what became of single values.

    `saturated_frac` of the values lay beyond the largest code of their block. `zeroed_frac` became 0 and were not.
    """

    relative_rms: float
    saturated_frac: float
    zeroed_frac: float
    expert_relative_rms: tuple[float, ...]

    @property
    def sqnr_db(self) -> float:
        """Signal to quantization noise; infinite without an error."""
        return -20.0 * math.log10(self.relative_rms) if self.relative_rms else math.inf

    @property
    def worst_expert(self) -> int:
        """The expert with the largest relative error, the first of equals."""
        return max(range(len(self.expert_relative_rms)), key=self.expert_relative_rms.__getitem__)


def quantized(weight_EOK: torch.Tensor, rule: ScaleRule, name: str) -> torch.Tensor:
    """The values that are read back, fp32 of the same shape.

    Raises:
        MXFP4Error: MXFP4 cannot hold the tensor.
    """
    return dequantize(*quantize(weight_EOK, rule=rule, name=name))


def quantized_with_error(weight_EOK: torch.Tensor, rule: ScaleRule, name: str) -> tuple[torch.Tensor, WeightError]:
    """As `quantized`, with the error; scratch memory is that of a few experts. Sums are fp64."""
    result_EOK = torch.empty_like(weight_EOK)
    noise, signal, num_saturated, num_zeroed = [], [], 0, 0
    for expert, weight_OK in enumerate(weight_EOK):
        blocks, scales = quantize(weight_OK, rule=rule, name=f"{name}[{expert}]")
        result_OK = dequantize(blocks, scales)
        largest_OK = dequantize(torch.full_like(blocks, _LARGEST_CODES), scales)
        num_saturated += int((weight_OK.abs() > largest_OK).sum())
        num_zeroed += int(((result_OK == 0) & (weight_OK != 0)).sum())
        noise.append(square_sum(result_OK - weight_OK))
        signal.append(square_sum(weight_OK))
        result_EOK[expert] = result_OK
    return result_EOK, WeightError(
        relative_rms=root_ratio(sum(noise), sum(signal)),
        saturated_frac=num_saturated / weight_EOK.numel(),
        zeroed_frac=num_zeroed / weight_EOK.numel(),
        expert_relative_rms=tuple(map(root_ratio, noise, signal)),
    )


def square_sum(x: torch.Tensor) -> float:
    """The sum of squares, accumulated in fp64."""
    return float(torch.linalg.vector_norm(x, dtype=torch.float64)) ** 2


def root_ratio(noise: float, signal: float) -> float:
    """sqrt(noise / signal); 0 without noise, whatever the signal."""
    if noise == 0.0:
        return 0.0
    return math.sqrt(noise / signal) if signal else math.inf

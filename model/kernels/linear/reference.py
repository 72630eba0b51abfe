"""The definition of a dense product: y = x @ weight.T + bias, products and sums in fp32, rounded once at the end.

Weights are values of bf16 (their published form), so a product of two bf16 values is exact in fp32.

Shapes: T rows, I inputs, O outputs.
"""

from __future__ import annotations

import torch


def linear(x_TI: torch.Tensor, weight_OI: torch.Tensor, bias_O: torch.Tensor | None = None) -> torch.Tensor:
    """[T, O] in the dtype of `x_TI` (fp32 or bf16)."""
    y_TO = x_TI.float() @ weight_OI.float().T
    if bias_O is not None:
        y_TO = y_TO + bias_O.float()
    return y_TO.to(x_TI.dtype)

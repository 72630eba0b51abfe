"""The definition of RMSNorm: x / sqrt(mean(x^2) + eps) * weight over the last axis (Zhang and Sennrich 2019, eq. 4).

Shapes: T rows, D values of a row.
"""

from __future__ import annotations

import torch


def rms_norm(x_TD: torch.Tensor, weight_D: torch.Tensor, eps: float) -> torch.Tensor:
    """Any floating dtypes in, fp32 [T, D] out; the mean is accumulated in fp32."""
    x_TD = x_TD.float()
    return x_TD * torch.rsqrt(x_TD.square().mean(-1, keepdim=True) + eps) * weight_D.float()

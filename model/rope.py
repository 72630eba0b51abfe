"""Rotary position embedding (Su et al. 2021, RoFormer, eq. 34), with the halves of a head as pairs.

Pair i of a head of size d is (x[i], x[i + d/2]) (the NeoX layout, which checkpoints of the Hugging Face families use),
and is turned by position * theta^(-2 i / d). Angles, sines and cosines are fp32.

Shapes: T packed tokens, H heads, d head dim, h = d / 2.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch


class Rotation(NamedTuple):
    """Cosines and sines of the angles, fp32 [T, 1, h]; one pair serves every layer."""

    cos_T1h: torch.Tensor
    sin_T1h: torch.Tensor


def rotation(positions_T: torch.Tensor, head_dim: int, theta: float) -> Rotation:
    """The angles of int64 positions; each sequence counts its own from 0."""
    exponent_h = torch.arange(0, head_dim, 2, dtype=torch.float32, device=positions_T.device) / head_dim
    angle_T1h = (positions_T.float().unsqueeze(-1) * theta**-exponent_h).unsqueeze(1)
    return Rotation(angle_T1h.cos(), angle_T1h.sin())


def rotate(x_THd: torch.Tensor, by: Rotation) -> torch.Tensor:
    """Turn every head of [T, H, d]; computed in fp32, returned in the dtype of `x_THd`."""
    return _Rotate.apply(x_THd, by.cos_T1h, by.sin_T1h)  # pyright: ignore[reportReturnType]


class _Rotate(torch.autograd.Function):
    """A rotation's gradient is the opposite rotation; written out so that halves are never concatenated."""

    @staticmethod
    def forward(ctx: Any, x_THd: torch.Tensor, cos_T1h: torch.Tensor, sin_T1h: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(cos_T1h, sin_T1h)
        return _turn(x_THd, cos_T1h, sin_T1h, 1.0)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        cos_T1h, sin_T1h = ctx.saved_tensors
        return _turn(grads[0], cos_T1h, sin_T1h, -1.0), None, None


def _turn(x_THd: torch.Tensor, cos_T1h: torch.Tensor, sin_T1h: torch.Tensor, sense: float) -> torch.Tensor:
    half = x_THd.shape[-1] // 2
    first, second = x_THd[..., :half], x_THd[..., half:]
    out = torch.empty(x_THd.shape, dtype=torch.float32, device=x_THd.device)
    torch.mul(first, cos_T1h, out=out[..., :half]).addcmul_(second, sin_T1h, value=-sense)
    torch.mul(second, cos_T1h, out=out[..., half:]).addcmul_(first, sin_T1h, value=sense)
    return out.to(x_THd.dtype)

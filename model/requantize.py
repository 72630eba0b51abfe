"""Requantizing after a step: which codes an update moves, and which gradients pass a code that saturated.

Plain `model.mxfp4.quantize` lets a master that lies on the boundary of two codes flip between them at every step
(weight oscillation: TetraJet, arXiv 2502.20853). `requantize` adds hysteresis: a code moves only when its master is
more than a fraction of a step past the boundary, and a block keeps its scale within `model.mxfp4.HYSTERESIS`.

With x = master / scale, v the value of the present code, l and u those of its neighbours and h the hysteresis, the code
stays while

    (l + v) / 2 - h (v - l)  <=  x  <=  (v + u) / 2 + h (u - v)

and becomes the nearest one otherwise. The largest code has no neighbour above it. At h = 0.5 a master must pass the
neighbour itself. Where the block's scale changes, its codes are the nearest ones: they are of another grid.

Invariant: requantizing the same masters again changes no byte, and no byte depends on how the work is cut.

Shapes: K values along the last axis, N blocks.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch

from model.mxfp4 import BLOCK, BLOCK_BYTES, E2M1_VALUES, MXFP4Error, ScaleRule, check_packed, dequantize, quantize

_CHUNK_BLOCKS = 1 << 15
"""Blocks looked at at once: the temporary tensors then stay below 32 MiB."""
_LARGEST_CODES = 0x77
"""A byte of two elements with the largest code."""


def requantize(
    w: torch.Tensor,
    previous_blocks: torch.Tensor,
    previous_scales: torch.Tensor,
    *,
    hysteresis: float,
    rule: ScaleRule = ScaleRule.EVEN,
    name: str = "tensor",
    quantizer: Any = quantize,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize to nearest with hysteresis.

    Args:
        w: fp32 [..., K].
        previous_blocks: uint8 [..., K/32, 16], the codes that `w` had before.
        previous_scales: uint8 [..., K/32].
        hysteresis: In [0, 0.5], in steps between the two codes of a boundary. 0 keeps ties and scales alone.
        rule: Scale rule of blocks that do not keep their scale.
        name: What the tensor is called in an error.
        quantizer: `model.mxfp4.quantize`, or a kernel that writes the same bytes.

    Returns:
        blocks, uint8 [..., K/32, 16], and scales, uint8 [..., K/32].

    Raises:
        MXFP4Error: As `quantize`, the previous bytes are not of this tensor, or the hysteresis is out of range.
    """
    check_packed(f"{name}: previous", previous_blocks, previous_scales)
    if not 0 <= hysteresis <= 0.5:
        raise MXFP4Error(f"{name}: hysteresis must lie in [0, 0.5] steps, got {hysteresis}; beyond, no code would move")
    blocks, scales = quantizer(w, rule=rule, previous_scales=previous_scales, name=name)
    lower, upper = _bands(hysteresis)
    lower, upper = lower.to(w.device), upper.to(w.device)
    rows_NK, new_NB, old_NB = (
        w.reshape(-1, BLOCK),
        blocks.view(-1, BLOCK_BYTES),
        previous_blocks.reshape(-1, BLOCK_BYTES),
    )
    scale_N, old_scale_N = scales.view(-1), previous_scales.reshape(-1)
    for start in range(0, len(rows_NK), _CHUNK_BLOCKS):
        part = slice(start, start + _CHUNK_BLOCKS)
        # Exact, by a power of two, unless the result is not normal: then it is far inside the band of code 0.
        unit_N = ((254 - scale_N[part].to(torch.int32).clamp_max(252)) << 23).view(torch.float32)
        x_NK = rows_NK[part].float() * unit_N.unsqueeze(-1)
        old_NK = torch.stack([old_NB[part] & 15, old_NB[part] >> 4], -1).flatten(-2)
        index_NK = old_NK.to(torch.int32)
        keep_NK = (x_NK >= lower[index_NK]) & (x_NK <= upper[index_NK])
        keep_NK &= (scale_N[part] == old_scale_N[part]).unsqueeze(-1)
        keep_NK = keep_NK.to(torch.uint8)
        mask_NB = keep_NK[:, 0::2] * 0x0F | keep_NK[:, 1::2] * 0xF0
        new_NB[part] = new_NB[part] & ~mask_NB | old_NB[part] & mask_NB
    return blocks, scales


def _bands(hysteresis: float) -> tuple[torch.Tensor, torch.Tensor]:
    """For each code, the least and the largest x, fp32 [16], at which it stays."""
    values = sorted({value + 0.0 for value in E2M1_VALUES})  # + 0.0 makes one of both zeros
    lower = dict.fromkeys(values, -torch.inf)
    upper = dict.fromkeys(values, torch.inf)
    for left, right in pairwise(values):
        boundary, margin = (left + right) / 2, hysteresis * (right - left)
        upper[left], lower[right] = boundary + margin, boundary - margin
    return torch.tensor([lower[v + 0.0] for v in E2M1_VALUES]), torch.tensor([upper[v + 0.0] for v in E2M1_VALUES])


def inside_range(w: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Where a master, fp32 [..., K], is not beyond the largest code of its block (uint8 [..., K/32]): bool [..., K]."""
    blocks = torch.full((*scales.shape, BLOCK_BYTES), _LARGEST_CODES, dtype=torch.uint8, device=scales.device)
    return w.detach().abs() <= dequantize(blocks, scales).view(w.shape)


class ClippedStraightThrough(torch.autograd.Function):
    """`apply(master, view, inside)` is the view in the forward pass; the gradient passes where `inside`, else 0.

    The clip-aware form of `model.snapshot.StraightThrough`: moving a saturated master changes nothing in the forward.
    """

    @staticmethod
    def forward(ctx: Any, master: torch.Tensor, viewed: torch.Tensor, inside: torch.Tensor) -> torch.Tensor:
        """The view."""
        ctx.dtype = master.dtype
        ctx.save_for_backward(inside)
        return viewed.view_as(viewed)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        """The gradient of the view where it is not cut, in the master's dtype."""
        (inside,) = ctx.saved_tensors
        return torch.where(inside, grads[0], 0).to(ctx.dtype), None, None

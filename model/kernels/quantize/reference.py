"""The definition of the quantizer is `model.mxfp4`; here is that of the tiles which the products read.

Shapes: N rows (columns of the product), K values of a row, S = ceil(N / 16) strips.
"""

from __future__ import annotations

import torch

from model.mxfp4 import BLOCK_BYTES, dequantize, quantize

__all__ = ["STRIP", "TILE_BYTES", "dequantize", "quantize", "tile"]

STRIP = 16
"""Rows of a tile."""

TILE_BYTES = STRIP * BLOCK_BYTES


def tile(blocks: torch.Tensor, scales: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Canonical bytes (uint8 [..., N, K/32, 16] and [..., N, K/32]) in the layout of `cpu/gemm.h`.

    Returns:
        codes, uint8 [..., S, K/32, 256], and scales, uint8 [..., S, K/32, 16], with zeros in rows beyond N; and the
        extreme strips, uint8 [..., S]: 1 where a scale byte is 255, or lies outside 2..252 and its block is not all
        zeros.
    """
    *lead, num_rows, num_blocks = scales.shape
    num_strips = -(-num_rows // STRIP)
    padded = blocks.new_zeros(*lead, num_strips * STRIP, num_blocks, BLOCK_BYTES)
    padded[..., :num_rows, :, :] = blocks
    padded_scales = scales.new_zeros(*lead, num_strips * STRIP, num_blocks)
    padded_scales[..., :num_rows, :] = scales
    # byte b = 4 g + j of a row holds k = 2 b (low nibble, c = 0) and 2 b + 1 (c = 1)
    quads = padded.view(*lead, num_strips, STRIP, num_blocks, 4, 4)  # [strip, row, block, g, j]
    nibbles = torch.stack([quads & 15, quads >> 4], -2)  # [strip, row, block, g, c, j]
    pairs = nibbles[..., 0::2] | (nibbles[..., 1::2] << 4)  # the two bytes of a 16-bit word
    codes = pairs.movedim(len(lead) + 1, -3).reshape(*lead, num_strips, num_blocks, TILE_BYTES)
    tile_scales = padded_scales.view(*lead, num_strips, STRIP, num_blocks).transpose(-1, -2).contiguous()
    outside = ((padded_scales < 2) | (padded_scales > 252)) & (padded & 0x77).any(-1)
    extreme = (outside | (padded_scales == 255)).view(*lead, num_strips, STRIP * num_blocks).any(-1)
    return codes.contiguous(), tile_scales, extreme.byte()

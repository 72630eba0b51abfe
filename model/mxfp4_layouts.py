"""The byte orders in which others store MXFP4, to and from the project's own (`mxfp4`).

Invariant: every pair of functions is a bijection on bytes: no value is decoded, so codes (-0 too) and scale bytes
survive a round trip whatever they hold.

    gpt-oss (Hugging Face)   blocks [..., K/32, 16], scales [..., K/32]: the project's own layout, nothing to convert
    compressed-tensors       `mxfp4-pack-quantized`: weight_packed [..., K/2], weight_scale [..., K/32]; the same bytes
                             under other shapes, one tensor an expert
    GGUF                     `GGML_TYPE_MXFP4` (39): 17 bytes a block, the scale byte first; byte j then holds element j
                             low and element j + 16 high

What their readers do with the same bytes differs in places. GGUF evaluates code 8 to +0; compressed-tensors and GGUF do
not know that scale byte 255 is NaN.

Shapes: K values along the last axis.
"""

from __future__ import annotations

import torch

from model.mxfp4 import BLOCK, BLOCK_BYTES, MXFP4Error, check_packed

GGUF_BLOCK_BYTES = 1 + BLOCK_BYTES


def to_compressed_tensors(blocks: torch.Tensor, scales: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """weight_packed, uint8 [..., K/2], and weight_scale, uint8 [..., K/32]: views where the strides allow.

    Raises:
        MXFP4Error: blocks are not uint8 [..., K/32, 16], or scales not uint8 [..., K/32].
    """
    check_packed("to_compressed_tensors", blocks, scales)
    return blocks.flatten(-2), scales


def from_compressed_tensors(
    weight_packed: torch.Tensor, weight_scale: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """blocks, uint8 [..., K/32, 16], and scales, uint8 [..., K/32]: views where the strides allow.

    Raises:
        MXFP4Error: weight_packed is not uint8 [..., K/2], or weight_scale not uint8 [..., K/32], K a multiple of 32.
    """
    blocks = _split_last_axis("from_compressed_tensors: weight_packed", weight_packed, BLOCK_BYTES)
    check_packed("from_compressed_tensors", blocks, weight_scale)
    return blocks, weight_scale


def to_gguf(blocks: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """The rows of a GGUF tensor, uint8 [..., 17 K/32], as a new tensor.

    Raises:
        MXFP4Error: blocks are not uint8 [..., K/32, 16], or scales not uint8 [..., K/32].
    """
    check_packed("to_gguf", blocks, scales)
    codes = torch.stack([blocks & 15, blocks >> 4], -1).flatten(-2)
    low, high = codes.split(BLOCK // 2, -1)
    return torch.cat([scales.unsqueeze(-1), low | (high << 4)], -1).flatten(-2)


def from_gguf(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """blocks, uint8 [..., K/32, 16], and scales, uint8 [..., K/32], as new tensors.

    Raises:
        MXFP4Error: rows are not uint8 with a last axis that is a multiple of 17.
    """
    packed = _split_last_axis("from_gguf: rows", rows, GGUF_BLOCK_BYTES)
    scales, halves = packed[..., 0].clone(), packed[..., 1:]
    codes = torch.cat([halves & 15, halves >> 4], -1)
    return codes[..., 0::2] | (codes[..., 1::2] << 4), scales


def _split_last_axis(what: str, packed: torch.Tensor, size: int) -> torch.Tensor:
    if packed.ndim == 0 or packed.dtype != torch.uint8 or packed.shape[-1] % size:
        raise MXFP4Error(
            f"{what}: must be uint8 with a last axis that is a multiple of {size}, "
            f"got {packed.dtype} {tuple(packed.shape)}; pass the stored bytes as they are"
        )
    return packed.unflatten(-1, (packed.shape[-1] // size, size))

"""How the values of one stored tensor are encoded in a safetensors file: plain, MXFP4 or FP8, under whose names.

    encoding            entries of tensor X                          dtypes            published by
    plain               X                                            F32 F16 BF16      everyone
    gpt-oss             X_blocks, X_scales                           U8, U8            gpt-oss in `transformers`
    gpt-oss original    X.blocks, X.scales                           U8, U8            gpt-oss in OpenAI's code
    compressed-tensors  X_packed, X_scale                            U8, U8            mxfp4-pack-quantized
    deepseek-fp4        X (two values a byte), X_scale_inv or scale  I8, F8_E8M0       DeepSeek-V4's experts
    deepseek-fp8        X, X_scale_inv or scale                      F8_E4M3, F32      DeepSeek-V3, one scale a tile

`scale` stands for X with its last word `weight` replaced. The four MXFP4 encodings hold the same bytes, those of
`model/mxfp4.py`, under other names and shapes, so they convert by views. FP8: value = code * scale of its tile.

Invariant: the encoding follows from the names and dtypes in the file's header; nothing is guessed from values.

Shapes: stored tensors are [..., out, in]; blocks [..., out, in/32, 16]; scales [..., out, in/32].
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import torch

from model.loaded import CheckpointError
from model.mxfp4 import BLOCK, BLOCK_BYTES
from model.mxfp4_layouts import from_compressed_tensors

FP8_TILE = (128, 128)
"""Rows and columns that share an FP8 scale, unless `quantization_config.weight_block_size` says otherwise."""


class Kind(StrEnum):
    """What the stored bytes are."""

    PLAIN = "plain"
    MXFP4 = "mxfp4"
    FP8 = "fp8"


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """What a safetensors header says of one tensor, and the file that has it."""

    dtype: str
    shape: tuple[int, ...]
    file: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Encoding:
    """One row of the table above. `scales` lists the names in use, the usual one first; `{stem}` is X less `weight`."""

    kind: Kind
    payload: str
    scales: tuple[str, ...]
    dtypes: tuple[str, ...]
    scale_dtypes: tuple[str, ...] = ("U8", "F8_E8M0")
    flat: bool = False

    def names(self, name: str, entries: Mapping[str, Entry]) -> tuple[str, ...]:
        """The entries that tensor `name` needs, payload first."""
        stem = name.removesuffix("weight")
        options = [pattern.format(name=name, stem=stem) for pattern in self.scales]
        chosen = [next((option for option in options if option in entries), options[0])] if options else []
        return (self.payload.format(name=name), *chosen)


PLAIN = Encoding(kind=Kind.PLAIN, payload="{name}", scales=(), dtypes=("F32", "F16", "BF16"))
GPT_OSS = Encoding(kind=Kind.MXFP4, payload="{name}_blocks", scales=("{name}_scales",), dtypes=("U8",))
COMPRESSED_TENSORS = Encoding(
    kind=Kind.MXFP4, payload="{name}_packed", scales=("{name}_scale",), dtypes=("U8",), flat=True
)
_DEEPSEEK_SCALES = ("{name}_scale_inv", "{stem}scale")
ENCODINGS = (
    PLAIN,
    GPT_OSS,
    Encoding(kind=Kind.MXFP4, payload="{name}.blocks", scales=("{name}.scales",), dtypes=("U8",)),
    COMPRESSED_TENSORS,
    Encoding(kind=Kind.MXFP4, payload="{name}", scales=_DEEPSEEK_SCALES, dtypes=("I8",), flat=True),
    Encoding(
        kind=Kind.FP8,
        payload="{name}",
        scales=_DEEPSEEK_SCALES,
        dtypes=("F8_E4M3",),
        scale_dtypes=("F32", "BF16", "F8_E8M0"),
    ),
)


def detect(name: str, entries: Mapping[str, Entry]) -> Encoding:
    """The encoding of stored tensor `name`; plain when the file has nothing of it.

    Raises:
        CheckpointError: The file has it in a dtype that no encoding uses.
    """
    for encoding in ENCODINGS:
        entry = entries.get(encoding.payload.format(name=name))
        if entry is not None and entry.dtype in encoding.dtypes:
            return encoding
    if name in entries:
        raise CheckpointError(
            f"{name}: must be floating point, FP8 (F8_E4M3) or MXFP4, got dtype {entries[name].dtype}; "
            "convert the checkpoint to one of these"
        )
    return PLAIN


def expected_shapes(encoding: Encoding, shape: tuple[int, ...], tile: tuple[int, int]) -> tuple[tuple[int, ...], ...]:
    """Shapes of the entries of a tensor [..., out, in], in the order of `Encoding.names`."""
    *lead, columns = shape
    match encoding.kind:
        case Kind.PLAIN:
            return (shape,)
        case Kind.MXFP4:
            scales = (*lead, columns // BLOCK)
            return ((*lead, columns // 2) if encoding.flat else (*scales, BLOCK_BYTES), scales)
        case Kind.FP8:
            *lead, num_rows = lead
            return (shape, (*lead, -(-num_rows // tile[0]), -(-columns // tile[1])))


def mxfp4_bytes(encoding: Encoding, payload: torch.Tensor, scales: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Blocks and scales of the stored entries of an MXFP4 encoding, as uint8 views."""
    payload, scales = payload.view(torch.uint8), scales.view(torch.uint8)
    return from_compressed_tensors(payload, scales) if encoding.flat else (payload, scales)


def decode_fp8(weight: torch.Tensor, scales: torch.Tensor, tile: tuple[int, int] = FP8_TILE) -> torch.Tensor:
    """The values of float8_e4m3fn [..., out, in] with a scale for each tile, in fp32: each product is rounded once."""
    values, scales = weight.float(), scales.float()
    for index in range(scales.shape[-2]):
        by_column = scales[..., index, :].repeat_interleave(tile[1], -1)[..., : weight.shape[-1]]
        values[..., index * tile[0] : (index + 1) * tile[0], :] *= by_column.unsqueeze(-2)
    return values


def check_quantization(values: Any) -> tuple[int, int]:
    """The FP8 tile of a `quantization_config`, after checking that its method is one that can be read.

    Raises:
        CheckpointError: Another method or format, or values of another type.
    """
    values = {} if values is None else values
    if not isinstance(values, Mapping):
        raise CheckpointError(f"config.json: quantization_config: must be a mapping, got {values}; correct the file")
    method, format = values.get("quant_method"), values.get("format")
    if method not in (None, "mxfp4", "fp8", "compressed-tensors"):
        raise CheckpointError(
            f"config.json: quantization_config.quant_method: must be mxfp4, fp8 or compressed-tensors, got {method}; "
            "start from the unquantized checkpoint"
        )
    if method == "compressed-tensors" and format != "mxfp4-pack-quantized":
        raise CheckpointError(
            f"config.json: quantization_config.format: must be mxfp4-pack-quantized, got {format}; "
            "start from the unquantized checkpoint"
        )
    tile = values.get("weight_block_size") or [*FP8_TILE]
    if not isinstance(tile, list) or [*map(type, tile)] != [int, int] or min(tile) < 1:
        raise CheckpointError(
            f"config.json: quantization_config.weight_block_size: must be two positive numbers, got {tile}; "
            "correct the file"
        )
    return tile[0], tile[1]

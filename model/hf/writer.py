"""Writing published checkpoints: config.json, sharded safetensors files and the companions of the source.

    format  experts                                                                 everything else
    mxfp4   gpt-oss: `_blocks` and `_scales` as `transformers` reads them;           bf16 (selection bias: fp32)
            other families: compressed-tensors `mxfp4-pack-quantized`, one tensor
            an expert and matrix
    bf16    bf16                                                                    the same

`bf16` rounds what it is given: masters as they are, published bytes decoded exactly. `mxfp4` passes packed experts on
byte for byte and quantizes others. Weights are taken one by one and written shard by shard, so a checkpoint can be
converted without ever being in memory: `save_hf(folder, config, open_hf(source).read(), ...)`.

A folder is written in place: the caller owns atomicity (write to a temporary folder, then rename).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from enum import StrEnum
from pathlib import Path
from typing import Any

import torch

from model.config import Family, ModelConfig
from model.families.base import Piece
from model.families.registry import FAMILIES, write_config
from model.hf.encodings import COMPRESSED_TENSORS, GPT_OSS, PLAIN, Encoding, Kind
from model.hf.files import CONFIG_FILE, INDEX_FILE, WEIGHTS_FILE, Folder
from model.loaded import CheckpointError, Weight, packed_of
from model.mxfp4_layouts import to_compressed_tensors
from model.safetensors_file import write_safetensors
from model.snapshot import PLAIN_DTYPES, SNAPSHOT_METADATA, Format, PackedTensor, as_tensor, tensor_format, view
from model.transformer import parameter_shapes

MAX_SHARD_BYTES = 5_000_000_000
"""Bytes of tensors in a file, unless one tensor alone is larger."""

_CARRIED = ("bos_token_id", "eos_token_id", "pad_token_id")
"""Keys of the source's config.json that belong to its tokenizer, not to the network."""


class HfFormat(StrEnum):
    """How the experts are stored; see the module's table."""

    MXFP4 = "mxfp4"
    BF16 = "bf16"


def save_hf(
    folder: Path,
    config: ModelConfig,
    weights: Iterable[tuple[str, Weight]],
    format: HfFormat,
    *,
    source: Folder | None = None,
    metadata: Mapping[str, str] | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> None:
    """Write a checkpoint of the configuration's family into an existing folder.

    Args:
        folder: Where; should be empty.
        config: The network; its family decides names and keys.
        weights: Name and weight of every parameter, in any order.
        format: How the experts are stored.
        source: Where tokenizer, chat template and defaults of generation are copied from.
        metadata: What is known of packed experts that are passed on; `None`: this project quantized them.
        max_shard_bytes: Bytes of tensors in a file.

    Raises:
        ConfigError: The family cannot hold the configuration; one line for each field.
        CheckpointError: The weights are not exactly the parameters of `config`, or a companion cannot be copied.
    """
    values = write_config(config)
    layout, shapes = FAMILIES[config.family].layouts[0], parameter_shapes(config)
    packed = GPT_OSS if config.family is Family.gpt_oss else COMPRESSED_TENSORS
    rule = SNAPSHOT_METADATA if metadata is None else metadata
    shards = _Shards(folder, max_shard_bytes, {k: str(v) for k, v in rule.items()} if format is HfFormat.MXFP4 else {})
    missing = dict(shapes)
    for name, weight in weights:
        if missing.get(name) != tuple(weight.shape):
            raise CheckpointError(
                f"save_hf: {name}: must be a parameter of shape {shapes.get(name)}, once, got {tuple(weight.shape)}; "
                "check that the weights belong to this configuration"
            )
        is_packed = format is HfFormat.MXFP4 and tensor_format(name) is Format.MXFP4
        pieces = layout.pieces(config, name, missing.pop(name))
        shards.add(_entries(name, weight, pieces, packed if is_packed else PLAIN))
    if missing:
        raise CheckpointError(
            f"save_hf: every parameter must be given, got none of {sorted(missing)}; check the weights' configuration"
        )
    shards.finish()
    if format is HfFormat.MXFP4:
        values["quantization_config"] = _quantization_config(packed)
    if source is not None:
        found = source.read_json(CONFIG_FILE)
        values |= {key: found[key] for key in _CARRIED if key in found}
        for name in source.companions():
            source.copy(name, folder)
    (folder / CONFIG_FILE).write_text(json.dumps(values, indent=2) + "\n")


class _Shards:
    """Files of at most so many bytes; their names tell their number, so they are final only in `finish`."""

    def __init__(self, folder: Path, max_bytes: int, metadata: Mapping[str, str]) -> None:
        self._folder = folder
        self._max_bytes = max_bytes
        self._metadata = {"format": "pt", **metadata}
        self._open: dict[str, torch.Tensor] = {}
        self._open_bytes = 0
        self._written: list[tuple[Path, list[str]]] = []
        self._total_bytes = 0

    def add(self, entries: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Take tensors, and write what fills a file."""
        for name, tensor in entries:
            if self._open and self._open_bytes + tensor.nbytes > self._max_bytes:
                self._write()
            self._open[name] = tensor
            self._open_bytes += tensor.nbytes

    def finish(self) -> None:
        """Write the rest, name the files, and write the index if there is more than one."""
        self._write()
        if len(self._written) == 1:
            self._written[0][0].rename(self._folder / WEIGHTS_FILE)
            return
        weight_map: dict[str, str] = {}
        for index, (path, names) in enumerate(self._written, start=1):
            final = f"model-{index:05d}-of-{len(self._written):05d}.safetensors"
            path.rename(self._folder / final)
            weight_map |= dict.fromkeys(names, final)
        index = {"metadata": {"total_size": self._total_bytes}, "weight_map": dict(sorted(weight_map.items()))}
        (self._folder / INDEX_FILE).write_text(json.dumps(index, indent=2) + "\n")

    def _write(self) -> None:
        path = self._folder / f"model-{len(self._written) + 1:05d}.partial"
        write_safetensors(path, {name: tensor.contiguous() for name, tensor in self._open.items()}, self._metadata)
        self._written.append((path, [*self._open]))
        self._total_bytes += self._open_bytes
        self._open, self._open_bytes = {}, 0


def _entries(
    name: str, weight: Weight, pieces: Iterable[Piece], encoding: Encoding
) -> Iterator[tuple[str, torch.Tensor]]:
    """The stored tensors of one parameter."""
    if encoding.kind is Kind.MXFP4:
        packed = packed_of(name, weight)
        parts = (as_tensor(packed.payload), as_tensor(packed.scales))
        parts = to_compressed_tensors(*parts) if encoding.flat else parts
    else:
        parts = (_plain(name, weight),)
    by_name: dict[str, list[Piece]] = {}
    for piece in pieces:
        by_name.setdefault(piece.name, []).append(piece)
    for stored_name, group in by_name.items():
        names = encoding.names(stored_name, {})
        for entry, part in zip(names, parts, strict=True):
            stored = _stored(group, part, len(weight.shape))
            yield entry, stored.mT if group[0].transposed and encoding is PLAIN else stored


def _stored(pieces: list[Piece], part: torch.Tensor, num_axes: int) -> torch.Tensor:
    """One stored tensor (values, blocks or scales) from that part of a parameter with `num_axes` axes."""
    if len(pieces) == 1 and not pieces[0].source:
        return part[pieces[0].target]
    stored = part.new_empty(*pieces[0].shape[:-1], *part.shape[num_axes - 1 :])
    for piece in pieces:
        stored[piece.source] = part[piece.target]
    return stored


def _plain(name: str, weight: Weight) -> torch.Tensor:
    if isinstance(weight, PackedTensor):
        return view(weight, torch.bfloat16)
    return weight.detach().cpu().to(PLAIN_DTYPES.get(tensor_format(name), torch.bfloat16))


def _quantization_config(encoding: Encoding) -> dict[str, Any]:
    """What tells other programs that the experts, and only they, are MXFP4."""
    if encoding is GPT_OSS:
        kept = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
        return {"quant_method": "mxfp4", "modules_to_not_convert": kept}
    weights = {
        "num_bits": 4,
        "type": "float",
        "symmetric": True,
        "strategy": "group",
        "group_size": 32,
        "dynamic": False,
        "scale_dtype": "torch.uint8",
    }
    group = {
        "targets": ["Linear"],
        "weights": weights,
        "input_activations": None,
        "output_activations": None,
        "format": "mxfp4-pack-quantized",
    }
    kept = ["lm_head", *(f"re:.*[.]{part}$" for part in _KEPT_MODULES)]
    return {
        "quant_method": "compressed-tensors",
        "format": "mxfp4-pack-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": kept,
        "kv_cache_scheme": None,
    }


_KEPT_MODULES = (
    "self_attn[.].*",
    "mlp[.](gate|gate_proj|up_proj|down_proj)",
    "mlp[.]shared_experts[.].*",
    "block_sparse_moe[.]gate",
)
"""The linear modules of all families that are not experts, as patterns after a dot."""

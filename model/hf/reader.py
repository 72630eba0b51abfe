"""Reading published checkpoints: config.json and safetensors files as the families of `model/families/` write them.

    open_hf(source) -> HfCheckpoint      configuration and headers are read and checked; no byte of weights yet
    checkpoint.read() -> iterator        (parameter's name, weight), one file after the other, as each is complete
    checkpoint.load() -> LoadedModel     all of them; `model.checkpoint.load_model(source)` is the short way here

`source` is a path or any URL that fsspec reads. Invariants: every stored tensor is used exactly once or named in an
error or a note; weights that are in the published format arrive byte for byte (`PackedTensor`), others in their stored
dtype (FP8 as fp32); memory is at most the weights plus one file.

Shapes: stored tensors are [..., out, in], as in `model/hf/encodings.py`.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open

from model.config import ConfigError, ModelConfig
from model.families.registry import read_config
from model.hf.encodings import Entry, Kind, check_quantization, decode_fp8, mxfp4_bytes
from model.hf.files import CONFIG_FILE, Folder
from model.hf.plan import Parameter, Source, make_plan, read_headers
from model.loaded import CheckpointError, Form, LoadedModel, Weight
from model.mxfp4 import BLOCK, BLOCK_BYTES, dequantize
from model.snapshot import PLAIN_DTYPES, Format, PackedTensor, plain_bytes, tensor_format
from model.transformer import EMBEDDING, LM_HEAD


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class HfCheckpoint:
    """A published checkpoint whose headers have been checked; `metadata` is that of its first file."""

    folder: Folder
    config: ModelConfig
    metadata: Mapping[str, str]
    notes: tuple[str, ...]
    _entries: Mapping[str, Entry]
    _parameters: tuple[Parameter, ...]
    _tile: tuple[int, int]

    @property
    def has_mxfp4(self) -> bool:
        """Whether any tensor is stored in MXFP4."""
        return any(source.encoding.kind is Kind.MXFP4 for each in self._parameters for source in each.sources)

    def read(self) -> Iterator[tuple[str, Weight]]:
        """Every parameter once, in the order in which the files complete them.

        Raises:
            CheckpointError: A file that changed since its header was read, or tied embeddings that differ.
        """
        assemblies = {parameter.name: _Assembly(parameter, self._tile) for parameter in self._parameters}
        tied = set[str]()
        for file, sources in self._sources_by_file():
            with self.folder.local_copy(file) as path, _opened(path) as tensors:
                for name, source in sources:
                    here = [entry for entry in source.names if self._entries[entry].file == file]
                    assemblies[name].add(source, {entry: tensors.get_tensor(entry) for entry in here})
                    if not assemblies[name].is_complete:
                        continue
                    weight = assemblies.pop(name).weight()
                    if self.config.tie_embeddings and name in (EMBEDDING, LM_HEAD):
                        tied.add(_fingerprint(weight))
                    if not (self.config.tie_embeddings and name == LM_HEAD):
                        yield name, weight
        if len(tied) > 1:
            raise CheckpointError(
                f"{self.folder.source}: {LM_HEAD}: must equal {EMBEDDING} because config.json ties them, got another "
                "matrix; set tie_word_embeddings to false"
            )

    def load(self) -> LoadedModel:
        """All weights in memory, in the parameters' order."""
        weights = dict(self.read())
        names = [each.name for each in self._parameters if each.name != LM_HEAD or not self.config.tie_embeddings]
        return LoadedModel(
            config=self.config,
            form=Form.FOREIGN,
            weights={name: weights[name] for name in names},
            metadata=self.metadata,
            notes=self.notes,
        )

    def _sources_by_file(self) -> list[tuple[str, list[tuple[str, Source]]]]:
        by_file: dict[str, list[tuple[str, Source]]] = {}
        for parameter in self._parameters:
            for source in parameter.sources:
                for file in {self._entries[name].file for name in source.names}:
                    by_file.setdefault(file, []).append((parameter.name, source))
        return sorted(by_file.items())


class _Assembly:
    """A parameter under construction; memory is taken with its first piece."""

    def __init__(self, parameter: Parameter, tile: tuple[int, int]) -> None:
        self._parameter = parameter
        self._tile = tile
        self._num_missing = len(parameter.sources)
        self._format = tensor_format(parameter.name)
        kinds = {source.encoding.kind for source in parameter.sources}
        self._is_packed = self._format is Format.MXFP4 and kinds == {Kind.MXFP4}
        self._parts: tuple[torch.Tensor, ...] = ()
        self._held: dict[str, torch.Tensor] = {}

    @property
    def is_complete(self) -> bool:
        """Whether every piece is in place."""
        return self._num_missing == 0

    def add(self, source: Source, found: dict[str, torch.Tensor]) -> None:
        """Place one piece, or hold what was found of it until another file brings the rest (payload or scales)."""
        stored = {**self._held, **found}
        if all(entry in stored for entry in source.names):
            self._place(source, [stored[entry] for entry in source.names])
        else:
            self._held |= {entry: tensor.clone() for entry, tensor in found.items()}

    def _place(self, source: Source, stored: list[torch.Tensor]) -> None:
        parts = mxfp4_bytes(source.encoding, *stored) if self._is_packed else (self._values(source, stored),)
        self._parts = self._parts or self._empty(parts[0].dtype)
        if parts[0].dtype != self._parts[0].dtype:  # pieces of several dtypes: the one that holds them all
            self._parts = (self._parts[0].float(),)
        for whole, part in zip(self._parts, parts, strict=True):
            whole[source.piece.target] = part[source.piece.source]
        self._num_missing -= 1

    def weight(self) -> Weight:
        """The finished parameter."""
        shape, nothing = self._parameter.shape, np.empty(0, np.uint8)
        if self._is_packed:
            blocks, scales = (part.numpy() for part in self._parts)
            return PackedTensor(format=Format.MXFP4, shape=shape, payload=blocks, scales=scales)
        (values,) = self._parts
        if PLAIN_DTYPES.get(self._format) != values.dtype:
            return values
        return PackedTensor(format=self._format, shape=shape, payload=plain_bytes(values), scales=nothing)

    def _values(self, source: Source, stored: list[torch.Tensor]) -> torch.Tensor:
        match source.encoding.kind:
            case Kind.PLAIN:
                return stored[0].mT if source.piece.transposed else stored[0]
            case Kind.MXFP4:
                return dequantize(*mxfp4_bytes(source.encoding, *stored), torch.bfloat16)
            case Kind.FP8:
                return decode_fp8(*stored, tile=self._tile)

    def _empty(self, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
        *lead, columns = self._parameter.shape
        if not self._is_packed:
            return (torch.empty(self._parameter.shape, dtype=dtype),)
        scales = torch.empty(*lead, columns // BLOCK, dtype=torch.uint8)
        return torch.empty(*scales.shape, BLOCK_BYTES, dtype=torch.uint8), scales


def open_hf(source: str | os.PathLike[str]) -> HfCheckpoint:
    """Read and check the configuration and the headers of a published checkpoint.

    Raises:
        CheckpointError: A file is missing or damaged, a quantization is not supported, or tensors are missing, extra or
            of another shape; their names are listed.
        ConfigError: Unsupported keys of config.json, one line each.
    """
    folder = Folder(source)
    values = folder.read_json(CONFIG_FILE)
    try:
        family, config = read_config(values)
        tile = check_quantization(values.get("quantization_config"))
    except (ConfigError, CheckpointError) as error:
        raise type(error)("\n".join(f"{folder.source}: {line}" for line in str(error).splitlines())) from error
    entries, metadata = read_headers(folder)
    parameters, notes = make_plan(folder.source, family, config, entries, tile=tile, skipped=family.skipped(values))
    return HfCheckpoint(
        folder=folder,
        config=config,
        metadata=metadata,
        notes=notes,
        _entries=entries,
        _parameters=parameters,
        _tile=tile,
    )


def _fingerprint(weight: Weight) -> str:
    """A digest of a weight's dtype and bytes."""
    payload = weight.payload if isinstance(weight, PackedTensor) else plain_bytes(weight)
    return hashlib.blake2b(np.ascontiguousarray(payload).data, digest_size=16).hexdigest() + str(payload.shape)


def _opened(path: Path) -> Any:
    """A safetensors file as a context manager."""
    try:
        return safe_open(path, framework="pt")
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path}: must be a safetensors file, got {error}; fetch it again") from error

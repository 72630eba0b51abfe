"""Model weights on disk: `model.safetensors` and `config.json` in a folder; the way in for every checkpoint.

`load_model` also reads the folders and URLs of published checkpoints (`model/hf/reader.py`), told apart by config.json:
ours names the family as `family`.

Our own files have two forms, told apart by the file's own metadata. `master`: fp32 tensors under the parameters' names,
what training resumes from. `published`: the bytes of a snapshot; an MXFP4 tensor is two entries, `<name>_blocks` and
`<name>_scales`, in the layout of the gpt-oss checkpoints, the rest is bf16. Either carries the digests of its tensors
(`model/manifest.py`), which are checked whenever it is read.

A folder is written in place: the caller owns atomicity (write to a temporary folder, then rename).
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open

from model.config import ConfigError, ModelConfig
from model.hf.files import CONFIG_FILE, WEIGHTS_FILE, Folder
from model.hf.reader import open_hf
from model.loaded import CheckpointError, Form, LoadedModel, Weight
from model.manifest import verify_digests, with_digests
from model.safetensors_file import write_safetensors
from model.snapshot import (
    PLAIN_DTYPES,
    SNAPSHOT_METADATA,
    Format,
    PackedTensor,
    plain_bytes,
    tensor_format,
)
from model.transformer import parameter_shapes

_OWN_FORMS = (Form.MASTER, Form.PUBLISHED)

PUBLISHED_FOLDER = "published"
"""In a checkpoint whose masters alone do not tell the bytes that were trained on: a folder of those bytes."""


def save_model(
    folder: Path,
    config: ModelConfig,
    weights: Mapping[str, torch.Tensor] | Mapping[str, PackedTensor],
    metadata: Mapping[str, str],
) -> None:
    """Write both files into an existing folder.

    Raises:
        CheckpointError: The weights are not exactly the parameters of `config`, or mix both forms.
    """
    _check_names("save_model", weights.keys(), parameter_shapes(config).keys())
    packed = {name: w for name, w in weights.items() if isinstance(w, PackedTensor)}
    if packed and len(packed) != len(weights):
        raise CheckpointError(
            f"save_model: weights must be all fp32 or all packed, got {len(packed)} packed of {len(weights)}; "
            "save masters and published bytes in two folders"
        )
    form = Form.PUBLISHED if packed else Form.MASTER
    entries: dict[str, torch.Tensor] = {}
    for name, weight in weights.items():
        if isinstance(weight, PackedTensor):
            entries |= _packed_entries(name, weight)
        elif weight.dtype == torch.float32:
            entries[name] = weight.detach().cpu().contiguous().clone()
        else:
            raise CheckpointError(f"save_model: {name}: a master must be fp32, got {weight.dtype}; save the master")
    formats = {key: str(value) for key, value in SNAPSHOT_METADATA.items()} if packed else {}
    metadata = with_digests(entries, {**metadata, **formats, "form": form.value})
    write_safetensors(folder / WEIGHTS_FILE, entries, metadata)
    (folder / CONFIG_FILE).write_text(json.dumps(config.to_dict(), indent=2) + "\n")


@contextmanager
def appearing_whole(dest: Path) -> Iterator[Path]:
    """A folder to write `dest` in: it gets its name when the block ends well, and is removed when it does not.

    Raises:
        CheckpointError: `dest` exists, or it or the folder above cannot be written.
    """
    if os.path.lexists(dest):
        raise CheckpointError(f"{dest}: must not exist, got a file or folder; choose another name or remove it")
    partial = partial_of(dest)
    shutil.rmtree(partial, ignore_errors=True)  # of a conversion that was killed
    try:
        partial.mkdir(parents=True)
        yield partial
        partial.rename(dest)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{dest}: could not be written, got {error}; give a folder with room for it") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def partial_of(dest: Path) -> Path:
    """Where `appearing_whole` prepares `dest`."""
    return dest.with_name(f".{dest.name}.partial")


def load_model(source: str | os.PathLike[str]) -> LoadedModel:
    """Read a folder that `save_model` wrote, or a published checkpoint (a folder, or a URL that fsspec reads).

    Raises:
        CheckpointError: A file is missing or damaged, or lists the names that are missing, extra or of another shape.
        ConfigError: A published config.json has keys that are not supported, or sizes that cannot be.
    """
    if not is_native(source):
        return open_hf(source).load()
    config = _load_config(source)
    path = Path(source) / WEIGHTS_FILE
    try:
        with safe_open(path, framework="pt") as file:
            metadata = dict(file.metadata() or {})
            entries = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a mapping)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path}: must be a safetensors file, got {error}; restore or rewrite it") from error
    verify_digests(path, entries, metadata)
    form = metadata.pop("form", None)
    if form not in _OWN_FORMS:
        raise CheckpointError(
            f"{path}: metadata 'form' must be one of {[*map(str, _OWN_FORMS)]}, got {form}; write it with save_model"
        )
    shapes = parameter_shapes(config)
    if form == Form.MASTER:
        _check_names(str(path), entries.keys(), shapes.keys())
        weights: dict[str, Any] = {name: entries[name] for name in shapes}
        for name, weight in weights.items():
            if weight.dtype != torch.float32:
                raise CheckpointError(f"{path}: {name}: a master must be fp32, got {weight.dtype}; write it again")
    else:
        _check_rule(path, metadata)
        expected = [entry for name in shapes for entry in _entry_names(name)]
        _check_names(str(path), entries.keys(), expected)
        weights = {name: _packed_from_entries(name, shape, entries) for name, shape in shapes.items()}
    for name, shape in shapes.items():
        if tuple(weights[name].shape) != shape:
            found = tuple(weights[name].shape)
            raise CheckpointError(
                f"{path}: {name}: shape must be {shape}, got {found}; config.json is of another model"
            )
    return LoadedModel(config=config, form=Form(form), weights=weights, metadata=metadata)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class OpenedModel:
    """A checkpoint whose weights are yet to come: of a published one, a file at a time is held.

    `metadata` describes packed experts that another program wrote, `None` where there are none; `notes` are what a user
    should know of how it is read.
    """

    config: ModelConfig
    weights: Iterator[tuple[str, Weight]]
    metadata: Mapping[str, str] | None
    notes: tuple[str, ...]


def open_model(source: str | os.PathLike[str]) -> OpenedModel:
    """As `load_model`, for a reader that takes the weights one by one. Our own folders are read whole.

    Raises:
        CheckpointError, ConfigError: As `load_model`, those of single weights while they are read.
    """
    if is_native(source):
        loaded = load_model(source)
        return OpenedModel(
            config=loaded.config, weights=iter(loaded.weights.items()), metadata=None, notes=loaded.notes
        )
    opened = open_hf(source)
    return OpenedModel(
        config=opened.config,
        weights=opened.read(),
        metadata=opened.metadata if opened.has_mxfp4 else None,
        notes=opened.notes,
    )


def policy_folder(source: str | os.PathLike[str]) -> str | os.PathLike[str]:
    """Where the published bytes of the policy are that `source` holds: its folder of them, or else `source` itself.

    Raises:
        CheckpointError: As `is_native`.
    """
    inner = Path(source) / PUBLISHED_FOLDER
    return inner if inner.is_dir() and is_native(source) else source


def is_native(source: str | os.PathLike[str]) -> bool:
    """Whether a folder is one that `save_model` wrote, by its config.json.

    Raises:
        CheckpointError: There is no readable config.json.
    """
    return ModelConfig.is_own(Folder(source).read_json(CONFIG_FILE))


def _load_config(source: str | os.PathLike[str]) -> ModelConfig:
    folder = Folder(source)
    try:
        config = ModelConfig.from_dict(folder.read_json(CONFIG_FILE))
    except ConfigError as error:
        raise CheckpointError(f"{folder.path(CONFIG_FILE)}: {error}") from error
    config.validate()
    return config


def _check_names(where: str, found: Any, expected: Any) -> None:
    missing, extra = set(expected) - set(found), set(found) - set(expected)
    if missing or extra:
        raise CheckpointError(
            f"{where}: names must be exactly the model's, got missing {sorted(missing)} and extra {sorted(extra)}; "
            "check that the weights belong to this configuration"
        )


def _check_rule(path: Path, metadata: dict[str, str]) -> None:
    found = {key: metadata.pop(key, None) for key in SNAPSHOT_METADATA}
    expected = {key: str(value) for key, value in SNAPSHOT_METADATA.items()}
    if found != expected:
        raise CheckpointError(f"{path}: must be written as {expected}, got {found}; convert it with its own release")


def _entry_names(name: str) -> list[str]:
    return [f"{name}_blocks", f"{name}_scales"] if tensor_format(name) is Format.MXFP4 else [name]


def _packed_entries(name: str, packed: PackedTensor) -> dict[str, torch.Tensor]:
    payload = torch.from_numpy(np.array(packed.payload))
    if packed.format is Format.MXFP4:
        return dict(zip(_entry_names(name), (payload, torch.from_numpy(np.array(packed.scales))), strict=True))
    return {name: payload.view(PLAIN_DTYPES[packed.format]).view(packed.shape)}


def _packed_from_entries(name: str, shape: tuple[int, ...], entries: Mapping[str, torch.Tensor]) -> PackedTensor:
    if tensor_format(name) is Format.MXFP4:
        blocks, scales = (entries[entry].numpy() for entry in _entry_names(name))
        found = (*blocks.shape[:-2], blocks.shape[-2] * blocks.shape[-1] * 2)
        return PackedTensor(format=Format.MXFP4, shape=found, payload=blocks, scales=scales)
    plain = entries[name].contiguous()
    return PackedTensor(
        format=tensor_format(name),
        shape=tuple(plain.shape),
        payload=plain_bytes(plain),
        scales=np.empty(0, np.uint8),
    )

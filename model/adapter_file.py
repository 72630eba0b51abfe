"""Adapters on disk: `adapters.safetensors`, which names its base and that base's digest.

The base is a model folder of its own (`model/checkpoint.py`), written once, beside the folders of adapters to it. The
file's metadata holds rank, alpha, targets and the digests of its tensors, which are checked whenever it is read.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from model.checkpoint import load_model
from model.config import LoraConfig, LoraTargets
from model.hf.files import WEIGHTS_FILE
from model.loaded import CheckpointError, LoadedModel
from model.lora import adapter_shapes, base_digest
from model.manifest import verify_digests, with_digests
from model.safetensors_file import write_safetensors
from model.snapshot import digests

ADAPTERS_FILE = "adapters.safetensors"
BASE_FOLDER = "base"
"""Beside the folders of its adapters."""
BASE_DIGEST = "base_digest"
"""The entry in the metadata of both."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StoredAdapters:
    """fp32 masters of adapters, and which base they belong to (`model.lora.base_digest`)."""

    lora: LoraConfig
    masters: Mapping[str, torch.Tensor]
    base: Path
    base_digest: str


def save_adapters(folder: Path, masters: Mapping[str, torch.Tensor], lora: LoraConfig, base_digest: str) -> None:
    """Write the file; the base is expected in the folder `BASE_FOLDER` beside `folder`."""
    entries = {name: master.detach().float().contiguous().clone() for name, master in masters.items()}
    settings = {"rank": lora.rank, "alpha": lora.alpha, "targets": lora.targets.value}
    metadata = {"lora": json.dumps(settings), "base": f"../{BASE_FOLDER}", BASE_DIGEST: base_digest}
    write_safetensors(folder / ADAPTERS_FILE, entries, with_digests(entries, metadata))


def has_adapters(folder: Path) -> bool:
    """Whether a folder holds adapters and no model."""
    return (folder / ADAPTERS_FILE).is_file()


def load_adapters(folder: Path) -> StoredAdapters:
    """Read what `save_adapters` wrote.

    Raises:
        CheckpointError: The file is missing or damaged, or does not say what it belongs to.
    """
    path = folder / ADAPTERS_FILE
    try:
        with safe_open(path, framework="pt") as file:
            metadata = dict(file.metadata() or {})
            entries = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a mapping)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(
            f"{path}: must be a safetensors file of adapters, got {error}; resume with the learner.lora.rank it was "
            "saved with"
        ) from error
    verify_digests(path, entries, metadata)
    try:
        settings: dict[str, Any] = json.loads(metadata["lora"])
        lora = LoraConfig(rank=settings["rank"], alpha=settings["alpha"], targets=LoraTargets(settings["targets"]))
        base, of = folder.resolve() / metadata["base"], metadata[BASE_DIGEST]
    except (KeyError, ValueError) as error:
        raise CheckpointError(f"{path}: metadata must tell rank and base, got {error}; write the file again") from error
    return StoredAdapters(lora=lora, masters=entries, base=base.resolve(), base_digest=of)


def load_base(folder: Path, stored: StoredAdapters) -> LoadedModel:
    """The base of the adapters of `folder`, which it must be to the last bit.

    Raises:
        CheckpointError: It is not there, is another one, or the adapters are not of its shapes.
    """
    if not stored.base.is_dir():
        raise CheckpointError(
            f"{folder}: its adapters need their base in {stored.base}, got no such folder; keep both side by side"
        )
    loaded = load_model(stored.base)
    check_base(folder, stored, digests(loaded.packed()))
    expected = adapter_shapes(loaded.config, stored.lora)
    found = {name: tuple(master.shape) for name, master in stored.masters.items()}
    if found != expected:
        wrong = sorted(name for name in {*found, *expected} if found.get(name) != expected.get(name))
        raise CheckpointError(
            f"{folder}: adapters must be exactly those of its settings, got {len(wrong)} others, such as {wrong[0]}; "
            "restore the file"
        )
    return loaded


def check_base(folder: Path, stored: StoredAdapters, base: Mapping[str, str]) -> None:
    """Raises CheckpointError where the base with these digests is not the one that the adapters were trained on."""
    found = base_digest(base)
    if found != stored.base_digest:
        raise CheckpointError(
            f"{folder}: adapters belong to the base with digest {stored.base_digest}, got {found}; restore the base "
            "that the run started from"
        )


def check_beside(base: Path, base_digest: str) -> None:
    """Raises CheckpointError where the base that lies beside the adapters to be saved is not theirs."""
    path = base / WEIGHTS_FILE
    try:
        with safe_open(path, framework="pt") as file:
            found = (file.metadata() or {}).get(BASE_DIGEST)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path}: must be a safetensors file, got {error}; restore or remove the base") from error
    if found != base_digest:
        raise CheckpointError(
            f"{base}: must be the base with digest {base_digest} that this run trains on, got {found}; give the run a "
            "folder of its own"
        )

"""Digests of the tensors of a safetensors file, in its own header: bytes that changed on the disk are never loaded.

The digests travel with the file, whoever copies it. A file without them (of another program, or of an older release)
is read as it is. They are hex BLAKE2b-128 of each stored tensor's name, dtype, shape and bytes.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, MutableMapping
from pathlib import Path

import torch

from model.loaded import CheckpointError

_KEY = "blake2b"
"""The metadata entry: a JSON object of digest by stored name."""


def with_digests(entries: Mapping[str, torch.Tensor], metadata: Mapping[str, str]) -> dict[str, str]:
    """The metadata to store `entries` with."""
    return {**metadata, _KEY: json.dumps({name: _digest(name, tensor) for name, tensor in sorted(entries.items())})}


def verify_digests(path: Path, entries: Mapping[str, torch.Tensor], metadata: MutableMapping[str, str]) -> None:
    """Check what was read of `path`, and take the digests out of its metadata.

    Raises:
        CheckpointError: Names the first tensor that is not as it was stored.
    """
    stored = metadata.pop(_KEY, None)
    if stored is None:
        return
    try:
        digests = dict(json.loads(stored))
    except (ValueError, TypeError) as error:
        raise CheckpointError(
            f"{path}: metadata '{_KEY}' must hold a digest a tensor, got {error}; restore or rewrite the file"
        ) from error
    for name in sorted({*entries, *digests}):
        found = _digest(name, entries[name]) if name in entries else None
        if found != digests.get(name):
            raise CheckpointError(
                f"{path}: {name}: digest must be {digests.get(name)}, got {found}; the file is damaged: restore it"
            )


def _digest(name: str, tensor: torch.Tensor) -> str:
    state = hashlib.blake2b(f"{name}|{tensor.dtype}|{tuple(tensor.shape)}|".encode(), digest_size=16)
    if tensor.numel():
        state.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return state.hexdigest()

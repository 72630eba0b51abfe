"""Writing safetensors files whose bytes depend on what they hold alone.

The library keeps metadata in a hash map whose order changes from process to process, so that two files of the same
tensors differ as soon as there are two entries. Here the header is put in order after it is written.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file

_LENGTH_BYTES = 8


def write_safetensors(path: Path, entries: Mapping[str, torch.Tensor], metadata: Mapping[str, str]) -> None:
    """Write contiguous tensors with metadata; equal arguments give equal bytes.

    Raises:
        RuntimeError: The header cannot be put in order in its place.
    """
    save_file(dict(entries), path, metadata=dict(metadata))
    with path.open("r+b") as file:
        length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
        header = json.loads(file.read(length))
        header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
        ordered = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode().ljust(length)
        if len(ordered) != length:
            raise RuntimeError(f"{path}: an ordered header must have {length} bytes, got {len(ordered)}; report this")
        file.seek(_LENGTH_BYTES)
        file.write(ordered)

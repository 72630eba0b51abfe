"""The files of a published checkpoint: a local folder or any URL that fsspec reads (hf://, s3://, memory://, ...).

Headers of safetensors files are read by byte range, without the weights; a remote shard is fetched to a temporary file
for as long as it is read, so that at most one lies on the disk.
"""

from __future__ import annotations

import fnmatch
import json
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import fsspec

from model.hf.encodings import Entry
from model.loaded import CheckpointError

CONFIG_FILE = "config.json"
WEIGHTS_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"

COMPANIONS = (
    *("tokenizer*.json", "special_tokens_map.json", "added_tokens.json", "vocab.json", "merges.txt"),
    *("tokenizer.model", "tiktoken.model", "*.tiktoken", "tokenization_*.py"),
    *("chat_template.json", "chat_template.jinja", "generation_config.json"),
)
"""Files that travel with a checkpoint unchanged: tokenizer, chat template, defaults of generation."""

_MAX_HEADER_BYTES = 100_000_000
"""The limit of the safetensors format."""


class Folder:
    """A folder by path or URL; every failure to read is a `CheckpointError` that names the file."""

    def __init__(self, source: str | os.PathLike[str]) -> None:
        self.source = os.fspath(source)
        try:
            filesystem, self._root = fsspec.core.url_to_fs(self.source)
        except (ImportError, ValueError) as error:
            raise CheckpointError(f"{self.source}: must be a folder or a URL, got {error}; see fsspec") from error
        self._filesystem = cast("fsspec.AbstractFileSystem", filesystem)
        self._is_local = "file" in self._filesystem.protocol

    def path(self, name: str) -> str:
        """The full path of a file, within its file system."""
        return f"{self._root.rstrip('/')}/{name}"

    def names(self) -> list[str]:
        """The files of the folder, sorted, without subfolders."""
        with self._reading("must be a readable folder"):
            listed = self._filesystem.ls(self._root, detail=True)
        return sorted(Path(item["name"]).name for item in listed if item["type"] != "directory")

    def read_json(self, name: str) -> dict[str, Any]:
        """A JSON object."""
        with self._reading(f"{name}: must be a JSON object"):
            return dict(json.loads(self._filesystem.cat_file(self.path(name))))

    def companions(self) -> list[str]:
        """The files that travel with the checkpoint."""
        return [name for name in self.names() if any(fnmatch.fnmatch(name, pattern) for pattern in COMPANIONS)]

    def copy(self, name: str, target: Path) -> None:
        """Copy a file into a local folder."""
        with self._reading(f"{name}: could not be copied"):
            self._filesystem.get_file(self.path(name), str(target / name))

    def weight_files(self) -> list[str]:
        """The safetensors files: those of the index, the single one, or (without either) all there are."""
        names = self.names()
        if INDEX_FILE in names:
            index = self.read_json(INDEX_FILE)
            with self._reading(f"{INDEX_FILE}: must have a weight_map of file names"):
                files = sorted({os.fspath(file) for file in dict(index["weight_map"]).values()})
        else:
            files = [WEIGHTS_FILE] if WEIGHTS_FILE in names else [n for n in names if n.endswith(".safetensors")]
        absent = [name for name in files if name not in names]
        if absent or not files:
            raise CheckpointError(
                f"{self.source}: needs {' and '.join(absent) or WEIGHTS_FILE}, got {names}; fetch the checkpoint again"
            )
        return files

    def header(self, file: str) -> tuple[dict[str, Entry], dict[str, str]]:
        """Entries and metadata of a safetensors file: 8 bytes with the length n, then n bytes of JSON."""
        path = self.path(file)
        with self._reading(f"{file}: must be a whole safetensors file"):
            length = int.from_bytes(self._bytes(path, 0, 8), "little")
            if not 2 <= length <= _MAX_HEADER_BYTES:
                raise ValueError(f"a header of {length} bytes")
            header = dict(json.loads(self._bytes(path, 8, 8 + length)))
            metadata = header.pop("__metadata__", {})
            entries = {
                name: Entry(dtype=str(about["dtype"]), shape=tuple(about["shape"]), file=file)
                for name, about in header.items()
            }
            num_bytes = 8 + length + max((about["data_offsets"][1] for about in header.values()), default=0)
            if self._filesystem.size(path) != num_bytes:
                raise ValueError(f"{self._filesystem.size(path)} bytes instead of {num_bytes}")
        return entries, metadata

    @contextmanager
    def local_copy(self, file: str) -> Iterator[Path]:
        """A local path of the file, valid within the block."""
        if self._is_local:
            yield Path(self.path(file))
            return
        with tempfile.TemporaryDirectory(prefix="checkpoint-") as scratch:
            self.copy(file, Path(scratch))
            yield Path(scratch) / file

    @contextmanager
    def _reading(self, what: str) -> Iterator[None]:
        """Any failure within is one of this folder's: a plugin of fsspec raises whatever its client library does."""
        try:
            yield
        except Exception as error:
            raise CheckpointError(f"{self.source}: {what}, got {error!r}; check the name, or fetch it again") from error

    def _bytes(self, path: str, start: int, end: int) -> bytes:
        return cast("bytes", self._filesystem.cat_file(path, start=start, end=end))

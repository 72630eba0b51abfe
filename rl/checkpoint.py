"""Checkpoints of a run: masters, optimizer, counters, written atomically, verified when read.

A checkpoint is a folder `round-000010` that appears by one rename after everything in it is on disk, with a manifest of
sizes and digests. All random numbers of a run are counters (seed, round, task, sample), so the state of every generator
is the seed and the number of the next round. Invariant: `round-N` holds the state before round N.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

_MANIFEST = "manifest.json"
_STATE = "state.json"


class CheckpointError(ValueError):
    """A checkpoint that is damaged or missing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunState:
    """The counters of a run before round `next_round`: which task comes next and which weights are published."""

    next_round: int
    data_cursor: int
    weight_version: int
    seed: int
    wandb_id: str


class Checkpoints:
    """The checkpoints of one run folder, of which the newest `keep` stay."""

    def __init__(self, folder: Path, keep: int):
        self._folder = folder
        self._keep = keep

    def save(self, state: RunState, write: Callable[[Path], None]) -> Path:
        """Write a checkpoint: `write` puts the learner's files into the folder it is given."""
        self._folder.mkdir(parents=True, exist_ok=True)
        final = self._folder / f"round-{state.next_round:06d}"
        staging = self._folder / f".{final.name}.{os.getpid()}"
        shutil.rmtree(staging, ignore_errors=True)
        staging.mkdir()
        write(staging)
        (staging / _STATE).write_text(json.dumps(asdict(state), indent=1))
        seal(staging)
        publish_folder(staging, final)
        self._prune(final)
        return final

    def latest(self) -> tuple[Path, RunState] | None:
        """The newest whole checkpoint, and its state; `None` when there is none.

        A folder that was not renamed is the trace of a crash and is removed. Raises CheckpointError for one that was
        completed and is damaged: it is not skipped silently, since that would repeat rounds.
        """
        if not self._folder.is_dir():
            return None
        for torn in self._folder.glob(".round-*"):
            shutil.rmtree(torn, ignore_errors=True)
        newest = max(self._folder.glob("round-*"), default=None)
        if newest is None:
            return None
        verify_seal(newest)
        return newest, _read_state(newest)

    def _prune(self, newest: Path) -> None:
        older = sorted(path for path in self._folder.glob("round-*") if path < newest)
        for path in older[: max(0, len(older) - self._keep + 1)]:
            _remove(path)


def _read_state(folder: Path) -> RunState:
    try:
        return RunState(**json.loads((folder / _STATE).read_text()))
    except (OSError, ValueError, TypeError) as error:
        raise CheckpointError(
            f"checkpoint {folder.name}: {_STATE} must hold the counters of a run, got {error}; "
            f"remove {folder} to go on from the one before"
        ) from error


def seal(folder: Path) -> None:
    """Flush every file in and below `folder` to disk and write its manifest."""
    manifest: dict[str, dict[str, int | str]] = {}
    for path in sorted(folder.rglob("*")):
        if path == folder / _MANIFEST:
            continue
        if path.is_dir():
            _sync_names(path)
            continue
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "blake2b").hexdigest()[:32]
            os.fsync(file.fileno())
        manifest[path.relative_to(folder).as_posix()] = {"bytes": path.stat().st_size, "blake2b": digest}
    with (folder / _MANIFEST).open("w") as file:
        json.dump(manifest, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    _sync_names(folder)


def verify_seal(folder: Path) -> None:
    """Raises CheckpointError naming the first file of `folder` that is not as it was sealed."""
    manifest_file = folder / _MANIFEST
    if not manifest_file.is_file():
        raise CheckpointError(
            f"checkpoint: no manifest, got {folder}; remove the folder, or name one that was written whole"
        )
    try:
        manifest = json.loads(manifest_file.read_text())
    except ValueError as error:
        raise CheckpointError(
            f"checkpoint {folder.name}: {_MANIFEST} is damaged, got {error}; "
            f"remove {folder} to go on from the one before"
        ) from error
    for name, expected in manifest.items():
        path = folder / name
        if not path.is_file() or path.stat().st_size != expected["bytes"]:
            size = path.stat().st_size if path.is_file() else "no file"
            raise CheckpointError(
                f"checkpoint {folder.name}: {name} must have {expected['bytes']} bytes, got {size}; "
                f"remove {folder} to go on from the one before"
            )
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "blake2b").hexdigest()[:32]
        if digest != expected["blake2b"]:
            raise CheckpointError(
                f"checkpoint {folder.name}: {name} is damaged, got digest {digest}; "
                f"remove {folder} to go on from the one before"
            )


def publish_folder(staging: Path, final: Path) -> None:
    """Make a sealed folder appear under its name by one rename, durably; an older one of that name is replaced."""
    if final.exists():
        _remove(final)
    staging.rename(final)
    _sync_names(final.parent)


def _remove(folder: Path) -> None:
    """Take the folder's name away before its files, so that a crash never leaves half of it under its name."""
    hidden = folder.with_name(f".{folder.name}.{os.getpid()}.old")
    shutil.rmtree(hidden, ignore_errors=True)
    folder.rename(hidden)
    shutil.rmtree(hidden)


def _sync_names(folder: Path) -> None:
    """Make the names in `folder` durable."""
    directory = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)

"""Convert a checkpoint: `python -m model.export SOURCE DEST --format {mxfp4,bf16,native,peft}`.

SOURCE is a folder of this project (masters or published bytes), or a published checkpoint by path or URL. `mxfp4` is
what the policy is: the gpt-oss layout for gpt-oss, compressed-tensors otherwise. Where a checkpoint of a run keeps the
bytes trained on beside its masters (stochastic rounding, hysteresis), it is those. `bf16` rounds the weights as they
are stored, so of masters it is the unquantized network. `native` gives the fp32 masters that training starts from.

A checkpoint of adapters (`learner.lora`) is merged with its base before it is written so; `peft` writes the adapters
alone, as `adapter_config.json` and `adapter_model.safetensors`.

DEST appears complete or not at all. Exit codes: 0 done, 2 a mistake (one line on stderr).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from model.adapter_file import ADAPTERS_FILE, has_adapters
from model.checkpoint import appearing_whole, load_model, open_model, partial_of, policy_folder, save_model
from model.config import ConfigError
from model.hf.files import Folder
from model.hf.writer import MAX_SHARD_BYTES, HfFormat, save_hf
from model.loaded import CheckpointError
from model.lora_export import PEFT, merged_model, save_peft
from model.mxfp4 import MXFP4Error
from model.snapshot import SnapshotError

_NATIVE = "native"


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse the command line, convert, and return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m model.export", description="Convert a checkpoint.")
    parser.add_argument("source", help="a checkpoint of this project, or a published one by path or URL")
    parser.add_argument("dest", type=Path, help="the folder to write; must not exist")
    parser.add_argument("--format", required=True, choices=[*map(str, HfFormat), _NATIVE, PEFT], help="what to write")
    parser.add_argument(
        "--max-shard-bytes", type=int, default=MAX_SHARD_BYTES, help=f"bytes in a file (default: {MAX_SHARD_BYTES})"
    )
    chosen = parser.parse_args(arguments)
    try:
        notes = export(chosen.source, chosen.dest, chosen.format, chosen.max_shard_bytes)
    except (CheckpointError, ConfigError, MXFP4Error, SnapshotError) as error:
        sys.stderr.write("".join(f"{line}\n" for line in str(error).splitlines()))
        return 2
    sys.stdout.write("".join(f"note: {note}\n" for note in notes) + f"{chosen.format} checkpoint in {chosen.dest}\n")
    return 0


def export(source: str, dest: Path, format: str, max_shard_bytes: int = MAX_SHARD_BYTES) -> tuple[str, ...]:
    """Convert `source` into the new folder `dest`, and return notes on how it was read.

    Raises:
        CheckpointError: `dest` exists or cannot be written, or the source cannot be read.
        ConfigError: The source's configuration is not supported, or its family cannot hold it.
    """
    if max_shard_bytes < 1:
        raise CheckpointError(
            f"--max-shard-bytes: must be positive, got {max_shard_bytes}; leave it out for the default"
        )
    prepared = partial_of(dest).resolve()
    if Path(Folder(source).path("")).resolve().is_relative_to(prepared):
        raise CheckpointError(f"{source}: must not be where {dest} is prepared, got {prepared}; choose another name")
    with appearing_whole(dest) as partial:
        return _write(source, partial, format, max_shard_bytes)


def _write(source: str, folder: Path, format: str, max_shard_bytes: int) -> tuple[str, ...]:
    is_adapted = has_adapters(Path(source))
    if format == PEFT:
        if not is_adapted:
            raise CheckpointError(
                f"{source}: must hold adapters for --format {PEFT}, got a folder without {ADAPTERS_FILE}; name a "
                "checkpoint of a run with learner.lora.rank"
            )
        save_peft(folder, Path(source))
        _copy_companions(source, folder)
        return ()
    if format == _NATIVE:
        loaded = merged_model(Path(source)) if is_adapted else load_model(source)
        save_model(folder, loaded.config, loaded.masters(), {})
        _copy_companions(source, folder)
        return loaded.notes
    if is_adapted:
        loaded = merged_model(Path(source))
        save_hf(folder, loaded.config, loaded.weights.items(), HfFormat(format), max_shard_bytes=max_shard_bytes)
        _copy_companions(source, folder)
        return ()
    read = policy_folder(source) if format == HfFormat.MXFP4 else source
    opened = open_model(read)
    save_hf(
        folder,
        opened.config,
        opened.weights,
        HfFormat(format),
        source=Folder(source),
        metadata=opened.metadata,
        max_shard_bytes=max_shard_bytes,
    )
    told = () if read == source else (f"the bytes are those of {read}, which training read",)
    return (*opened.notes, *told)


def _copy_companions(source: str, folder: Path) -> None:
    companions = Folder(source)
    for name in companions.companions():
        companions.copy(name, folder)


if __name__ == "__main__":
    sys.exit(main())

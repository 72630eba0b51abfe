"""How long a checkpoint takes to load from disk, in bf16 and in MXFP4: nothing of it in the page cache before.

    python scripts/bench/cold_load.py [--repeats 7] [--folder runs] [--drop-all]

One mini model of gpt-oss's proportions (93 % of 0.38 B parameters in experts) in three forms: a published checkpoint in
bf16 and in MXFP4 (compressed-tensors), and what this project publishes. Its family is Qwen3-MoE, whose files hold the
matrices as they lie in memory; gpt-oss's bf16 files hold them transposed, which costs more time than a fast disk.

A load ends when every page of every weight is in memory. Each round loads all three, in turns; before a load its files
are taken out of the page cache with `posix_fadvise` (with `--drop-all`, as root, the whole cache is dropped). A load
counts only if the kernel says that the process read the files' bytes from storage; otherwise there is no figure. A warm
load follows each: what is left of the time when the disk costs nothing. The cache of the host behind a virtual disk is
out of reach, so the rate is told too.

Prints a table and writes `results/cold_load.<isa>.json`.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch

from model.checkpoint import load_model, save_model
from model.config import Family, ModelConfig, QkNorm
from model.hf.writer import HfFormat, save_hf
from model.loaded import LoadedModel, Weight
from model.size import ModelSize, Part
from model.snapshot import PackedTensor, digests
from model.transformer import parameter_shapes
from rl.report import machine_facts

ROOT = Path(__file__).parents[2]
CONFIG = ModelConfig(
    family=Family.qwen3_moe, vocab_size=8192, hidden_size=960, num_layers=4, num_heads=16, num_kv_heads=2, head_dim=64,
    qk_norm=QkNorm.head, expert_hidden_size=960, num_experts=32, num_experts_per_tok=4, tie_embeddings=False,
)  # fmt: skip
BF16, MXFP4, PUBLISHED = "bf16", "MXFP4", "MXFP4, published form"
PAGE = 4096
LEAST_READ = 0.99
"""Share of the files' bytes that must come from storage; headers may have been read before."""


class NotColdError(RuntimeError):
    """A load that the page cache helped."""


def weights() -> Iterator[tuple[str, torch.Tensor]]:
    """Random values that bf16 holds exactly, the same each time."""
    generator = torch.Generator().manual_seed(0)
    for name, shape in parameter_shapes(CONFIG).items():
        yield name, torch.empty(shape, dtype=torch.bfloat16).normal_(0.0, 0.02, generator=generator)


def write(folder: Path) -> dict[str, Path]:
    """The three checkpoints, by name, all bytes on the disk."""
    folders = {BF16: folder / "bf16", MXFP4: folder / "mxfp4", PUBLISHED: folder / "published"}
    for each in folders.values():
        each.mkdir()
    for name, format in ((BF16, HfFormat.BF16), (MXFP4, HfFormat.MXFP4)):
        save_hf(folders[name], CONFIG, weights(), format)
    save_model(folders[PUBLISHED], CONFIG, load_model(folders[MXFP4]).packed(), {})
    os.sync()  # only clean pages leave the cache
    return folders


def check_same(folders: Mapping[str, Path]) -> None:
    """Every form must publish the same bytes; compared on the first layer.

    Raises:
        ValueError: Two forms differ.
    """
    found: dict[str, dict[str, str]] = {}
    for name, folder in folders.items():
        loaded = load_model(folder)
        first = {key: weight for key, weight in loaded.weights.items() if key.startswith("model.layers.0.")}
        packed = LoadedModel(config=CONFIG, form=loaded.form, weights=first, metadata={}).packed()
        found[name] = digests(packed)
    if any(others != found[BF16] for others in found.values()):
        raise ValueError("cold load: all forms must hold the same model, got other bytes; correct the writers")


def files(folder: Path) -> list[Path]:
    """The files of a checkpoint."""
    return sorted(path for path in folder.iterdir() if path.is_file())


def num_bytes(folder: Path) -> int:
    """Their size."""
    return sum(path.stat().st_size for path in files(folder))


def drop(folder: Path, *, everything: bool) -> None:
    """Take a checkpoint out of the page cache, or all that is clean."""
    for path in files(folder):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)
    if everything:
        Path("/proc/sys/vm/drop_caches").write_text("1\n")


def bytes_read() -> int:
    """Bytes that this process has had fetched from storage."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("read_bytes:"))


def touch(weight: Weight) -> int:
    """Read a byte of each page: a loaded weight may be a file mapped into memory that nobody has read yet."""
    if isinstance(weight, PackedTensor):
        return sum(int(array.reshape(-1)[::PAGE].sum()) for array in (weight.payload, weight.scales))
    return int(weight.view(-1).view(torch.uint8)[::PAGE].sum())


def load_s(folder: Path) -> float:
    """Seconds until every weight is in memory."""
    gc.collect()
    started = time.perf_counter()
    for weight in load_model(folder).weights.values():
        touch(weight)
    return time.perf_counter() - started


def cold_load_s(folder: Path, *, everything: bool) -> float:
    """Seconds of a load from storage.

    Raises:
        NotColdError: The kernel counted fewer bytes than the files have.
    """
    drop(folder, everything=everything)
    before, size = bytes_read(), num_bytes(folder)
    seconds = load_s(folder)
    if (read := bytes_read() - before) < LEAST_READ * size:
        raise NotColdError(
            f"cold load: {folder.name} must be read from storage, got {read:,} of {size:,} bytes from there; use a "
            "--folder on a disk (not tmpfs, not overlaid by a cache), or --drop-all as root"
        )
    return seconds


def main() -> int:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--folder", type=Path, default=ROOT / "runs", help="where the checkpoints are written")
    parser.add_argument("--drop-all", action="store_true", help="drop the whole page cache (root)")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    arguments.folder.mkdir(parents=True, exist_ok=True)
    cold: dict[str, list[float]] = {}
    warm: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory(prefix="cold-load-", dir=arguments.folder) as scratch:
        folders = write(Path(scratch))
        check_same(folders)
        sizes = {name: num_bytes(folder) for name, folder in folders.items()}
        try:
            for _ in range(arguments.repeats):
                for name, folder in folders.items():
                    cold.setdefault(name, []).append(cold_load_s(folder, everything=arguments.drop_all))
                    warm.setdefault(name, []).append(load_s(folder))
        except NotColdError as error:
            print(error, file=sys.stderr)
            return 1
    report(cold, warm, sizes, "drop_caches" if arguments.drop_all else "posix_fadvise")
    return 0


def report(
    cold: Mapping[str, list[float]], warm: Mapping[str, list[float]], sizes: Mapping[str, int], dropped_by: str
) -> None:
    """Print the medians, and write them with all loads."""
    size, machine = ModelSize.of(CONFIG), machine_facts(1)
    isa = machine.column
    share = size.total[Part.experts] / size.num_total
    print(f"{isa}: {size.num_total:,} parameters, {share:.1%} in experts; dropped by {dropped_by}")
    forms: dict[str, dict[str, object]] = {}
    for name, seconds in cold.items():
        median, warm_median = statistics.median(seconds), statistics.median(warm[name])
        shorter = statistics.median(1 - mine / bf16 for mine, bf16 in zip(seconds, cold[BF16], strict=True))
        forms[name] = {
            "bytes": sizes[name],
            "cold_s": seconds,
            "cold_median_s": median,
            "cold_bytes_per_s": sizes[name] / median,
            "warm_median_s": warm_median,
            "shorter_than_bf16_frac": shorter,
        }
        print(
            f"{name:<22}{sizes[name] / 1e6:6.1f} MB   cold {median:.3f} s ({sizes[name] / median / 1e6:.0f} MB/s)   "
            f"warm {warm_median:.3f} s   {1 - sizes[name] / sizes[BF16]:.1%} fewer bytes, {shorter:.1%} shorter"
        )
    path = ROOT / "results" / f"cold_load.{isa.lower()}.json"
    path.parent.mkdir(exist_ok=True)
    figures = {
        "isa": list(machine.isa),
        "parameters": size.num_total,
        "experts_frac": share,
        "dropped_by": dropped_by,
        "forms": forms,
    }
    path.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())

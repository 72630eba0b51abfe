"""Compile every Triton kernel for every architecture without a GPU, and compare with the committed table.

    python scripts/kernels_aot.py            write results/kernels_aot.json and results/kernels_aot.md
    python scripts/kernels_aot.py --check    compare; one line for each deviation, and exit status 1
    python scripts/kernels_aot.py --only route/    write, or with --check compare, some kernels' rows, and print them

A deviation is a spill, more registers than a kernel's spec allows (or a tenth more than the table says), too much
shared memory, a matrix instruction or an asynchronous copy that is missing, or a kernel that is not in the table.
What this cannot show is that the code is right or fast: that takes a GPU.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

from model.kernels.gpu.compile import Compiled, compile_spec, deviations, registry, table

RESULT = Path("results/kernels_aot.json")
PROCESSES = 2


def main() -> int:
    """Compile and compare, or write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="compare with the table instead of writing it")
    parser.add_argument("--only", metavar="WORD", default="", help="only the kernels whose names contain this")
    args = parser.parse_args()
    started = time.perf_counter()
    specs = registry()
    chosen = {key: spec for key, spec in specs.items() if args.only in key}
    measured = _measure([(key, target) for key, spec in chosen.items() for target in spec.targets])
    made = table(measured)
    committed = json.loads(RESULT.read_text()) if RESULT.exists() else {"triton": made["triton"], "kernels": {}}
    if not args.check:
        if args.only and committed["triton"] != made["triton"]:
            parser.error(
                f"--only: the table's other rows are of another compiler, got Triton {made['triton']} for a table of "
                f"{committed['triton']}; write the whole table"
            )
        kept = {key: rows for key, rows in committed["kernels"].items() if args.only and key in specs}
        committed = made | {"kernels": dict(sorted((kept | made["kernels"]).items()))}
        RESULT.write_text(json.dumps(committed, indent=1) + "\n")
        RESULT.with_suffix(".md").write_text(_readable(committed))
    problems = list(deviations(specs, measured, committed))
    if args.only:
        print(_readable(made))
    print(*problems, sep="\n", end="\n" if problems else "")
    num_variants = sum(len(rows) for rows in measured.values())
    print(
        f"kernels_aot: {len(chosen)} kernels, {num_variants} variants, {len(problems)} deviations, "
        f"{time.perf_counter() - started:.0f} s"
    )
    return 1 if problems else 0


def _measure(jobs: list[tuple[str, str]]) -> dict[str, dict[str, Compiled]]:
    """Compile in processes of their own, with a cache of their own that is thrown away."""
    measured: dict[str, dict[str, Compiled]] = {}
    with tempfile.TemporaryDirectory() as cache:
        os.environ["TRITON_CACHE_DIR"] = cache
        context = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(PROCESSES, mp_context=context) as pool:
            for (key, target), row in zip(jobs, pool.map(_compile, jobs), strict=True):
                measured.setdefault(key, {})[target] = row
    return measured


def _compile(job: tuple[str, str]) -> Compiled:
    key, target = job
    return compile_spec(registry()[key], target)


def _readable(committed: dict[str, Any]) -> str:
    lines = [
        f"Made by `python scripts/kernels_aot.py` with Triton {committed['triton']}; nothing of this ran on a GPU.",
        "",
        "| kernel | target | registers | spills | shared KiB | matrix instructions | async copies | 16-byte loads |",
        "|---|---|---:|---:|---:|---|---|---|",
    ]
    for key, targets in committed["kernels"].items():
        for target, row in targets.items():
            shown = [row["instructions"].get(name, "") for name in ("mma", "async_copy", "wide_load")]
            cells = [key, target, row["registers"], row["spills"], f"{row['shared_bytes'] / 1024:.1f}", *shown]
            lines.append("| " + " | ".join(str(cell) for cell in cells) + " |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())

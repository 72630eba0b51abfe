"""Check and time every Triton kernel on this machine's GPU, in under 8 minutes.

    python scripts/gpu_check.py                  all cases; writes results/gpu_check.<device>.json
    python scripts/gpu_check.py --only prefill   some of them; writes nothing
    python scripts/gpu_check.py --list           their names; needs no GPU
    TRITON_INTERPRET=1 python scripts/gpu_check.py --tiny    compare small shapes in the interpreter, on a CPU

A kernel is first compared with its definition; only where they agree is it timed, on large shapes, with a cold
second-level cache: median of the times of single calls. Its roofline is the longer of two times, its bytes at the
device's peak bandwidth and its operations at the peak of bf16 (vendors' figures), and `share` is the roofline over the
time. Torch's own ways are timed beside it. The exit status is 1 when a comparison fails. After `--limit` seconds what
is left is named and not run. Odd shapes are compared by `KERNELS_ON=cuda python -m pytest tests/numerics/triton`.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from pathlib import Path
from typing import Any

import torch
from gpu_cases import CASES, Case, Size, Work

PEAKS = {
    "A100-SXM4-40GB": (1.555e12, 312e12),
    "A100": (2.039e12, 312e12),
    "H100 PCIe": (2.0e12, 756e12),
    "H100": (3.35e12, 989e12),
    "H200": (4.8e12, 989e12),
    "B200": (8.0e12, 2250e12),
    "MI300X": (5.3e12, 1307e12),
    "RTX 4090": (1.008e12, 165e12),
    "L40S": (0.864e12, 362e12),
    "L4": (0.3e12, 121e12),
}
"""Bytes and dense bf16 operations a second, by a part of the device's name; the first that fits counts."""


def main() -> int:
    """Run the chosen cases; the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", metavar="WORD", help="only cases whose name contains this; writes nothing")
    parser.add_argument("--list", action="store_true", help="print the names of the cases")
    parser.add_argument("--tiny", action="store_true", help="compare only, on small shapes and the CPU's interpreter")
    parser.add_argument("--limit", type=float, default=420.0, help="seconds after which no case is started")
    args = parser.parse_args()
    cases = {name: case for name, case in CASES.items() if args.only is None or args.only in name}
    if args.list:
        print(*cases, sep="\n")
        return 0
    if not cases:
        print(f"gpu_check: no case has this in its name, got {args.only!r}; --list prints them", file=sys.stderr)
        return 2
    if not args.tiny and not torch.cuda.is_available():
        print("gpu_check: needs a GPU that torch can use, got none; --list and --tiny work without", file=sys.stderr)
        return 2
    device = "cpu" if args.tiny else "cuda"
    peak = None if args.tiny else _peak(torch.cuda.get_device_name())
    started = time.perf_counter()
    rows: dict[str, dict[str, Any]] = {}
    for name, case in cases.items():
        if time.perf_counter() - started > args.limit:
            rows[name] = {"problem": f"not run: {args.limit:.0f} s were over"}
        else:
            rows[name] = _row(case, device, Size.TINY if args.tiny else Size.SMALL, peak, started)
        print(f"{name:24}", _line(rows[name]), flush=True)
    failed = [name for name, row in rows.items() if "problem" in row]
    if not args.tiny and args.only is None:
        _write(rows, peak, time.perf_counter() - started)
    print(f"gpu_check: {len(rows)} cases, {len(failed)} failed, {time.perf_counter() - started:.0f} s")
    return 1 if failed else 0


def _row(case: Case, device: str, size: Size, peak: tuple[float, float] | None, started: float) -> dict[str, Any]:
    """One case compared and, on a GPU, timed; whatever goes wrong is its `problem`, so that the others still run."""
    try:
        work = case(size, device)
        error = _difference(work.run(), work.expected())
        row: dict[str, Any] = {"error": error, "tolerance": work.tolerance}
        if not error <= work.tolerance:
            return row | {"problem": f"differs from its definition by {error:.3g}, {work.tolerance:.3g} are allowed"}
        if size is Size.SMALL:
            del work
            row |= _timed(case(Size.LARGE, device), peak)
        return row | {"at_s": round(time.perf_counter() - started, 1)}
    except Exception as error:  # noqa: BLE001  a kernel that does not compile must not hide the others
        return {"problem": f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"}
    finally:
        if device == "cuda":
            torch.cuda.empty_cache()


def _timed(work: Work, peak: tuple[float, float] | None) -> dict[str, Any]:
    if not work.num_bytes:
        return {}
    row: dict[str, Any] = {"ms": _milliseconds(work.run), "bytes": work.num_bytes, "operations": work.num_operations}
    if peak is not None:
        row["roofline_ms"] = max(work.num_bytes / peak[0], work.num_operations / peak[1]) * 1e3
        row["bound"] = "memory" if work.num_bytes / peak[0] >= work.num_operations / peak[1] else "compute"
        row["share"] = row["roofline_ms"] / row["ms"]
    row["rivals_ms"] = {name: _milliseconds(rival) for name, rival in work.rivals.items()}
    return row


def _milliseconds(run: Any) -> float:
    from triton.testing import do_bench  # needs a driver when it runs

    return float(do_bench(run, warmup=20, rep=80, return_mode="median"))  # pyright: ignore[reportArgumentType]


def _difference(actual: Any, expected: Any) -> float:
    """Largest difference over the largest expected value, of tensors that may be nested; infinite when not finite."""
    if isinstance(expected, torch.Tensor):
        actual, wanted = actual.detach().double().cpu(), expected.detach().double().cpu()
        if actual.shape != wanted.shape or not (actual.isfinite().all() and wanted.isfinite().all()):
            return math.inf
        return float((actual - wanted).abs().max() / wanted.abs().max().clamp_min(1e-30))
    return max(_difference(*pair) for pair in zip(actual, expected, strict=True))


def _peak(name: str) -> tuple[float, float] | None:
    return next((peak for part, peak in PEAKS.items() if part in name), None)


def _line(row: dict[str, Any]) -> str:
    if "problem" in row:
        return f"FAILED  {row['problem']}"
    line = f"error {row['error']:.2e}"
    if "ms" in row:
        line += f"  {row['ms']:8.4f} ms  {row['bytes'] / row['ms'] / 1e6:7.0f} GB/s"
        line += f"  {row['operations'] / row['ms'] / 1e9:6.1f} TFLOP/s"
        line += f"  {row['share']:4.0%} of {row['bound']}" if "share" in row else ""
        line += "".join(f"  | {name} {ms:.4f} ms" for name, ms in row["rivals_ms"].items())
    return line


def _write(rows: dict[str, dict[str, Any]], peak: tuple[float, float] | None, seconds: float) -> None:
    import triton

    name = torch.cuda.get_device_name()
    path = Path("results") / f"gpu_check.{name.lower().replace(' ', '_')}.json"
    facts = {"device": name, "torch": torch.__version__, "triton": triton.__version__, "seconds": round(seconds)}
    peaks = None if peak is None else {"bytes_a_second": peak[0], "bf16_operations_a_second": peak[1]}
    path.write_text(json.dumps({**facts, "peaks": peaks, "cases": rows}, indent=1) + "\n")
    print(f"wrote {path}")


if __name__ == "__main__":
    sys.exit(main())

"""The dense product of the CPU and the MXFP4 product beside it, against torch and against what bounds them.

    python scripts/bench/linear.py [--repeats 15] [--isa avx2 avx512 amx] [--threads 2]

Weights [O, I]: 768 x 768, which a cache holds, and 4096 x 4096 and 32000 x 768, which rotate through copies that none
does. Each round runs every way once, in turns: this product on fp32 and on bf16 rows, `F.linear` in fp32 and in bf16,
oneDNN's fp32 product on a weight of its own layout, the MXFP4 product (4096 x 4096), and a plain sum of the bits of as
many bytes as the bf16 weight has. Nothing is timed before the products equal those of the reference.

`of_read` is the time of reading the weight's bytes at the measured rate, as a part of the product's time; `of_peak` is
the rate of multiply-adds as a part of what the registers of this instruction set do in fp32 (AMX does more). Both, and
`faster_than`, are medians of the ratios of a round.

On one thread the clock is the thread's own time, which a busy machine hardly changes; on more it is the wall's.

Torch uses the best instructions of the machine whatever --isa says. Variables hold it to less, and are recorded:
ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=avx2 MKL_ENABLE_INSTRUCTIONS=AVX2 for a CPU with AVX2 only, and
ATEN_CPU_CAPABILITY=avx512 ONEDNN_MAX_CPU_ISA=avx512_core MKL_ENABLE_INSTRUCTIONS=AVX512 for one without AMX.

Prints medians and writes `results/linear.<isa>.json`.
"""

from __future__ import annotations

import argparse
import ctypes
import dataclasses
import json
import math
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F

from model import mxfp4
from model.kernels.cpu.isa import Isa, available_isas, load
from model.kernels.linear import reference
from model.kernels.linear.cpu import Linear
from model.kernels.quantize.reference import tile

ROOT = Path(__file__).parents[2]
SHAPES = {(768, 768): False, (4096, 4096): True, (32000, 768): True}
"""[O, I], and whether every call meets a copy that is in no cache."""
NUM_ROWS = (1, 16, 64)
COLD_BYTES = 600e6
"""More than a shared last cache leaves to one process."""
LIMITS = ("ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA", "MKL_ENABLE_INSTRUCTIONS")
PEAK_ROUNDS = 2_000_000
READ_PIECE = 16384

Way = Callable[[torch.Tensor, int], object]
"""A product of rows with copy number i of the weight."""


class Machine:
    """The probes and products of `products.cpp`."""

    def __init__(self, isa: Isa) -> None:
        library = load(Path(__file__).with_name("products.cpp"), isa)
        pointer, count, flag = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32
        self.read_bytes, self._multiply_adds, self._mxfp4 = (
            library.read_bytes,
            library.multiply_adds,
            library.mxfp4_product,
        )
        self.read_bytes.argtypes, self.read_bytes.restype = [pointer, count], count
        self._multiply_adds.argtypes, self._multiply_adds.restype = [count], count
        self._mxfp4.argtypes = [pointer, count, flag, count, count, pointer, pointer, pointer, count, pointer]
        self._mxfp4.restype = None

    def peak_flops(self) -> float:
        """fp32 operations a second of all threads, two a multiply-add.

        The best of a second: a virtual machine takes that long to wake its other processors.
        """
        best, until = 0.0, time.perf_counter() + 1.0
        while time.perf_counter() < until:
            started = clock()
            done = self._multiply_adds(PEAK_ROUNDS)
            best = max(best, 2 * done / (clock() - started))
        return best

    def mxfp4(self, x: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor, extreme: torch.Tensor) -> torch.Tensor:
        """fp32 [T, O]."""
        y = x.new_empty(len(x), 16 * len(extreme), dtype=torch.float32)
        pointers = (tensor.data_ptr() for tensor in (codes, scales, extreme))
        self._mxfp4(
            x.data_ptr(), x.stride(0), x.dtype == torch.bfloat16, *x.shape, *pointers, len(extreme), y.data_ptr()
        )
        return y


def copies_of(tensor: torch.Tensor, cold: bool) -> list[torch.Tensor]:
    """Enough copies that none is in a cache when its turn comes again, or one."""
    count = math.ceil(COLD_BYTES / tensor.nbytes) if cold else 1
    return [tensor, *(tensor.clone() for _ in range(count - 1))]


def ways(isa: Isa, machine: Machine, weight: torch.Tensor, cold: bool) -> dict[str, Way]:
    """Every way to multiply by this bf16 weight, by name."""
    linear = Linear(isa)
    packed = linear.pack(weight)
    mine = [dataclasses.replace(packed, tiles_GSBW=tiles) for tiles in copies_of(packed.tiles_GSBW, cold)]
    wide, narrow = copies_of(weight.float(), cold), copies_of(weight, cold)
    reordered = [torch.ops.mkldnn._reorder_linear_weight(w, 64) for w in wide]
    found: dict[str, Way] = {
        "read": lambda x, i: machine.read_bytes(
            mine[i % len(mine)].tiles_GSBW.data_ptr(), packed.num_bytes // READ_PIECE * READ_PIECE
        ),
        "linear_fp32": lambda x, i: linear(x, mine[i % len(mine)]),
        "linear_bf16": lambda x, i: linear(x.bfloat16(), mine[i % len(mine)]),
        "torch_fp32": lambda x, i: F.linear(x, wide[i % len(wide)]),
        "torch_bf16": lambda x, i: F.linear(x.bfloat16(), narrow[i % len(narrow)]),
        "onednn_fp32": lambda x, i: torch.ops.mkldnn._linear_pointwise(
            x, reordered[i % len(reordered)], None, "none", [], ""
        ),
    }
    if weight.shape[0] == weight.shape[1] and cold:
        codes, scales, extreme = tile(*mxfp4.quantize(weight.float()))
        all_codes, all_scales = copies_of(codes, cold), copies_of(scales, cold)
        count = len(all_codes)
        found["mxfp4_fp32"] = lambda x, i: machine.mxfp4(x, all_codes[i % count], all_scales[i % count], extreme)
        found["mxfp4_bf16"] = lambda x, i: machine.mxfp4(
            x.bfloat16(), all_codes[i % count], all_scales[i % count], extreme
        )
    return found


def check(found: dict[str, Way], weight: torch.Tensor) -> None:
    """Every product of ours must be the reference's, to the rounding of an fp32 sum (or of one to bf16).

    Raises:
        ValueError: One is not.
    """
    x = torch.randn(17, weight.shape[1], generator=torch.Generator().manual_seed(7))
    for name, way in found.items():
        if name.startswith(("linear", "mxfp4")):
            rows = x.bfloat16().float() if name.endswith("bf16") else x
            used = mxfp4.dequantize(*mxfp4.quantize(weight.float())) if name.startswith("mxfp4") else weight.float()
            expected, actual = reference.linear(rows, used), way(x, 0)
            assert isinstance(actual, torch.Tensor)
            error = ((actual.float() - expected).abs().max() / expected.abs().max()).item()
            bound = 2.0**-8 if actual.dtype == torch.bfloat16 else 8 * 2.0**-24 * math.sqrt(weight.shape[1])
            if not error < bound:
                raise ValueError(f"linear: {name} must be within {bound:.1e}, got {error:.1e}; correct the kernel")


def clock() -> float:
    """Seconds, see above."""
    return time.thread_time() if torch.get_num_threads() == 1 else time.perf_counter()


def timed(found: dict[str, Way], x: torch.Tensor, repeats: int) -> dict[str, list[float]]:
    """Seconds of each way in each round."""
    times: dict[str, list[float]] = {name: [] for name in found}
    turn = 0
    for repeat in range(repeats + 2):
        for name, way in found.items():
            turn += 1  # no way meets the copy that another one has just read
            started = clock()
            way(x, turn)
            seconds = clock() - started
            if repeat >= 2:  # the first two warm the allocator and the threads
                times[name].append(seconds)
    return times


def summary(
    times: dict[str, list[float]], num_rows: int, weight: torch.Tensor, peak: float
) -> dict[str, dict[str, object]]:
    """Medians, and the medians of the ratios of each round."""

    def median_ratio(one: list[float], other: list[float]) -> float:
        return statistics.median(a / b for a, b in zip(one, other, strict=True))

    faster_torch = [min(pair) for pair in zip(times["torch_fp32"], times["torch_bf16"], strict=True)]
    figures: dict[str, dict[str, object]] = {}
    for name, seconds in times.items():
        median = statistics.median(seconds)
        row: dict[str, object] = {"median_s": median, "min_s": min(seconds)}
        if name == "read":
            row["bytes_per_s"] = weight.nbytes / median
        else:
            row["flop_per_s"] = 2 * num_rows * weight.numel() / median
            row["of_peak"] = 2 * num_rows * weight.numel() / median / peak
        if name.startswith(("linear", "mxfp4")):
            share = 17 / 64 if name.startswith("mxfp4") else 1.0  # of the bytes that were read
            row["of_read"] = share * median_ratio(times["read"], seconds)
            row["faster_than"] = {
                other: median_ratio(times[other], seconds) for other in ("torch_fp32", "torch_bf16", "onednn_fp32")
            }
            row["faster_than"]["faster_torch"] = median_ratio(faster_torch, seconds)
        figures[name] = row
    return figures


def show(title: str, figures: dict[str, dict[str, object]]) -> None:
    """Print one line a way."""
    for name, row in figures.items():
        line = f"{title} {name:<12}{row['median_s'] * 1e3:8.3f} ms [{row['min_s'] * 1e3:.3f}]"  # pyright: ignore[reportOperatorIssue]
        if "of_read" in row:
            line += f"  {row['of_read']:.0%} of read, {row['of_peak']:.0%} of peak"
            line += (
                f"  {row['faster_than']['faster_torch']:.2f}x torch, {row['faster_than']['onednn_fp32']:.2f}x oneDNN"  # pyright: ignore[reportIndexIssue]
            )
        print(line)


def main() -> int:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--isa", type=Isa, nargs="*", default=None, help="instruction sets (default: all of this CPU)")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    torch.set_grad_enabled(False)
    for isa in arguments.isa or available_isas():
        machine = Machine(isa)
        peak = machine.peak_flops()
        cases: dict[str, dict[str, dict[str, object]]] = {}
        for (outputs, inputs), cold in SHAPES.items():
            generator = torch.Generator().manual_seed(0)
            weight = (torch.randn(outputs, inputs, generator=generator) * inputs**-0.5).bfloat16()
            found = ways(isa, machine, weight, cold)
            check(found, weight)
            for num_rows in NUM_ROWS:
                x = torch.randn(num_rows, inputs, generator=generator)
                case = f"{outputs}x{inputs}{' cold' if cold else ''}, {num_rows} rows"
                cases[case] = summary(timed(found, x, arguments.repeats), num_rows, weight, peak)
                show(f"{isa:<7}{case:<24}", cases[case])
        path = ROOT / "results" / f"linear.{isa}.json"
        path.parent.mkdir(exist_ok=True)
        limits = {name: os.environ[name] for name in LIMITS if name in os.environ}
        figures = {"threads": arguments.threads, "repeats": arguments.repeats, "peak_flop_per_s": peak}
        path.write_text(json.dumps({**figures, "torch_limited_by": limits, "cases": cases}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())

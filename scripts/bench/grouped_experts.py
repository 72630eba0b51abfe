"""Products and MoE layers with MXFP4 weights on a CPU, against torch and against the rate at which it reads memory.

    python scripts/bench/grouped_experts.py [--rounds 11] [--isa avx2 avx512 amx] [--threads 2] [--only product layer]

Two workloads: one product of a 4096 x 4096 matrix for M = 1, 16, 64 rows, and an MoE layer (32 experts, 2880 / 2880,
top-4) for T = 1, 16, 64, 256 tokens, with fp32 and with bf16 activations. Every contestant rotates through copies of
its own weights that together exceed `COLD_BYTES`, so that no cache holds what it reads next; a layer of torch's has one
copy, which is larger than that. A round runs all contestants in turns, and ratios are medians over rounds of two times
of the same round. Nothing is printed unless results equal fp64 products of the dequantized weights.

Torch: `F.linear` in fp32 and bf16, oneDNN's fp32 product by name, `F.grouped_mm` in fp32 and bf16 with its sorting and
combining left out, and the project's eager loop over experts. Prints medians and writes
`results/grouped_experts.<isa>.json`.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

import torch
import torch.nn.functional as F

from model.kernels.cpu.isa import Isa, available_isas, load
from model.kernels.grouped_experts import eager, reference
from model.kernels.grouped_experts.cpu import GroupedExperts, PackedMatrix
from model.mxfp4 import BLOCK, BLOCK_BYTES, dequantize
from rl.report import machine_facts

ROOT = Path(__file__).parents[2]
COLD_BYTES = 700 << 20
SIZE = 4096
NUM_ROWS = (1, 16, 64)
EXPERTS, DIM, TOP_K = 32, 2880, 4
NUM_TOKENS = (1, 16, 64, 256)
RMS_BOUND = {torch.float32: 1e-6, torch.bfloat16: 2.0**-8}
"""Relative; a layer in bf16 rounds what enters the down product."""

READER = """
#include <immintrin.h>
#include <cstdint>
extern "C" int64_t read_all(const uint8_t* data, int64_t bytes) {
  int64_t total = 0;
#pragma omp parallel for schedule(static) reduction(+ : total)
  for (int64_t chunk = 0; chunk < bytes / 4096; ++chunk) {
    const uint8_t* p = data + 4096 * chunk;
    __m256i sum[4] = {};
    for (int i = 0; i < 4096; i += 128) {
      _mm_prefetch((const char*)p + 4096 + i, _MM_HINT_T0);
      _mm_prefetch((const char*)p + 4096 + i + 64, _MM_HINT_T0);
      for (int j = 0; j < 4; ++j) {
        sum[j] = _mm256_add_epi64(sum[j], _mm256_loadu_si256((const __m256i*)(p + i + 32 * j)));
      }
    }
    for (int j = 0; j < 4; ++j) total += _mm256_extract_epi64(sum[j], 0) + _mm256_extract_epi64(sum[j], 3);
  }
  return total;
}
"""

Run = Callable[[int], object]
Copy = TypeVar("Copy")


def random_mxfp4(*shape: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Random codes with scales near 2^-7, [..., O, I]."""
    generator = torch.Generator().manual_seed(seed)
    lead = (*shape[:-1], shape[-1] // BLOCK)
    blocks = torch.randint(0, 256, (*lead, BLOCK_BYTES), dtype=torch.uint8, generator=generator)
    return blocks, torch.randint(118, 122, lead, dtype=torch.uint8, generator=generator)


def check(name: str, actual: torch.Tensor, expected: torch.Tensor, bound: float) -> None:
    """Relative root mean square of the difference.

    Raises:
        ValueError: It exceeds the bound.
    """
    error = ((actual - expected).square().mean() / expected.square().mean()).sqrt().item()
    if not error <= bound:
        raise ValueError(f"{name}: relative error must be at most {bound:.1e}, got {error:.1e}; correct the kernel")


def interleaved(contestants: Mapping[str, Run], rounds: int) -> dict[str, list[float]]:
    """Seconds of each contestant in each round; the first two rounds warm up and do not count."""
    times: dict[str, list[float]] = {name: [] for name in contestants}
    for turn in range(rounds + 2):
        for name, run in contestants.items():
            started = time.perf_counter()
            run(turn)
            seconds = time.perf_counter() - started
            if turn >= 2:
                times[name].append(seconds)
    return times


def reader(isa: Isa) -> Callable[[PackedMatrix, float], int]:
    """A plain sum of a share of the bytes of a matrix, as fast as this machine reads."""
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "reader.cpp"
        source.write_text(READER)
        read_all = load(source, isa).read_all
    read_all.argtypes, read_all.restype = [ctypes.c_void_p, ctypes.c_int64], ctypes.c_int64

    def read(matrix: PackedMatrix, share: float) -> int:
        parts = (matrix.codes_ESB, matrix.scales_ESB)
        return sum(read_all(part.data_ptr(), int(share * part.numel())) for part in parts)

    return read


class Product:
    """One matrix in every form, as many copies as it takes to be cold."""

    def __init__(self, isa: Isa) -> None:
        self._kernel, self._read = GroupedExperts(isa), reader(isa)
        blocks, scales = random_mxfp4(SIZE, SIZE, seed=0)
        self._packed = self._kernel.pack_matrix(blocks, scales)
        self.num_bytes = self._packed.num_bytes
        weight = dequantize(blocks, scales)
        self._weight = weight.double()
        self._matrices = [self._kernel.pack_matrix(blocks, scales) for _ in range(COLD_BYTES // self.num_bytes + 1)]
        self._fp32 = [weight.clone() for _ in range(COLD_BYTES // (4 * SIZE * SIZE) + 1)]
        self._bf16 = [weight.bfloat16() for _ in range(COLD_BYTES // (2 * SIZE * SIZE) + 1)]
        self._turn = 0

    def contestants(self, num_rows: int) -> dict[str, Run]:
        """By name; checked first."""
        x = torch.randn(num_rows, SIZE, generator=torch.Generator().manual_seed(num_rows))
        low = x.bfloat16()
        for rows in (x, low):
            expected = rows.double() @ self._weight.T
            check(f"product of {num_rows} {rows.dtype}", self._kernel.multiply(rows, self._packed), expected, 1e-6)
        return {
            "read": lambda i: self._read(self._next(self._matrices), 1.0),
            "fp32": lambda i: self._kernel.multiply(x, self._next(self._matrices)),
            "bf16": lambda i: self._kernel.multiply(low, self._next(self._matrices)),
            "torch fp32": lambda i: F.linear(x, self._next(self._fp32)),
            "torch bf16": lambda i: F.linear(low, self._next(self._bf16)),
            "mkldnn fp32": lambda i: torch.ops.mkldnn._linear_pointwise(
                x, self._next(self._fp32), None, "none", [], ""
            ),
        }

    def _next(self, copies: Sequence[Copy]) -> Copy:
        self._turn += 1
        return copies[self._turn % len(copies)]


class Layer:
    """An MoE layer; each call of a contestant takes other experts than its calls before."""

    def __init__(self, isa: Isa) -> None:
        self._kernel, self._read = GroupedExperts(isa), reader(isa)
        gate_up, down = random_mxfp4(EXPERTS, 2 * DIM, DIM, seed=1), random_mxfp4(EXPERTS, DIM, DIM, seed=2)
        first = self._kernel.pack(*gate_up, *down)
        self._layers = [first, self._kernel.pack(*gate_up, *down)]
        self.num_bytes = first.num_bytes
        self._bf16 = dequantize(*gate_up, torch.bfloat16), dequantize(*down, torch.bfloat16)
        self._fp32 = dequantize(*gate_up), dequantize(*down)
        self._some = self._kernel.pack(*(part[:TOP_K].contiguous() for part in (*gate_up, *down)))
        self._calls: dict[str, int] = {}

    def contestants(self, num_tokens: int) -> dict[str, Run]:
        """By name; checked first on as many experts as a token chooses."""
        generator = torch.Generator().manual_seed(num_tokens)
        x = torch.randn(num_tokens, DIM, generator=generator)
        low = x.bfloat16()
        weights = torch.rand(num_tokens, TOP_K, generator=generator).softmax(-1)
        order = torch.stack([torch.randperm(EXPERTS, generator=generator) for _ in range(num_tokens)])
        routes = [order[:, first : first + TOP_K].contiguous() for first in range(0, EXPERTS, TOP_K)]
        self._check(x, low, weights)

        def packed(rows: torch.Tensor) -> Run:
            def run(_: int) -> object:
                call = self._next("packed")
                layer = self._layers[call // len(routes) % len(self._layers)]
                return self._kernel(rows, layer, routes[call % len(routes)], weights)

            return run

        def loop(name: str, rows: torch.Tensor, matrices: tuple[torch.Tensor, torch.Tensor]) -> Run:
            return lambda _: eager.experts_forward(rows, *matrices, routes[self._next(name) % len(routes)], weights)

        def grouped(name: str, rows: torch.Tensor, matrices: tuple[torch.Tensor, torch.Tensor]) -> Run:
            sorted_rows = [eager.sort_rows(route, EXPERTS) for route in routes]
            ends = [torch.tensor(each.counts).cumsum(0).int() for each in sorted_rows]
            gate_up, down = matrices[0].transpose(-2, -1), matrices[1].transpose(-2, -1)

            def run(_: int) -> object:
                at = self._next(name) % len(routes)
                gate, up = F.grouped_mm(rows[sorted_rows[at].token_N], gate_up, offs=ends[at]).chunk(2, -1)
                return F.grouped_mm(reference.gated_unit(gate, up, None), down, offs=ends[at])

            return run

        touched = statistics.mean(len(route.unique()) for route in routes) / EXPERTS
        self.touched_bytes = int(self.num_bytes * touched)

        def read(_: int) -> object:
            layer = self._layers[self._next("read") % len(self._layers)]
            return [self._read(matrix, touched) for matrix in (layer.gate_up, layer.down)]

        return {
            "read": read,
            "fp32": packed(x),
            "bf16": packed(low),
            "torch loop fp32": loop("fp32", x, self._fp32),
            "torch grouped_mm fp32": grouped("fp32", x, self._fp32),
            "torch loop bf16": loop("bf16", low, self._bf16),
            "torch grouped_mm bf16": grouped("bf16", low, self._bf16),
        }

    def _check(self, x: torch.Tensor, low: torch.Tensor, weights: torch.Tensor) -> None:
        chosen = torch.arange(TOP_K).expand(len(x), -1)
        gate_up, down = (matrix[:TOP_K].double() for matrix in self._fp32)
        for rows in (x, low):
            expected = reference.experts_forward(rows.double(), gate_up, down, chosen, weights.double())
            actual = self._kernel(rows, self._some, chosen, weights)
            check(f"layer of {len(x)} {rows.dtype}", actual, expected, RMS_BOUND[rows.dtype])

    def _next(self, name: str) -> int:
        self._calls[name] = self._calls.get(name, -1) + 1
        return self._calls[name]


def summary(title: str, times: Mapping[str, Sequence[float]], num_bytes: int) -> dict[str, object]:
    """Print and return medians; ratios are of times of one round."""

    def ratio(over: str, under: str) -> float:
        return statistics.median(a / b for a, b in zip(times[over], times[under], strict=True))

    figures: dict[str, object] = {"weight_bytes": num_bytes}
    torch_names = [name for name in times if name.startswith("torch")]
    fastest = min(torch_names, key=lambda name: statistics.median(times[name]))
    figures["fastest_torch"] = fastest
    print(title)
    for name, seconds in times.items():
        median = statistics.median(seconds)
        entry: dict[str, float] = {"median_s": median, "min_s": min(seconds)}
        line = f"  {name:<23}{median * 1e3:8.2f} ms [{min(seconds) * 1e3:.2f}]"
        if name in ("read", "fp32", "bf16"):
            entry |= {"bytes_per_s": num_bytes / median}
            line += f"  {num_bytes / median / 1e9:6.2f} GB/s"
        if name in ("fp32", "bf16"):
            entry |= {"of_read": ratio("read", name), "times_fastest_torch": ratio(fastest, name)}
            line += f", {entry['of_read']:.0%} of the read rate, {entry['times_fastest_torch']:.2f}x {fastest}"
            if "mkldnn fp32" in times:
                entry |= {"times_mkldnn": ratio("mkldnn fp32", name)}
                line += f", {entry['times_mkldnn']:.2f}x mkldnn fp32"
        figures[name] = entry
        print(line)
    return figures


def main() -> int:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--isa", type=Isa, nargs="*", default=None, help="instruction sets (default: all of this CPU)")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--only", nargs="*", choices=["product", "layer"], default=["product", "layer"])
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    for isa in arguments.isa or available_isas():
        path = ROOT / "results" / f"grouped_experts.{isa}.json"
        figures = json.loads(path.read_text()) if path.exists() else {}
        figures |= {"isa": list(machine_facts(1).isa), "threads": arguments.threads, "rounds": arguments.rounds}
        for kind, make, sizes in (("product", Product, NUM_ROWS), ("layer", Layer, NUM_TOKENS)):
            if kind not in arguments.only:
                continue
            case = make(isa)
            figures[kind] = {}
            for size in sizes:
                with torch.no_grad():
                    times = interleaved(case.contestants(size), arguments.rounds)
                num_bytes = case.touched_bytes if isinstance(case, Layer) else case.num_bytes
                figures[kind][str(size)] = summary(f"{isa} {kind}, {size} rows", times, num_bytes)
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps(figures, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())

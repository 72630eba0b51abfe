"""The MXFP4 quantizer of the CPU, 4096 x 4096 fp32 in, against the rate at which this machine reads memory.

    python scripts/bench/quantize.py [--repeats 21] [--isa avx2 avx512 amx] [--threads 2]

Each round reads the weights with a plain sum of their bits, quantizes them, quantizes them into both layouts and
decodes them (the results' memory included), in turns; the weights rotate through copies that no cache holds. Nothing is
timed before the bytes equal those of `model.mxfp4` on the same weights.

Prints medians and writes `results/quantize.<isa>.json`.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

from model import mxfp4
from model.kernels.cpu.isa import Isa, available_isas, load
from model.kernels.quantize import reference
from model.kernels.quantize.cpu import Quantize

ROOT = Path(__file__).parents[2]
SIZE = 4096
COPIES = 12
"""64 MiB each, so that a copy is out of a shared cache before its turn comes again."""

READER = """
#include <cstdint>
#include <immintrin.h>
extern "C" int64_t read_all(const float* data, int64_t count) {
  int64_t total = 0;
#pragma omp parallel for schedule(static) reduction(+ : total)
  for (int64_t chunk = 0; chunk < count; chunk += 4096) {
    __m256i sum[4] = {};
    for (int64_t i = chunk; i < chunk + 4096; i += 32) {
      for (int j = 0; j < 4; ++j) {
        sum[j] = _mm256_add_epi64(sum[j], _mm256_loadu_si256((const __m256i*)(data + i + 8 * j)));
      }
    }
    for (int j = 0; j < 4; ++j) total += _mm256_extract_epi64(sum[j], 0) + _mm256_extract_epi64(sum[j], 3);
  }
  return total;
}
"""


def check(quantize: Quantize, w: torch.Tensor) -> None:
    """Bytes and values must be those of the reference.

    Raises:
        ValueError: They are not.
    """
    blocks, scales = mxfp4.quantize(w)
    expected = (blocks, scales, *reference.tile(blocks, scales))
    same = [torch.equal(a, b) for a, b in zip(quantize.pack(w), expected, strict=True)]
    same += [torch.equal(a, b) for a, b in zip(quantize(w), expected[:2], strict=True)]
    same.append(torch.equal(quantize.dequantize(blocks, scales), mxfp4.dequantize(blocks, scales)))
    if not all(same):
        raise ValueError(f"quantize: bytes must equal the reference's, got {same}; correct the kernel")


def measure(isa: Isa, threads: int, repeats: int) -> dict[str, object]:
    """Medians of one instruction set, with the rates that they mean."""
    quantize = Quantize(isa)
    generator = torch.Generator().manual_seed(0)
    weights = [torch.randn(SIZE, SIZE, generator=generator).mul_(0.02)]
    check(quantize, weights[0])
    weights += [weights[0].clone() for _ in range(COPIES - 1)]
    packed = [mxfp4.quantize(weights[0])] * COPIES
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "reader.cpp"
        source.write_text(READER)
        read_all = load(source, isa).read_all
    read_all.argtypes, read_all.restype = [ctypes.c_void_p, ctypes.c_int64], ctypes.c_int64
    work: dict[str, Callable[[int], object]] = {
        "read": lambda i: read_all(weights[i].data_ptr(), weights[i].numel()),
        "quantize": lambda i: quantize(weights[i]),
        "quantize_and_tile": lambda i: quantize.pack(weights[i]),
        "dequantize": lambda i: quantize.dequantize(*packed[i]),
    }
    times: dict[str, list[float]] = {name: [] for name in work}
    turn = 0
    for repeat in range(repeats + 2):
        for name, run in work.items():
            turn += 1
            started = time.perf_counter()
            run(turn % COPIES)
            seconds = time.perf_counter() - started
            if repeat >= 2:  # the first two warm the allocator and the threads
                times[name].append(seconds)
    size = weights[0].numel() * 4
    figures: dict[str, object] = {"threads": threads, "repeats": repeats, "bytes": size}
    for name, seconds in times.items():
        of_read = statistics.median(read / mine for read, mine in zip(times["read"], seconds, strict=True))
        median = statistics.median(seconds)
        figures[name] = {"median_s": median, "min_s": min(seconds), "bytes_per_s": size / median, "of_read": of_read}
        print(
            f"{isa:<7}{name:<19}{median * 1e3:7.2f} ms [{min(seconds) * 1e3:.2f}]  "
            f"{size / median / 1e9:6.2f} GB/s of fp32, {of_read:.0%} of the read rate"
        )
    return figures


def main() -> int:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=21)
    parser.add_argument("--isa", type=Isa, nargs="*", default=None, help="instruction sets (default: all of this CPU)")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    for isa in arguments.isa or available_isas():
        figures = measure(isa, arguments.threads, arguments.repeats)
        path = ROOT / "results" / f"quantize.{isa}.json"
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps(figures, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())

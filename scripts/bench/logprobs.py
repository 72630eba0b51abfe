"""Logprobs of a large vocabulary by chunks of rows against all logits at once: forward and backward, one thread.

    python scripts/bench/logprobs.py [--repeats 5] [--tokens 2048] [--vocabulary 151936] [--hidden 256]

Both run on the kernels that this machine resolves, in turns, so that a busy machine slows both. Memory is the growth of
the peak resident size of a process of its own. Prints nothing but an error unless the two agree; writes
`results/logprobs.<isa>.json`.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path

import torch

from model.config import KernelChoice
from model.kernels.dispatch import resolve_kernels
from model.layers import project_logits
from model.logprobs import CHUNK_BYTES, Unembedding, logprobs
from rl.machine import peak_growth_bytes
from rl.report import machine_facts

ROOT = Path(__file__).parents[2]
ROUNDING = 2e-5
"""fp32 sums over rows and vocabulary in two orders, relative to the largest element."""
WAYS = {"chunked": CHUNK_BYTES, "all_logits": 2**62}


class Work:
    """Operands, and one forward and backward of them either way."""

    def __init__(self, tokens: int, vocabulary: int, hidden: int) -> None:
        generator = torch.Generator().manual_seed(0)
        self.hidden_RD = torch.randn(tokens, hidden, generator=generator).requires_grad_()
        self.weight_VD = (torch.randn(vocabulary, hidden, generator=generator) * hidden**-0.5).requires_grad_()
        self.ids_R = torch.randint(0, vocabulary, (tokens,), generator=generator)
        self.temperatures_R = torch.ones(tokens)
        self.kernels = resolve_kernels(KernelChoice.auto)

    def __call__(self, chunk_bytes: int, num_rows: int | None = None) -> tuple[float, tuple[torch.Tensor, ...]]:
        """Seconds, and logprobs with both gradients, of the first `num_rows` (`None`: all)."""
        self.hidden_RD.grad = self.weight_VD.grad = None
        rows = slice(num_rows)
        started = time.perf_counter()
        unembedding = Unembedding(project_logits, self.weight_VD, chunk_bytes)
        found_R = logprobs(unembedding, self.hidden_RD[rows], self.ids_R[rows], self.temperatures_R[rows], self.kernels)
        found_R.mean().backward()
        seconds = time.perf_counter() - started
        assert self.hidden_RD.grad is not None
        assert self.weight_VD.grad is not None
        return seconds, (found_R.detach(), self.hidden_RD.grad, self.weight_VD.grad)


def growth_bytes(way: str, sizes: list[int]) -> int:
    """Growth of the peak resident size during one call, in a process of its own."""
    command = [sys.executable, __file__, "--only", way, "--sizes", *map(str, sizes)]
    return int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


def measure_memory(way: str, sizes: list[int]) -> None:
    """What that process does; a call on two rows before loads what a first call loads."""
    torch.set_num_threads(1)
    work = Work(*sizes)
    work(1, 2)
    print(peak_growth_bytes(lambda: work(WAYS[way])))


def main() -> int:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--vocabulary", type=int, default=151_936)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--only", choices=tuple(WAYS), help=argparse.SUPPRESS)
    parser.add_argument("--sizes", type=int, nargs=3, help=argparse.SUPPRESS)
    settings = parser.parse_args()
    if settings.only:
        measure_memory(settings.only, settings.sizes)
        return 0
    torch.set_num_threads(1)
    sizes = [settings.tokens, settings.vocabulary, settings.hidden]
    work = Work(*sizes)
    chunked, all_logits = (work(chunk_bytes)[1] for chunk_bytes in WAYS.values())  # warms the caches, too
    for what, one, other in zip(("logprobs", "hidden gradient", "weight gradient"), chunked, all_logits, strict=True):
        difference = float((one - other).abs().max() / other.abs().max())
        if not difference <= ROUNDING:
            print(f"logprobs: {what} must agree to {ROUNDING}, got {difference}; the timing would mean nothing")
            return 1
    del chunked, all_logits
    times: dict[str, list[float]] = {way: [] for way in WAYS}
    for _ in range(settings.repeats):
        for way, chunk_bytes in WAYS.items():
            times[way].append(work(chunk_bytes)[0])
    medians = {way: statistics.median(values) for way, values in times.items()}
    memory = {way: growth_bytes(way, sizes) for way in WAYS}
    machine = machine_facts(1)
    isa = machine.column
    ratio = statistics.median(one / other for one, other in zip(times["chunked"], times["all_logits"], strict=True))
    told = ", ".join(f"{way} {medians[way]:.2f} s and {memory[way] / 2**20:.0f} MiB" for way in WAYS)
    print(f"{isa}: {sizes[0]} tokens, vocabulary {sizes[1]}, hidden {sizes[2]}: {told}; time x {ratio:.2f}")
    path = ROOT / "results" / f"logprobs.{isa.lower()}.json"
    path.parent.mkdir(exist_ok=True)
    figures = {
        "isa": list(machine.isa),
        "tokens": sizes[0],
        "vocabulary": sizes[1],
        "hidden": sizes[2],
        "repeats": settings.repeats,
        "median_s": medians,
        "chunked_over_all_logits": ratio,
        "peak_growth_bytes": memory,
    }
    path.write_text(json.dumps(figures, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Paged attention on this CPU against torch's fused attention on contiguous keys: decode steps and prefill, one thread.

    python scripts/bench/attention.py [--repeats 9] [--isa amx] [--quick]

Torch gets keys that lie as it likes them, [B, G, C, d], without pages, and the fastest of its ways to share a key-value
head: `enable_gqa`, or the heads of a group folded into the queries (decode), or keys repeated (prefill). `read` is how
long torch takes to add up as many bytes as the keys and values are: the memory's own speed. All are measured in turns,
in seconds of this thread, so that a busy machine slows all and counts little; medians count. A case whose outputs
differ has no figures, and the script fails. Writes `results/attention.<isa>.json`.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F

from model.kernels.attention.cpu import PagedAttention
from model.kernels.attention.reference import Pages, PageTable
from model.kernels.cpu.isa import Isa, machine_isa
from rl.report import machine_facts

ROOT = Path(__file__).parents[2]
PAGE_SIZE = 16
BOUND = {torch.float32: 1e-4, torch.bfloat16: 2e-2}
"""Largest difference over the largest output: far above rounding, far below a wrong key."""


class Shape(NamedTuple):
    """Sequences of `context` positions, the last `num_new` of them queries."""

    batch: int
    heads: int
    kv_heads: int
    dim: int
    context: int
    num_new: int


DECODE = [
    Shape(16, heads, kv_heads, dim, context, 1)
    for heads, kv_heads, dim in ((12, 2, 64), (12, 12, 64), (64, 8, 64), (32, 4, 128))
    for context in (128, 1024, 4096)
]
PREFILL = [
    Shape(1, heads, kv_heads, dim, tokens, tokens)
    for heads, kv_heads, dim in ((12, 2, 64), (64, 8, 64), (32, 4, 128))
    for tokens in (512, 2048)
]
QUICK = [Shape(4, 12, 2, 64, 256, 1), Shape(1, 12, 2, 64, 256, 256)]


def make_runs(shape: Shape, dtype: torch.dtype, kernel: PagedAttention) -> dict[str, Callable[[], torch.Tensor]]:
    """What is measured, by name; all but `read` return [B, new, H, d]."""
    batch, heads, kv_heads, dim, context, num_new = shape
    g = torch.Generator().manual_seed(0)
    q = torch.randn(batch, num_new, heads, dim, generator=g).to(dtype)
    k, v = (torch.randn(batch, context, kv_heads, dim, generator=g).to(dtype) for _ in range(2))

    num_pages = -(-context // PAGE_SIZE)
    pages_NB = torch.randperm(batch * num_pages, generator=g).int().view(batch, num_pages)
    position = torch.arange(context)
    slots = (pages_NB.long()[:, position // PAGE_SIZE] * PAGE_SIZE + position % PAGE_SIZE).flatten()
    keys, values = (Pages(torch.zeros(batch * num_pages * PAGE_SIZE, kv_heads, dim, dtype=dtype)) for _ in range(2))
    kernel.write(keys, slots, k.flatten(0, 1))
    kernel.write(values, slots, v.flatten(0, 1))
    counts_N = torch.full((batch,), num_new, dtype=torch.int32)
    table = PageTable(pages_NB, context - counts_N, counts_N, PAGE_SIZE)
    q_THd = q.flatten(0, 1)

    q_t, k_t, v_t = (x.transpose(1, 2).contiguous() for x in (q, k, v))
    causal, grouped = num_new > 1, heads != kv_heads

    def ours() -> torch.Tensor:
        return kernel(q_THd, keys, values, table, scale=dim**-0.5).view(q.shape)

    def gqa() -> torch.Tensor:
        return F.scaled_dot_product_attention(q_t, k_t, v_t, is_causal=causal, enable_gqa=grouped).transpose(1, 2)

    def folded() -> torch.Tensor:
        q_folded = q_t.view(batch, kv_heads, heads // kv_heads, dim)
        return F.scaled_dot_product_attention(q_folded, k_t, v_t).reshape(batch, 1, heads, dim)

    def expanded() -> torch.Tensor:
        k_h, v_h = (x.repeat_interleave(heads // kv_heads, 1) for x in (k_t, v_t))
        return F.scaled_dot_product_attention(q_t, k_h, v_h, is_causal=True).transpose(1, 2)

    def read() -> torch.Tensor:
        return keys.rows_SGd.view(torch.float32).sum() + values.rows_SGd.view(torch.float32).sum()

    other = expanded if causal else folded
    return {"kernel": ours, "torch gqa": gqa, other.__name__: other} | ({} if causal else {"read": read})


def measure(shape: Shape, dtype: torch.dtype, kernel: PagedAttention, repeats: int) -> dict[str, float] | None:
    """Median seconds by name; `None` when the outputs differ."""
    runs = make_runs(shape, dtype, kernel)
    outs = {name: run().float() for name, run in runs.items() if name != "read"}
    expected = outs["torch gqa"]
    if not all((out - expected).abs().max() <= BOUND[dtype] * expected.abs().max() for out in outs.values()):
        return None
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(repeats):
        for name, run in runs.items():
            started = time.thread_time()
            run()
            times[name].append(time.thread_time() - started)
    return {name: statistics.median(values) for name, values in times.items()}


def main() -> int:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--isa", type=Isa, default=machine_isa())
    parser.add_argument("--quick", action="store_true", help="two small shapes, nothing written")
    options = parser.parse_args()
    torch.set_num_threads(1)
    kernel = PagedAttention(options.isa)
    cases, failed = [], False
    for shape in QUICK if options.quick else DECODE + PREFILL:
        for dtype in (torch.float32, torch.bfloat16):
            kind = "decode" if shape.num_new == 1 else "prefill"
            name = (
                f"{kind} {str(dtype).removeprefix('torch.')} {' '.join(f'{k}={v}' for k, v in shape._asdict().items())}"
            )
            seconds = measure(shape, dtype, kernel, options.repeats)
            if seconds is None:
                print(f"{name}: outputs differ")
                failed = True
                continue
            best = min(value for other, value in seconds.items() if other not in ("kernel", "read"))
            speedup = best / seconds["kernel"]
            figures = {"kind": kind, "dtype": str(dtype).removeprefix("torch."), **shape._asdict(), "median_s": seconds}
            cases.append(figures | {"best_torch_over_kernel": speedup})
            columns = ", ".join(f"{other} {value * 1e3:.2f} ms" for other, value in seconds.items())
            print(f"{name}: {columns}; best torch / kernel = {speedup:.2f}")
    if not options.quick:
        machine = machine_facts(1)
        figures = {"isa": list(machine.isa), "kernels": str(options.isa), "threads": 1, "cases": cases}
        path = ROOT / "results" / f"attention.{options.isa}.json"
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps(figures, indent=1) + "\n")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())

"""Activation checkpointing against keeping every activation: forward and backward of the learner's policy, one thread.

    python scripts/bench/recompute.py [--repeats 5] [--layers 48] [--tokens 4096] [--hidden 128]

Both run on the kernels that this machine resolves, in turns, so that a busy machine slows both. Memory is the growth of
the peak resident size of a process of its own, whose malloc maps every buffer above 64 KiB: glibc keeps smaller ones
than 32 MiB in a heap, which grows by the holes between them, and larger ones never. Prints nothing but an error unless
loss and gradients of the two have the same bits; writes `results/recompute.<isa>.json`.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import torch

from model.config import KernelChoice, ModelConfig
from model.kernels.dispatch import resolve_kernels
from model.parallel.groups import Ranks
from model.transformer import init_weights
from rl.batch import Batch, TrainSample, pack
from rl.learner.config import ActivationCheckpointing
from rl.learner.policy import PublishedPolicy
from rl.learner.streams import batch_logprobs
from rl.machine import peak_growth_bytes
from rl.report import machine_facts

ROOT = Path(__file__).parents[2]
SEQUENCE, EXPERTS, TOP_K, VOCABULARY = 256, 4, 2, 512
NONE, BLOCK = ActivationCheckpointing.none, ActivationCheckpointing.block


def configuration(layers: int, hidden: int) -> ModelConfig:
    """A small Mixture of Experts of many layers."""
    return ModelConfig(
        vocab_size=VOCABULARY, hidden_size=hidden, num_layers=layers, num_heads=hidden // 32,
        num_kv_heads=hidden // 64, head_dim=32, expert_hidden_size=hidden // 2, num_experts=EXPERTS,
        num_experts_per_tok=TOP_K, max_positions=SEQUENCE,
    )  # fmt: skip


class Work:
    """A policy, and one forward and backward of it on packed sequences of 256 tokens."""

    def __init__(self, way: ActivationCheckpointing, layers: int, hidden: int) -> None:
        self.kernels = resolve_kernels(KernelChoice.auto)
        alone = Ranks(rank=0, num_ranks=1, expert_group=None)
        self.policy = PublishedPolicy(configuration(layers, hidden), self.kernels, alone, checkpointing=way)
        init_weights(self.policy.model, 0)
        self.policy.refresh()

    def __call__(self, tokens: int) -> tuple[float, dict[str, torch.Tensor]]:
        """Seconds, and the loss and the gradients, which the next pass writes over."""
        batch = _batch(tokens)
        for master in self.policy.parameters():
            if master.grad is not None:
                master.grad.zero_()
        started = time.perf_counter()
        loss = -batch_logprobs(self.policy(batch), batch, self.kernels).mean()
        loss.backward()
        seconds = time.perf_counter() - started
        gradients = {name: master.grad for name, master in self.policy.masters().items() if master.grad is not None}
        return seconds, {"loss": loss.detach(), **gradients}


def _batch(tokens: int) -> Batch:
    rng = np.random.default_rng(0)
    num_targets = SEQUENCE // 2
    sample = TrainSample(
        key="",
        ids_T=rng.integers(0, VOCABULARY, SEQUENCE + 1),
        targets_R=np.arange(SEQUENCE + 1 - num_targets, SEQUENCE + 1),
        behavior_logprobs_R=np.zeros(num_targets, np.float32),
        advantages_R=np.ones(num_targets, np.float32),
        routes_TLK=np.zeros((0, 0, 0), np.uint8),
        weight_version=0,
        trained=True,
    )
    return pack([sample] * (tokens // SEQUENCE))


def growth_bytes(way: ActivationCheckpointing, sizes: list[int], *, mapped: bool) -> int:
    """Growth of the peak resident size during one pass, in a process of its own; `mapped`: no heap for its buffers."""
    command = [sys.executable, __file__, "--only", way, "--sizes", *map(str, sizes)]
    environment = os.environ | ({"MALLOC_MMAP_THRESHOLD_": str(64 * 1024)} if mapped else {})
    return int(subprocess.run(command, capture_output=True, text=True, check=True, env=environment).stdout)


def measure_memory(way: ActivationCheckpointing, layers: int, tokens: int, hidden: int) -> None:
    """What that process does; a pass over one sequence before loads what a first pass loads, and makes gradients."""
    torch.set_num_threads(1)
    work = Work(way, layers, hidden)
    work(SEQUENCE)
    print(peak_growth_bytes(lambda: work(tokens)))


def main() -> int:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--layers", type=int, default=48)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--only", type=ActivationCheckpointing, help=argparse.SUPPRESS)
    parser.add_argument("--sizes", type=int, nargs=3, help=argparse.SUPPRESS)
    settings = parser.parse_args()
    if settings.only:
        measure_memory(settings.only, *settings.sizes)
        return 0
    torch.set_num_threads(1)
    sizes = [settings.layers, settings.tokens, settings.hidden]
    works = {way: Work(way, settings.layers, settings.hidden) for way in (NONE, BLOCK)}
    (_, kept), (_, again) = (work(settings.tokens) for work in works.values())  # warms the caches, too
    if different := [name for name, tensor in kept.items() if not torch.equal(tensor, again[name])]:
        print(f"recompute: both must have the same bits, got others in {different[0]}; the timing would mean nothing")
        return 1
    times: dict[str, list[float]] = {way: [] for way in works}
    for _ in range(settings.repeats):
        for way, work in works.items():
            times[way].append(work(settings.tokens)[0])
    medians = {way: statistics.median(values) for way, values in times.items()}
    ratio = statistics.median(one / other for one, other in zip(times[BLOCK], times[NONE], strict=True))
    memory, in_heap = ({way: growth_bytes(way, sizes, mapped=mapped) for way in works} for mapped in (True, False))
    machine = machine_facts(1)
    isa = machine.column
    told = ", ".join(
        f"{way} {medians[way]:.2f} s and {memory[way] / 2**20:.0f} MiB ({in_heap[way] / 2**20:.0f} with a heap)"
        for way in works
    )
    print(f"{isa}: {sizes[0]} layers, {sizes[1]} tokens, hidden {sizes[2]}: {told}; time x {ratio:.2f}")
    path = ROOT / "results" / f"recompute.{isa.lower()}.json"
    path.parent.mkdir(exist_ok=True)
    figures = {
        "isa": list(machine.isa),
        "layers": sizes[0],
        "tokens": sizes[1],
        "hidden": sizes[2],
        "repeats": settings.repeats,
        "median_s": medians,
        "block_over_none": ratio,
        "peak_growth_bytes": memory,
        "peak_growth_with_heap_bytes": in_heap,
    }
    path.write_text(json.dumps(figures, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())

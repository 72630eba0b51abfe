"""fp32 against bf16 compute on this CPU: forward and backward of the quickstart's model on packed tokens, one thread.

    python scripts/bench/compute_dtype.py [--repeats 15]

The two are measured in turns, so that a busy machine slows both. Prints the ratio of the medians and writes
`results/compute_dtype.<isa>.json`. The default stays fp32 unless bf16 is clearly faster: in fp32 sampler and learner
agree to 1e-7 nats, in bf16 to 1e-3 (`rl.parity.BOUNDS`).
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from itertools import accumulate
from pathlib import Path

import torch

from model.config import ComputeDtype, ModelConfig
from model.layers import project_logits
from model.packed_attention import PackedAttention
from model.transformer import Transformer, init_weights
from rl.report import machine_facts

ROOT = Path(__file__).parents[2]
NUM_SEQUENCES, LENGTH = 60, 70


def make(dtype: ComputeDtype) -> Transformer:
    """The quickstart's model, with the same weights for either dtype."""
    model = Transformer(ModelConfig(vocab_size=512, compute_dtype=dtype))
    init_weights(model, 0)
    return model


def step_s(model: Transformer, ids_T: torch.Tensor, positions_T: torch.Tensor, bounds: list[int]) -> float:
    """Seconds of one forward and backward."""
    started = time.perf_counter()
    out = model(ids_T, positions_T, PackedAttention(bounds))
    loss = project_logits(out.hidden_TD, model.get_parameter(model.output_name)).logsumexp(-1).mean()
    loss.backward()
    seconds = time.perf_counter() - started
    model.zero_grad()
    return seconds


def main() -> int:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=15)
    repeats = parser.parse_args().repeats
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(0)
    ids_T = torch.randint(6, 512, (NUM_SEQUENCES * LENGTH,), generator=generator)
    positions_T = torch.arange(LENGTH).repeat(NUM_SEQUENCES)
    bounds = list(accumulate([LENGTH] * NUM_SEQUENCES, initial=0))
    models = {dtype: make(dtype) for dtype in ComputeDtype}
    times: dict[ComputeDtype, list[float]] = {dtype: [] for dtype in ComputeDtype}
    for repeat in range(repeats + 2):
        for dtype, model in models.items():
            seconds = step_s(model, ids_T, positions_T, bounds)
            if repeat >= 2:  # the first two warm the caches
                times[dtype].append(seconds)
    medians = {dtype.value: statistics.median(values) for dtype, values in times.items()}
    ratio = medians["fp32"] / medians["bf16"]
    machine = machine_facts(1)
    isa = machine.column
    print(f"{isa}: fp32 {medians['fp32'] * 1e3:.0f} ms, bf16 {medians['bf16'] * 1e3:.0f} ms, fp32 / bf16 = {ratio:.2f}")
    path = ROOT / "results" / f"compute_dtype.{isa.lower()}.json"
    path.parent.mkdir(exist_ok=True)
    figures = {"isa": list(machine.isa), "tokens": len(ids_T), "median_s": medians, "fp32_over_bf16": ratio}
    path.write_text(json.dumps(figures, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())

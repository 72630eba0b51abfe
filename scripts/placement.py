"""Simulates the experts of a layer on 8 to 512 GPUs: contiguous, random and planned placements of skewed loads.

    python scripts/placement.py [--gpus 8 16 32 64 128 256 512] [--zipf 0 0.5 1] [--locality 0 0.5]
    python scripts/placement.py --load-file runs/<name>/checkpoints/round-000010/expert_load.json

Nothing is measured: times come from the cost model below and its defaults, every one an option. A layer's forward on a
group of P = min(GPUs, experts) ranks is three steps, each of which ends when the last rank has done it:

    dispatch   max over ranks of (choices in or out) D b_d / intra, or over nodes of (choices in or out across the
               node boundary) D b_d / (inter x GPUs of a node), whichever is slower, + latency
    compute    max over ranks of choices x 6 D F / flops
    combine    as dispatch, the other way, with b_c bytes a value

Every rank has the same number of tokens. What it leaves out: reading weights, the backward pass, overlap, congestion.

Zipf load with exponent s: the k-th most chosen expert has a share in proportion to k^-s, and which that is differs from
layer to layer. With locality q, that part of an expert's choices comes from tokens of one node (its home, by chance)
beyond their even share. The exchange has one message a choice, as `model/parallel/experts.py`.

Prints a table and writes `results/placement.simulated.json`.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import numpy as np

from model.parallel.placement import ExpertPlacement, Floats, PlacementError, plan, read_load

ROOT = Path(__file__).parents[1]
OUT = ROOT / "results" / "placement.simulated.json"
NUM_RANDOM = 8
"""Random placements, of which the mean is shown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """A cluster and a layer; the defaults are the sizes of DeepSeek-V3 on nodes of 8 GPUs.

    Rates are round figures of the order that vendors state for a GPU of 2023 (half of its dense bf16 rate, one
    direction of its links), not measurements.
    """

    gpus_per_node: int = 8
    intra_gb_per_s: float = 450.0
    inter_gb_per_s: float = 50.0
    latency_us: float = 20.0
    tflops: float = 500.0
    tokens_per_gpu: int = 4096
    top_k: int = 8
    hidden: int = 7168
    expert_hidden: int = 2048
    dispatch_bytes: float = 2.0
    combine_bytes: float = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """Of one placement, means over the layers: heaviest rank over mean rank, share of choices that cross nodes,
    heaviest node's traffic over a mean node's choices, and milliseconds a layer.
    """  # noqa: D205

    rank_max_over_mean: float
    cross_node_frac: float
    node_traffic: float
    layer_ms: float


def zipf_load(num_layers: int, num_experts: int, exponent: float, num_nodes: int, locality: float, seed: int) -> Floats:
    """Shares [L, N, E] of a layer's choices; each node has the same number of tokens, so each row sums to 1 / N."""
    rng = np.random.default_rng(seed)
    share_E = np.arange(1, num_experts + 1, dtype=np.float64) ** -exponent
    layers: list[Floats] = []
    for _ in range(num_layers):
        load_E = rng.permutation(share_E / share_E.sum())
        home_E = rng.integers(0, num_nodes, num_experts)
        at_home_NE = np.arange(num_nodes)[:, None] == home_E
        mixed_NE = load_E * ((1 - locality) / num_nodes + locality * at_home_NE)
        layers.append(mixed_NE / mixed_NE.sum(1, keepdims=True) / num_nodes)
    return np.array(layers)


def simulate(machine: Machine, load_LNE: Floats, placement: ExpertPlacement) -> Cost:
    """What a layer of this load costs under a placement; `load_LNE` are shares that sum to 1 a layer."""
    num_ranks, num_nodes = placement.num_ranks, load_LNE.shape[1]
    choices = machine.tokens_per_gpu * machine.top_k * num_ranks
    found: list[tuple[float, float, float, float]] = []
    for layer, load_NE in enumerate(load_LNE):
        to_NP = choices * load_NE[:, placement.expert_LS[layer]].reshape(num_nodes, num_ranks, -1).sum(2)
        to_NM = to_NP.reshape(num_nodes, num_nodes, -1).sum(2)
        home_N = np.diagonal(to_NM)
        in_P = to_NP.sum(0)
        # The ranks of a node send alike, so each has its share of what the node keeps or sends.
        links = max(in_P.max(), to_NP.sum(1).max() * num_nodes / num_ranks)
        across = max((to_NM.sum(0) - home_N).max(), (to_NM.sum(1) - home_N).max())
        intra_s = machine.hidden * links / (machine.intra_gb_per_s * 1e9)
        inter_s = machine.hidden * across / (machine.inter_gb_per_s * 1e9 * num_ranks / num_nodes)
        travel_s = max(intra_s, inter_s) * (machine.dispatch_bytes + machine.combine_bytes)
        compute_s = in_P.max() * 6 * machine.hidden * machine.expert_hidden / (machine.tflops * 1e12)
        seconds = travel_s + compute_s + 2e-6 * machine.latency_us
        crossing = (to_NM.sum() - home_N.sum()) / choices
        found.append((in_P.max() / in_P.mean(), crossing, across * num_nodes / choices, 1e3 * seconds))
    return Cost(**dict(zip((field.name for field in fields(Cost)), map(float, np.mean(found, 0)), strict=True)))


def traffic_weight(machine: Machine) -> float:
    """The planner's w on this machine: a mean node's choices on its links over a mean rank's choices in its kernels."""
    on_links = machine.hidden * (machine.dispatch_bytes + machine.combine_bytes) / (machine.inter_gb_per_s * 1e9)
    return on_links / (6 * machine.hidden * machine.expert_hidden / (machine.tflops * 1e12))


def compare(machine: Machine, load_LNE: Floats, num_ranks: int) -> dict[str, Cost]:
    """The costs of the three placements; `planned` knows the load that it meets."""
    num_layers, num_nodes, num_experts = load_LNE.shape
    node_of_rank = np.repeat(np.arange(num_nodes), num_ranks // num_nodes).tolist()
    costs: list[Cost] = []
    for seed in range(NUM_RANDOM):
        rng = np.random.default_rng(seed)
        order_LS = np.array([rng.permutation(num_experts) for _ in range(num_layers)])
        costs.append(simulate(machine, load_LNE, ExpertPlacement(order_LS, num_ranks)))
    names = [field.name for field in fields(Cost)]
    planned = plan(load_LNE, node_of_rank, traffic_weight=traffic_weight(machine)).placement
    return {
        "contiguous": simulate(machine, load_LNE, ExpertPlacement.contiguous(num_layers, num_experts, num_ranks)),
        "random": Cost(**{name: float(np.mean([getattr(cost, name) for cost in costs])) for name in names}),
        "planned": simulate(machine, load_LNE, planned),
    }


def group_of(machine: Machine, num_gpus: int, num_experts: int) -> tuple[int, int]:
    """Ranks and nodes of an expert-parallel group on `num_gpus` GPUs.

    Raises:
        PlacementError: The GPUs do not make up whole nodes and groups.
    """
    num_ranks = min(num_gpus, num_experts)
    num_nodes = max(1, num_ranks // machine.gpus_per_node)
    if num_gpus % num_ranks or num_experts % num_ranks or num_ranks % num_nodes:
        raise PlacementError(
            f"gpus: must make up whole nodes of {machine.gpus_per_node}, and share {num_experts} experts evenly, got "
            f"{num_gpus}; use a power of two"
        )
    return num_ranks, num_nodes


def rows(
    machine: Machine,
    gpus: Sequence[int],
    loads: Mapping[str, tuple[float, Floats | None]],
    *,
    localities: Sequence[float],
    num_experts: int,
    num_layers: int,
) -> list[dict[str, object]]:
    """One row for each number of GPUs, load and locality; a load is an exponent, or measured shares [L, E]."""
    found: list[dict[str, object]] = []
    for name, (exponent, measured_LE) in loads.items():
        for locality in localities if measured_LE is None else [0.0]:
            for num_gpus in gpus:
                num_ranks, num_nodes = group_of(machine, num_gpus, num_experts)
                if measured_LE is None:
                    load_LNE = zipf_load(num_layers, num_experts, exponent, num_nodes, locality, seed=0)
                else:
                    load_LNE = np.repeat(measured_LE[:, None], num_nodes, 1) / num_nodes
                costs = compare(machine, load_LNE, num_ranks)
                row: dict[str, object] = {"gpus": num_gpus, "group": num_ranks, "nodes": num_nodes}
                row |= {"load": name, "locality": locality}
                found.append(row | {kind: asdict(cost) for kind, cost in costs.items()})
    return found


def table(found: Sequence[Mapping[str, object]]) -> str:
    """The rows in Markdown: contiguous / random / planned."""
    lines = [
        "| GPUs (group) | load, locality | heaviest rank over mean | choices that cross nodes | layer, ms |",
        "|---|---|---|---|---|",
    ]
    for row in found:
        costs = [row[kind] for kind in ("contiguous", "random", "planned")]
        cells = [
            " / ".join(f"{scale * cost[name]:.{digits}f}" for cost in costs if isinstance(cost, dict)) + unit
            for name, scale, digits, unit in (
                ("rank_max_over_mean", 1, 2, ""),
                ("cross_node_frac", 100, 0, " %"),
                ("layer_ms", 1, 2, ""),
            )
        ]
        lines.append(
            f"| {row['gpus']} ({row['group']}) | {row['load']}, {row['locality']:g} | " + " | ".join(cells) + " |"
        )
    return "\n".join(lines)


def main() -> int:
    """Run the simulation; 1 after a mistake in the options."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--gpus", type=int, nargs="+", default=[8, 16, 32, 64, 128, 256, 512])
    parser.add_argument("--zipf", type=float, nargs="+", default=[0.0, 0.5, 1.0])
    parser.add_argument("--locality", type=float, nargs="+", default=[0.0, 0.5])
    parser.add_argument("--experts", type=int, default=256)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--load-file", type=Path, help="measured choices instead of Zipf: a checkpoint's load file")
    parser.add_argument("--out", type=Path, default=OUT)
    for field in fields(Machine):
        parser.add_argument(f"--{field.name.replace('_', '-')}", type=type(field.default), default=field.default)
    given = parser.parse_args()
    machine = Machine(**{field.name: getattr(given, field.name) for field in fields(Machine)})
    try:
        loads: dict[str, tuple[float, Floats | None]] = {f"Zipf {s:g}": (s, None) for s in given.zipf}
        num_experts = given.experts
        if given.load_file is not None:
            counts_LE = read_load(given.load_file)
            num_experts = counts_LE.shape[1]
            loads = {given.load_file.name: (0.0, counts_LE / counts_LE.sum(1, keepdims=True))}
        found = rows(
            machine, given.gpus, loads, localities=given.locality, num_experts=num_experts, num_layers=given.layers
        )
    except PlacementError as error:
        print(error)
        return 1
    print(table(found))
    out = {"simulated": True, "machine": asdict(machine), "traffic_weight": traffic_weight(machine)}
    out |= {"experts": num_experts, "layers": given.layers, "rows": found}
    given.out.write_text(json.dumps(out, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

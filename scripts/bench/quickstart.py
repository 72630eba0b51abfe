"""The quickstart's figures on this machine: held-out rise of several seeds, the control, seconds and peak memory.

    python scripts/bench/quickstart.py [--seeds 0 1 2] [--control-seed 0]

Each run is a whole process with its own cold warm-start cache. The control permutes the rewards within each group, so
there is nothing to learn. Updates its runs in `results/quickstart.<isa>.json`; fails when
a seed does not rise as the README says.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil

from rl.metrics import read_metrics
from rl.report import HeldOut, machine_facts
from rl.run_folder import commit

ROOT = Path(__file__).parents[2]
LEAST_AFTER, LEAST_RISE = 0.85, 0.25
LIMIT_S = {"AMX": 360.0, "AVX-512": 360.0, "AVX2": 540.0}
LIMIT_BYTES = 8 * 2**30


def tree_bytes(pid: int) -> int:
    """Proportional memory (PSS) of a process and all below it: shared pages count once."""
    total = 0
    try:
        processes = [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
    except psutil.NoSuchProcess:
        return 0
    for process in processes:
        try:
            total += process.memory_full_info().pss
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return total


def run(overrides: list[str], folder: Path) -> dict[str, Any]:
    """One run of the experiment in `folder`, watched from outside."""
    argv = [sys.executable, "-m", "rl.train", "+experiment=coding", f"run.root={folder}"]
    argv += [f"warm_start.cache={folder}/warm", *overrides]
    started, peak = time.monotonic(), 0
    with (folder / "log.txt").open("w") as log:
        process = subprocess.Popen(argv, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT)
        while process.poll() is None:
            peak = max(peak, tree_bytes(process.pid))
            time.sleep(1.0)
    seconds = time.monotonic() - started
    if process.returncode:
        raise SystemExit(f"the run failed with exit code {process.returncode}:\n{(folder / 'log.txt').read_text()}")
    run_folder = folder / "coding"
    before, after = (HeldOut.load(run_folder / f"held_out_{when}.json") for when in ("before", "after"))
    rows = read_metrics(run_folder / "metrics.jsonl")
    rounds = [row.values for row in rows if row.round > 0]
    head, dirty = commit()
    return {
        "commit": head + (" with changes" if dirty else ""),
        "overrides": overrides,
        "seconds": round(seconds, 1),
        "median_round_s": round(sorted(row["time/round_s"] or 0.0 for row in rounds)[len(rounds) // 2], 2),
        "peak_bytes": peak,
        "held_out": {
            f"{result.decoding} {when}": {
                "passed": result.passed.passed,
                "total": result.passed.total,
                "rate": result.passed.rate,
                "low": result.passed.low,
                "high": result.passed.high,
                "first_turn": result.first_turn.rate,
            }
            for when, moment in (("before", before), ("after", after))
            for result in moment.results
        },
        "parity_mean_abs_nats_max": max(row["parity/mean_abs_nats"] or 0.0 for row in rounds),
        "parity_max_abs_nats_max": max(row["parity/max_abs_nats"] or 0.0 for row in rounds),
        "flipped_routes": sum(row["parity/flipped_routes"] or 0.0 for row in rounds),
        "tokens_sampled": sum(row["tokens/sampled"] or 0.0 for row in rounds),
    }


def problems(seed: str, figures: dict[str, Any], limit_s: float) -> list[str]:
    """What a seed's figures fall short of."""
    before, after = figures["held_out"]["greedy before"], figures["held_out"]["greedy after"]
    found: list[str] = []
    if not 0.2 <= before["rate"] <= 0.7:
        found.append(f"{seed}: starts at {before['rate']:.1%}, outside 20 % to 70 %")
    if after["rate"] < LEAST_AFTER or after["rate"] - before["rate"] < LEAST_RISE or after["low"] <= before["high"]:
        found.append(f"{seed}: {before['rate']:.1%} -> {after['rate']:.1%} is not the promised rise")
    if figures["seconds"] > limit_s:
        found.append(f"{seed}: took {figures['seconds']:.0f} s, more than {limit_s:.0f}")
    if figures["peak_bytes"] > LIMIT_BYTES:
        found.append(f"{seed}: peak memory {figures['peak_bytes'] / 2**30:.1f} GiB, more than 8")
    return found


def main() -> int:
    """1 when a promise does not hold."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="*", default=[0, 1, 2])
    parser.add_argument("--control-seed", type=int, nargs="?", default=0, help="without a value: no control")
    arguments = parser.parse_args()
    machine = machine_facts(0)
    isa = next((name for name in LIMIT_S if name in machine.isa), "other")
    path = ROOT / "results" / f"quickstart.{isa.lower()}.json"
    report: dict[str, Any] = json.loads(path.read_text()) if path.is_file() else {"runs": {}}
    report |= {"isa": list(machine.isa), "cpu": machine.cpu, "cores": machine.num_cores}
    jobs = {f"seed {seed}": [f"run.seed={seed}"] for seed in arguments.seeds}
    if arguments.control_seed is not None:
        control = [f"run.seed={arguments.control_seed}", "run.permute_rewards=true", "run.rounds=10"]
        jobs[f"control, seed {arguments.control_seed}"] = control
    found: list[str] = []
    for name, overrides in jobs.items():
        folder = Path(tempfile.mkdtemp(prefix="quickstart-"))
        figures = run(overrides, folder)
        report["runs"][name] = figures
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps(report, indent=1) + "\n")  # after each run: a sweep of minutes may be ended
        held_out = figures["held_out"]
        print(
            f"{name}: greedy {held_out['greedy before']['rate']:.1%} -> {held_out['greedy after']['rate']:.1%}, "
            f"sampled {held_out['sampled before']['rate']:.1%} -> {held_out['sampled after']['rate']:.1%}, "
            f"{figures['seconds']:.0f} s, peak {figures['peak_bytes'] / 2**30:.2f} GiB",
            flush=True,
        )
        if name.startswith("seed"):
            found += problems(name, figures, LIMIT_S.get(isa, LIMIT_S["AVX2"]))
        elif held_out["greedy after"]["low"] > held_out["greedy before"]["high"]:
            found.append(f"{name}: rose, so something other than the reward teaches")
        shutil.rmtree(folder)
    print(f"written: {path.relative_to(ROOT)}")
    for problem in found:
        print(f"falls short: {problem}", file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())

"""What boxes cost: a new one, a call into a warm one, a reset; local, and docker when an engine is reachable.

    python scripts/bench/sandbox.py [--calls 300] [--boxes 15]

Times are those of `envs.sandbox` as environments use it, from one thread. Prints p50 and p95 in milliseconds and writes
`results/sandbox.<isa>.json`; without an engine the figures of docker boxes that the file has are kept.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

from envs.config import SandboxKind
from envs.sandbox.agentbox import AgentSandbox, BoxServer
from envs.sandbox.base import ExecStatus, SandboxSpec, SandboxUnavailable
from envs.sandbox.probe import open_server
from rl.report import machine_facts

ROOT = Path(__file__).parents[2]
KINDS = (SandboxKind.local, SandboxKind.docker)
TIMEOUT_S = 20.0


def percentiles(action: Callable[[], object], count: int) -> dict[str, float]:
    """Median and 95th percentile of the milliseconds that an action takes."""
    times: list[float] = []
    for _ in range(count):
        start = time.perf_counter()
        action()
        times.append((time.perf_counter() - start) * 1e3)
    return {"p50_ms": round(statistics.median(times), 3), "p95_ms": round(statistics.quantiles(times, n=20)[-1], 3)}


def measure(server: BoxServer, num_calls: int, num_boxes: int) -> dict[str, dict[str, float]]:
    """The figures of one kind of box."""
    spec = SandboxSpec()
    made: list[AgentSandbox] = []
    figures = {"new_box": percentiles(lambda: made.append(AgentSandbox(server, spec)), num_boxes)}
    figures["close"] = percentiles(lambda: made.pop().close(), num_boxes - 1)
    box = made[0]

    def cell() -> None:
        if box.run_code("1 + 1", TIMEOUT_S).status is not ExecStatus.OK:
            raise SystemExit("sandbox bench: a cell failed, so there are no figures; run scripts/doctor.py")

    def reset_and_cell() -> None:
        box.reset()
        cell()

    cell()
    figures["cell"] = percentiles(cell, num_calls)
    box.load("def f(x): return x + 1", "f", TIMEOUT_S)
    figures["call"] = percentiles(lambda: box.call((1,), TIMEOUT_S), num_calls)
    figures["put_10_kb"] = percentiles(lambda: box.put("file", bytes(10_000)), num_calls)
    figures["reset"] = percentiles(box.reset, num_calls)
    figures["reset_and_cell"] = percentiles(reset_and_cell, num_calls)
    box.close()
    return figures


def main() -> int:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, default=300)
    parser.add_argument("--boxes", type=int, default=15)
    options = parser.parse_args()
    machine = machine_facts(1)
    path = ROOT / "results" / f"sandbox.{machine.column}.json"
    figures = json.loads(path.read_text())["boxes"] if path.exists() else {}
    for kind in KINDS:
        try:
            server = open_server(kind)
        except SandboxUnavailable as error:
            print(f"{kind.value}: {error}")
            continue
        try:
            figures[kind.value] = measure(server, options.calls, options.boxes)
        finally:
            server.close()
        for name, times in figures[kind.value].items():
            print(f"{kind.value:8} {name:16} p50 {times['p50_ms']:9.3f} ms   p95 {times['p95_ms']:9.3f} ms")
    facts = {"isa": list(machine.isa), "calls": options.calls, "boxes": figures}
    path.write_text(json.dumps(facts, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())

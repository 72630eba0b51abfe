"""How long `python -m model.plan` takes for the largest preset, as a whole process, and its memory.

    python scripts/bench/plan.py [--repeats 5]

Fails when the median is above 5 s or the peak above 1 GB.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time

COMMAND = [sys.executable, "-m", "model.plan", "model=moe_2_8t", "plan.tp=8", "plan.pp=4", "plan.ep=64"]
LIMIT_S, LIMIT_BYTES = 5.0, 1e9


def run() -> tuple[float, int]:
    """Seconds and peak resident bytes of one process."""
    started = time.monotonic()
    with subprocess.Popen(COMMAND, stdout=subprocess.DEVNULL) as process:
        _, status, used = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"plan: the command failed, got exit code {process.returncode}; run it by itself")
    return time.monotonic() - started, used.ru_maxrss * 1024


def main() -> int:
    """Print the figures; 1 when a limit is passed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    seconds, peaks = zip(*(run() for _ in range(parser.parse_args().repeats)), strict=True)
    median = statistics.median(seconds)
    print(f"plan: {median:.2f} s median of {len(seconds)}, peak {max(peaks) / 1e6:.0f} MB")
    return int(median > LIMIT_S or max(peaks) > LIMIT_BYTES)


if __name__ == "__main__":
    sys.exit(main())

"""Fail unless a finished run's held-out pass rate (greedy decoding) rose: `check_rise.py runs/ci [--points 15]`."""

import argparse
import sys
from pathlib import Path

from rl.config_check import ConfigError
from rl.run_folder import read_result, read_state


def main() -> int:
    """1 when the run is not finished or rose by too little, 2 when there is no such run."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="the run's folder, such as runs/ci")
    parser.add_argument("--points", type=float, default=15.0, help="least rise, in percentage points")
    arguments = parser.parse_args()
    try:
        state, result = read_state(arguments.folder), read_result(arguments.folder)
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    if state is None:
        print(f"{arguments.folder}: no run there, got no run.json; name the folder of a run", file=sys.stderr)
        return 2
    if result is None or state["state"] != "finished":
        print(f"{arguments.folder}: not finished, got the state {state['state']}; see its failure.txt", file=sys.stderr)
        return 1
    rise = 100 * (result.held_out_after - result.held_out_before)
    line = f"held-out {result.held_out_before:.1%} -> {result.held_out_after:.1%}, {rise:+.1f} points in "
    line += f"{result.rounds} rounds, {result.minutes:.1f} minutes"
    if rise < arguments.points:
        print(f"{arguments.folder}: rose by less than {arguments.points:g} points, got {line}", file=sys.stderr)
        return 1
    print(f"{arguments.folder}: {line} (at least {arguments.points:g} points wanted)")
    return 0


if __name__ == "__main__":
    sys.exit(main())

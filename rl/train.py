"""`python -m rl.train +experiment=coding`: the entry, without logic.

The checks are `rl.entry`'s, the run is `rl.build`'s, and the folder between them is `rl.run_folder`'s.
"""

from __future__ import annotations

import sys

from rl.config import RunConfig
from rl.entry import hydra_main
from rl.run_folder import RunFolder


def run_one(config: RunConfig) -> None:
    """Carry out one run in its folder, or show the result of one that is finished."""
    with RunFolder.open(config) as folder:
        if folder.is_finished:
            sys.stdout.write("\n".join(folder.finished_lines()) + "\n")
            return
        from rl import build  # heavy, so only after every check

        build.run(config, folder)


def main() -> int:
    """Run what the command line asks for; returns the exit code."""
    return hydra_main(run_one, module="rl.train")


if __name__ == "__main__":
    raise SystemExit(main())

"""`python -m rl.sft +experiment=coding`: only the warm start of an experiment, without the run that would follow."""

from __future__ import annotations

from rl.config import RunConfig
from rl.entry import hydra_main


def make_start(config: RunConfig) -> None:
    """Make the start, or find it in the cache, and say where it is."""
    from rl import build  # heavy, so only after every check

    build.make_start(config)


def main() -> int:
    """Run what the command line asks for; returns the exit code."""
    return hydra_main(make_start, module="rl.sft")


if __name__ == "__main__":
    raise SystemExit(main())

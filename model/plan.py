"""What a model of this shape needs: parameters, memory of each GPU, loading and publishing. Nothing is allocated.

    python -m model.plan model=moe_2_8t
    python -m model.plan model=gpt_oss_120b plan.tp=8 plan.ep=8 plan.context=131072 plan.batch=16
    python -m model.plan model=tiny model.vocab_size=512 model.num_experts=16

Formulas and assumptions stand in the modules of `model/planning/` and `model/size.py`. Exit codes: 0 done, 2 a mistake,
told in one line.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from model.config import ConfigError
from model.planning.compose import compose, keys, presets
from model.planning.config import PlanError
from model.planning.table import render

EXIT_OK = 0
EXIT_MISTAKE = 2


def main(arguments: Sequence[str]) -> int:
    """Print the plan, and return the exit code."""
    if {"-h", "--help"} & set(arguments):
        sys.stdout.write(help_text())
        return EXIT_OK
    try:
        run = compose(arguments).resolved()
    except (PlanError, ConfigError) as error:
        sys.stderr.write(f"{error}\n")
        return EXIT_MISTAKE
    sys.stdout.write(render(run.model, run.plan))
    return EXIT_OK


def help_text() -> str:
    """The program, its presets and its own keys."""
    lines = [f"  {key} = {default}" for key, default in keys().items() if key.startswith("plan.")]
    return "\n".join(
        [
            (__doc__ or "").strip(),
            "",
            f"Presets: {', '.join(presets())}",
            "",
            "Keys and their defaults (model/planning/config.py), besides model.* (model/config.py)",
            *lines,
            "",
        ]
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

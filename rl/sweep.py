"""A sweep: `python -m rl.train -m +experiment=coding algorithm.lr=1e-4,3e-4`.

Hydra's multirun makes the combinations and runs them one after the other; this module gives each job a folder of its
own whose name depends on the swept values alone (so the same command goes on with it), records a failed job without
ending the others, and shows all of them side by side at the end.

    runs/<run.name>-sweep/<key=value,...>/   a run's folder (`rl.run_folder`)
                          results.json       all jobs, rewritten after each
"""

from __future__ import annotations

import dataclasses
import hashlib
import io
import json
import re
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, cast

from rich.console import Console
from rich.table import Table

from rl.config import RunConfig
from rl.overrides import parse
from rl.run_folder import RunResult, read_result, write_atomically

_MAX_NAME: Final = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class JobOutcome:
    """How one job ended; `result` is what its folder holds, and `error` one line, or `None` for success."""

    overrides: list[str]
    folder: str
    error: str | None
    minutes: float
    result: RunResult | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One combination of the swept values, and where its run lives."""

    overrides: list[str]
    sweep_folder: Path
    folder: Path

    @classmethod
    def of(cls, config: RunConfig, job_overrides: Sequence[str], given: Sequence[str]) -> Job:
        """The job that `job_overrides` describe; `config.run.name` becomes its folder below the sweep's.

        `given` is the command line: what it sets to a single value is the same in every job, and not part of the name.
        """
        fixed = {each.get_key_element() for each in map(parse, given) if not each.is_sweep_override()}
        swept = [text for text in job_overrides if parse(text).get_key_element() not in fixed]
        base = f"{config.run.name}-sweep"
        config.run.name = f"{base}/{job_name(swept)}"
        root = Path(config.run.root)
        return cls(overrides=swept, sweep_folder=root / base, folder=root / config.run.name)

    @property
    def title(self) -> str:
        """The swept values, as a person reads them."""
        return " ".join(self.overrides) or "nothing swept"

    def carry_out(self, run: Callable[[], Exception | None]) -> JobOutcome:
        """Run the job and leave nothing of it running, whatever it raised."""
        started = time.monotonic()
        try:
            error = run()
        finally:
            _stop_ray()
        return JobOutcome(
            overrides=self.overrides,
            folder=str(self.folder),
            error=None if error is None else f"{type(error).__name__}: {' '.join(str(error).split())}",
            minutes=(time.monotonic() - started) / 60,
            result=read_result(self.folder) if error is None else None,
        )


def job_name(swept: Sequence[str]) -> str:
    """A folder name made of the swept overrides: the same for the same values, and short enough for a file system."""
    name = re.sub(r"[^A-Za-z0-9._=,+-]+", "_", ",".join(text.lstrip("+") for text in swept)) or "all"
    if len(name) <= _MAX_NAME:
        return name
    return f"{name[:_MAX_NAME]}-{hashlib.sha256(name.encode()).hexdigest()[:8]}"


def _stop_ray() -> None:
    """A run tears its cluster down itself; this makes sure of it before the next job starts one."""
    ray = sys.modules.get("ray")
    if ray is not None and ray.is_initialized():
        ray.shutdown()


def write_results(folder: Path, outcomes: Sequence[JobOutcome]) -> None:
    """Rewrite results.json of the sweep."""
    folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps([dataclasses.asdict(outcome) for outcome in outcomes], indent=2)
    write_atomically(folder / "results.json", text + "\n")


def table(outcomes: Sequence[JobOutcome]) -> str:
    """All jobs side by side, in the order in which they ran, and the folder of each below."""
    shown = Table(title="sweep", title_justify="left")
    shown.add_column("", justify="right")
    for heading in ("overrides", "status", "held-out", "reward", "minutes"):
        shown.add_column(heading, no_wrap=heading != "status")
    for number, outcome in enumerate(outcomes, start=1):
        result = outcome.result
        shown.add_row(
            str(number),
            "\n".join(outcome.overrides),
            "finished" if outcome.error is None else outcome.error,
            f"{result.held_out_before:.1%} -> {result.held_out_after:.1%}" if result else "-",
            f"{result.reward_first:.3f} -> {result.reward_last:.3f}" if result else "-",
            f"{result.minutes if result else outcome.minutes:.1f}",
        )
    console = Console(file=io.StringIO(), width=max(100, Console().width))
    console.print(shown)
    folders = "".join(f"{number:>3}  {outcome.folder}\n" for number, outcome in enumerate(outcomes, start=1))
    return cast(io.StringIO, console.file).getvalue() + folders

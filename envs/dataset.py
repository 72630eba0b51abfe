"""Tasks from data (`env.dataset`, `env.datasets`), and the procedural tasks written in the project's own shape.

Rows of any convention in `envs.data.adapters` will do. The own shape is, one row a line:

    {"id": "sum-positive-1", "prompt": "Write f(xs): ...", "entry_point": "f",
     "visible": [{"args": [[1, -2, 3]], "expected": 4}],      examples for feedback, at least one
     "hidden": [{"args": [[5, 5]], "expected": 10}],          examples for grading, at least one
     "split": "train",                                        optional: "train" or "held_out"
     "solution": "def f(xs): ..."}                            optional: a right program, for demonstrations

Values are JSON and keep their exact types (1, 1.0 and true are three answers; `envs.data.rows`).
Without a "held_out" row, a tenth of the rows is held out, chosen by a hash of the prompt, so that equal prompts stay on
one side. Every row is checked before anything slow starts. Look at a data set, or write the built-in tasks, with:

    python -m envs.dataset check tasks.jsonl
    python -m envs.dataset export --count 1000 tasks.jsonl
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, cast

from envs.base import EnvError, TaskSource
from envs.coding.compositions import Composition
from envs.coding.tasks import CodingTasks
from envs.config import DatasetConfig, EnvConfig
from envs.data.adapters import AUTO, Item, check_format, read_row, recognise, refuse_foreign
from envs.data.errors import DatasetError, RowError
from envs.data.indexed import IndexedTasks, TaskList
from envs.data.locate import sources
from envs.data.mixed import MixedTasks
from envs.data.own import SCHEMA
from envs.data.rows import Rows
from rollout.types import Task

__all__ = ["DatasetError", "DatasetTasks", "TaskList", "dataset_tasks", "export_row", "main"]

_MOST_PROBLEMS = 20


class _Reader:
    """The rows of one source as tasks."""

    def __init__(
        self,
        source: DatasetConfig,
        *,
        key: str,
        max_row_mb: float,
        rank_column: str | None,
        accept: Callable[[Task], object] | None,
    ) -> None:
        setting = f"{key}_format" if key == "env.dataset" else f"{key}.format"
        if problem := check_format(source.format, setting):
            raise DatasetError(problem)
        self.rows = Rows(source, key=key, max_row_mb=max_row_mb)
        self.format = source.format
        self._is_guessed = source.format == AUTO
        self._rank_column = rank_column
        self._accept = accept

    def __call__(self, position: int) -> tuple[Item, float] | None:
        """Raises `DatasetError` with the file, the number and the columns of a row that makes no task."""
        columns: list[str] = []
        try:
            row = self.rows.read(position)
            if row is None:
                return None
            columns = list(row)
            if self.format == AUTO:
                self.format = recognise(columns)
            elif self._is_guessed:
                refuse_foreign(columns, self.format)
            rank = self._rank(row)
            item = read_row(row, name=self.format, default_id=self.rows.label(position))
            if self._accept is not None:
                self._accept_task(item.task)
        except RowError as problem:
            if not problem.remedy:
                is_own = self.format in (AUTO, "own")
                problem.remedy = f"a row has {SCHEMA}" if is_own else "write every row as one JSON object"
            raise self.rows.error(position, problem, columns) from problem
        return item, rank

    def _rank(self, row: dict[str, Any]) -> float:
        if self._rank_column is None:
            return 0.0
        value: Any = row
        for name in self._rank_column.split("."):
            value = cast(Mapping[str, Any], value).get(name) if isinstance(value, Mapping) else None
        if isinstance(value, bool) or not isinstance(value, int | float) or value != value:
            raise RowError(
                f"env.curriculum_column: {self._rank_column!r} must be a number", repr(value), "give every row one"
            )
        if self.format == "own":
            row.pop(self._rank_column, None)
        return float(value)

    def _accept_task(self, task: Task) -> None:
        try:
            cast(Callable[[Task], object], self._accept)(task)
        except EnvError as problem:
            raise RowError(
                f"this environment cannot use a row of {self.format}",
                list(task.payload),
                str(problem).rpartition("; ")[2],
            ) from problem


class DatasetTasks(IndexedTasks):
    """The tasks of one data set; every row is read and checked once, and read again when its task is due."""

    def __init__(
        self,
        source: DatasetConfig | str,
        *,
        seed: int,
        key: str = "env.dataset",
        max_row_mb: float = EnvConfig().dataset_max_row_mb,
        curriculum: tuple[str, int] | None = None,
        accept: Callable[[Task], object] | None = None,
    ) -> None:
        source = DatasetConfig(path=source) if isinstance(source, str) else source
        rank_column = curriculum[0] if curriculum is not None else None
        self._reader = _Reader(source, key=key, max_row_mb=max_row_mb, rank_column=rank_column, accept=accept)
        rows = self._reader.rows
        if all(self._is_empty(position) for position in range(len(rows))):
            raise DatasetError(f"{key}: no rows, got the file {source.path!r} without any; a row has {SCHEMA}")
        super().__init__(
            length=len(rows),
            seed=seed,
            name=f"{key} {source.path!r}",
            curriculum_tasks=curriculum[1] if curriculum is not None else None,
        )

    def _is_empty(self, position: int) -> bool:
        return self._reader(position) is None

    def _read(self, position: int) -> tuple[Item, float] | None:
        return self._reader(position)

    def _pair(self, first: int, second: int) -> str:
        (name, number), (other, at) = self._reader.rows.where(first), self._reader.rows.where(second)
        return f"in rows {number} and {at}" if name == other else f"in row {number} of {name!r} and {at} of {other!r}"


def dataset_tasks(config: EnvConfig, *, seed: int, accept: Callable[[Task], object] | None = None) -> TaskSource | None:
    """The tasks of the data that a configuration names, or `None` when it names none.

    `accept` raises `EnvError` for a task that the environment cannot use. Raises `DatasetError`.
    """
    found = sources(config)
    if config.dataset is not None and config.datasets:
        raise DatasetError(
            f"env.datasets: goes without env.dataset, got both {config.dataset!r} and {sorted(config.datasets)}; "
            "drop one"
        )
    if config.curriculum_column is not None and config.dataset is None:
        raise DatasetError(
            f"env.curriculum_column: orders the rows of env.dataset, got {config.curriculum_column!r} without it; "
            "set first_task and last_task of env.datasets, or drop it"
        )
    if not found:
        return None
    curriculum = None if config.curriculum_column is None else (config.curriculum_column, config.curriculum_tasks)
    parts = {
        key: DatasetTasks(
            source, seed=seed, key=key, max_row_mb=config.dataset_max_row_mb, curriculum=curriculum, accept=accept
        )
        for key, source in found.items()
    }
    if config.dataset is not None:
        return parts["env.dataset"]
    names = {key: key.removeprefix("env.datasets.") for key in parts}
    return MixedTasks(
        {names[key]: part for key, part in parts.items()}, {names[key]: each for key, each in found.items()}, seed=seed
    )


def export_row(task: Task) -> dict[str, Any]:
    """A procedural task as a row of this module's shape."""
    return {
        "id": task.id,
        "prompt": task.messages[0].content,
        "entry_point": task.payload["entry_point"],
        "visible": task.payload["visible"],
        "hidden": task.payload["hidden"],
        "split": task.split.value,
        "solution": Composition(*task.payload["composition"]).source,
    }


def check(path: str, *, name: str, split: str, max_row_mb: float, out: Callable[[str], object]) -> int:
    """Say what a data set holds and what is wrong with it; returns the number of bad rows."""
    source = DatasetConfig(path=path, format=name, split=split)
    reader = _Reader(source, key="env.dataset", max_row_mb=max_row_mb, rank_column=None, accept=None)
    num_tasks, first, problems = 0, None, list[str]()
    num_bad = 0
    for position in range(len(reader.rows)):
        try:
            read = reader(position)
        except DatasetError as problem:
            num_bad += 1
            problems += [str(problem)] if num_bad <= _MOST_PROBLEMS else []
            continue
        if read is not None:
            num_tasks += 1
            first = first or read[0].task
    out(f"{path}: {num_tasks + num_bad} rows, {num_bad} with a problem; convention: {reader.format}")
    if first is not None:
        out(f"first task: {json.dumps(asdict(first), ensure_ascii=False)[:2000]}")
    for problem in problems:
        out(problem)
    if not num_bad:
        try:
            tasks = DatasetTasks(source, seed=0, max_row_mb=max_row_mb)
        except DatasetError as problem:
            out(str(problem))
            return 1
        out(f"{tasks.num_train} training tasks, {tasks.num_held_out} held out")
    return num_bad


def _run_check(chosen: argparse.Namespace) -> int:
    """The exit status of `check`."""
    try:
        num_bad = check(
            chosen.path,
            name=chosen.format,
            split=chosen.split,
            max_row_mb=chosen.max_row_mb,
            out=lambda line: sys.stdout.write(f"{line}\n"),
        )
    except DatasetError as problem:
        sys.stdout.write(f"{problem}\n")
        return 1
    return 1 if num_bad else 0


def main(arguments: Sequence[str] | None = None) -> None:
    """Look at a data set, or write the procedural tasks as one: `count` for training, a quarter as many held out."""
    parser = argparse.ArgumentParser(prog="python -m envs.dataset", description=main.__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    export = commands.add_parser("export", help="write the procedural coding tasks as JSON lines")
    export.add_argument("path", type=Path, help="the file to write")
    export.add_argument("--count", type=int, default=1000, help="number of training tasks (default: 1000)")
    export.add_argument("--held-out", type=int, default=None, help="number of held-out tasks (default: count / 4)")
    export.add_argument("--seed", type=int, default=0, help="seed of the training tasks (default: 0)")
    look = commands.add_parser("check", help="say what a data set holds and what is wrong with it")
    look.add_argument("path", help="what env.dataset would be")
    defaults = EnvConfig()
    look.add_argument("--format", default=defaults.dataset_format, help="what env.dataset_format would be")
    look.add_argument("--split", default=defaults.dataset_split, help="what env.dataset_split would be")
    look.add_argument("--max-row-mb", type=float, default=defaults.dataset_max_row_mb, help="the longest row, in MB")
    export.add_argument("--num-visible", type=int, default=defaults.num_visible_checks, help="visible examples a task")
    export.add_argument("--num-hidden", type=int, default=defaults.num_hidden_checks, help="hidden examples a task")
    chosen = parser.parse_args(arguments)
    if chosen.command == "check":
        sys.exit(_run_check(chosen))
    num_held_out = max(1, chosen.count // 4) if chosen.held_out is None else chosen.held_out
    if chosen.count < 1 or num_held_out < 1:
        parser.error(f"--count and --held-out: must be at least 1, got {chosen.count} and {num_held_out}; raise them")
    tasks = CodingTasks(seed=chosen.seed, num_visible=chosen.num_visible, num_hidden=chosen.num_hidden)
    rows = [export_row(tasks.train(index)) for index in range(chosen.count)]
    rows += [export_row(task) for task in tasks.held_out(num_held_out)]
    chosen.path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    sys.stdout.write(f"{len(rows)} tasks in {chosen.path}\n")


if __name__ == "__main__":
    main()

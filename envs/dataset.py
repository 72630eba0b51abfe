"""Tasks from a JSON-lines file, and the procedural tasks written in that shape.

One row a line:

    {"id": "sum-positive-1", "prompt": "Write f(xs): ...", "entry_point": "f",
     "visible": [{"args": [[1, -2, 3]], "expected": 4}],      examples for feedback, at least one
     "hidden": [{"args": [[5, 5]], "expected": 10}],          examples for grading, at least one
     "split": "train",                                        optional: "train" or "held_out"
     "solution": "def f(xs): ..."}                            optional: a right program, for demonstrations

Values are JSON and keep their exact types (1, 1.0 and true are three answers); so the file is read through `datasets`
as lines of text: its JSON reader casts a column to one type, which turns 1 into 1.0 and a date-like text into a date.
Without a "held_out" row, a tenth of the rows is held out, chosen by a hash of the prompt, so that equal prompts stay on
one side. Every row is checked before anything slow starts. Export with:

    python -m envs.dataset export --count 1000 tasks.jsonl
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn, cast

from envs.base import EnvError, TaskSource, texts
from envs.coding.answer import extract, format_answer
from envs.coding.compositions import Composition
from envs.coding.examples import Example, Problem
from envs.coding.tasks import CodingTasks
from envs.config import EnvConfig
from envs.sandbox.wire import BadValueError, encode_value
from rollout.types import Answer, Json, Message, Role, Split, Task

HELD_OUT_FRAC = 0.1
SCHEMA = (
    'id: str, prompt: str, entry_point: str, visible: [{"args": [...], "expected": ...}, ...], hidden: like visible, '
    'split?: "train" | "held_out", solution?: str'
)
_REQUIRED = ("id", "prompt", "entry_point", "visible", "hidden")
_OPTIONAL = ("split", "solution")


class DatasetError(EnvError):
    """A task file that does not have the shape of this module's docstring."""


class TaskList(TaskSource):
    """A finite list of tasks: reshuffled every epoch by (seed, epoch), held-out tasks apart.

    `solutions` maps the id of a task to the answers of its demonstration, one a turn.
    """

    def __init__(
        self, tasks: Iterable[Task], *, seed: int, name: str, solutions: Mapping[str, tuple[Answer, ...]] | None = None
    ) -> None:
        tasks = _with_held_out(tuple(tasks))
        self._seed = seed
        self._name = name
        self._train = tuple(task for task in tasks if task.split is Split.TRAIN)
        self._held_out = tuple(task for task in tasks if task.split is Split.HELD_OUT)
        self._solutions = dict(solutions or {})
        self._order: tuple[int, list[int]] = (-1, [])
        duplicates = [task_id for task_id, count in Counter(task.id for task in tasks).items() if count > 1]
        if duplicates:
            raise DatasetError(f"{name}: ids must differ, got {duplicates[0]!r} more than once; rename one")
        for split, part in ((Split.TRAIN, self._train), (Split.HELD_OUT, self._held_out)):
            if not part:
                raise DatasetError(f"{name}: no {split.value} task, got {len(tasks)} tasks; give at least one")
        asked = {task.messages for task in self._train}
        for task in self._held_out:
            if task.messages in asked:
                raise DatasetError(
                    f"{name}: held-out task {task.id!r} asks what a training task asks, got the prompt "
                    f"{task.messages[-1].content[:60]!r} in both splits; move one of them"
                )

    def train(self, index: int) -> Task:
        """Training task number `index`; every epoch has its own order."""
        if index < 0:
            raise DatasetError(f"{self._name}: the index must not be negative, got {index}; count from 0")
        epoch, position = divmod(index, len(self._train))
        if self._order[0] != epoch:
            order = list(range(len(self._train)))
            random.Random(f"epoch:{self._seed}:{epoch}").shuffle(order)
            self._order = (epoch, order)
        return self._train[self._order[1][position]]

    def held_out(self, count: int) -> tuple[Task, ...]:
        """The first `count` held-out tasks in the order of the file (all of them, when there are fewer)."""
        return self._held_out[:count]

    def demonstrations(self, seed: int) -> Iterator[tuple[Task, tuple[Answer, ...]]]:
        """Endless training tasks with their solutions. Raises `DatasetError` when no training task has one."""
        shown = [task for task in self._train if task.id in self._solutions]
        if not shown:
            raise DatasetError(
                f"{self._name}: no demonstrations, got {len(self._train)} training tasks without a solution; "
                "add solutions, or start from a checkpoint without a warm start"
            )
        rng = random.Random(f"demonstrations:{seed}")
        while True:
            task = rng.choice(shown)
            yield task, self._solutions[task.id]

    def corpus(self) -> Iterator[str]:
        """Opening messages and solutions of the training tasks."""
        for task in self._train:
            for message in task.messages:
                yield message.content
            for answer in self._solutions.get(task.id, ()):
                yield from texts(answer)

    def solve(self, task: Task) -> tuple[Answer, ...] | None:
        """The right answers to a task, where they are known."""
        return self._solutions.get(task.id)


class DatasetTasks(TaskList):
    """The tasks of a JSON-lines file."""

    def __init__(self, path: str, *, seed: int) -> None:
        rows = {number: _checked(path, number, line) for number, line in _read_lines(path) if line.strip()}
        if not rows:
            raise DatasetError(f"env.dataset: no rows, got the file {path!r} without any; a row has {SCHEMA}")
        numbers: dict[str, int] = {}
        for number, row in rows.items():
            first = numbers.setdefault(row["id"], number)
            if first != number:
                raise DatasetError(
                    f"env.dataset: ids must differ, got {row['id']!r} in rows {first} and {number} of {path!r}; "
                    "rename one"
                )
        super().__init__(
            (_task(row) for row in rows.values()),
            seed=seed,
            name=f"env.dataset {path!r}",
            solutions={row["id"]: (format_answer(row["solution"]),) for row in rows.values() if "solution" in row},
        )


def _with_held_out(tasks: tuple[Task, ...]) -> tuple[Task, ...]:
    """The tasks as they are, or with a share held out by hash when none is."""
    if not tasks or any(task.split is Split.HELD_OUT for task in tasks):
        return tasks
    digests = {task.messages: _digest("\n".join(message.content for message in task.messages)) for task in tasks}
    bound = max(HELD_OUT_FRAC * 2**32, min(digests.values()) + 1)
    return tuple(replace(task, split=Split.HELD_OUT) if digests[task.messages] < bound else task for task in tasks)


def _digest(text: str) -> int:
    """32 bits that follow from the text in every process."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "big")


def _read_lines(path: str) -> Iterator[tuple[int, str]]:
    """The numbered lines of a local file, or of any address that `datasets` reads."""
    is_local = "://" not in path
    if is_local and not Path(path).is_file():
        raise DatasetError(f"env.dataset: no such file, got {path!r}; give the path of a JSON-lines file")
    if is_local and Path(path).stat().st_size == 0:
        return
    import datasets  # pyright: ignore[reportMissingTypeStubs] (here: it takes a second, and most runs have no file)

    library = cast(Any, datasets)
    library.disable_progress_bars()
    try:
        rows = library.load_dataset("text", data_files={"train": path}, split="train")
    except (OSError, ValueError, library.exceptions.DatasetsError) as problem:
        raise DatasetError(
            f"env.dataset: could not be read ({type(problem).__name__}: {problem}), got {path!r}; "
            "give a JSON-lines file in UTF-8"
        ) from problem
    for number, row in enumerate(cast(Iterable[Mapping[str, str]], rows), start=1):
        yield number, row["text"]


def _checked(path: str, number: int, line: str) -> dict[str, Any]:
    """One parsed row of the right shape. Raises `DatasetError` with the row's number and keys."""
    keys: Sequence[str] = ()

    def refuse(problem: str, got: object) -> NoReturn:
        raise DatasetError(
            f"env.dataset: row {number} of {path!r}: {problem}, got {str(got)[:80]} in a row with the keys "
            f"{list(keys)}; a row has {SCHEMA}"
        )

    try:
        parsed: object = json.loads(line, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as problem:
        refuse(f"not JSON ({problem})", line)
    if not isinstance(parsed, dict):
        refuse("not a JSON object", line)
    row = cast(dict[str, Any], parsed)
    keys = list(row)
    for key in _REQUIRED:
        if key not in row:
            refuse(f"the key {key!r} is missing", "none")
    for key in keys:
        if key not in (*_REQUIRED, *_OPTIONAL):
            refuse(f"unknown key {key!r}", repr(row[key]))
    for key in ("id", "prompt", "entry_point"):
        if not isinstance(row[key], str) or not row[key]:
            refuse(f"{key} must be a text that is not empty", repr(row[key]))
    if not row["entry_point"].isidentifier():
        refuse("entry_point must be a Python name", repr(row["entry_point"]))
    for key in ("visible", "hidden"):
        if not isinstance(row[key], list) or not row[key]:
            refuse(f"{key} must be a list of at least one example", repr(row[key]))
        for example in cast(list[object], row[key]):
            problem = _problem_of_example(example)
            if problem is not None:
                refuse(f"{key}: {problem}", repr(example))
    if "split" in row and row["split"] not in (Split.TRAIN.value, Split.HELD_OUT.value):
        refuse("split must be 'train' or 'held_out'", repr(row["split"]))
    if "solution" in row:
        answer = extract(format_answer(str(row["solution"])), row["entry_point"])
        if not isinstance(row["solution"], str) or not answer.well_formed:
            refuse(f"solution must be a program that defines {row['entry_point']}", repr(row["solution"]))
    return row


def _problem_of_example(example: object) -> str | None:
    if not isinstance(example, dict):
        return "an example must be an object"
    fields = cast(dict[str, object], example)
    if set(fields) != {"args", "expected"}:
        return "an example has exactly the keys 'args' and 'expected'"
    if not isinstance(fields["args"], list):
        return "args must be the list of the call's arguments"
    try:
        encode_value(cast(object, fields["args"]))
        encode_value(fields["expected"])
    except BadValueError as problem:
        return str(problem)
    return None


def _refuse_constant(text: str) -> NoReturn:
    raise ValueError(f"{text} is not JSON")


def _task(row: Mapping[str, Any]) -> Task:
    problem = Problem(
        entry_point=row["entry_point"],
        visible=_examples(row["visible"]),
        hidden=_examples(row["hidden"]),
    )
    return Task(
        id=row["id"],
        messages=(Message(role=Role.USER, content=row["prompt"]),),
        payload=problem.payload(),
        split=Split(row.get("split", Split.TRAIN)),
        seed=_digest(row["id"]),
    )


def _examples(rows: Sequence[Mapping[str, Any]]) -> tuple[Example, ...]:
    return tuple(Example(args=tuple(cast(list[Json], row["args"])), expected=row["expected"]) for row in rows)


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


def main(arguments: Sequence[str] | None = None) -> None:
    """Write procedural tasks: `count` for training and a quarter as many held out."""
    parser = argparse.ArgumentParser(prog="python -m envs.dataset", description=main.__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    export = commands.add_parser("export", help="write the procedural coding tasks as JSON lines")
    export.add_argument("path", type=Path, help="the file to write")
    export.add_argument("--count", type=int, default=1000, help="number of training tasks (default: 1000)")
    export.add_argument("--held-out", type=int, default=None, help="number of held-out tasks (default: count / 4)")
    export.add_argument("--seed", type=int, default=0, help="seed of the training tasks (default: 0)")
    defaults = EnvConfig()
    export.add_argument("--num-visible", type=int, default=defaults.num_visible_checks, help="visible examples a task")
    export.add_argument("--num-hidden", type=int, default=defaults.num_hidden_checks, help="hidden examples a task")
    chosen = parser.parse_args(arguments)
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

"""The function tasks of CodeI/O (Li et al., 2025; arXiv 2502.07316), from the package `reasoning-gym`.

A row of the data is a description, reference code and a generator of inputs. Nothing of it runs in this process: a task
carries the code and a seed, and the episode makes its examples in a box (`envs.coding.reference`), so that each task of
a run has inputs nobody saw before. `codeio_rows.json` names the rows that can be used (`scripts/codeio_rows.py`), each
with its parameters: they are deterministic, run without further packages, and tell answers apart.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Final

from envs.base import EnvError, TaskSource
from envs.coding.answer import format_answer
from envs.coding.examples import Problem, Reference, require_checks
from envs.data.digest import text_digest
from envs.data_packages import data_file, digest, read_lines
from rollout.types import Message, Role, Split, Task

PACKAGE: Final = "reasoning-gym"
FILE: Final = "reasoning_gym/data/codeio.jsonl.gz"
INDEX: Final = Path(__file__).with_name("codeio_rows.json")
ENTRY_POINT: Final = "main_solution"

HELD_OUT_SHARE: Final = 0.1
HELD_OUT_SEED: Final = 7
REL_TOLERANCE: Final = 1e-9
"""Another order of the same sums differs in the last bits of a double (2.2e-16 each); a wrong formula by more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Row:
    """A usable row: what the policy reads, the reference code, the generator of its inputs."""

    prompt: str
    source: str
    generator: str


class CodeioTasks(TaskSource):
    """Tasks from the usable rows; a row is trained on or held out, by a digest of its text."""

    def __init__(self, *, seed: int, num_visible: int, num_hidden: int) -> None:
        require_checks(num_visible=num_visible, num_hidden=num_hidden)
        self._seed = seed
        self._num_visible = num_visible
        self._num_hidden = num_hidden
        self._rows = _read()
        self._held_out = [number for number, row in self._rows.items() if _is_held_out(row.prompt)]
        self._train = tuple(number for number, row in self._rows.items() if not _is_held_out(row.prompt))
        random.Random(f"codeio-held-out:{HELD_OUT_SEED}").shuffle(self._held_out)

    def train(self, index: int) -> Task:
        """Training task number `index`: every row once an epoch, with new inputs each time."""
        if index < 0:
            raise EnvError(f"codeio tasks: the index must not be negative, got {index}; count from 0")
        epoch, place = divmod(index, len(self._train))
        number = _shuffled(self._train, f"codeio-train:{self._seed}:{epoch}")[place]
        return self._task(f"codeio/train/{self._seed}/{index}", number, Split.TRAIN, index)

    def held_out(self, count: int) -> tuple[Task, ...]:
        """The first `count` held-out tasks, or all; they do not depend on the run's seed."""
        return tuple(
            self._task(f"codeio/held_out/{number}", number, Split.HELD_OUT, HELD_OUT_SEED)
            for number in self._held_out[:count]
        )

    def demonstrations(self, seed: int) -> Iterator[tuple[Task, tuple[str, ...]]]:
        """Endless tasks of the training rows with their reference code."""
        rng = random.Random(f"codeio-demonstrations:{seed}")
        count = 0
        while True:
            task = self._task(f"codeio/demonstration/{seed}/{count}", rng.choice(self._train), Split.TRAIN, count)
            yield task, self.solve(task)
            count += 1

    def corpus(self) -> Iterator[str]:
        """Prompts and reference code of the training rows."""
        for number in self._train:
            yield self._rows[number].prompt
            yield format_answer(self._rows[number].source)

    def solve(self, task: Task) -> tuple[str, ...]:
        """The reference code as an answer."""
        return (format_answer(task.payload["reference"]["source"]),)

    def _task(self, task_id: str, number: int, split: Split, seed: int) -> Task:
        row = self._rows[number]
        reference = Reference(
            source=row.source,
            generator=row.generator,
            seed=random.Random(f"{task_id}:{number}").getrandbits(32),
            num_visible=self._num_visible,
            num_hidden=self._num_hidden,
        )
        problem = Problem(
            entry_point=ENTRY_POINT, visible=(), hidden=(), rel_tolerance=REL_TOLERANCE, reference=reference
        )
        return Task(
            id=task_id,
            messages=(Message(role=Role.USER, content=row.prompt),),
            payload=problem.payload(),
            split=split,
            seed=seed,
        )


def read_rows() -> tuple[list[dict[str, Any]], str]:
    """All rows of the data, and the digest of its file."""
    path = data_file(PACKAGE, FILE)
    return [json.loads(line) for line in read_lines(path)], digest(path)


def _read() -> dict[int, _Row]:
    """The usable rows, by their number in the data."""
    rows, found = read_rows()
    index: dict[str, Any] = json.loads(INDEX.read_text())
    if index["sha256"] != found:
        raise EnvError(
            f"data package: {PACKAGE} holds another {FILE} than was indexed, got sha256 {found[:12]}; run "
            "`make data-packages`, or index it with scripts/codeio_rows.py"
        )
    return {int(number): _row(rows[int(number)], parameters) for number, parameters in index["rows"].items()}


def _row(row: dict[str, Any], parameters: list[str]) -> _Row:
    prompt = (
        f"{row['task_description'].strip()}\n\n{row['input_output_spec'].strip()}\n\n"
        f"Answer with one Python code block that defines `{ENTRY_POINT}({', '.join(parameters)})`."
    )
    return _Row(prompt=prompt, source=row["code_sample"], generator=row["input_generator"])


@cache
def _shuffled(numbers: tuple[int, ...], key: str) -> list[int]:
    order = list(numbers)
    random.Random(key).shuffle(order)
    return order


def _is_held_out(prompt: str) -> bool:
    return text_digest(prompt, num_bits=32) / 2**32 < HELD_OUT_SHARE

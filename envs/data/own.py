"""A row of the project's own shape: a function to write, with examples. The shape is told in `envs.dataset`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NoReturn, cast

from envs.coding.answer import extract, format_answer
from envs.coding.examples import Example, Problem
from envs.data.digest import text_digest
from envs.data.errors import RowError
from envs.sandbox.wire import BadValueError, encode_value
from rollout.types import Json, Message, Role, Split, Task

SCHEMA = (
    'id: str, prompt: str, entry_point: str, visible: [{"args": [...], "expected": ...}, ...], hidden: like visible, '
    'split?: "train" | "held_out", solution?: str'
)
_REQUIRED = ("id", "prompt", "entry_point", "visible", "hidden")
_OPTIONAL = ("split", "solution")


def own_item(row: Mapping[str, Any]) -> tuple[Task, tuple[str, ...] | None]:
    """The task and the demonstration of a row. Raises `RowError` when it does not have the shape."""
    _check(row)
    return _task(row), (format_answer(row["solution"]),) if "solution" in row else None


def _check(row: Mapping[str, Any]) -> None:
    def refuse(problem: str, got: object) -> NoReturn:
        raise RowError(problem, got, f"a row has {SCHEMA}")

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
        seed=text_digest(row["id"], num_bits=32),
    )


def _examples(rows: Sequence[Mapping[str, Any]]) -> tuple[Example, ...]:
    return tuple(Example(args=tuple(cast(list[Json], row["args"])), expected=row["expected"]) for row in rows)

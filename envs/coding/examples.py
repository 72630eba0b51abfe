"""Examples of a coding task, and the payload that carries them.

The payload is JSON: `{"entry_point": "f", "visible": [{"args": [[1, 2]], "expected": 3}], "hidden": [...]}`. The policy
sees the visible examples through feedback only, and the hidden ones never. Values keep their exact types: 1, 1.0 and
True are three different answers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from envs.base import EnvError
from rollout.types import Json, Task


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    """One call of the entry point and the value it must return."""

    args: tuple[Json, ...]
    expected: Json


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """What a task of this environment asks for: the payload, parsed."""

    entry_point: str
    visible: tuple[Example, ...]
    hidden: tuple[Example, ...]

    def payload(self) -> dict[str, Any]:
        """The JSON form that a `Task` carries."""
        return {
            "entry_point": self.entry_point,
            "visible": [{"args": list(example.args), "expected": example.expected} for example in self.visible],
            "hidden": [{"args": list(example.args), "expected": example.expected} for example in self.hidden],
        }


def problem_of(task: Task) -> Problem:
    """Read the payload of a task. Raises `EnvError` when it is not one of a coding task."""
    try:
        return Problem(
            entry_point=str(task.payload["entry_point"]),
            visible=_examples(task.payload["visible"]),
            hidden=_examples(task.payload["hidden"]),
        )
    except (KeyError, TypeError) as problem:
        raise EnvError(
            f"task {task.id}: not a coding task ({type(problem).__name__}: {problem}), got a payload with the keys "
            f"{sorted(task.payload)}; give entry_point, visible and hidden (see envs/coding/examples.py)"
        ) from problem


def _examples(rows: object) -> tuple[Example, ...]:
    return tuple(
        Example(args=tuple(cast(Sequence[Json], row["args"])), expected=cast(Json, row["expected"]))
        for row in cast(Sequence[Mapping[str, object]], rows)
    )

"""Examples of a coding task, and the payload that carries them.

The payload is JSON: `{"entry_point": "f", "visible": [{"args": [[1, 2]], "expected": 3}], "hidden": [...]}`. The policy
sees the visible examples through feedback only, and the hidden ones never. Values keep their exact types: 1, 1.0 and
True are three different answers. Three more keys are for tasks from data:

    "preamble": "import math"           code of the task that stands before every answer
    "rel_tolerance": 1e-9               how far a float may be from the expected one
    "check": {...}                      check code that grades in place of hidden examples (`envs.sandbox.checker`)
    "reference": {...}                  code that makes the examples, in place of both lists
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, cast

from envs.base import EnvError
from envs.sandbox.checker import CheckCode
from rollout.types import Json, Task


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    """One call of the entry point and the value it must return."""

    args: tuple[Json, ...]
    expected: Json


def require_checks(*, num_visible: int, num_hidden: int) -> None:
    """Raise `EnvError` for a number of checks that makes no task."""
    for name, count in (("num_visible_checks", num_visible), ("num_hidden_checks", num_hidden)):
        if count < 1:
            raise EnvError(f"env.{name}: must be at least 1, got {count}; a task without checks cannot be graded")


@dataclass(frozen=True, slots=True, kw_only=True)
class Reference:
    """Code of a task's data that makes its examples in a box of its own (`envs.coding.reference`).

    The examples follow from `seed`; the first `num_visible` are shown, `num_hidden` grade.
    """

    source: str
    generator: str
    seed: int
    num_visible: int
    num_hidden: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """What a task of this environment asks for: the payload, parsed."""

    entry_point: str
    visible: tuple[Example, ...]
    hidden: tuple[Example, ...]
    preamble: str = ""
    rel_tolerance: float = 0.0
    check: CheckCode | None = None
    reference: Reference | None = None

    @property
    def num_hidden(self) -> int:
        """Checks that grade, as declared."""
        if self.check is not None:
            return self.check.declared
        return len(self.hidden) if self.reference is None else self.reference.num_hidden

    def program(self, answer: str) -> str:
        """What runs for an answer."""
        return f"{self.preamble}\n{answer}" if self.preamble else answer

    def payload(self) -> dict[str, Any]:
        """The JSON form that a `Task` carries."""
        extras: dict[str, Any] = {
            "preamble": self.preamble,
            "rel_tolerance": self.rel_tolerance,
            "check": self.check and self.check.payload(),
            "reference": self.reference and asdict(self.reference),
        }
        return {
            "entry_point": self.entry_point,
            "visible": [{"args": list(example.args), "expected": example.expected} for example in self.visible],
            "hidden": [{"args": list(example.args), "expected": example.expected} for example in self.hidden],
            **{key: value for key, value in extras.items() if value},
        }


def problem_of(task: Task) -> Problem:
    """Read the payload of a task. Raises `EnvError` when it is not one of a coding task."""
    try:
        return Problem(
            entry_point=str(task.payload["entry_point"]),
            visible=_examples(task.payload["visible"]),
            hidden=_examples(task.payload["hidden"]),
            preamble=str(task.payload.get("preamble", "")),
            rel_tolerance=float(task.payload.get("rel_tolerance", 0.0)),
            check=CheckCode.of(task.payload["check"]) if "check" in task.payload else None,
            reference=Reference(**task.payload["reference"]) if "reference" in task.payload else None,
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

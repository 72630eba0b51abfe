"""The procedural tasks as a `TaskSource`: everything follows from (seed, index), in every process.

Random numbers come from `random.Random("<stream>:<seed>:<index>")`, whose seeding by text does not depend on the
process (Python's `hash` does). The held-out stream has its own seed: before and after training, and in every run, the
same held-out tasks are asked.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import cast

from envs.base import EnvError, TaskSource
from envs.coding import feedback
from envs.coding.answer import format_answer
from envs.coding.compositions import (
    DEMONSTRATED,
    ENTRY_POINT,
    HELD_OUT,
    TRAIN,
    Composition,
    careless,
)
from envs.coding.examples import Example, Problem, problem_of, require_checks
from rollout.types import Message, Role, Split, Task

HELD_OUT_SEED = 7
CORPUS_SEED = 5
LOWEST_ITEM, HIGHEST_ITEM = -12, 12
SHORTEST_LIST, LONGEST_LIST = 3, 8

REPAIR_SHOWN_RATE = 0.3
"""Share of the wrong first answers whose demonstration goes on to a second turn."""
REPAIR_RIGHT_RATE = 0.3
"""Share of those second answers that are the reference. If repairs were always right, the pass rate after repair would
start near 1 and leave nothing to learn."""


class CodingTasks(TaskSource):
    """Endless training tasks, held-out tasks and demonstrations of the procedural family."""

    def __init__(self, *, seed: int, num_visible: int, num_hidden: int) -> None:
        require_checks(num_visible=num_visible, num_hidden=num_hidden)
        self._seed = seed
        self._num_visible = num_visible
        self._num_hidden = num_hidden

    def train(self, index: int) -> Task:
        """Training task number `index` of this run's seed."""
        if index < 0:
            raise EnvError(f"coding tasks: the index must not be negative, got {index}; count from 0")
        rng = random.Random(f"coding-train:{self._seed}:{index}")
        return self._task(f"coding/train/{self._seed}/{index}", rng.choice(TRAIN), rng, Split.TRAIN, index)

    def held_out(self, count: int) -> tuple[Task, ...]:
        """The first `count` held-out tasks; they do not depend on the run's seed."""
        return tuple(self._held_out(index) for index in range(count))

    def demonstrations(self, seed: int) -> Iterator[tuple[Task, tuple[str, ...]]]:
        """Endless answers of the careless solver: one, or two when the first fails a visible example."""
        rng = random.Random(f"coding-demonstrations:{seed}")
        number = 0
        while True:
            composition = rng.choice(DEMONSTRATED)
            task_id = f"coding/demonstration/{seed}/{number}"
            task = self._task(task_id, composition, rng, Split.TRAIN, number)
            first = careless(composition, rng)
            answers = [first]
            if _first_failure(first, problem_of(task)) is not None and rng.random() < REPAIR_SHOWN_RATE:
                right = rng.random() < REPAIR_RIGHT_RATE
                answers.append(composition if right else careless(composition, rng))
            yield task, tuple(format_answer(answer.source) for answer in answers)
            number += 1

    def corpus(self) -> Iterator[str]:
        """Prompts, answers and feedback of the training compositions."""
        rng = random.Random(f"coding-corpus:{CORPUS_SEED}")
        for composition in TRAIN:
            yield composition.prompt
            yield format_answer(composition.source)
            task = self._task("coding/corpus", composition, rng, Split.TRAIN, 0)
            line = _first_failure(careless(composition, rng), problem_of(task))
            if line is not None:
                yield line

    def solve(self, task: Task) -> tuple[str, ...]:
        """The right answer to a task of this source, for checks of the environment."""
        return (format_answer(Composition(*task.payload["composition"]).source),)

    def _held_out(self, index: int) -> Task:
        rng = random.Random(f"coding-held-out:{HELD_OUT_SEED}:{index}")
        return self._task(f"coding/held_out/{index}", rng.choice(HELD_OUT), rng, Split.HELD_OUT, index)

    def _task(self, task_id: str, composition: Composition, rng: random.Random, split: Split, seed: int) -> Task:
        lists = _distinct_lists(rng, self._num_visible + self._num_hidden)
        examples = tuple(Example(args=(xs,), expected=composition.evaluate(xs)) for xs in lists)
        problem = Problem(
            entry_point=ENTRY_POINT,
            visible=examples[: self._num_visible],
            hidden=examples[self._num_visible :],
        )
        return Task(
            id=task_id,
            messages=(Message(role=Role.USER, content=composition.prompt),),
            payload={**problem.payload(), "composition": list(composition)},
            split=split,
            seed=seed,
        )


def _distinct_lists(rng: random.Random, count: int) -> list[list[int]]:
    lists: list[list[int]] = []
    while len(lists) < count:
        length = rng.randint(SHORTEST_LIST, LONGEST_LIST)
        xs = [rng.randint(LOWEST_ITEM, HIGHEST_ITEM) for _ in range(length)]
        if xs not in lists:
            lists.append(xs)
    return lists


def _first_failure(answer: Composition, problem: Problem) -> str | None:
    """The feedback line that `answer` gets on the visible examples, or `None` when it passes them."""
    for example in problem.visible:
        got = answer.evaluate(cast(list[int], example.args[0]))
        if type(got) is not type(example.expected) or got != example.expected:
            return feedback.wrong_value(problem.entry_point, example.args, got=got, want=example.expected)
    return None

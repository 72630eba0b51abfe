"""BFCL's rows as tasks. The four categories are made from the same 200 rows, so a row is held out in all of them."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from envs.base import EnvError, TaskSource, texts
from envs.bfcl.data import CATEGORIES, KnownCall, rows
from envs.bfcl.env import declarations_of
from envs.tool_env import calls
from rollout.types import Answer, Message, Role, Split, Task

HELD_OUT_EVERY = 5
DONE = "Done."


class BfclTasks(TaskSource):
    """The tasks of some categories, in an order of every epoch's own."""

    def __init__(self, categories: Sequence[str], *, seed: int) -> None:
        unknown = [category for category in categories if category not in CATEGORIES]
        if unknown or not categories:
            raise EnvError(
                f"env.bfcl_categories: choose some of {', '.join(CATEGORIES)}, got {unknown or list(categories)}"
            )
        self._seed = seed
        tasks = [_task(category, row) for category in categories for row in rows(category)]
        self._train = [task for task in tasks if task.split is Split.TRAIN]
        # By row, so that the first few hold some of each category.
        self._held_out = sorted((task for task in tasks if task.split is Split.HELD_OUT), key=lambda task: task.seed)

    def train(self, index: int) -> Task:
        """See `TaskSource`."""
        epoch, position = divmod(index, len(self._train))
        order = list(range(len(self._train)))
        random.Random(f"bfcl:{self._seed}:{epoch}").shuffle(order)
        return self._train[order[position]]

    def held_out(self, count: int) -> tuple[Task, ...]:
        """See `TaskSource`."""
        return tuple(self._held_out[:count])

    def demonstrations(self, seed: int) -> Iterator[tuple[Task, tuple[Answer, ...]]]:
        """Training tasks with their known answers, without end."""
        draw = random.Random(f"bfcl-demonstrations:{seed}")
        while True:
            task = draw.choice(self._train)
            yield task, self.solve(task)

    def corpus(self) -> Iterator[str]:
        """Requests and known answers of the training tasks."""
        for task in self._train:
            yield from task.payload["requests"]
            for answer in self.solve(task):
                yield from texts(answer)

    def solve(self, task: Task) -> tuple[Answer, ...]:
        """For each request its known calls, one a turn, and a word to end it."""
        answers: list[Answer] = []
        for turn in task.payload["known"]:
            for name, positional, named in turn:
                known = KnownCall(name, tuple(positional), named)
                answers.append(calls((name, known.arguments())))
            answers.append(DONE)
        return tuple(answers)


def _task(category: str, row: Mapping[str, Any]) -> Task:
    number = int(row["id"].rsplit("_", 1)[1])
    excluded = row.get("excluded_function", [])
    later: Mapping[str, list[str]] = row.get("missed_function", {})
    hidden = {*excluded, *(name for names in later.values() for name in names)}
    requests = ["\n".join(message["content"] for message in turn) for turn in row["question"]]
    known = [[KnownCall.parse(text) for text in turn] for turn in row["ground_truth"]]
    apis = row["involved_classes"]
    declared = tuple(tool for api in apis for name, tool in declarations_of(api).items() if name not in hidden)
    return Task(
        id=f"bfcl/{category}/{number}",
        messages=(Message(role=Role.USER, content=requests[0]),),
        payload={
            "objects": {api: row["initial_config"].get(api, {}) for api in apis},
            "long_context": category == "long_context",
            "requests": requests,
            "known": [[[each.name, list(each.positional), dict(each.named)] for each in turn] for turn in known],
            "later": later,
            "excluded": excluded,
        },
        split=Split.HELD_OUT if number % HELD_OUT_EVERY == 0 else Split.TRAIN,
        seed=number,
        tools=declared,
    )

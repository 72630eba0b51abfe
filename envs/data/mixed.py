"""Several sources as one, by weight and in stages.

Training tasks come in blocks of `BLOCK`: each block has so many tasks of a source as its weight says (largest
remainders), in an order of the seed's and the block's. So the task at an index follows from the seed and the index
alone, and every source is read through epoch by epoch. A stage begins where a source starts or ends.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from envs.base import TaskSource
from envs.config import DatasetConfig
from envs.data.errors import DatasetError
from envs.data.indexed import IndexedTasks
from rollout.types import Answer, Task

BLOCK = 1000


@dataclass(frozen=True, slots=True)
class _Stage:
    first: int
    end: int | None
    shares: Mapping[str, int]
    """Tasks of each source in a block."""


class MixedTasks(TaskSource):
    """Sources by name, mixed. The id of a task is `<name>/<its own id>`."""

    def __init__(self, parts: Mapping[str, IndexedTasks], settings: Mapping[str, DatasetConfig], *, seed: int) -> None:
        self._parts = dict(sorted(parts.items()))  # by name, so that the order of the settings changes no task
        self._seed = seed
        self._stages = _stages(dict(sorted(settings.items())))
        self._block: tuple[tuple[int, int], list[str]] = ((-1, -1), [])
        for part in self._parts.values():
            for name, other in self._parts.items():
                if other is not part:
                    part.refuse_leaks(other.train_prompts, f"env.datasets.{name}")

    def train(self, index: int) -> Task:
        """Training task number `index`."""
        if index < 0:
            raise DatasetError(f"env.datasets: the index must not be negative, got {index}; count from 0")
        number = max(n for n, stage in enumerate(self._stages) if stage.first <= index)
        block, slot = divmod(index - self._stages[number].first, BLOCK)
        order = self._order(number, block)
        name = order[slot]
        before = sum(self._drawn(n, name) for n in range(number))
        before += block * self._stages[number].shares.get(name, 0) + order[:slot].count(name)
        return _named(name, self._parts[name].train(before))

    def held_out(self, count: int) -> tuple[Task, ...]:
        """Held-out tasks of all sources in turn, until `count` or all."""
        lists = {name: part.held_out(count) for name, part in self._parts.items()}
        rounds = max(len(tasks) for tasks in lists.values())
        turns = (_named(name, tasks[n]) for n in range(rounds) for name, tasks in lists.items() if n < len(tasks))
        return tuple(turns)[:count]

    def demonstrations(self, seed: int) -> Iterator[tuple[Task, tuple[Answer, ...]]]:
        """Endless demonstrations of the sources that have some, in turn. Raises `DatasetError` when none has."""
        shown = {name: part.demonstrations(seed) for name, part in self._parts.items() if part.has_demonstrations}
        if not shown:
            raise DatasetError(
                "env.datasets: no demonstrations, got no training task with a solution; add solutions, or start from "
                "a checkpoint without a warm start"
            )
        while True:
            for name, tasks in shown.items():
                task, answers = next(tasks)
                yield _named(name, task), answers

    def corpus(self) -> Iterator[str]:
        """The text of all sources."""
        for part in self._parts.values():
            yield from part.corpus()

    def solve(self, task: Task) -> tuple[Answer, ...] | None:
        """The right answers to a task, where they are known."""
        name, _, own_id = task.id.partition("/")
        return self._parts[name].solve(replace(task, id=own_id)) if name in self._parts else None

    def _order(self, stage: int, block: int) -> list[str]:
        if self._block[0] != (stage, block):
            names = [name for name, share in self._stages[stage].shares.items() for _ in range(share)]
            random.Random(f"mix:{self._seed}:{stage}:{block}").shuffle(names)
            self._block = ((stage, block), names)
        return self._block[1]

    def _drawn(self, number: int, name: str) -> int:
        """How many tasks of a source a finished stage has taken."""
        stage = self._stages[number]
        blocks, rest = divmod((stage.end or stage.first) - stage.first, BLOCK)
        key, order = self._block
        drawn = blocks * stage.shares.get(name, 0) + self._order(number, blocks)[:rest].count(name)
        self._block = (key, order)
        return drawn


def _named(name: str, task: Task) -> Task:
    return replace(task, id=f"{name}/{task.id}")


def _stages(settings: Mapping[str, DatasetConfig]) -> list[_Stage]:
    """The stages in their order; the last has no end. Raises `DatasetError` for settings that leave a gap."""
    for name, source in settings.items():
        if not (math.isfinite(source.weight) and source.weight > 0):
            raise DatasetError(
                f"env.datasets.{name}.weight: must be positive, got {source.weight}; raise it or drop it"
            )
        if source.first_task < 0 or (source.last_task != 0 and source.last_task <= source.first_task):
            raise DatasetError(
                f"env.datasets.{name}.last_task: must be beyond first_task={source.first_task}, or 0 for no end, got "
                f"{source.last_task}; raise it"
            )
    bounds: list[int] = sorted(
        {0} | {s.first_task for s in settings.values()} | {s.last_task for s in settings.values()}
    )
    ends: Sequence[int | None] = [*(end for _, end in pairwise(bounds)), None]
    return [_Stage(first, end, _shares(settings, first)) for first, end in zip(bounds, ends, strict=True)]


def _shares(settings: Mapping[str, DatasetConfig], index: int) -> Mapping[str, int]:
    weights = {
        name: source.weight
        for name, source in settings.items()
        if source.first_task <= index and (source.last_task == 0 or index < source.last_task)
    }
    if not weights:
        raise DatasetError(f"env.datasets: no source gives training task {index}, got stages with a gap; let one last")
    exact = {name: BLOCK * weight / sum(weights.values()) for name, weight in weights.items()}
    shares = {name: int(share) for name, share in exact.items()}
    by_remainder = sorted(exact, key=lambda name: shares[name] - exact[name])
    for name in by_remainder[: BLOCK - sum(shares.values())]:
        shares[name] += 1
    for name, share in shares.items():
        if share == 0:
            raise DatasetError(
                f"env.datasets.{name}.weight: less than one task in {BLOCK}, got {weights[name]:g} of "
                f"{sum(weights.values()):g}; raise it or drop the source"
            )
    return shares

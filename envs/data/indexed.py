"""A finite list of tasks as a source, whether it lies in memory or in a file that is read row by row.

One pass at the start checks every task and keeps some 40 bytes of each (position, hashes, rank), so a list may be as
long as the disk allows.
"""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from array import array
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from envs.base import TaskSource, texts
from envs.data.adapters import Item
from envs.data.digest import text_digest
from envs.data.errors import DatasetError
from rollout.types import Answer, Split, Task

HELD_OUT_FRAC = 0.1


class IndexedTasks(TaskSource, ABC):
    """Tasks by position: reshuffled every epoch by (seed, epoch), held-out tasks apart.

    Without a held-out task, a share of `HELD_OUT_FRAC` is held out by a hash of the prompt. With ranks, the first
    `curriculum_tasks` training tasks (0: as many as there are) are an even choice of all, from the lowest rank to the
    highest.
    """

    def __init__(self, *, length: int, seed: int, name: str, curriculum_tasks: int | None = None) -> None:
        self._seed = seed
        self._name = name
        self._order: tuple[int, array[int]] = (-1, array("q"))
        positions, ids, prompts = array("q"), array("Q"), array("Q")
        held, solved, ranks = array("b"), array("b"), array("d")
        for position in range(length):
            read = self._read(position)
            if read is None:
                continue
            item, rank = read
            positions.append(position)
            ids.append(text_digest(item.task.id))
            prompts.append(_prompt_digest(item.task))
            held.append(item.task.split is Split.HELD_OUT)
            solved.append(item.solution is not None)
            ranks.append(rank)
        where = np.array(positions, dtype=np.int64)
        self._refuse_duplicates(np.array(ids, dtype=np.uint64), where)
        digests, is_held = np.array(prompts, dtype=np.uint64), np.array(held, dtype=bool)
        if len(where) and not is_held.any():
            bound = np.uint64(max(int(HELD_OUT_FRAC * 2**32), int(digests.min() >> np.uint64(32)) + 1))
            is_held = (digests >> np.uint64(32)) < bound
        self._train = array("q", where[~is_held].tolist())
        self._held_out = array("q", where[is_held].tolist())
        self._shown = array("q", where[~is_held & np.array(solved, dtype=bool)].tolist())
        for split, part in ((Split.TRAIN, self._train), (Split.HELD_OUT, self._held_out)):
            if not part:
                raise DatasetError(f"{name}: no {split.value} task, got {len(where)} tasks; give at least one")
        self.train_prompts: npt.NDArray[np.uint64] = np.unique(digests[~is_held])
        self.refuse_leaks(self.train_prompts, name)
        by_id = np.argsort(np.array(ids, dtype=np.uint64))
        self._ids: tuple[npt.NDArray[np.uint64], npt.NDArray[np.int64]] = (
            np.array(ids, dtype=np.uint64)[by_id],
            where[by_id],
        )
        self._eased = array("q")
        if curriculum_tasks is not None:
            self._eased = self._by_rank(np.array(ranks, dtype=np.float64)[~is_held], curriculum_tasks)

    @abstractmethod
    def _read(self, position: int) -> tuple[Item, float] | None:
        """The task at a position as the data give it, with its rank; `None` where there is none."""

    def _pair(self, first: int, second: int) -> str:
        """Where two tasks of one id stand."""
        return "more than once"

    def train(self, index: int) -> Task:
        """Training task number `index`; every epoch has its own order."""
        if index < 0:
            raise DatasetError(f"{self._name}: the index must not be negative, got {index}; count from 0")
        if index < len(self._eased):
            return self._task(self._eased[index], Split.TRAIN)
        epoch, position = divmod(index - len(self._eased), len(self._train))
        if self._order[0] != epoch:
            order = array("q", range(len(self._train)))
            random.Random(f"epoch:{self._seed}:{epoch}").shuffle(order)
            self._order = (epoch, order)
        return self._task(self._train[self._order[1][position]], Split.TRAIN)

    def held_out(self, count: int) -> tuple[Task, ...]:
        """The first `count` held-out tasks in the order of the data (all of them, when there are fewer)."""
        return tuple(self._task(position, Split.HELD_OUT) for position in self._held_out[:count])

    def demonstrations(self, seed: int) -> Iterator[tuple[Task, tuple[Answer, ...]]]:
        """Endless training tasks with their solutions. Raises `DatasetError` when no training task has one."""
        if not self._shown:
            raise DatasetError(
                f"{self._name}: no demonstrations, got {len(self._train)} training tasks without a solution; "
                "add solutions, or start from a checkpoint without a warm start"
            )
        rng = random.Random(f"demonstrations:{seed}")
        while True:
            item = self._item(rng.choice(self._shown))
            yield replace(item.task, split=Split.TRAIN), item.solution or ()

    def corpus(self) -> Iterator[str]:
        """Opening messages and solutions of the training tasks."""
        for position in self._train:
            item = self._item(position)
            for message in item.task.messages:
                yield message.content
            for answer in item.solution or ():
                yield from texts(answer)

    def solve(self, task: Task) -> tuple[Answer, ...] | None:
        """The right answers to a task, where they are known."""
        ids, positions = self._ids
        digest = np.uint64(text_digest(task.id))
        slot = int(np.searchsorted(ids, digest))
        return self._item(int(positions[slot])).solution if slot < len(ids) and ids[slot] == digest else None

    @property
    def num_train(self) -> int:
        """Number of training tasks."""
        return len(self._train)

    @property
    def num_held_out(self) -> int:
        """Number of held-out tasks."""
        return len(self._held_out)

    @property
    def has_demonstrations(self) -> bool:
        """Whether a training task has a solution."""
        return bool(self._shown)

    def refuse_leaks(self, asked: npt.NDArray[np.uint64], of: str) -> None:
        """Raise `DatasetError` when a held-out task asks what is in `asked`, the sorted prompts of `of`'s training."""
        for position in self._held_out:
            task = self._item(position).task
            digest = np.uint64(_prompt_digest(task))
            slot = int(np.searchsorted(asked, digest))
            if slot < len(asked) and asked[slot] == digest:
                other = "" if of == self._name else f" of {of}"
                raise DatasetError(
                    f"{self._name}: held-out task {task.id!r} asks what a training task{other} asks, got the prompt "
                    f"{task.messages[-1].content[:60]!r} in both splits; move one of them"
                )

    def _item(self, position: int) -> Item:
        read = self._read(position)
        if read is None:
            raise DatasetError(f"{self._name}: the data changed, got no task at {position}; start the run again")
        return read[0]

    def _task(self, position: int, split: Split) -> Task:
        task = self._item(position).task
        return task if task.split is split else replace(task, split=split)

    def _refuse_duplicates(self, ids: npt.NDArray[np.uint64], where: npt.NDArray[np.int64]) -> None:
        order = np.argsort(ids, kind="stable")
        twins = np.flatnonzero(ids[order][1:] == ids[order][:-1])
        if len(twins):
            first, second = min((int(where[order[twin]]), int(where[order[twin + 1]])) for twin in twins)
            raise DatasetError(
                f"{self._name}: ids must differ, got {self._item(first).task.id!r} {self._pair(first, second)}; "
                "rename one"
            )

    def _by_rank(self, ranks: npt.NDArray[np.float64], count: int) -> array[int]:
        """`count` training positions, ranks rising; equal ranks in an order of the seed's."""
        num_train = len(self._train)
        if not 0 <= count <= num_train:
            raise DatasetError(
                f"env.curriculum_tasks: must be 0 (all) to the number of training tasks, {num_train}, got {count}; "
                "lower it"
            )
        count = count or num_train
        shuffled = list(range(num_train))
        random.Random(f"curriculum:{self._seed}").shuffle(shuffled)
        shuffled.sort(key=lambda slot: ranks[slot])
        return array("q", (self._train[shuffled[number * num_train // count]] for number in range(count)))


class TaskList(IndexedTasks):
    """Tasks in memory. `solutions` maps the id of a task to the answers of its demonstration, one a turn."""

    def __init__(
        self, tasks: Iterable[Task], *, seed: int, name: str, solutions: Mapping[str, tuple[Answer, ...]] | None = None
    ) -> None:
        self._items = [Item(task, (solutions or {}).get(task.id)) for task in tasks]
        super().__init__(length=len(self._items), seed=seed, name=name)

    def _read(self, position: int) -> tuple[Item, float] | None:
        return self._items[position], 0.0


def _prompt_digest(task: Task) -> int:
    return text_digest("\n".join(message.content for message in task.messages))

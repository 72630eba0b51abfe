"""An environment of tools: the policy changes a state by calls, and the state it leaves is graded.

Subclass `ToolEnv`: `tasks`, `start`, one method under `@tool` for each tool, and `grade` (README.md has an example).
A turn without calls ends the episode, unless `reply` has something to say to it. Whatever the grading needs is computed
here, outside anything that the policy reaches.
"""

from __future__ import annotations

import hashlib
import json
import pickle
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from envs.base import Env, EnvError, Solver, StepResult, TaskSource
from envs.tools import ToolBox, turn_of_calls
from rollout.types import Answer, Checks, Evidence, Json, Message, Role, Task, ToolCall, TurnEvidence, Verdict


def call(name: str, /, **arguments: Json) -> Message:
    """A turn of the policy that makes one call, for demonstrations and tests."""
    return calls((name, arguments))


def calls(*pairs: tuple[str, Mapping[str, Json]]) -> Message:
    """A turn of the policy that makes several calls, each a name and its arguments."""
    made = tuple(
        ToolCall(id=f"call_{index}", name=name, arguments=arguments) for index, (name, arguments) in enumerate(pairs)
    )
    return Message(role=Role.ASSISTANT, content="", tool_calls=made)


class ToolEnv(Env):
    """See the module. `state` is JSON: it is hashed, compared and copied."""

    state: dict[str, Any]
    _task: Task | None = None

    @abstractmethod
    def tasks(self) -> Iterable[Task] | TaskSource:
        """The tasks, training and held out."""

    @abstractmethod
    def start(self, task: Task) -> dict[str, Any]:
        """The state that the episode starts from, new for every call."""

    @abstractmethod
    def grade(self, task: Task) -> bool | Checks:
        """Whether `state` solves the task, or how many checks it passes."""

    def milestones(self, task: Task) -> Mapping[str, bool]:
        """States on the way to the goal, and whether each holds now; those that hold at the start do not count."""
        return {}

    def violations(self, task: Task) -> Sequence[str]:
        """What must not be, and is: an episode with one of these after any turn has solved nothing."""
        return ()

    def reply(self, task: Task, text: str) -> str | None:
        """What the user says to a turn without calls; `None` ends the episode."""
        return None

    @property
    def declarations(self) -> tuple[Mapping[str, Any], ...]:
        """The tools as chat formats show them."""
        return ToolBox.of(self).declarations

    async def reset(self, task: Task) -> tuple[Message, ...]:
        """A fresh state and the task's own messages."""
        self._task, self.state = task, self.start(task)
        self._box = ToolBox.of(self)
        self._turns: tuple[TurnEvidence, ...] = ()
        self._violations: tuple[str, ...] = tuple(self.violations(task))
        self._given = frozenset(name for name, holds in self.milestones(task).items() if holds)
        if self._violations:
            raise EnvError(
                f"task {task.id}: must not start in a forbidden state, got {self._violations[0]!r}; fix start"
            )
        return task.messages

    async def step(self, message: Message) -> StepResult:
        """Run the calls of the turn one after the other; without any, hear what `reply` says."""
        task, before = self._current(), self._box.counts
        if message.tool_calls:
            observations = await self._box.run(message.tool_calls)
        else:
            said = self.reply(task, message.content)
            observations = () if said is None else (Message(role=Role.USER, content=said),)
        broken = tuple(self.violations(task))
        reached = [holds for name, holds in self.milestones(task).items() if name not in self._given]
        milestones = Checks(passed=sum(map(bool, reached)), declared=len(reached))
        turn = turn_of_calls(message, before, self._box.counts, milestones=milestones, violations=broken)
        self._turns = (*self._turns, turn)
        self._violations = tuple(dict.fromkeys((*self._violations, *broken)))
        return StepResult(observations=observations, terminated=not observations)

    async def evidence(self) -> Evidence:
        """Grade the state as it stands; an episode without a turn, or with a violation, has passed nothing."""
        task = self._current()
        graded = self.grade(task)
        hidden = graded if isinstance(graded, Checks) else Checks(passed=int(graded), declared=1)
        reason = "no answer" if not self._turns else "; ".join(self._violations)
        if reason:
            hidden = Checks(passed=0, declared=hidden.declared)
        return Evidence(
            verdict=Verdict.POLICY_FAILED if reason else Verdict.VALID,
            turns=self._turns,
            hidden=hidden,
            reason=reason,
            extras={"state": self.state_hash()},
        )

    async def close(self) -> None:
        """Nothing is held."""

    def state_hash(self) -> str:
        """A digest of `state`: equal states have equal hashes, in every process."""
        text = json.dumps(self.state, sort_keys=True, ensure_ascii=False)
        return hashlib.blake2b(text.encode(errors="surrogatepass"), digest_size=16).hexdigest()

    def snapshot(self) -> bytes:
        """The episode as it stands; `restore` of another instance goes on from it."""
        return pickle.dumps((self._current(), self.state, self._given, self._turns, self._violations, self._box.counts))

    def restore(self, blob: bytes) -> None:
        """Take the place of the episode that made `blob` (of this program's own making: it is unpickled)."""
        self._task, self.state, self._given, self._turns, self._violations, counts = pickle.loads(blob)
        self._box = ToolBox.of(self)
        self._box.counts = counts

    def _current(self) -> Task:
        if self._task is None:
            raise EnvError(f"{type(self).__name__}: no episode is open, got a call before reset; call reset first")
        return self._task


class WithTools(TaskSource):
    """The tasks of another source with tools declared in each."""

    def __init__(self, source: TaskSource, tools: tuple[Mapping[str, Any], ...]) -> None:
        self._source = source
        self._tools = tools

    def train(self, index: int) -> Task:
        """See `TaskSource`."""
        return self._declared(self._source.train(index))

    def held_out(self, count: int) -> tuple[Task, ...]:
        """See `TaskSource`."""
        return tuple(map(self._declared, self._source.held_out(count)))

    def demonstrations(self, seed: int) -> Iterator[tuple[Task, tuple[Answer, ...]]]:
        """See `TaskSource`."""
        for task, answers in self._source.demonstrations(seed):
            yield self._declared(task), answers

    def corpus(self) -> Iterator[str]:
        """See `TaskSource`."""
        return self._source.corpus()

    def solve(self, task: Task) -> Sequence[Answer] | None:
        """The right answers, where the source knows them."""
        return self._source.solve(task) if isinstance(self._source, Solver) else None

    def _declared(self, task: Task) -> Task:
        return task if task.tools else replace(task, tools=self._tools)

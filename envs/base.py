"""The contract of an environment: one instance runs one episode.

The environment speaks in messages; tokens belong to `rollout.renderer`. It writes the `Evidence` that rewards judge,
outside any box that the policy's code can reach. Sits below `rollout.episode`, which drives it:

    observation = await env.reset(task)
    while not done: result = await env.step(message)
    evidence = await env.evidence()       # also after a truncation
    await env.close()                     # always, also after an exception; idempotent
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol, runtime_checkable

from rollout.types import Answer, Evidence, Message, Task, ToolCall


class EnvError(ValueError):
    """A task or a setting that an environment cannot run."""


class SandboxLost(RuntimeError):  # noqa: N818 (an event at the boundary, not a mistake of the caller)
    """Infrastructure failed: the episode is masked and retried, never scored 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """What the environment says to one answer. `terminated`: the episode is over and nothing more will be read."""

    observations: tuple[Message, ...]
    terminated: bool


class Env(ABC):
    """One episode of one task. Implementations may block only in `asyncio.to_thread`."""

    @abstractmethod
    async def reset(self, task: Task) -> tuple[Message, ...]:
        """Start the episode and return the opening messages."""

    @abstractmethod
    async def step(self, message: Message) -> StepResult:
        """Act on one answer of the policy. Raises `SandboxLost` when infrastructure fails."""

    @abstractmethod
    async def evidence(self) -> Evidence:
        """Grade the episode as it stands. Raises `SandboxLost` when infrastructure fails."""

    @abstractmethod
    async def close(self) -> None:
        """Give every resource back. Idempotent."""

    def state_hash(self) -> str:
        """A digest of the state that the policy's actions change: equal states, equal hashes. Raises `EnvError`."""
        raise EnvError(f"{type(self).__name__}: its state has no hash, got a call of state_hash; implement it")

    def snapshot(self) -> bytes:
        """The open episode as bytes that `restore` takes. Raises `EnvError` where it cannot be copied."""
        raise EnvError(f"{type(self).__name__}: an episode cannot be copied, got a call of snapshot; implement it")

    def restore(self, blob: bytes) -> None:
        """Go on with the episode that `snapshot` copied. Raises `EnvError` where it cannot be."""
        raise EnvError(f"{type(self).__name__}: an episode cannot be restored, got a call of restore; implement it")


class EnvFactory(ABC):
    """Makes episodes and tasks; one for each rollout worker, shared by its episodes (it owns the sandbox pool)."""

    @abstractmethod
    def make(self, *, fresh_grading: bool = False) -> Env:
        """A new environment for one episode.

        `fresh_grading` asks that the final answer be graded in a sandbox that has run nothing before (evaluation);
        otherwise a pooled one that was reset will do. An environment without sandboxes ignores it.
        """

    @abstractmethod
    def close(self) -> None:
        """Give back what the episodes shared. Idempotent."""


def texts(answer: Answer) -> Iterator[str]:
    """What an answer spells, for a tokenizer's corpus: its content, and each call as `name {"argument": value}`."""
    if isinstance(answer, str):
        yield answer
        return
    if answer.content:
        yield answer.content
    for call in answer.tool_calls:
        if isinstance(call, ToolCall):
            yield spelled(call)


def spelled(call: ToolCall) -> str:
    """A call as text: `name {"argument": value}`."""
    return f"{call.name} {json.dumps(call.arguments, ensure_ascii=False, default=dict)}"


@runtime_checkable
class Solver(Protocol):
    """Whatever knows the right answers to tasks, one a turn; `None` where it does not."""

    def solve(self, task: Task) -> Sequence[Answer] | None:
        """The answers of an episode that passes every check."""
        ...


class TaskSource(ABC):
    """An indexed stream of training tasks and a fixed list of held-out tasks.

    `train(i)` depends on the seed and `i` alone: the data cursor of a run is one integer, so a resumed run reads on
    exactly where it stopped.
    """

    evaluation_only: ClassVar[bool] = False
    """Whether it has held-out tasks alone: then the other methods raise, and no run trains on it."""

    @abstractmethod
    def train(self, index: int) -> Task:
        """Training task number `index` (any index >= 0; a finite data set is reshuffled every epoch)."""

    @abstractmethod
    def held_out(self, count: int) -> tuple[Task, ...]:
        """The first `count` held-out tasks, the same in every run of this source."""

    @abstractmethod
    def demonstrations(self, seed: int) -> Iterator[tuple[Task, tuple[Answer, ...]]]:
        """Endless (task, answers of the scripted solver, one a turn); answers after the episode's end are unused."""

    @abstractmethod
    def corpus(self) -> Iterator[str]:
        """Text of the environment's family (training split only), for training a tokenizer."""

"""A user's own environment: what `env.target` may name, and a base class that makes one short.

    # my_pkg/my_env.py
    from envs.custom import TextEnv, question

    class Double(TextEnv):
        def __init__(self, highest: int = 9) -> None:
            self.highest = highest

        def tasks(self):
            return [question(f"double-{n}", f"Double {n}.", answer=2 * n) for n in range(1, self.highest + 1)]

        def grade(self, task, answers):
            return answers[-1].strip() == str(task.payload["answer"])

    python -m rl.train env=custom env.target=my_pkg.my_env:Double +env.params.highest=20

The target is called with `env.params` and makes either an `Env` (one is made for each episode), or an `EnvFactory`,
where episodes share something. Either has a method `tasks()`: an iterable of `Task` (a tenth is held out when none says
`split=HELD_OUT`), or a `TaskSource`. A method `solve(task)` returns the answers of a demonstration, one a turn, and is
needed for a warm start only. Whatever fails in there is caught at the episode's boundary and masked, never scored 0.
"""

from __future__ import annotations

import zlib
from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol, cast, runtime_checkable

from envs.base import Env, EnvFactory, Solver, StepResult, TaskSource
from envs.config import EnvConfig
from envs.dataset import TaskList, dataset_tasks
from envs.extension import ExtensionError, load_target
from envs.tool_env import ToolEnv, WithTools
from rollout.types import Answer, Checks, Evidence, Message, Role, Split, Task, TurnEvidence, Verdict


def question(task_id: str, prompt: str, *, split: Split = Split.TRAIN, **payload: Any) -> Task:
    """A task that opens with one user message; `payload` is what the grading needs, which the policy never sees."""
    return Task(
        id=task_id,
        messages=(Message(role=Role.USER, content=prompt),),
        payload=payload,
        split=split,
        seed=zlib.crc32(task_id.encode()),
    )


class TextEnv(Env):
    """An environment of plain text: implement `tasks` and `grade`, and `reply` when an episode has several turns."""

    _task: Task | None = None
    _answers: tuple[str, ...] = ()

    @abstractmethod
    def tasks(self) -> Iterable[Task] | TaskSource:
        """The tasks, training and held out."""

    @abstractmethod
    def grade(self, task: Task, answers: Sequence[str]) -> bool | Checks:
        """Whether the answers so far (at least one) solve the task, or how many checks they pass."""

    def reply(self, task: Task, answers: Sequence[str]) -> str | None:
        """What is said to the last answer; `None` ends the episode."""
        return None

    async def reset(self, task: Task) -> tuple[Message, ...]:
        """Open with the task's own messages."""
        self._task, self._answers = task, ()
        return task.messages

    async def step(self, message: Message) -> StepResult:
        """Keep the answer and say what `reply` says."""
        self._answers = (*self._answers, message.content)
        text = self.reply(self._current(), self._answers)
        if text is None:
            return StepResult(observations=(), terminated=True)
        return StepResult(observations=(Message(role=Role.TOOL, content=text),), terminated=False)

    async def evidence(self) -> Evidence:
        """Grade what was answered; nothing answered is a failed check of the policy."""
        turns = tuple(
            TurnEvidence(well_formed=bool(answer.strip()), visible=Checks(passed=0, declared=0))
            for answer in self._answers
        )
        if not turns:
            failed = Checks(passed=0, declared=1)
            return Evidence(verdict=Verdict.POLICY_FAILED, turns=(), hidden=failed, reason="no answer")
        graded = self.grade(self._current(), self._answers)
        hidden = graded if isinstance(graded, Checks) else Checks(passed=int(graded), declared=1)
        return Evidence(verdict=Verdict.VALID, turns=turns, hidden=hidden)

    async def close(self) -> None:
        """Nothing is held."""

    def _current(self) -> Task:
        if self._task is None:
            raise ExtensionError(
                f"{type(self).__name__}: no episode is open, got a call before reset; call reset first"
            )
        return self._task


@runtime_checkable
class _HasTasks(Protocol):
    def tasks(self) -> Iterable[Task] | TaskSource: ...


class _PerEpisode(EnvFactory):
    """Makes a user's `Env` anew for each episode."""

    def __init__(self, make: Callable[[], Env]) -> None:
        self._make = make

    def make(self, *, fresh_grading: bool = False) -> Env:
        return self._make()

    def close(self) -> None:
        pass


def _made(config: EnvConfig) -> tuple[Callable[[], Any], object]:
    """The target bound to its parameters, and a first thing that it made."""
    if config.target is None:
        raise ExtensionError("env.target: missing, got env.name=custom alone; set env.target=module:attribute")
    target, params = load_target(config.target, config.params, "env"), dict(config.params)

    def make() -> Any:
        return target(**params)

    first: object = make()
    if not isinstance(first, Env | EnvFactory):
        raise ExtensionError(
            f"env.target: must make an Env or an EnvFactory, got {type(first).__name__} from {config.target!r}; "
            "see envs/custom.py"
        )
    return make, first


def custom_factory(config: EnvConfig) -> EnvFactory:
    """The factory of a user's environment. Raises `ExtensionError`."""
    make, first = _made(config)
    return first if isinstance(first, EnvFactory) else _PerEpisode(cast(Callable[[], Env], make))


def custom_tasks(config: EnvConfig, seed: int) -> TaskSource:
    """The tasks of a user's environment, or of the data that the configuration names. Raises `ExtensionError`."""
    _, first = _made(config)
    from_data = dataset_tasks(config, seed=seed)
    tasks = _tasks(config, first, seed) if from_data is None else from_data
    return WithTools(tasks, first.declarations) if isinstance(first, ToolEnv) else tasks


def _tasks(config: EnvConfig, first: object, seed: int) -> TaskSource:
    if not isinstance(first, _HasTasks):
        raise ExtensionError(
            f"env.target: has no method tasks(), got {type(first).__name__} from {config.target!r}; "
            "add one, or set env.dataset"
        )
    tasks = first.tasks()
    if isinstance(tasks, TaskSource):
        return tasks
    tasks = tuple(tasks)
    solutions: Mapping[str, tuple[Answer, ...]] = {}
    if isinstance(first, Solver):
        solved = {task.id: first.solve(task) for task in tasks}
        solutions = {task_id: tuple(answers) for task_id, answers in solved.items() if answers is not None}
    return TaskList(tasks, seed=seed, name=f"env.target {config.target!r}", solutions=solutions)

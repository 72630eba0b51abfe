"""BFCL's own known answers pass, and what they leave out is caught; a call that hangs ends its episode alone."""

from __future__ import annotations

import asyncio
from importlib.util import find_spec

import pytest

from envs.base import EnvError, SandboxLost
from envs.bfcl.data import CATEGORIES, KnownCall, rows
from envs.bfcl.env import MORE_FUNCTIONS, BfclFactory
from envs.bfcl.tasks import DONE, BfclTasks
from envs.config import EnvConfig
from envs.registry import build_tasks
from envs.tool_env import call
from rollout.types import Message, Role, Split, Verdict

pytestmark = pytest.mark.skipif(
    find_spec("bfcl_eval") is None, reason="the package bfcl-eval is not installed: make data-packages"
)
NUM_ROWS = 200
STILL_VALID_WITHOUT_ONE = 0.01
"""Share of the dropped calls that may go unnoticed: a result that another call gives too, without a change of state."""


@pytest.fixture(scope="module")
def factory():
    made = BfclFactory(EnvConfig(call_timeout_s=5.0))
    yield made
    made.close()
    made.close()


@pytest.fixture(scope="module")
def base():
    return BfclTasks(["base"], seed=0)


def _all(tasks):
    train = [tasks.train(index) for index in range(NUM_ROWS - NUM_ROWS // 5)]
    return [*train, *tasks.held_out(NUM_ROWS)]


async def _play(factory, task, answers):
    env = factory.make()
    try:
        await env.reset(task)
        said = []
        for answer in answers:
            message = answer if isinstance(answer, Message) else Message(role=Role.ASSISTANT, content=answer)
            said.append(await env.step(message))
            if said[-1].terminated:
                break
        return await env.evidence(), said
    finally:
        await env.close()


@pytest.mark.parametrize("category", CATEGORIES)
def test_every_known_answer_is_valid(factory, category):
    tasks = BfclTasks([category], seed=0)
    played = _all(tasks)
    assert len({task.id for task in played}) == NUM_ROWS

    async def replay():
        return [(task.id, *await _play(factory, task, tasks.solve(task))) for task in played]

    for task_id, evidence, said in asyncio.run(replay()):
        assert (evidence.verdict, evidence.reason) == (Verdict.VALID, ""), task_id
        assert evidence.hidden.all_passed, task_id
        assert said[-1].terminated, task_id


def test_saying_nothing_of_use_is_never_valid(factory, base):
    async def replay():
        return [(await _play(factory, task, [DONE] * 12))[0] for task in _all(base)]

    assert [evidence.hidden.passed for evidence in asyncio.run(replay())] == [0] * NUM_ROWS


@pytest.mark.slow
def test_a_known_answer_without_one_of_its_calls_is_caught(factory, base):
    async def replay():
        missed, tried = [], 0
        for task in _all(base):
            answers = base.solve(task)
            for index, answer in enumerate(answers):
                if isinstance(answer, Message):
                    tried += 1
                    evidence, _ = await _play(factory, task, [*answers[:index], *answers[index + 1 :]])
                    missed += [(task.id, answer.tool_calls)] if evidence.hidden.all_passed else []
        return missed, tried

    missed, tried = asyncio.run(replay())
    assert tried == sum(len(turn) for row in rows("base") for turn in row["ground_truth"])
    assert len(missed) <= STILL_VALID_WITHOUT_ONE * tried, missed


def test_a_call_that_hangs_ends_its_own_episode_and_no_other(factory, base):
    hurried = BfclFactory(EnvConfig(call_timeout_s=1.0))
    (hanging,) = (task for task in _all(BfclTasks(["base"], seed=0)) if task.id == "bfcl/base/1")
    with_maths = next(task for task in _all(base) if "MathAPI" in task.payload["objects"])

    async def both():
        other = hurried.make()
        await other.reset(hanging)
        evidence, said = await _play(hurried, with_maths, [call("power", base=7, exponent=10**9), DONE])
        answers = base.solve(hanging)
        for answer in answers:
            message = answer if isinstance(answer, Message) else Message(role=Role.ASSISTANT, content=answer)
            await other.step(message)
        return evidence, said, await other.evidence()

    evidence, said, undisturbed = asyncio.run(both())
    hurried.close()
    assert said[0].terminated
    assert evidence.verdict is Verdict.POLICY_FAILED
    assert evidence.reason == "a call did not return"
    assert evidence.hidden.passed == 0
    assert undisturbed.hidden.all_passed


def test_a_dead_worker_masks_its_episodes_and_is_made_anew(base):
    factory = BfclFactory(EnvConfig())
    task = base.train(0)

    async def killed():
        env = factory.make()
        await env.reset(task)
        env._session.kill()
        with pytest.raises(SandboxLost, match="bfcl worker"):
            await env.step(Message(role=Role.ASSISTANT, content=DONE))
        await env.close()

    asyncio.run(killed())
    factory._worker._process.kill()
    factory._worker._process.wait()
    evidence, _ = asyncio.run(_play(factory, task, base.solve(task)))
    assert evidence.hidden.all_passed
    factory.close()


def test_functions_that_come_later_are_described_when_they_come(factory):
    tasks = BfclTasks(["miss_func"], seed=0)
    task = next(task for task in _all(tasks) if task.id == "bfcl/miss_func/0")
    assert task.payload["later"] == {"3": ["sort"]}
    declared = {tool["function"]["name"] for tool in task.tools}
    assert "sort" not in declared
    assert "grep" in declared
    _, said = asyncio.run(_play(factory, task, tasks.solve(task)))
    users = [message.content for result in said for message in result.observations if message.role is Role.USER]
    assert users[2].startswith(f'{MORE_FUNCTIONS}\n{{"name": "sort"')


def test_a_mistake_is_told_counted_and_leaves_the_state(factory, base):
    task = next(task for task in _all(base) if task.id == "bfcl/base/0")
    mistakes = [call("cd", folder="nowhere"), call("cd"), call("sing")]
    evidence, said = asyncio.run(_play(factory, task, [*mistakes, *base.solve(task)]))
    texts = [result.observations[0].content for result in said[:3]]
    assert texts[1] == "Error: folder: missing argument"
    assert texts[2].startswith("Error: no tool named 'sing'")
    assert [turn.num_call_errors for turn in evidence.turns[:3]] == [0, 1, 1]
    assert evidence.hidden.all_passed


def test_a_row_is_held_out_in_every_category():
    tasks = BfclTasks(CATEGORIES, seed=3)
    held_out = {task.seed for task in tasks.held_out(1000)}
    assert held_out == set(range(0, NUM_ROWS, 5))
    assert all(tasks.train(index).seed not in held_out for index in range(640))
    assert all(tasks.train(index).split is Split.TRAIN for index in range(8))


def test_what_is_no_call_of_literals_is_not_evaluated():
    assert KnownCall.parse("mv('a', destination='b')").arguments() == {"source": "a", "destination": "b"}
    for text in ("__import__('os').system('true')", "f(g())", "f(", "x"):
        with pytest.raises(EnvError, match="bfcl: a known answer must be calls of literals"):
            KnownCall.parse(text)


def test_an_unknown_category_is_named():
    with pytest.raises(EnvError, match=r"env.bfcl_categories: choose some of base, .* got \['bse'\]"):
        build_tasks(EnvConfig(name="bfcl", bfcl_categories=["bse"]), seed=0)

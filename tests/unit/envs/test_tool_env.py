"""An environment of tools: what the turns leave is graded; episodes are apart, and can be copied."""

import asyncio
import re
import sys
from pathlib import Path

import pytest

from envs.base import EnvError
from envs.check import EnvContractError, check_env
from envs.config import EnvConfig
from envs.custom import custom_factory, custom_tasks
from envs.tool_env import call, calls
from rollout.types import Checks, Message, Role, Verdict

README = (Path(__file__).parents[3] / "README.md").read_text()
(LEDGER,) = (block for block in re.findall(r"```python\n(.*?)```", README, re.DOTALL) if "class Ledger" in block)
GENEROUS = "\n\n\nclass Generous(Ledger):\n    def grade(self, task):\n        return True\n"
STRICT = """

class Strict(Ledger):
    def milestones(self, task):
        return {"ada paid": self.state["ada"] < 10, "bob has it": self.state["bob"] == task.payload["amount"]}

    def violations(self, task):
        return ["eve was paid"] if "eve" in self.state else []

    def reply(self, task, text):
        return "Go on." if text == "What?" else None
"""


@pytest.fixture
def ledger(tmp_path, monkeypatch):
    (tmp_path / "my_ledger.py").write_text(LEDGER + GENEROUS + STRICT)
    monkeypatch.syspath_prepend(tmp_path)
    yield lambda name: EnvConfig(name="custom", target=f"my_ledger:{name}")
    sys.modules.pop("my_ledger", None)


def _play(config, answers, *, amount=3):
    (task,) = (task for task in _all(config) if task.payload["amount"] == amount)
    env = custom_factory(config).make()

    async def episode():
        await env.reset(task)
        said = []
        for answer in answers:
            message = answer if isinstance(answer, Message) else Message(role=Role.ASSISTANT, content=answer)
            said.append(await env.step(message))
        return said, await env.evidence()

    return (env, *asyncio.run(episode()))


def _all(config):
    tasks = custom_tasks(config, seed=0)
    found = {task.id: task for task in (*(tasks.train(n) for n in range(20)), *tasks.held_out(8))}
    return tuple(found.values())


def test_the_example_keeps_the_contract(ledger):
    config = ledger("Ledger")
    check_env(custom_factory(config), custom_tasks(config, seed=0))
    (schema,) = _all(config)[0].tools
    assert schema["function"]["name"] == "transfer"


def test_paying_for_nothing_breaks_the_contract(ledger):
    config = ledger("Generous")
    with pytest.raises(EnvContractError, match="must pass no hidden check"):
        check_env(custom_factory(config), custom_tasks(config, seed=0))


def test_the_state_that_is_left_is_graded(ledger):
    pay = call("transfer", payer="ada", payee="bob", amount=3)
    _, said, evidence = _play(ledger("Ledger"), [pay, "Paid."])
    assert [message.content for message in said[0].observations] == ["done"]
    assert [result.terminated for result in said] == [False, True]
    assert (evidence.verdict, evidence.hidden) == (Verdict.VALID, Checks(passed=1, declared=1))
    _, _, twice = _play(ledger("Ledger"), [pay, pay, "Paid."])
    assert not twice.hidden.all_passed
    _, _, idle = _play(ledger("Ledger"), [])
    assert (idle.verdict, idle.reason) == (Verdict.POLICY_FAILED, "no answer")


def test_turns_tell_their_calls_their_mistakes_and_how_far_they_came(ledger):
    turns = [
        calls(("transfer", {"payer": "ada", "payee": "bob", "amount": 1}), ("transfer", {"payer": "ada"})),
        "What?",
        call("transfer", payer="ada", payee="bob", amount=2),
        "Paid.",
    ]
    _, said, evidence = _play(ledger("Strict"), turns)
    assert said[1].observations == (Message(role=Role.USER, content="Go on."),)
    told = [(turn.num_calls, turn.num_call_errors, turn.milestones.passed, turn.violations) for turn in evidence.turns]
    assert told == [(2, 1, 1, ()), (0, 0, 1, ()), (1, 0, 2, ()), (0, 0, 2, ())]
    assert evidence.hidden.all_passed


def test_a_violation_solves_nothing_even_when_it_is_mended(ledger):
    turns = [
        call("transfer", payer="ada", payee="eve", amount=2),
        call("transfer", payer="eve", payee="ada", amount=2),
        call("transfer", payer="ada", payee="bob", amount=3),
        "Paid.",
    ]
    _, _, evidence = _play(ledger("Strict"), turns)
    assert (evidence.verdict, evidence.reason) == (Verdict.POLICY_FAILED, "eve was paid")
    assert evidence.hidden == Checks(passed=0, declared=1)


def test_an_episode_goes_on_in_its_copy(ledger):
    config = ledger("Strict")
    env, _, _ = _play(config, [call("transfer", payer="ada", payee="bob", amount=1), call("nothing")])
    copy = custom_factory(config).make()
    copy.restore(env.snapshot())
    assert copy.state_hash() == env.state_hash()

    async def finish(which):
        await which.step(call("transfer", payer="ada", payee="bob", amount=2))
        await which.step(Message(role=Role.ASSISTANT, content="Paid."))
        return await which.evidence()

    before = env.state_hash()
    there = asyncio.run(finish(copy))
    assert env.state_hash() == before
    assert asyncio.run(finish(env)) == there
    assert there.hidden.all_passed


def test_nothing_is_open_before_reset(ledger):
    env = custom_factory(ledger("Ledger")).make()
    with pytest.raises(EnvError, match="no episode is open"):
        asyncio.run(env.evidence())

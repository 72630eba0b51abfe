import asyncio
import itertools
import sys

import pytest

from envs.base import EnvFactory
from envs.config import EnvConfig
from envs.custom import TextEnv, custom_factory, custom_tasks, question
from envs.extension import ExtensionError
from rollout.types import Checks, Message, Role, Split, Verdict

TEN_LINES = """\
from envs.custom import TextEnv, question

class Double(TextEnv):
    def __init__(self, highest: int = 9) -> None:
        self.highest = highest
    def tasks(self):
        return [question(f"double-{n}", f"Double {n}.", answer=2 * n) for n in range(1, self.highest + 1)]
    def grade(self, task, answers):
        return answers[-1].strip() == str(task.payload["answer"])
"""


class Guess(TextEnv):
    def tasks(self):
        return [question("a", "Guess.", secret=3), question("b", "Guess it.", secret=5, split=Split.HELD_OUT)]

    def reply(self, task, answers):
        return None if answers[-1] == str(task.payload["secret"]) or len(answers) == 3 else "no"

    def grade(self, task, answers):
        return Checks(passed=int(answers[-1] == str(task.payload["secret"])), declared=1)

    def solve(self, task):
        return None if task.id == "b" else ("1", "3")


@pytest.fixture
def my_env(tmp_path, monkeypatch):
    (tmp_path / "my_env.py").write_text(TEN_LINES)
    monkeypatch.syspath_prepend(tmp_path)
    yield EnvConfig(name="custom", target="my_env:Double", params={"highest": 20})
    sys.modules.pop("my_env", None)


def _play(env, task, answers):
    async def episode():
        opening = await env.reset(task)
        said = [await env.step(Message(role=Role.ASSISTANT, content=answer)) for answer in answers]
        evidence = await env.evidence()
        await env.close()
        return opening, said, evidence

    return asyncio.run(episode())


def test_an_environment_of_ten_lines(my_env):
    assert len(TEN_LINES.splitlines()) < 10
    tasks = custom_tasks(my_env, seed=0)
    held_out = tasks.held_out(100)
    train = [tasks.train(index) for index in range(20 - len(held_out))]
    assert sorted(task.payload["answer"] for task in (*train, *held_out)) == list(range(2, 42, 2))
    factory = custom_factory(my_env)
    right = str(train[0].payload["answer"])
    opening, said, evidence = _play(factory.make(), train[0], [right])
    assert opening == train[0].messages
    assert said[0].terminated
    assert evidence.hidden == Checks(passed=1, declared=1)
    assert _play(factory.make(), train[0], [right + "1"])[2].hidden == Checks(passed=0, declared=1)
    nothing = _play(factory.make(), train[0], [])[2]
    assert (nothing.verdict, nothing.hidden) == (Verdict.POLICY_FAILED, Checks(passed=0, declared=1))


def test_several_turns_and_demonstrations():
    config = EnvConfig(name="custom", target=f"{__name__}:Guess")
    tasks = custom_tasks(config, seed=0)
    assert [task.id for task in tasks.held_out(9)] == ["b"]
    assert [(task.id, answers) for task, answers in itertools.islice(tasks.demonstrations(0), 2)] == [
        ("a", ("1", "3"))
    ] * 2
    _, said, evidence = _play(custom_factory(config).make(), tasks.train(0), ["1", "3"])
    assert said[0].observations == (Message(role=Role.TOOL, content="no"),)
    assert [step.terminated for step in said] == [False, True]
    assert evidence.hidden.all_passed


def test_each_episode_has_its_own_state(my_env):
    factory = custom_factory(my_env)
    tasks = custom_tasks(my_env, seed=0)
    first, second = factory.make(), factory.make()

    async def interleaved():
        for env, index in ((first, 0), (second, 1)):
            await env.reset(tasks.train(index))
        for env, index in ((first, 0), (second, 1)):
            answer = str(tasks.train(index).payload["answer"])
            await env.step(Message(role=Role.ASSISTANT, content=answer))
        return await first.evidence(), await second.evidence()

    assert all(evidence.hidden.all_passed for evidence in asyncio.run(interleaved()))


def test_targets_that_make_something_else_are_named():
    with pytest.raises(ExtensionError, match=r"env.target: must make an Env or an EnvFactory, got dict from"):
        custom_factory(EnvConfig(name="custom", target="builtins:dict"))
    with pytest.raises(ExtensionError, match=r"env.target: missing, got env.name=custom alone"):
        custom_factory(EnvConfig(name="custom"))


def test_a_target_may_be_a_factory_with_tasks(monkeypatch):
    class Shared(EnvFactory):
        def make(self, *, fresh_grading=False):
            return Guess()

        def close(self):
            pass

        def tasks(self):
            return Guess().tasks()

    monkeypatch.setattr(sys.modules["envs.custom"], "Shared", Shared, raising=False)
    config = EnvConfig(name="custom", target="envs.custom:Shared")
    assert isinstance(custom_factory(config), Shared)
    assert custom_tasks(config, seed=0).train(0).id == "a"


def test_a_call_before_reset_is_named():
    with pytest.raises(ExtensionError, match="Guess: no episode is open, got a call before reset; call reset first"):
        asyncio.run(Guess().step(Message(role=Role.ASSISTANT, content="1")))

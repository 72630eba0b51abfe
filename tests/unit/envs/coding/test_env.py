import asyncio

import pytest

from envs.base import EnvError, SandboxLost
from envs.coding.answer import format_answer
from envs.coding.env import CodingFactory
from envs.coding.examples import problem_of
from envs.coding.tasks import CodingTasks
from envs.sandbox.base import CallOutcome, CallStatus
from envs.sandbox.grader import FunctionReport
from rollout.types import Checks, Message, Role, Verdict

WRONG = "def f(xs):\n    return 'no'\n"
BROKEN = "def f(xs):\n    return y\n"
DYING = "def f(xs):\n    return 'die'\n"
TAMPERING = "def f(xs):\n    return 'tamper'\n"
UNLOADABLE = "def f(xs):\n    return (\n"
SLOW = "def f(xs):\n    return 'slow'\n"


class InProcessRunner:
    """Runs TRUSTED programs (the ones in this file and the reference) here, and acts out what a sandbox reports."""

    def __init__(self):
        self.calls = []
        self.lost = False
        self.num_closed = 0

    def call(self, source, entry_point, inputs, *, fresh):
        self.calls.append((source, list(inputs), fresh))
        if self.lost:
            raise SandboxLost("box 1 is gone")
        if source == UNLOADABLE:
            outcome = CallOutcome(status=CallStatus.RAISED, error="not loaded")
            return FunctionReport(outcomes=(outcome,) * len(inputs), load_error="SyntaxError: '(' was never closed")
        namespace = {}
        exec(source, namespace)
        outcomes = tuple(self._outcome(namespace[entry_point], args) for args in inputs)
        return FunctionReport(outcomes=outcomes, tampered=source == TAMPERING)

    def close(self):
        self.num_closed += 1

    @staticmethod
    def _outcome(function, args):
        try:
            value = function(*args)
        except NameError as problem:
            return CallOutcome(status=CallStatus.RAISED, error=f"NameError: {problem}")
        if value in ("die", "slow"):
            return CallOutcome(status=CallStatus.DIED if value == "die" else CallStatus.TIMEOUT)
        return CallOutcome(status=CallStatus.RETURNED, value=value)


TASKS = CodingTasks(seed=0, num_visible=3, num_hidden=4)
TASK = TASKS.train(0)
(RIGHT,) = TASKS.solve(TASK)
NOTHING = Checks(passed=0, declared=4)


@pytest.fixture
def runner():
    return InProcessRunner()


def _play(runner, *answers, max_turns=2, fresh_grading=False, task=TASK):
    env = CodingFactory(runner, max_turns=max_turns).make(fresh_grading=fresh_grading)

    async def episode():
        assert await env.reset(task) == task.messages
        said = [await env.step(Message(role=Role.ASSISTANT, content=answer)) for answer in answers]
        evidence = await env.evidence()
        await env.close()
        await env.close()
        return said, evidence

    return asyncio.run(episode())


def test_the_right_answer_ends_the_episode_and_passes_everything(runner):
    said, evidence = _play(runner, RIGHT)
    assert (said[0].terminated, said[0].observations) == (True, ())
    assert evidence.verdict is Verdict.VALID
    assert evidence.hidden == Checks(passed=4, declared=4)
    assert evidence.turns[0].visible == Checks(passed=3, declared=3)
    assert (evidence.turns[0].well_formed, evidence.turns[0].note) == (True, "")


def test_a_wrong_answer_hears_the_first_failing_visible_example_and_may_try_again(runner):
    said, evidence = _play(runner, format_answer(WRONG), RIGHT)
    first = problem_of(TASK).visible[0]
    want = f"f({first.args[0]}) gave 'no', want {first.expected}"[:60]
    assert said[0].observations == (Message(role=Role.TOOL, content=want),)
    assert [step.terminated for step in said] == [False, True]
    assert evidence.hidden.all_passed
    assert [turn.visible.passed for turn in evidence.turns] == [0, 3]


@pytest.mark.parametrize(
    ("answer", "note"),
    [
        ("I give up", "no code block"),
        ("```python\ndef f(xs):", "unclosed code block"),
        (format_answer("def g(xs):\n    return 1"), "no function f"),
        (format_answer(BROKEN), "error NameError: name 'y' is not defined"),
        (format_answer(UNLOADABLE), "error SyntaxError: '(' was never closed"),
        (format_answer(DYING), "error died"),
        (format_answer(SLOW), "error timeout"),
        (format_answer(TAMPERING), "error broke the grader's protocol"),
    ],
)
def test_every_other_failure_is_one_short_line(runner, answer, note):
    said, evidence = _play(runner, answer)
    assert said[0].observations == (Message(role=Role.TOOL, content=note),)
    assert not said[0].terminated
    assert evidence.turns[0].note == note
    assert evidence.hidden == NOTHING


@pytest.mark.parametrize(
    ("answers", "verdict", "reason"),
    [
        ((), Verdict.POLICY_FAILED, "no answer"),
        (("", "```"), Verdict.POLICY_FAILED, "no well-formed answer"),
        ((format_answer(UNLOADABLE),), Verdict.POLICY_FAILED, "error SyntaxError: '(' was never closed"),
        ((format_answer(DYING),), Verdict.POLICY_FAILED, "the program ended its process"),
        ((format_answer(TAMPERING),), Verdict.POLICY_FAILED, "broke the grader's protocol"),
        ((format_answer(WRONG),), Verdict.VALID, ""),
        ((format_answer(SLOW),), Verdict.VALID, ""),
    ],
)
def test_who_is_to_blame_for_a_failure(runner, answers, verdict, reason):
    _, evidence = _play(runner, *answers)
    assert (evidence.verdict, evidence.reason, evidence.hidden) == (verdict, reason, NOTHING)
    assert evidence.tampered == (reason == "broke the grader's protocol")


def test_tampering_once_spoils_the_episode(runner):
    _, evidence = _play(runner, format_answer(TAMPERING), RIGHT)
    assert (evidence.tampered, evidence.hidden) == (True, NOTHING)


def test_the_last_well_formed_answer_is_graded(runner):
    _, evidence = _play(runner, format_answer(WRONG), "I give up")
    assert (evidence.verdict, evidence.hidden) == (Verdict.VALID, NOTHING)
    partly = "def f(xs):\n    return sum(xs)\n"
    _, evidence = _play(runner, RIGHT, format_answer(partly), max_turns=5)
    assert not evidence.hidden.all_passed


def test_visible_examples_alone_solve_nothing(runner):
    table = {str(example.args[0]): example.expected for example in problem_of(TASK).visible}
    said, evidence = _play(runner, format_answer(f"def f(xs):\n    return {table!r}.get(str(xs), 'unknown')\n"))
    assert said[0].terminated
    assert evidence.turns[0].visible.all_passed
    assert evidence.hidden == NOTHING


def test_the_turn_limit_ends_the_episode_without_feedback(runner):
    said, _ = _play(runner, "no", "no", "no", max_turns=3)
    assert [step.terminated for step in said] == [False, False, True]
    assert said[2].observations == ()


def test_no_hidden_input_or_value_is_ever_said(runner):
    for index in range(30):
        task = TASKS.train(index)
        said, _ = _play(runner, format_answer(WRONG), format_answer(BROKEN), "no", max_turns=4, task=task)
        text = " ".join(message.content for step in said for message in step.observations)
        assert text
        for example in problem_of(task).hidden:
            assert str(example.args[0]) not in text


def test_hidden_examples_run_at_grading_only_and_fresh_on_request(runner):
    problem = problem_of(TASK)
    _play(runner, format_answer(WRONG), RIGHT, fresh_grading=True)
    visible, hidden = ([example.args for example in part] for part in (problem.visible, problem.hidden))
    assert [(inputs, fresh) for _, inputs, fresh in runner.calls] == [
        (visible, False),
        (visible, False),
        (hidden, True),
    ]
    runner.calls.clear()
    _play(runner, RIGHT)
    assert [fresh for _, _, fresh in runner.calls] == [False, False]


def test_grading_twice_runs_once(runner):
    env = CodingFactory(runner, max_turns=2).make()

    async def episode():
        await env.reset(TASK)
        await env.step(Message(role=Role.ASSISTANT, content=RIGHT))
        return await env.evidence(), await env.evidence()

    first, second = asyncio.run(episode())
    assert first == second
    assert len(runner.calls) == 2


def test_a_lost_sandbox_is_raised_and_no_score(runner):
    runner.lost = True
    with pytest.raises(SandboxLost, match="box 1 is gone"):
        _play(runner, RIGHT)


def test_an_episode_that_is_reset_forgets_the_one_before(runner):
    env = CodingFactory(runner, max_turns=2).make()

    async def episode():
        await env.reset(TASK)
        await env.step(Message(role=Role.ASSISTANT, content=RIGHT))
        await env.reset(TASK)
        return await env.evidence()

    evidence = asyncio.run(episode())
    assert (evidence.reason, evidence.turns) == ("no answer", ())


def test_mistakes_of_the_caller_are_named(runner):
    env = CodingFactory(runner, max_turns=2).make()
    with pytest.raises(EnvError, match="coding episode: no task is open, got a call before reset; call reset first"):
        asyncio.run(env.evidence())
    with pytest.raises(EnvError, match=r"task t: not a coding task \(KeyError: 'entry_point'\), got a payload with"):
        problem_of(type(TASK)(id="t", messages=TASK.messages, payload={"x": 1}, split=TASK.split, seed=0))


def test_the_factory_closes_its_runner(runner):
    factory = CodingFactory(runner, max_turns=2)
    factory.close()
    assert runner.num_closed == 1

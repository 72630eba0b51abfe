import asyncio
import random
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from envs.base import Env, SandboxLost, StepResult
from rewards.base import score
from rollout.config import ChatFormat
from rollout.episode import EpisodeJob, run_episode
from rollout.renderers.registry import make_renderer
from rollout.scripted import SCRIPTED, ScriptedSampler
from rollout.tokenizer import train_tokenizer
from rollout.types import (
    Boundary,
    Checks,
    Evidence,
    FinishReason,
    Generation,
    Message,
    Role,
    SampleRequest,
    SpanOrigin,
    Split,
    StopReason,
    Task,
    TaskLimits,
    Verdict,
    WeightVersion,
)
from tests.unit.rollout.renderers.vocabulary import WEB, call, renderer_for, says

RENDERER = make_renderer(ChatFormat.native, train_tokenizer(["return x"] * 5, vocab_size=270))
(STOP_ID,) = RENDERER.stop_ids
TASK = Task(id="t", messages=(Message(role=Role.USER, content="go"),), payload={}, split=Split.TRAIN, seed=0)
JOB = EpisodeJob(
    task=TASK,
    sample_index=3,
    session=7,
    seed=11,
    temperature=0.5,
    limits=TaskLimits(max_turns=4, max_tokens_per_turn=20),
    max_context_tokens=10_000,
)


def answer_ids(text):
    return RENDERER.answer_ids(Message(role=Role.ASSISTANT, content=text))


@dataclass
class EchoEnv(Env):
    """Ends after `num_turns` answers and says `said[t]` until then; breaks where it is told to."""

    num_turns: int = 2
    said: tuple[str, ...] = ("again",) * 10
    break_in: str = ""
    error: BaseException = field(default_factory=lambda: RuntimeError("boom"))
    heard: list[str] = field(default_factory=list)
    num_closed: int = 0
    wait: bool = False

    async def reset(self, task):
        await self._reach("reset")
        return task.messages

    async def step(self, message):
        await self._reach("step")
        self.heard.append(message.content)
        if len(self.heard) == self.num_turns:
            return StepResult(observations=(), terminated=True)
        said = Message(role=Role.TOOL, content=self.said[len(self.heard) - 1])
        return StepResult(observations=(said,), terminated=False)

    async def evidence(self):
        await self._reach("evidence")
        return Evidence(
            verdict=Verdict.VALID,
            turns=(),
            hidden=Checks(passed=1, declared=1),
            extras={"heard": list(self.heard)},
        )

    async def close(self):
        self.num_closed += 1
        if self.break_in == "close":
            raise self.error

    async def _reach(self, place):
        if self.wait:
            await asyncio.sleep(random.random() / 500)
        if self.break_in == place:
            raise self.error


class Recording(ScriptedSampler):
    """A scripted sampler that keeps what it was asked."""

    def __init__(self, *answers, renderer=RENDERER):
        super().__init__(renderer, answers)
        self.requests = []
        self.closed = []

    async def sample(self, request):
        self.requests.append(request)
        return await super().sample(request)

    def close_session(self, session):
        self.closed.append(session)


class FakeEngine(Recording):
    """Samples given ids; logprobs and routes say at which absolute position each token was computed."""

    def __init__(self, *ids, computed_before=0):
        super().__init__()
        self._ids = list(ids)
        self._computed = computed_before

    async def sample(self, request):
        self.requests.append(request)
        ids = self._ids.pop(0)[: request.params.max_tokens]
        start, end = len(request.prompt_ids), len(request.prompt_ids) + len(ids)
        rows = np.arange(self._computed, end - 1).astype(np.uint8)
        self._computed = end - 1
        return Generation(
            ids=tuple(ids),
            logprobs_T=-np.arange(start, end, dtype=np.float32),
            routes_TLK=np.stack([rows, rows + 100], axis=-1)[:, None],  # [T, 1 layer, 2 experts]
            finish=FinishReason.STOP if ids[-1] == STOP_ID else FinishReason.LENGTH,
            weight_version=WeightVersion(5),
        )


def play(env, sampler, job=JOB):
    return asyncio.run(run_episode(job, env, sampler, RENDERER))


def spans(trajectory):
    (segment,) = trajectory.segments
    return list(segment.spans())


def ids_of(trajectory):
    return [token for span in spans(trajectory) for token in span.ids]


# ---- how an episode ends


def test_an_episode_that_the_environment_ends():
    env, sampler = EchoEnv(num_turns=2), Recording("one", "two", "three")
    trajectory = play(env, sampler)
    assert (trajectory.stop, trajectory.failure) == (StopReason.TERMINATED, None)
    assert (trajectory.task_id, trajectory.sample_index) == ("t", 3)
    assert env.heard == ["one", "two"]
    assert trajectory.evidence.extras == {"heard": ["one", "two"]}
    first, second = trajectory.segments[0].turns
    assert [turn.message.content for turn in (first, second)] == ["one", "two"]
    assert first.observations == (Message(role=Role.TOOL, content="again"),)
    assert second.observations == ()
    assert [request.session for request in sampler.requests] == [7, 7]
    assert [request.seed for request in sampler.requests] == [11, 11]
    assert all(request.params.temperature == 0.5 for request in sampler.requests)
    assert (env.num_closed, sampler.closed) == (1, [7])


def test_spans_say_where_each_token_comes_from():
    trajectory = play(EchoEnv(num_turns=2), Recording("one", "two"))
    opening, first, observation, second = spans(trajectory)
    assert opening == RENDERER.opening(TASK.messages)
    assert first.ids == answer_ids("one")
    assert observation == RENDERER.observation([Message(role=Role.TOOL, content="again")])
    assert second.ids == answer_ids("two")
    assert [span.origin for span in (first, second)] == [SpanOrigin.SAMPLED] * 2
    for span in (first, second):
        assert span.sampled_by.weight_version == SCRIPTED
        assert span.sampled_by.logprobs_T.tolist() == [0.0] * len(span.ids)
        assert span.routes_TLK is None
    assert trajectory.num_turns == 2
    assert trajectory.num_sampled_tokens == len(first.ids) + len(second.ids)


def test_an_answer_that_is_cut_off_is_kept_but_not_acted_on():
    env = EchoEnv()
    answer = answer_ids("ok")
    trajectory = play(env, FakeEngine(answer, [60] * 30))
    assert trajectory.stop is StopReason.TRUNCATED_TOKENS
    assert len(env.heard) == 1
    assert spans(trajectory)[-1].ids == (60,) * 20
    assert trajectory.evidence.verdict is Verdict.VALID  # graded as it stands
    assert (env.num_closed, trajectory.num_turns) == (1, 2)


def test_the_turn_limit_ends_an_episode_without_a_last_context():
    env, sampler = EchoEnv(num_turns=9), Recording(*"abcdefg")
    trajectory = play(env, sampler)
    assert trajectory.stop is StopReason.TRUNCATED_TURNS
    assert env.heard == ["a", "b", "c", "d"]
    assert spans(trajectory)[-1].origin is SpanOrigin.SAMPLED
    assert trajectory.segments[0].turns[-1].observations[0].content == "again"


def test_the_context_limit_ends_an_episode_before_a_turn():
    answer, opening = answer_ids("one"), RENDERER.opening(TASK.messages).ids
    observation = RENDERER.observation([Message(role=Role.TOOL, content="again")]).ids
    full = len(opening) + len(answer) + len(observation)
    env, sampler = EchoEnv(), Recording("one", "two")
    trajectory = play(env, sampler, replace(JOB, max_context_tokens=full))
    assert (trajectory.stop, len(sampler.requests)) == (StopReason.TRUNCATED_CONTEXT, 1)
    assert ids_of(trajectory) == [*opening, *answer]  # what no turn followed is not part of it
    trajectory = play(EchoEnv(), FakeEngine(answer, [60] * 30), replace(JOB, max_context_tokens=full + 2))
    assert trajectory.stop is StopReason.TRUNCATED_CONTEXT
    assert spans(trajectory)[-1].ids == (60, 60)
    assert len(ids_of(trajectory)) == full + 2


def test_an_opening_that_fills_the_context_asks_for_nothing():
    sampler = Recording("one")
    opening = RENDERER.opening(TASK.messages)
    trajectory = play(EchoEnv(), sampler, replace(JOB, max_context_tokens=len(opening.ids)))
    assert (trajectory.stop, sampler.requests) == (StopReason.TRUNCATED_CONTEXT, [])
    assert (trajectory.num_turns, trajectory.num_sampled_tokens) == (0, 0)


# ---- tokens


def test_sampled_ids_are_never_encoded_again():
    letters = [answer_ids(letter)[0] for letter in "return"]
    assert len(answer_ids("return")) < len(letters)  # encoding their text would give other ids
    sampler = FakeEngine([*letters, STOP_ID], [4, 3, STOP_ID])
    env = EchoEnv()
    trajectory = play(env, sampler)
    assert env.heard == ["return", ""]
    assert spans(trajectory)[1].ids == (*letters, STOP_ID)
    assert spans(trajectory)[3].ids == (4, 3, STOP_ID)
    prompt = sampler.requests[1].prompt_ids
    assert prompt[len(sampler.requests[0].prompt_ids) :][: len(letters) + 1] == (*letters, STOP_ID)


@settings(deadline=None, max_examples=50)
@given(st.lists(st.text(max_size=12) | st.sampled_from(["<end>", "\n\n", "return", "\ud800"]), min_size=3, max_size=3))
def test_the_ids_of_a_turn_begin_with_those_of_the_turn_before(said):
    sampler = Recording("a", "return x", "\n", "d")
    trajectory = play(EchoEnv(num_turns=4, said=tuple(said)), sampler)
    prompts = [request.prompt_ids for request in sampler.requests]
    assert len(prompts) == 4
    for before, after, answer in zip(prompts, prompts[1:], ["a", "return x", "\n"], strict=False):
        grown = before + answer_ids(answer)
        assert after[: len(grown)] == grown
        assert after[len(grown)] == 4  # the tool's header
        assert after[-1] == 3  # the assistant's header
    assert tuple(ids_of(trajectory)) == prompts[-1] + answer_ids("d")


def test_routes_and_logprobs_are_cut_to_their_spans():
    """The rows count through all computed tokens; the last sampled token was never computed, so its row is absent."""
    first, second = [*answer_ids("return x")], [*answer_ids("no")]
    trajectory = play(EchoEnv(), FakeEngine(first, second))
    position = 0
    for span in spans(trajectory):
        expected = list(range(position, position + len(span.ids)))
        if span.sampled_by is not None:
            assert span.sampled_by.logprobs_T.tolist() == [-float(at) for at in expected]
            assert span.sampled_by.weight_version == 5
            assert span.sampled_by.params.max_tokens == 20
        if span is spans(trajectory)[-1]:
            expected.pop()
        assert span.routes_TLK.tolist() == [[[at, at + 100]] for at in expected]
        position += len(span.ids)
    assert position == len(ids_of(trajectory))


def test_routes_of_an_episode_that_was_cut_off_are_one_row_short_too():
    trajectory = play(EchoEnv(), FakeEngine(answer_ids("ok"), [60] * 30))
    lengths = [(len(span.ids), len(span.routes_TLK)) for span in spans(trajectory)]
    assert [ids - rows for ids, rows in lengths] == [0, 0, 0, 1]


@pytest.mark.parametrize("computed_before", [-5, -1, 1])
def test_routes_that_do_not_fit_the_tokens_are_a_failure(computed_before):
    trajectory = play(EchoEnv(), FakeEngine(answer_ids("ok"), computed_before=computed_before))
    assert trajectory.failure.boundary is Boundary.EPISODE
    assert "routes: one row a computed token, got" in trajectory.failure.message
    assert all(span.routes_TLK is None for span in spans(trajectory))


# ---- failures


@pytest.mark.parametrize("place", ["reset", "step", "evidence", "close"])
@pytest.mark.parametrize("lost", [True, False])
def test_whatever_breaks_is_masked_and_never_scored(place, lost):
    error = SandboxLost("box 3 is gone") if lost else KeyError("boom")
    env, sampler = EchoEnv(break_in=place, error=error), Recording("one", "two")
    trajectory = play(env, sampler)
    assert trajectory.stop is None
    assert trajectory.failure.boundary is (Boundary.SANDBOX if lost else Boundary.EPISODE)
    assert trajectory.evidence.verdict is Verdict.MASKED
    assert trajectory.evidence.reason == trajectory.failure.message
    if lost:
        assert trajectory.failure.message == "box 3 is gone"
    else:
        assert trajectory.failure.message.endswith("KeyError: 'boom'\n")
        assert place in trajectory.failure.message  # the innermost calls are kept
    assert score(lambda *_: 1.0, TASK, trajectory).total is None
    assert (env.num_closed, sampler.closed) == (1, [7])
    assert trajectory.num_turns == {"reset": 0, "step": 1}.get(place, 2)


def test_a_sampler_that_fails_is_a_failure_of_the_episode():
    env, sampler = EchoEnv(num_turns=3), Recording("one")
    trajectory = play(env, sampler)
    assert trajectory.failure.boundary is Boundary.EPISODE
    assert "script: no answer left, got a request in session 7; lower max_turns" in trajectory.failure.message
    assert [span.origin for span in spans(trajectory)][-1] is SpanOrigin.SAMPLED
    assert (env.num_closed, sampler.closed) == (1, [7])


def test_the_environment_is_closed_when_the_sampler_cannot_be():
    class Stuck(Recording):
        def close_session(self, session):
            raise RuntimeError("stuck")

    env = EchoEnv()
    trajectory = play(env, Stuck("one", "two"))
    assert "RuntimeError: stuck" in trajectory.failure.message
    assert env.num_closed == 1


def test_an_environment_that_returns_no_evidence_is_a_failure():
    class Silent(EchoEnv):
        async def evidence(self):
            return None

    trajectory = play(Silent(), Recording("one", "two"))
    assert "evidence() must return an Evidence, got NoneType" in trajectory.failure.message


@pytest.mark.parametrize("place", ["sample", "reset", "step", "evidence"])
def test_a_cancelled_episode_closes_both_sides_once(place):
    class Waits(EchoEnv):
        async def _reach(self, reached):
            if reached == place:
                await asyncio.sleep(60)

    class Slow(Recording):
        async def sample(self, request):
            if place == "sample":
                await asyncio.sleep(60)
            return await super().sample(request)

    env, sampler = Waits(), Slow("one", "two")

    async def cancelled():
        episode = asyncio.create_task(run_episode(JOB, env, sampler, RENDERER))
        for _ in range(10):
            await asyncio.sleep(0)
        episode.cancel()
        with pytest.raises(asyncio.CancelledError):
            await episode

    asyncio.run(cancelled())
    assert (env.num_closed, sampler.closed) == (1, [7])


# ---- concurrency


class Echoing:
    """One sampler for many episodes: answers with the session's number and the turn, after a random wait."""

    def __init__(self):
        self.turns = {}
        self.closed = []

    async def sample(self, request: SampleRequest):
        turn = self.turns[request.session] = self.turns.get(request.session, 0) + 1
        await asyncio.sleep(random.random() / 500)
        ids = answer_ids(f"{request.session}.{turn}")
        return Generation(
            ids=ids,
            logprobs_T=np.full(len(ids), -request.session, dtype=np.float32),
            routes_TLK=np.zeros((0, 1, 1), dtype=np.uint8),
            finish=FinishReason.STOP,
            weight_version=WeightVersion(0),
        )

    def close_session(self, session):
        self.closed.append(session)


def test_64_interleaved_episodes_do_not_mix():
    envs = [EchoEnv(num_turns=1 + number % 4, wait=True, said=(f"said to {number}",) * 4) for number in range(64)]
    envs[40].break_in = "step"
    sampler = Echoing()

    async def play_all():
        return await asyncio.gather(
            *(
                run_episode(
                    replace(JOB, session=number, sample_index=number, task=replace(TASK, id=f"task {number}")),
                    env,
                    sampler,
                    RENDERER,
                )
                for number, env in enumerate(envs)
            )
        )

    trajectories = asyncio.run(play_all())
    assert sorted(sampler.closed) == list(range(64))
    assert [env.num_closed for env in envs] == [1] * 64
    for number, trajectory in enumerate(trajectories):
        assert (trajectory.task_id, trajectory.sample_index) == (f"task {number}", number)
        if number == 40:
            assert trajectory.failure is not None
            continue
        expected = [f"{number}.{turn}" for turn in range(1, 2 + number % 4)]
        assert trajectory.evidence.extras == {"heard": expected}
        assert [turn.message.content for turn in trajectory.segments[0].turns] == expected
        for turn in trajectory.segments[0].turns[:-1]:
            assert turn.observations[0].content == f"said to {number}"
        for span in spans(trajectory):
            if span.sampled_by is not None:
                assert set(span.sampled_by.logprobs_T.tolist()) == {-float(number)}


# ---- chat formats


class AskingEnv(EchoEnv):
    """Answers each tool call of a turn; keeps what it was told."""

    async def step(self, message):
        self.heard.append(message)
        if not message.tool_calls:
            return StepResult(observations=(), terminated=True)
        results = tuple(
            Message(role=Role.TOOL, content="<|end|> 21", name="f", tool_call_id=call.id) for call in message.tool_calls
        )
        return StepResult(observations=results, terminated=False)

    async def evidence(self):
        return Evidence(verdict=Verdict.VALID, turns=(), hidden=Checks(passed=1, declared=1))


@pytest.mark.parametrize("chat_format", WEB, ids=lambda value: value.value)
def test_an_episode_in_every_chat_format_only_appends(chat_format):
    renderer = renderer_for(chat_format)
    function = {"name": "f", "description": "d", "parameters": {"type": "object", "properties": {}}}
    tools = ({"type": "function", "function": function},) if renderer.declares_tools else ()
    asked = says("", call("functions.f:0" if chat_format is ChatFormat.kimi else "call_0", x=1), reasoning="Hm.")
    env, sampler = AskingEnv(), Recording(asked, "21 degrees.", renderer=renderer)
    job = replace(JOB, task=replace(TASK, tools=tools), limits=TaskLimits(max_turns=4, max_tokens_per_turn=999))
    trajectory = asyncio.run(run_episode(job, env, sampler, renderer))
    assert (trajectory.failure, trajectory.stop) == (None, StopReason.TERMINATED)
    assert env.heard == [asked, says("21 degrees.")]
    opening, first, observation, second = spans(trajectory)
    assert opening == renderer.opening(TASK.messages, tools)
    assert [span.ids for span in (first, second)] == [renderer.answer_ids(asked), renderer.answer_ids(env.heard[1])]
    assert sampler.requests[0].prompt_ids == opening.ids
    assert sampler.requests[1].prompt_ids == opening.ids + first.ids + observation.ids
    assert first.ids[-1] in renderer.stop_ids

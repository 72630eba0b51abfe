import asyncio
import random

import numpy as np
import pytest

from rollout.engine.sampler import EpisodeSampler, Joining
from rollout.types import FinishReason, Generation, SampleRequest, SamplingParams, WeightVersion


class FakeEngine:
    """Needs `session % 3 + 1` steps for a request and answers with the step; keeps who ran in each step.

    Raises `error` in step `fails_in`, after which it has no requests.
    """

    def __init__(self, fails_in=None, error=None):
        self.steps = []
        self.closed = []
        self._fails_in = fails_in
        self._error = error
        self._left = {}
        self._sessions = {}

    def add_request(self, request):
        if len(request.prompt_ids) > 3:
            raise ValueError(f"session {request.session} is too long")
        request_id = len(self.steps) * 100 + request.session
        self._left[request_id] = request.session % 3 + 1
        self._sessions[request_id] = request.session
        return request_id

    def step(self):
        self.steps.append([self._sessions[request_id] for request_id in self._left])
        if self._fails_in == len(self.steps):
            self._left.clear()
            raise self._error
        ended = []
        for request_id in list(self._left):
            self._left[request_id] -= 1
            if not self._left[request_id]:
                del self._left[request_id]
                ended.append((request_id, self._answer(self._sessions[request_id])))
        return ended

    def close_session(self, session):
        self.closed.append(session)
        for request_id in [key for key in self._left if self._sessions[key] == session]:
            del self._left[request_id]

    def _answer(self, session):
        return Generation(
            ids=(session, len(self.steps)),
            logprobs_T=np.zeros(2, np.float32),
            routes_TLK=np.zeros((0, 0, 0), np.uint8),
            finish=FinishReason.STOP,
            weight_version=WeightVersion(0),
        )


def request(session, length=1):
    return SampleRequest(session=session, prompt_ids=(0,) * length, params=SamplingParams(), seed=0)


async def _episode(sampler, session, num_turns, dies_after=None, slow=True):
    """What the sampler answered, turn by turn; the environment takes a random time."""
    answers = []
    try:
        for turn in range(num_turns):
            if slow:
                await asyncio.sleep(random.random() / 300)
            if turn == dies_after:
                raise RuntimeError(f"{session} died")
            answers.append((await sampler.sample(request(session, turn + 1))).ids)
    finally:
        sampler.close_session(session)
    return answers


def _run(engine, sessions, episodes, timeout_s=5.0, joining=Joining.LOCKSTEP):
    sampler = EpisodeSampler(engine, sessions, joining)

    async def run_all():
        tasks = [_episode(sampler, session, **how) for session, how in episodes.items()]
        async with asyncio.timeout(timeout_s):
            return await asyncio.gather(*tasks, return_exceptions=True)

    return asyncio.run(run_all())


@pytest.mark.parametrize("attempt", range(3))
def test_lockstep_follows_the_sessions_and_not_the_clock(attempt):
    engine = FakeEngine()
    turns = {5: 2, 3: 1, 9: 3, 4: 2}
    results = _run(engine, [5, 3, 9, 4], {session: {"num_turns": turns[session]} for session in (9, 4, 3, 5)})
    assert engine.steps == [[5, 3, 9, 4], [5, 4], [5], [5, 9, 4], [5, 4], [5], [9]]
    assert results == [[(9, 1), (9, 4), (9, 7)], [(4, 2), (4, 5)], [(3, 1)], [(5, 3), (5, 6)]]
    assert sorted(engine.closed) == [3, 4, 5, 9]


def test_in_lockstep_an_early_answer_frees_its_environment_at_once():
    """Session 0 ends in the first step of three: it is told then, and not when the batch has ended."""
    engine = FakeEngine()
    sampler = EpisodeSampler(engine, [0, 2], Joining.LOCKSTEP)
    seen = []

    async def quick():
        await sampler.sample(request(0))
        seen.append(len(engine.steps))
        await sampler.sample(request(0, 2))
        sampler.close_session(0)

    async def scenario():
        async with asyncio.timeout(2):
            await asyncio.gather(quick(), _episode(sampler, 2, 2, slow=False))

    asyncio.run(scenario())
    assert seen == [1]
    assert engine.steps == [[0, 2], [2], [2], [0, 2], [2], [2]]


def test_continuous_requests_join_the_running_ones():
    engine = FakeEngine()
    sampler = EpisodeSampler(engine, [0, 2, 5], Joining.CONTINUOUS)

    async def late():
        while len(engine.steps) < 2:
            await asyncio.sleep(0)
        return await _episode(sampler, 5, 1, slow=False)

    async def scenario():
        async with asyncio.timeout(2):
            return await asyncio.gather(
                _episode(sampler, 0, 3, slow=False), _episode(sampler, 2, 1, slow=False), late()
            )

    assert asyncio.run(scenario()) == [[(0, 1), (0, 2), (0, 3)], [(2, 3)], [(5, 5)]]
    assert engine.steps == [[0, 2], [2, 0], [2, 0, 5], [5], [5]]


@pytest.mark.parametrize("joining", Joining)
@pytest.mark.parametrize("dies_after", [0, 1])
def test_an_episode_that_dies_holds_nobody_up(dies_after, joining):
    engine = FakeEngine()
    how = {session: {"num_turns": 2} for session in range(4)}
    how[2]["dies_after"] = dies_after
    results = _run(engine, list(range(4)), how, joining=joining)
    assert isinstance(results[2], RuntimeError)
    assert [len(result) for number, result in enumerate(results) if number != 2] == [2, 2, 2]
    if joining is Joining.LOCKSTEP:
        assert engine.steps[0] == ([0, 1, 3] if dies_after == 0 else [0, 1, 2, 3])
        assert [0, 1, 3] in engine.steps


def test_the_last_busy_episode_that_dies_starts_the_batch_of_the_others():
    engine = FakeEngine()
    sampler = EpisodeSampler(engine, [0, 1], Joining.LOCKSTEP)

    async def scenario():
        waiting = asyncio.create_task(_episode(sampler, 0, 1, slow=False))
        await asyncio.sleep(0.01)
        assert engine.steps == []
        sampler.close_session(1)
        async with asyncio.timeout(1):
            return await waiting

    assert asyncio.run(scenario()) == [(0, 1)]
    assert engine.steps == [[0]]


@pytest.mark.parametrize("joining", Joining)
def test_an_engine_error_reaches_every_running_episode(joining):
    error = RuntimeError("out of memory")
    engine = FakeEngine(fails_in=2, error=error)
    results = _run(
        engine, [1, 2, 4], {session: {"num_turns": 3, "slow": False} for session in (1, 2, 4)}, joining=joining
    )
    assert results == [error] * 3
    assert len(engine.steps) == 2
    assert sorted(engine.closed) == [1, 2, 4]


@pytest.mark.parametrize("joining", Joining)
def test_a_request_that_is_refused_fails_alone(joining):
    engine = FakeEngine()
    results = _run(
        engine, [0, 1], {0: {"num_turns": 5, "slow": False}, 1: {"num_turns": 2, "slow": False}}, joining=joining
    )
    assert str(results[0]) == "session 0 is too long"
    assert len(results[1]) == 2


@pytest.mark.parametrize("joining", Joining)
@pytest.mark.parametrize("settle", [0, 3])
def test_an_episode_cancelled_while_it_waits_disturbs_no_other(settle, joining):
    """`settle` 0: the batch completes before the cancelled episode has closed its session."""
    engine = FakeEngine()
    sampler = EpisodeSampler(engine, [0, 1, 2], joining)

    async def scenario():
        tasks = [asyncio.create_task(_episode(sampler, session, 2, slow=False)) for session in (0, 1)]
        await asyncio.sleep(0)
        tasks[0].cancel()
        for _ in range(settle):
            await asyncio.sleep(0)
        late = await _episode(sampler, 2, 2, slow=False)
        with pytest.raises(asyncio.CancelledError):
            await tasks[0]
        return late, await tasks[1]

    async def with_deadline():
        async with asyncio.timeout(2):
            return await scenario()

    assert [len(answers) for answers in asyncio.run(with_deadline())] == [2, 2]
    assert sorted(engine.closed) == [0, 1, 2]
    if joining is Joining.LOCKSTEP:
        assert engine.steps[0] == [1, 2]


def test_a_refusal_that_nobody_waits_for_any_more_disturbs_no_other():
    engine = FakeEngine()
    sampler = EpisodeSampler(engine, [0, 2], Joining.CONTINUOUS)

    async def scenario():
        going_on = asyncio.create_task(_episode(sampler, 2, 2, slow=False))
        refused = asyncio.create_task(sampler.sample(request(0, 4)))
        await asyncio.sleep(0)
        refused.cancel()
        async with asyncio.timeout(2):
            return await going_on

    assert len(asyncio.run(scenario())) == 2

import asyncio
import random

import numpy as np
import pytest

from rollout.engine.scheduler import LockstepSampler
from rollout.types import FinishReason, Generation, SampleRequest, SamplingParams, WeightVersion


class FakeEngine:
    """Answers with the number of the batch; keeps the batches. Raises `error` in batch `fails_in`."""

    def __init__(self, fails_in=None, error=None):
        self.batches = []
        self.closed = []
        self._fails_in = fails_in
        self._error = error

    def generate(self, requests):
        self.batches.append([(request.session, len(request.prompt_ids)) for request in requests])
        if self._fails_in == len(self.batches):
            raise self._error
        return [
            Generation(
                ids=(request.session, len(self.batches)),
                logprobs_T=np.zeros(2, np.float32),
                routes_TLK=np.zeros((0, 0, 0), np.uint8),
                finish=FinishReason.STOP,
                weight_version=WeightVersion(0),
            )
            for request in requests
        ]

    def close_session(self, session):
        self.closed.append(session)


async def _episode(sampler, session, num_turns, dies_after=None, slow=True):
    """What the sampler answered, turn by turn; the environment takes a random time."""
    answers = []
    try:
        for turn in range(num_turns):
            if slow:
                await asyncio.sleep(random.random() / 300)
            if turn == dies_after:
                raise RuntimeError(f"{session} died")
            request = SampleRequest(session=session, prompt_ids=(0,) * (turn + 1), params=SamplingParams(), seed=0)
            answers.append((await sampler.sample(request)).ids)
    finally:
        sampler.close_session(session)
    return answers


def _run(engine, sessions, episodes, timeout_s=5.0):
    sampler = LockstepSampler(engine, sessions)

    async def run_all():
        tasks = [_episode(sampler, session, **how) for session, how in episodes.items()]
        async with asyncio.timeout(timeout_s):
            return await asyncio.gather(*tasks, return_exceptions=True)

    return asyncio.run(run_all())


@pytest.mark.parametrize("attempt", range(3))
def test_batches_follow_the_sessions_and_not_the_clock(attempt):
    engine = FakeEngine()
    turns = {5: 2, 3: 1, 9: 3, 4: 2}
    results = _run(engine, [5, 3, 9, 4], {session: {"num_turns": turns[session]} for session in (9, 4, 3, 5)})
    assert engine.batches == [[(5, 1), (3, 1), (9, 1), (4, 1)], [(5, 2), (9, 2), (4, 2)], [(9, 3)]]
    assert results == [[(9, 1), (9, 2), (9, 3)], [(4, 1), (4, 2)], [(3, 1)], [(5, 1), (5, 2)]]
    assert sorted(engine.closed) == [3, 4, 5, 9]


@pytest.mark.parametrize("dies_after", [0, 1])
def test_an_episode_that_dies_holds_nobody_up(dies_after):
    engine = FakeEngine()
    how = {session: {"num_turns": 2} for session in range(4)}
    how[2]["dies_after"] = dies_after
    results = _run(engine, list(range(4)), how)
    assert isinstance(results[2], RuntimeError)
    assert [len(result) for number, result in enumerate(results) if number != 2] == [2, 2, 2]
    assert [[session for session, _ in batch] for batch in engine.batches] == (
        [[0, 1, 3], [0, 1, 3]] if dies_after == 0 else [[0, 1, 2, 3], [0, 1, 3]]
    )


def test_the_last_busy_episode_that_dies_starts_the_batch_of_the_others():
    engine = FakeEngine()
    sampler = LockstepSampler(engine, [0, 1])

    async def scenario():
        waiting = asyncio.create_task(_episode(sampler, 0, 1, slow=False))
        await asyncio.sleep(0.01)
        assert engine.batches == []
        sampler.close_session(1)
        assert engine.batches == [[(0, 1)]]
        async with asyncio.timeout(1):
            return await waiting

    assert asyncio.run(scenario()) == [(0, 1)]


def test_an_engine_error_reaches_every_waiting_episode():
    error = RuntimeError("out of memory")
    engine = FakeEngine(fails_in=2, error=error)
    results = _run(engine, [0, 1, 2], {session: {"num_turns": 3} for session in range(3)})
    assert results == [error] * 3
    assert len(engine.batches) == 2
    assert sorted(engine.closed) == [0, 1, 2]


@pytest.mark.parametrize("settle", [0, 3])
def test_an_episode_cancelled_while_it_waits_disturbs_no_other(settle):
    """`settle` 0: the batch completes before the cancelled episode has closed its session."""
    engine = FakeEngine()
    sampler = LockstepSampler(engine, [0, 1, 2])

    async def scenario():
        tasks = [asyncio.create_task(_episode(sampler, session, 2, slow=False)) for session in (0, 1)]
        await asyncio.sleep(0)
        tasks[0].cancel()
        for _ in range(settle):
            await asyncio.sleep(0)
        late = await asyncio.gather(_episode(sampler, 2, 2, slow=False))
        with pytest.raises(asyncio.CancelledError):
            await tasks[0]
        return [*late, await tasks[1]]

    async def with_deadline():
        async with asyncio.timeout(2):
            return await scenario()

    assert asyncio.run(with_deadline()) == [[(2, 1), (2, 2)], [(1, 1), (1, 2)]]
    assert [session for session, _ in engine.batches[-1]] == [1, 2]
    assert sorted(engine.closed) == [0, 1, 2]

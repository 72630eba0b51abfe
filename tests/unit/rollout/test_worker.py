import dataclasses

import pytest

from model.config import KernelChoice
from rollout.engine.sampler import Joining
from rollout.episode import EpisodeJob
from rollout.types import Boundary, SpanOrigin, StopReason, TaskLimits, Verdict
from rollout.worker import RolloutWorker
from tests.unit.rollout.toy_envs import TASKS, Flaky, Parrot, Unmakeable, snapshot, spec

JOBS = [
    EpisodeJob(
        task=task,
        sample_index=sample,
        session=2 * number + sample,
        seed=77 * number + sample,
        temperature=1.0,
        limits=TaskLimits(max_turns=2, max_tokens_per_turn=8),
        max_context_tokens=96,
    )
    for number, task in enumerate(TASKS)
    for sample in range(2)
]
SNAPSHOT = snapshot(2)


def _worker(env, **how):
    worker = RolloutWorker(spec(env, **how))
    worker.receive(SNAPSHOT)
    return worker


def _run(env, **how):
    return _worker(env, **how).run(JOBS, fresh_grading=False)


def _ids(trajectory):
    return [span.ids for segment in trajectory.segments for span in segment.spans()]


def test_trajectories_come_in_the_order_of_their_jobs():
    trajectories = _run(Parrot)
    assert [(t.task_id, t.sample_index) for t in trajectories] == [(j.task.id, j.sample_index) for j in JOBS]
    stops = {trajectory.stop for trajectory in trajectories}
    assert stops == {StopReason.TERMINATED, StopReason.TRUNCATED_TOKENS}
    for trajectory in trajectories:
        number = trajectory.task_id.removeprefix("task ")
        turns = trajectory.segments[0].turns
        for turn in turns:
            for said in turn.observations:
                assert said.content == f"{number} heard {len(turns[0].message.content)}"
        heard = trajectory.num_turns - (trajectory.stop is StopReason.TRUNCATED_TOKENS)
        assert len(trajectory.evidence.turns) == heard
        for span in (span for turn in turns for span in turn.spans if span.origin is SpanOrigin.SAMPLED):
            assert span.sampled_by.weight_version == 2
    assert len({str(_ids(trajectory)) for trajectory in trajectories}) == len(JOBS)


def test_small_batches_sample_the_same_tokens_as_large_ones():
    together, in_threes = _run(Parrot), _run(Parrot, max_sessions=3)
    assert [_ids(trajectory) for trajectory in together] == [_ids(trajectory) for trajectory in in_threes]


def test_the_same_jobs_give_the_same_bits():
    for one, two in zip(_run(Parrot), _run(Parrot), strict=True):
        assert _ids(one) == _ids(two)
        for a, b in zip(one.segments[0].spans(), two.segments[0].spans(), strict=True):
            assert a.routes_TLK.tobytes() == b.routes_TLK.tobytes()
            if a.sampled_by is not None:
                assert a.sampled_by.logprobs_T.tobytes() == b.sampled_by.logprobs_T.tobytes()


def test_little_memory_for_keys_and_values_changes_nothing_but_the_time():
    budget = _worker(Parrot)._engine.cache_bytes * 3 // 16
    worker = RolloutWorker(dataclasses.replace(spec(Parrot), kv_memory_bytes=budget))
    worker.receive(SNAPSHOT)
    for one, two in zip(_run(Parrot), worker.run(JOBS, fresh_grading=False), strict=True):
        assert _ids(one) == _ids(two)
    assert 0 < worker._engine.cache_bytes <= budget


@pytest.mark.parametrize("kernels", [KernelChoice.auto, KernelChoice.torch])
def test_episodes_join_as_the_kernels_allow(kernels):
    worker = RolloutWorker(dataclasses.replace(spec(Parrot), kernels=kernels))
    worker.receive(SNAPSHOT)
    invariant = worker._engine.batch_invariant
    assert worker._joining is (Joining.CONTINUOUS if invariant else Joining.LOCKSTEP)
    assert worker._engine.config.share_prefixes is invariant
    first = worker.run(JOBS, fresh_grading=False)
    for one, two in zip(first, worker.run(JOBS, fresh_grading=False), strict=True):
        assert _ids(one) == _ids(two)
    assert worker._engine.metrics().kv_used_frac == 0.0


@pytest.mark.parametrize("breaks", [1, 2])
def test_a_lost_episode_runs_again_with_the_same_seed(breaks):
    Flaky.attempts = {}
    trajectories = _run(Flaky, breaks=2 * breaks, max_retries=2)  # two samples a task
    assert [trajectory.failure for trajectory in trajectories] == [None] * len(JOBS)
    assert [_ids(trajectory) for trajectory in trajectories] == [_ids(trajectory) for trajectory in _run(Parrot)]
    assert Flaky.attempts == {task.id: 2 + 2 * breaks * (number % 2) for number, task in enumerate(TASKS)}


def test_an_episode_that_stays_lost_is_returned_as_a_failure_and_harms_no_other():
    Flaky.attempts = {}
    trajectories = _run(Flaky, breaks=1000, max_retries=1)
    for trajectory, expected in zip(trajectories, _run(Parrot), strict=True):
        if int(trajectory.task_id[-1]) % 2:
            assert trajectory.failure.boundary is Boundary.SANDBOX
            assert trajectory.failure.message in ("lost in attempt 3", "lost in attempt 4")
            assert (trajectory.stop, trajectory.evidence.verdict) == (None, Verdict.MASKED)
        else:
            assert _ids(trajectory) == _ids(expected)
            assert trajectory.stop is expected.stop


def test_an_environment_that_cannot_be_made_is_a_failure_of_its_episode():
    Unmakeable.made = 0
    trajectories = _run(Unmakeable)
    broken = [trajectory for trajectory in trajectories if trajectory.failure is not None]
    assert len(broken) == 11  # the first was made for the factory; of the 16 that followed, two thirds fail
    assert all(trajectory.failure.boundary is Boundary.EPISODE for trajectory in broken)
    assert all("ConnectionError: no service at the door" in trajectory.failure.message for trajectory in broken)
    Unmakeable.made = 0
    assert [trajectory.failure for trajectory in _run(Unmakeable, max_retries=9)] == [None] * len(JOBS)


def test_demonstrations_say_their_scripts():
    scripts = [tuple(f"{job.session}.{turn}" for turn in range(2)) for job in JOBS]
    trajectories = _worker(Parrot).demonstrate(JOBS, scripts)
    for trajectory, script in zip(trajectories, scripts, strict=True):
        assert [turn.message.content for turn in trajectory.segments[0].turns] == list(script)
        assert trajectory.stop is StopReason.TERMINATED
        assert trajectory.evidence.hidden.passed == len(script[0]) % 5


def test_no_jobs_are_no_trajectories():
    worker = _worker(Parrot)
    assert worker.run([], fresh_grading=True) == []
    assert worker.demonstrate([], []) == []
    worker.close()
    worker.close()


def test_a_worker_that_shares_its_memory_holds_it_only_while_episodes_run(monkeypatch):
    sharing = RolloutWorker(dataclasses.replace(spec(Parrot), gives_memory_back=True))
    assert sharing._engine.cache_bytes == 0
    sharing.receive(SNAPSHOT)
    assert sharing._engine.cache_bytes == 0
    for _ in range(2):
        shared = sharing.run(JOBS, fresh_grading=False)
        assert sharing._engine.cache_bytes == 0
        for one, two in zip(_run(Parrot), shared, strict=True):
            assert _ids(one) == _ids(two)
    keeping = _worker(Parrot)
    keeping.run(JOBS, fresh_grading=False)
    assert keeping._engine.cache_bytes > 0

    def fail(*_):
        raise RuntimeError("broken")

    monkeypatch.setattr(sharing, "_run", fail)
    with pytest.raises(RuntimeError, match="broken"):
        sharing.run(JOBS, fresh_grading=False)
    assert sharing._engine.cache_bytes == 0

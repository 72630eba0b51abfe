"""Two rollout workers in Ray: order, weights, deaths, deadlines, and nothing left behind."""

import dataclasses
import os
import signal
import threading
import time
from contextlib import suppress

import numpy as np
import psutil
import pytest

from envs.config import EnvConfig
from envs.sandbox.base import SandboxUnavailable
from envs.sandbox.probe import probe
from model.snapshot import SnapshotError, view
from rl.cluster import ray_cluster
from rl.config import ClusterConfig
from rollout.episode import EpisodeJob
from rollout.pool import PoolError, RolloutPool, SamplePlan, _seed
from rollout.types import SpanOrigin, StopReason, TaskLimits
from rollout.worker import RolloutWorker
from tests.unit.rollout.toy_envs import TASKS, NeverMade, Parrot, Waiting, snapshot, spec

pytestmark = pytest.mark.ray

PLAN = SamplePlan(
    group_size=3,
    temperature=1.0,
    limits=TaskLimits(max_turns=2, max_tokens_per_turn=8),
    max_context_tokens=96,
    seed_key=(0, 1, 2),
)
SECONDS = 60.0


@pytest.fixture(scope="module", autouse=True)
def _cluster():
    with ray_cluster(ClusterConfig(), num_cpus=4):
        yield


def _pool(worker_spec, deadline_s=SECONDS):
    return RolloutPool(worker_spec, num_workers=2, deadline_s=deadline_s)


@pytest.fixture(scope="module")
def pool():
    with _pool(spec(Parrot)) as pool:
        pool.publish(snapshot(0))
        yield pool


def _runs(pid):
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _all_gone(pids, within_s=10.0):
    deadline = time.monotonic() + within_s
    while any(map(_runs, pids)) and time.monotonic() < deadline:
        time.sleep(0.05)
    return not any(map(_runs, pids))


def _ids(trajectory):
    return [span.ids for segment in trajectory.segments for span in segment.spans()]


def test_groups_come_in_the_order_of_their_tasks(pool):
    tasks = TASKS[:5]  # 15 episodes over two workers, so that one has more than the other
    groups = pool.rollout(tasks, PLAN)
    assert [group.task.id for group in groups] == [task.id for task in tasks]
    for group in groups:
        number = group.task.payload["number"]
        assert [trajectory.task_id for trajectory in group.trajectories] == [group.task.id] * 3
        assert [trajectory.sample_index for trajectory in group.trajectories] == [0, 1, 2]
        for trajectory in group.trajectories:
            assert trajectory.failure is None
            for turn in trajectory.segments[0].turns:
                assert all(said.content.startswith(f"{number} heard") for said in turn.observations)


def test_what_is_sampled_depends_on_the_plan_alone(pool):
    first, again = pool.rollout(TASKS, PLAN), pool.rollout(TASKS, PLAN)
    other = pool.rollout(TASKS, dataclasses.replace(PLAN, seed_key=(0, 1, 3)))
    ids = [[_ids(t) for group in groups for t in group.trajectories] for groups in (first, again, other)]
    assert ids[0] == ids[1]
    # Two short answers may be the same by chance.
    assert sum(a != b for a, b in zip(ids[0], ids[2], strict=True)) > 0.7 * len(ids[0])


def test_one_worker_in_this_process_samples_the_same_tokens(pool):
    groups = pool.rollout(TASKS[:2], PLAN)
    worker = RolloutWorker(spec(Parrot))
    worker.receive(snapshot(0))
    jobs = [
        EpisodeJob(
            task=TASKS[position],
            sample_index=sample,
            session=3 * position + sample,
            seed=_seed(*PLAN.seed_key, position, sample),
            temperature=PLAN.temperature,
            limits=PLAN.limits,
            max_context_tokens=PLAN.max_context_tokens,
        )
        for position in range(2)
        for sample in range(3)
    ]
    here = worker.run(jobs, fresh_grading=False)
    assert [_ids(t) for t in here] == [_ids(t) for group in groups for t in group.trajectories]


def test_demonstrations_come_in_the_order_of_their_scripts(pool):
    scripts = [(task, (f"{task.id} one", "two")) for task in TASKS[:3]]
    trajectories = pool.demonstrate(scripts, max_tokens_per_turn=32, max_context_tokens=96)
    assert [trajectory.segments[0].turns[0].message.content for trajectory in trajectories] == [
        f"task {number} one" for number in range(3)
    ]
    assert {trajectory.stop for trajectory in trajectories} == {StopReason.TERMINATED}


def test_fewer_episodes_than_workers(pool):
    (group,) = pool.rollout(TASKS[:1], dataclasses.replace(PLAN, group_size=1))
    assert len(group.trajectories) == 1
    assert pool.rollout([], PLAN) == []


def test_publishing_reaches_every_worker_and_is_verified():
    with _pool(spec(Parrot)) as pool:
        for version in (0, 4):
            published = snapshot(version, seed=version)
            pool.publish(published)
            for running in pool.running_views():
                assert running.keys() == published.tensors.keys()
                for name, packed in published.tensors.items():
                    assert np.array_equal(running[name], view(packed).numpy())
            for group in pool.rollout(TASKS[:2], PLAN):
                spans = [span for t in group.trajectories for span in t.segments[0].spans()]
                assert {s.sampled_by.weight_version for s in spans if s.origin is SpanOrigin.SAMPLED} == {version}
        name = "model.layers.0.mlp.experts.down_proj"
        broken = snapshot(5)
        payload = broken.tensors[name].payload.copy()
        payload.reshape(-1)[3] ^= 1
        tensors = {**broken.tensors, name: dataclasses.replace(broken.tensors[name], payload=payload)}
        with pytest.raises(SnapshotError, match=f"snapshot 5: {name}: digest must be"):
            pool.publish(dataclasses.replace(broken, tensors=tensors))
        old = snapshot(4, seed=4)
        for running in pool.running_views():
            assert all(np.array_equal(running[name], view(packed).numpy()) for name, packed in old.tensors.items())


def test_a_worker_that_answers_with_other_digests_is_named(pool, monkeypatch):
    published = snapshot(9)
    wrong = {**published.digests, "model.norm.weight": "00"}
    monkeypatch.setattr(pool, "_call", lambda *_: [published.digests, wrong])
    with pytest.raises(PoolError, match=r"worker 1 runs other weights than version 9, .*\['model\.norm\.weight'\]"):
        pool.publish(published)
    missing = {name: digest for name, digest in published.digests.items() if name != "lm_head.weight"}
    monkeypatch.setattr(pool, "_call", lambda *_: [missing, published.digests])
    with pytest.raises(PoolError, match=r"worker 0 runs other weights .*\['lm_head\.weight'\]"):
        pool.publish(published)


def test_a_killed_worker_is_named_within_seconds_while_the_other_still_runs(tmp_path):
    victim = 1  # the wait must not stand before worker 0
    with _pool(spec(Waiting, folder=str(tmp_path))) as pool:
        pool.publish(snapshot(0))
        pids = list(pool._pids)

        def kill():
            while not all((tmp_path / str(pid)).exists() for pid in pids):
                time.sleep(0.02)
            killed.append(time.monotonic())
            os.kill(pids[victim], signal.SIGKILL)

        killed = []
        killer = threading.Thread(target=kill, daemon=True)
        killer.start()
        with pytest.raises(PoolError) as caught:
            pool.rollout(TASKS, PLAN)
        assert time.monotonic() - killed[0] < 10.0
        killer.join()
        assert f"worker {victim} (pid {pids[victim]}) died while it should run episodes, got" in str(caught.value)
        assert "run the same command again to resume" in str(caught.value)
    assert _all_gone(pids)


@pytest.mark.slow
def test_a_worker_that_stalls_is_named_at_the_deadline(tmp_path):
    with _pool(spec(Waiting, folder=str(tmp_path)), deadline_s=30.0) as pool:
        pool.publish(snapshot(0))
        pids = list(pool._pids)
        pool._deadline_s = 2.0
        started = time.monotonic()
        with pytest.raises(PoolError) as caught:
            pool.rollout(TASKS[:1], dataclasses.replace(PLAN, group_size=1))  # worker 1 has nothing to do
        assert 2.0 <= time.monotonic() - started < 10.0
        message = str(caught.value)
        assert f"worker 0 (pid {pids[0]}) did not run episodes in time, got nothing for 2 s" in message
        assert "worker 1" not in message
        with pytest.raises(PoolError, match=r"worker 0 .*did not send its weights in time"):
            pool.running_views()
        started = time.monotonic()
    assert _all_gone(pids)
    assert time.monotonic() - started < 15.0


def test_a_worker_that_cannot_start_says_why_and_leaves_none_behind():
    before = set(_ray_workers())
    with pytest.raises(PoolError) as caught:
        _pool(spec(NeverMade))
    message = str(caught.value)
    assert "worker " in message
    assert "died while it should start, got ConnectionError: no service at the door" in message
    assert "\n" not in message
    assert _all_gone(set(_ray_workers()) - before)


def _ray_workers():
    """Of this process's own cluster: others may run on this machine."""
    found = []
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            if "RolloutActor" in " ".join(process.cmdline()):
                found.append(process.pid)
    return found


def test_sandboxes_end_with_their_workers_killed_or_closed():
    try:
        probe(EnvConfig().sandbox)
    except SandboxUnavailable as error:
        pytest.skip(str(error))
    coding = dataclasses.replace(spec(Parrot), env=EnvConfig(name="coding", max_context_tokens=96))
    with _pool(coding) as pool:
        workers = list(pool._pids)
        assert set(workers) <= set(_ray_workers())
        boxes = [[child.pid for child in psutil.Process(pid).children(recursive=True)] for pid in workers]
        assert all(boxes)  # a fork server each
        os.kill(workers[1], signal.SIGKILL)
        assert _all_gone(boxes[1])
        assert psutil.pid_exists(boxes[0][0])
        with pytest.raises(PoolError, match=rf"worker 1 \(pid {workers[1]}\) died while it should"):
            pool.publish(snapshot(0))
    assert _all_gone([*workers, *boxes[0]])
    pool.close()

"""Learner ranks as Ray actors: they work together, and the end of one is told by name at once."""

import dataclasses
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from model.checkpoint import save_model
from model.transformer import Transformer, init_weights, parameter_shapes
from rl.cluster import ray_cluster
from rl.config import ClusterConfig
from rl.learner.allocator import keeping_memory
from rl.learner.deepspeed import OptimizerSettings
from rl.learner.group import LearnerGroup, LearnerGroupError, RankDiedError
from rl.learner.learner import LearnerSpec
from rollout.types import WeightVersion
from tests.numerics.test_learner import GRPO, MODEL, SAMPLES

pytestmark = pytest.mark.ray

DEADLINE_S = 120.0


@pytest.fixture(scope="module")
def spec(tmp_path_factory: pytest.TempPathFactory) -> LearnerSpec:
    folder = tmp_path_factory.mktemp("start")
    model = Transformer(MODEL)
    init_weights(model, 3)
    save_model(folder, MODEL, dict(model.named_parameters()), {})
    optimizer = OptimizerSettings(beta1=0.9, beta2=0.95, weight_decay=0.0, max_grad_norm=1.0, zero_stage=1)
    return LearnerSpec(
        model=MODEL, optimizer=optimizer, start=folder, num_threads=1, micro_batch_tokens=60, expert_parallel=2
    )


@pytest.fixture(scope="module", autouse=True)
def _cluster() -> Iterator[None]:
    with ray_cluster(ClusterConfig(), num_cpus=2):
        yield


def test_ranks_that_share_the_experts_out_update_and_publish_one_model(spec: LearnerSpec, tmp_path: Path):
    with LearnerGroup(spec, num_ranks=2, deadline_s=DEADLINE_S) as group:
        assert len(set(group.pids)) == 2
        assert all("libjemalloc" in Path(f"/proc/{pid}/maps").read_text() for pid in group.pids)
        report = group.update([SAMPLES[:3], SAMPLES[3:]], GRPO, 1e-2)
        assert report is not None
        assert (report.num_steps, report.num_tokens) == (2, sum(len(one.targets_R) for one in SAMPLES))
        snapshot, changed = group.snapshot(WeightVersion(1))
        assert {name: packed.shape for name, packed in snapshot.tensors.items()} == parameter_shapes(MODEL)
        assert changed == {}
        assert group.digests() == snapshot.digests
        group.save(tmp_path)
        assert {file.name for file in tmp_path.iterdir()} == {
            "config.json", "expert_load.json", "model.safetensors", "optimizer.safetensors"
        }  # fmt: skip


def test_freed_memory_goes_back_to_the_system_when_asked(spec: LearnerSpec, monkeypatch: pytest.MonkeyPatch):
    spec = dataclasses.replace(spec, keep_memory=False, expert_parallel=1)
    with LearnerGroup(spec, num_ranks=1, deadline_s=DEADLINE_S) as group:
        assert "libjemalloc" not in Path(f"/proc/{group.pids[0]}/maps").read_text()
    monkeypatch.setenv("LD_PRELOAD", "/usr/lib/libmine.so")
    assert keeping_memory() == {}, "the user's choice stands"


def update_on_and_on(group: LearnerGroup) -> None:
    for _ in range(10_000):
        group.update([SAMPLES], GRPO, 1e-3)


@pytest.mark.parametrize("victim", [0, 1])
def test_the_death_of_a_rank_is_told_by_name_within_seconds(spec: LearnerSpec, victim: int):
    with LearnerGroup(spec, num_ranks=2, deadline_s=DEADLINE_S) as group:
        kill = threading.Timer(0.5, os.kill, (group.pids[victim], signal.SIGKILL))
        kill.start()
        started = time.monotonic()
        with pytest.raises(RankDiedError, match=rf"^learner: rank {victim} died while it should update, got "):
            update_on_and_on(group)
        assert time.monotonic() - started < 60


def test_more_ranks_than_the_cluster_has_cpus_are_refused(spec: LearnerSpec):
    with pytest.raises(
        LearnerGroupError, match=r"^learner\.num_ranks: the cluster must have a free CPU for each, got 3 ranks and 2 "
    ):
        LearnerGroup(spec, num_ranks=3, deadline_s=3.0)

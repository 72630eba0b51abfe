from pathlib import Path

import numpy as np
import pytest

from model.config import ModelConfig
from model.snapshot import WeightSnapshot, make_snapshot, published_view
from model.transformer import Transformer, init_weights
from rl.checkpoint import CheckpointError
from rl.config import RunConfig
from rl.config_check import count_parameters, estimate_memory_bytes, resolve_workers
from rl.held_back import HeldBack
from rollout.types import WeightVersion

MODEL = ModelConfig(vocab_size=24, hidden_size=32, num_layers=1, num_heads=2, num_kv_heads=1, expert_hidden_size=32)


def snapshot(version: int) -> WeightSnapshot:
    model = Transformer(MODEL)
    init_weights(model, version)
    return make_snapshot(WeightVersion(version), published_view(model.state_dict()))


SNAPSHOTS = [snapshot(version) for version in range(6)]


def passed(held: HeldBack, first: int, last: int) -> list[int]:
    return [held.pass_through(SNAPSHOTS[version]).version for version in range(first, last + 1)]


@pytest.mark.parametrize(
    ("num_versions", "due"), [(0, [0, 1, 2, 3, 4, 5]), (1, [0, 0, 1, 2, 3, 4]), (2, [0, 0, 0, 1, 2, 3]), (9, [0] * 6)]
)
def test_a_version_is_due_after_so_many_others(num_versions: int, due: list[int]):
    assert passed(HeldBack(MODEL, num_versions), 0, 5) == due


def test_nothing_is_kept_where_nothing_is_held_back(tmp_path: Path):
    held = HeldBack(MODEL, 0)
    assert held.pass_through(SNAPSHOTS[0]) is SNAPSHOTS[0]
    held.save(tmp_path)
    assert list(tmp_path.iterdir()) == []
    held.load(tmp_path, WeightVersion(3))
    assert held.pass_through(SNAPSHOTS[3]) is SNAPSHOTS[3]


def test_what_is_kept_is_a_copy_of_the_same_bytes():
    held = HeldBack(MODEL, 1)
    kept = held.pass_through(SNAPSHOTS[0])
    assert kept.digests == SNAPSHOTS[0].digests
    for name, packed in kept.tensors.items():
        assert not np.shares_memory(packed.payload, SNAPSHOTS[0].tensors[name].payload)
        assert np.array_equal(packed.payload, SNAPSHOTS[0].tensors[name].payload)


@pytest.mark.parametrize("version", range(5))
def test_a_resumed_run_sends_what_an_undisturbed_one_does(version: int, tmp_path: Path):
    undisturbed = HeldBack(MODEL, 2)
    passed(undisturbed, 0, version)
    undisturbed.save(tmp_path)
    resumed = HeldBack(MODEL, 2)
    resumed.load(tmp_path, WeightVersion(version))
    resumed.pass_through(SNAPSHOTS[version])  # the learner publishes again what its checkpoint holds
    for each in (undisturbed, resumed):
        assert each.newest.version == version
        assert each.due.version == max(0, version - 2)
    assert resumed.due.digests == undisturbed.due.digests == SNAPSHOTS[max(0, version - 2)].digests
    for number in range(version + 1, 6):
        due = [each.pass_through(SNAPSHOTS[number]) for each in (undisturbed, resumed)]
        assert [each.version for each in due] == [max(0, number - 2)] * 2
        assert due[1].digests == due[0].digests
        assert {name: packed.payload.tobytes() for name, packed in due[1].tensors.items()} == {
            name: packed.payload.tobytes() for name, packed in due[0].tensors.items()
        }


def test_a_checkpoint_without_a_version_that_is_due_is_named(tmp_path: Path):
    held = HeldBack(MODEL, 1)
    passed(held, 0, 4)
    held.save(tmp_path)
    with pytest.raises(CheckpointError) as caught:
        HeldBack(MODEL, 2).load(tmp_path, WeightVersion(4))
    assert str(caught.value) == (
        f"checkpoint {tmp_path.name}: rollout.hold_back_versions=2 needs version 2, got none; resume with the value it "
        "was saved with"
    )


def test_the_estimate_of_memory_has_the_bytes_of_all_that_is_kept():
    config, plan = RunConfig(), resolve_workers(RunConfig(), 2)
    without = estimate_memory_bytes(config, plan)
    config.rollout.hold_back_versions = 2
    parts = estimate_memory_bytes(config, plan)
    assert parts == {**without, "held-back versions": 3 * 2 * count_parameters(config)}

import dataclasses

import numpy as np
import pytest

from model.config import ComputeDtype, KernelChoice, ModelConfig
from model.layers import TORCH_DTYPE
from model.snapshot import SnapshotError, make_snapshot, published_view, view
from model.transformer import Transformer, init_weights
from rollout.config import EngineConfig
from rollout.engine.engine import Engine, EngineError
from rollout.subscribe import StaleSnapshotError, Subscriber
from rollout.types import SampleRequest, SamplingParams, WeightVersion

CONFIG = ModelConfig(vocab_size=24, hidden_size=32, num_layers=2, num_heads=2, num_kv_heads=1, expert_hidden_size=64)
EXPERT = "model.layers.1.mlp.experts.gate_up_proj"
NORM = "model.norm.weight"


def _snapshot(version, seed):
    model = Transformer(CONFIG)
    init_weights(model, seed)
    return make_snapshot(WeightVersion(version), published_view(model.state_dict()))


OLD, NEW = _snapshot(3, seed=0), _snapshot(4, seed=1)
REQUEST = SampleRequest(session=1, prompt_ids=(7, 8, 9), params=SamplingParams(max_tokens=6), seed=3)


def _damaged(name, **changes):
    return dataclasses.replace(NEW, tensors={**NEW.tensors, name: dataclasses.replace(NEW.tensors[name], **changes)})


def _without(name):
    return dataclasses.replace(NEW, tensors={key: value for key, value in NEW.tensors.items() if key != name})


def _flipped(name, bit):
    payload = NEW.tensors[name].payload.copy()
    payload.reshape(-1)[17] ^= bit
    return _damaged(name, payload=payload)


def _rescaled():
    scales = NEW.tensors[EXPERT].scales.copy()
    scales[7, 3, 0] ^= 1
    return _damaged(EXPERT, scales=scales)


@pytest.fixture
def engine():
    return Engine(CONFIG, EngineConfig(max_batch_size=2, max_seq_len=32), stop_ids={5})


def _say(engine):
    (generation,) = engine.sample([REQUEST])
    engine.close_session(1)
    return generation


def test_a_snapshot_is_swapped_in_whole(engine):
    subscriber = Subscriber(CONFIG, engine)
    assert subscriber.receive(OLD) == OLD.digests
    before = _say(engine)
    assert before.weight_version == 3
    assert subscriber.receive(NEW) == NEW.digests
    after = _say(engine)
    assert after.weight_version == 4
    assert not np.array_equal(before.logprobs_T, after.logprobs_T)
    running = engine.running_views()
    assert running.keys() == NEW.tensors.keys()
    assert all(np.array_equal(running[name], view(packed).numpy()) for name, packed in NEW.tensors.items())


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda: _flipped(EXPERT, 0x01), f"snapshot 4: {EXPERT}: digest must be"),
        (lambda: _flipped(EXPERT, 0x80), f"snapshot 4: {EXPERT}: digest must be"),
        (lambda: _flipped(NORM, 0x01), f"snapshot 4: {NORM}: digest must be"),
        (_rescaled, f"snapshot 4: {EXPERT}: digest must be"),
        (lambda: _without(EXPERT), f"missing ['{EXPERT}'] and extra []"),
        (lambda: dataclasses.replace(NEW, tensors={**NEW.tensors, "more": NEW.tensors[NORM]}), "extra ['more']"),
        (lambda: _damaged(NORM, shape=(16, 2)), f"snapshot 4: {NORM}: shape must be (32,)"),
        (lambda: dataclasses.replace(NEW, metadata={}), "run the same release on both sides"),
    ],
    ids=["low nibble", "high nibble", "bf16 bit", "scale", "missing", "extra", "shape", "release"],
)
def test_a_snapshot_that_did_not_arrive_as_sent_swaps_nothing(engine, make, named):
    subscriber = Subscriber(CONFIG, engine)
    subscriber.receive(OLD)
    before, running = _say(engine), engine.running_views()
    with pytest.raises(SnapshotError) as caught:
        subscriber.receive(make())
    assert named in str(caught.value)
    assert engine.weight_version == 3
    after = _say(engine)
    assert (after.ids, after.weight_version) == (before.ids, 3)
    assert after.logprobs_T.tobytes() == before.logprobs_T.tobytes()
    assert all(np.array_equal(tensor, running[name]) for name, tensor in engine.running_views().items())
    assert subscriber.receive(NEW) == NEW.digests  # and the same version may be sent again, undamaged
    assert _say(engine).weight_version == 4


def test_a_first_snapshot_that_is_damaged_leaves_the_engine_without_weights(engine):
    with pytest.raises(SnapshotError):
        Subscriber(CONFIG, engine).receive(_flipped(EXPERT, 0x10))
    with pytest.raises(EngineError, match="no weights yet"):
        _say(engine)


@pytest.mark.parametrize("version", [4, 3, 0])
def test_versions_only_grow(engine, version):
    subscriber = Subscriber(CONFIG, engine)
    subscriber.receive(NEW)
    before = _say(engine)
    with pytest.raises(StaleSnapshotError, match=f"snapshot: versions only grow, got {version} after 4"):
        subscriber.receive(dataclasses.replace(OLD, version=WeightVersion(version)))
    assert _say(engine).logprobs_T.tobytes() == before.logprobs_T.tobytes()


def test_a_sender_that_holds_versions_back_may_go_back_to_the_same_tokens(engine):
    subscriber = Subscriber(CONFIG, engine)
    subscriber.receive(OLD)
    before = _say(engine)
    subscriber.receive(NEW)
    assert subscriber.receive(OLD, may_go_back=True) == OLD.digests
    again = _say(engine)
    assert (again.ids, again.weight_version) == (before.ids, 3)
    assert again.logprobs_T.tobytes() == before.logprobs_T.tobytes()
    assert subscriber.receive(NEW) == NEW.digests


@pytest.mark.parametrize("dtype", ComputeDtype)
def test_torch_layers_hold_views_in_the_compute_dtype(dtype):
    config = dataclasses.replace(CONFIG, compute_dtype=dtype)
    settings = EngineConfig(max_batch_size=1, max_seq_len=32, kernels=KernelChoice.torch)
    engine = Engine(config, settings, stop_ids={5})
    Subscriber(config, engine).receive(NEW)
    assert {tensor.dtype for tensor in engine._model.state_dict().values()} == {TORCH_DTYPE[dtype]}
    assert all(np.array_equal(tensor, view(NEW.tensors[name])) for name, tensor in engine.running_views().items())


def test_a_snapshot_of_another_model_is_refused():
    config = dataclasses.replace(CONFIG, num_layers=1)
    engine = Engine(config, EngineConfig(max_batch_size=1, max_seq_len=32), stop_ids={5})
    with pytest.raises(SnapshotError, match=r"missing \[\] and extra \['model\.layers\.1\."):
        Subscriber(config, engine).receive(NEW)

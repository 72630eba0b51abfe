"""Every type that travels between processes arrives as it was sent, its invariants kept."""

import copy
import dataclasses
import enum
import inspect
import pickle

import numpy as np
import pytest

import rollout.types
from envs.config import EnvConfig
from model.config import ModelConfig
from model.snapshot import Format, PackedTensor, WeightSnapshot
from rollout.config import ChatFormat
from rollout.episode import EpisodeJob
from rollout.pool import SamplePlan
from rollout.types import (
    Boundary,
    Checks,
    Evidence,
    Failure,
    FinishReason,
    Generation,
    MalformedToolCall,
    Message,
    RewardNode,
    Role,
    SampledBy,
    SampleRequest,
    SamplingParams,
    ScoredGroup,
    ScoredTrajectory,
    Segment,
    SpanOrigin,
    Split,
    StopReason,
    Task,
    TaskLimits,
    TokenSpan,
    ToolCall,
    Trajectory,
    TrajectoryError,
    TrajectoryGroup,
    Turn,
    TurnEvidence,
    Verdict,
    WeightVersion,
)
from rollout.worker import WorkerSpec

MESSAGE = Message(role=Role.USER, content="héllo\x00<end>")
CALL = ToolCall(id="call_0", name="f", arguments={"x": [1, {"y": None}]})
MALFORMED = MalformedToolCall(id="call_1", raw="{", problem="p")
ANSWER = Message(role=Role.ASSISTANT, content="", reasoning="r", tool_calls=(CALL, MALFORMED))
LIMITS = TaskLimits(max_turns=2, max_tokens_per_turn=48)
TASK = Task(id="t", messages=(MESSAGE,), payload={"a": [1, {"b": None}]}, split=Split.HELD_OUT, seed=2**62, tools=({},))
PARAMS = SamplingParams(temperature=0.7, max_tokens=3)
ROUTES = np.arange(8, dtype=np.uint8).reshape(2, 2, 2)
SAMPLED_BY = SampledBy(
    logprobs_T=np.array([-0.5, -np.float32(1e-30)], np.float32), weight_version=WeightVersion(4), params=PARAMS
)
CONTEXT = TokenSpan(origin=SpanOrigin.CONTEXT, ids=(0, 2, 3))
SAMPLED = TokenSpan(origin=SpanOrigin.SAMPLED, ids=(9, 5), sampled_by=SAMPLED_BY, routes_TLK=ROUTES)
TURN = Turn(spans=(SAMPLED,), message=ANSWER, observations=(MESSAGE,))
SEGMENT = Segment(opening=CONTEXT, turns=(TURN,), parent=0)
CHECKS = Checks(passed=1, declared=3)
TURN_EVIDENCE = TurnEvidence(well_formed=True, visible=CHECKS, note="n")
EVIDENCE = Evidence(
    verdict=Verdict.POLICY_FAILED, turns=(TURN_EVIDENCE,), hidden=CHECKS, tampered=True, reason="r", extras={"k": [1.5]}
)
FAILURE = Failure(boundary=Boundary.REWARD, message="m")
TRAJECTORY = Trajectory(
    task_id="t", sample_index=1, segments=(SEGMENT,), stop=StopReason.TERMINATED, failure=None, evidence=EVIDENCE,
    seconds=0.25,
)  # fmt: skip
NODE = RewardNode(
    name="total", score=0.1, children=(RewardNode(name="a", score=None, masked="lost", weight=0.0, turn=0),)
)
SCORED = ScoredTrajectory(trajectory=TRAJECTORY, reward=NODE)

PACKED = PackedTensor(
    format=Format.BF16, shape=(2,), payload=np.array([[1, 2], [3, 4]], np.uint8), scales=np.empty(0, np.uint8)
)

VALUES = {
    type(value): value
    for value in (
        ANSWER, CALL, MALFORMED, LIMITS, TASK, PARAMS, SAMPLED_BY, SAMPLED, TURN, SEGMENT, CHECKS, TURN_EVIDENCE,
        EVIDENCE, FAILURE, TRAJECTORY, NODE, SCORED, PACKED,
        TrajectoryGroup(task=TASK, trajectories=(TRAJECTORY, TRAJECTORY)),
        ScoredGroup(task=TASK, scored=(SCORED,)),
        SampleRequest(session=3, prompt_ids=(0, 1), params=PARAMS, seed=5),
        Generation(
            ids=(9, 5), logprobs_T=SAMPLED_BY.logprobs_T, routes_TLK=ROUTES, finish=FinishReason.LENGTH,
            weight_version=WeightVersion(4),
        ),
        EpisodeJob(
            task=TASK, sample_index=0, session=1, seed=2, temperature=1.0, limits=LIMITS, max_context_tokens=9
        ),
        SamplePlan(group_size=2, temperature=1.0, limits=LIMITS, max_context_tokens=9, seed_key=(1, 2)),
        WorkerSpec(
            env=EnvConfig(), model=ModelConfig(), tokenizer_json="{}", chat_format=ChatFormat.kimi, num_threads=1,
            max_sessions=2, max_retries=0,
        ),
        WeightSnapshot(version=WeightVersion(2), tensors={"a": PACKED}, digests={"a": "00"}),
    )
}  # fmt: skip


def same(a, b):
    """Equality that looks into arrays: same type, same dtype, same bits."""
    if type(a) is not type(b):
        return False
    if isinstance(a, np.ndarray):
        return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    if dataclasses.is_dataclass(a):
        return all(same(getattr(a, field.name), getattr(b, field.name)) for field in dataclasses.fields(a))
    if isinstance(a, tuple | list):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    return a == b


def test_every_travelling_type_is_here():
    declared = {
        kind
        for _, kind in inspect.getmembers(rollout.types, inspect.isclass)
        if dataclasses.is_dataclass(kind) and kind.__module__ == "rollout.types"
    }
    assert declared - VALUES.keys() == set()


@pytest.mark.parametrize("kind", VALUES, ids=lambda kind: kind.__name__)
def test_it_arrives_as_it_was_sent(kind):
    value = VALUES[kind]
    for protocol in (pickle.DEFAULT_PROTOCOL, pickle.HIGHEST_PROTOCOL):
        arrived = pickle.loads(pickle.dumps(value, protocol))
        assert arrived is not value
        assert same(arrived, value)
    assert same(copy.deepcopy(value), value)


def test_the_comparison_sees_a_difference():
    other = dataclasses.replace(SAMPLED, routes_TLK=ROUTES + np.uint8(1))
    assert not same(SAMPLED, other)
    assert not same(SAMPLED, dataclasses.replace(SAMPLED, routes_TLK=ROUTES.astype(np.int64)))
    assert not same(TRAJECTORY, dataclasses.replace(TRAJECTORY, seconds=0.5))


@pytest.mark.parametrize("kind", VALUES, ids=lambda kind: kind.__name__)
def test_it_is_frozen_and_has_no_room_for_more(kind):
    value = VALUES[kind]
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(value, dataclasses.fields(value)[0].name, None)
    assert not hasattr(value, "__dict__")


def test_enums_travel_by_their_names():
    enums = [
        kind
        for _, kind in inspect.getmembers(rollout.types, inspect.isclass)
        if issubclass(kind, enum.Enum) and kind.__module__ == "rollout.types"
    ]
    assert len(enums) == 7
    for member in (member for kind in enums for member in kind):
        assert pickle.loads(pickle.dumps(member)) is member


def test_errors_travel():
    arrived = pickle.loads(pickle.dumps(TrajectoryError("span: wrong, got 1; fix it")))
    assert (type(arrived), str(arrived)) == (TrajectoryError, "span: wrong, got 1; fix it")

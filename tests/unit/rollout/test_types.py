import math

import numpy as np
import pytest

from rollout.types import (
    Boundary,
    Checks,
    Evidence,
    Failure,
    Message,
    RewardNode,
    Role,
    SampledBy,
    SamplingParams,
    ScoredTrajectory,
    Segment,
    SpanOrigin,
    Split,
    StopReason,
    Task,
    TokenSpan,
    Trajectory,
    TrajectoryError,
    Turn,
    Verdict,
    WeightVersion,
)

SAMPLED_BY = SampledBy(
    logprobs_T=np.array([-1.0, -2.0], np.float32), weight_version=WeightVersion(1), params=SamplingParams()
)
EVIDENCE = Evidence(verdict=Verdict.VALID, turns=(), hidden=Checks(passed=0, declared=0))
FAILURE = Failure(boundary=Boundary.SANDBOX, message="gone")


def _trajectory(**changes):
    fields = {
        "task_id": "t",
        "sample_index": 0,
        "segments": (),
        "stop": StopReason.TERMINATED,
        "failure": None,
        "evidence": EVIDENCE,
        "seconds": 0.0,
    }
    return Trajectory(**(fields | changes))


@pytest.mark.parametrize("origin", SpanOrigin)
def test_logprobs_belong_to_sampled_tokens_and_to_all_of_them(origin):
    sampled_by = SAMPLED_BY if origin is SpanOrigin.SAMPLED else None
    assert TokenSpan(origin=origin, ids=(1, 2), sampled_by=sampled_by).ids == (1, 2)
    with pytest.raises(TrajectoryError, match="logprobs belong to sampled tokens only"):
        TokenSpan(origin=origin, ids=(1, 2), sampled_by=None if sampled_by else SAMPLED_BY)


@pytest.mark.parametrize("ids", [(), (1,), (1, 2, 3)])
def test_one_logprob_a_sampled_token(ids):
    with pytest.raises(TrajectoryError, match=f"one logprob a sampled token, got 2 for {len(ids)} ids"):
        TokenSpan(origin=SpanOrigin.SAMPLED, ids=ids, sampled_by=SAMPLED_BY)


def test_a_trajectory_stopped_or_failed():
    with pytest.raises(TrajectoryError, match="trajectory of t: exactly one of stop and failure"):
        _trajectory(failure=FAILURE)
    with pytest.raises(TrajectoryError, match="exactly one of stop and failure, got stop=None failure=None"):
        _trajectory(stop=None)
    assert _trajectory(stop=None, failure=FAILURE).failure == FAILURE


def test_checks_pass_of_those_declared():
    for passed, declared in ((-1, 2), (3, 2), (1, 0)):
        with pytest.raises(TrajectoryError, match=f"got {passed} of {declared}"):
            Checks(passed=passed, declared=declared)
    assert [(c.all_passed, c.fraction) for c in (Checks(passed=2, declared=2), Checks(passed=1, declared=4))] == [
        (True, 1.0),
        (False, 0.25),
    ]
    nothing = Checks(passed=0, declared=0)
    assert (nothing.all_passed, nothing.fraction) == (False, 0.0)


def test_bounds_of_sampling_parameters():
    assert SamplingParams(temperature=0.0, max_tokens=1).temperature == 0.0
    for temperature in (-0.1, math.nan, math.inf):
        with pytest.raises(TrajectoryError, match=f"temperature: must be finite and not negative, got {temperature}"):
            SamplingParams(temperature=temperature)
    with pytest.raises(TrajectoryError, match="max_tokens: must be at least 1, got 0"):
        SamplingParams(max_tokens=0)


def test_a_task_opens_with_a_message():
    with pytest.raises(TrajectoryError, match="task t: no opening message"):
        Task(id="t", messages=(), payload={}, split=Split.TRAIN, seed=0)


def test_a_reward_is_a_score_or_masked():
    for score, masked in ((None, None), (1.0, "lost")):
        with pytest.raises(TrajectoryError, match="reward r: a score or a mask reason"):
            RewardNode(name="r", score=score, masked=masked)
    lost = ScoredTrajectory(trajectory=_trajectory(), reward=RewardNode(name="r", score=None, masked="lost"))
    zero = ScoredTrajectory(trajectory=_trajectory(), reward=RewardNode(name="r", score=0.0))
    assert lost.total is None
    assert zero.total == 0.0


def test_a_reward_tree_is_walked_parents_first():
    leaves = tuple(RewardNode(name=name, score=0.0) for name in "bc")
    tree = RewardNode(name="a", score=0.0, children=(leaves[0], RewardNode(name="d", score=0.0, children=leaves[1:])))
    assert [node.name for node in tree.walk()] == ["a", "b", "d", "c"]


def test_a_trajectory_counts_turns_and_sampled_tokens_over_its_segments():
    message = Message(role=Role.ASSISTANT, content="x")
    seen = TokenSpan(origin=SpanOrigin.OBSERVATION, ids=(8, 9, 10))
    sampled = TokenSpan(origin=SpanOrigin.SAMPLED, ids=(1, 2), sampled_by=SAMPLED_BY)
    opening = TokenSpan(origin=SpanOrigin.CONTEXT, ids=(0,))
    turns = (Turn(spans=(sampled,), message=message), Turn(spans=(seen, sampled), message=message))
    segments = (Segment(opening=opening, turns=turns), Segment(opening=opening, turns=turns[:1], parent=0))
    trajectory = _trajectory(segments=segments)
    assert (trajectory.num_turns, trajectory.num_sampled_tokens) == (3, 6)
    assert list(segments[0].spans()) == [opening, sampled, seen, sampled]


def test_types_are_frozen():
    with pytest.raises(AttributeError):
        FAILURE.message = "other"
    with pytest.raises((AttributeError, TypeError)):
        EVIDENCE.anything = 1

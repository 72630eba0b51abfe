import math
from dataclasses import replace

import numpy as np
import pytest

from rewards.base import RewardError, masked, per_turn, score, score_group, weighted_sum
from rollout.types import Boundary, Failure, RewardNode, TrajectoryGroup, Verdict


def test_a_number_becomes_the_total(task, evidence, trajectory):
    scored = score(lambda task, episode, judged: judged.hidden.fraction, task, trajectory(evidence(3)))
    assert scored.total == 0.5
    assert scored.reward.name == "total"
    assert scored.reward.milliseconds > 0


@pytest.mark.parametrize("value", [1, np.float32(0.25), np.float64(0.25)])
def test_other_real_numbers_are_numbers(task, evidence, trajectory, value):
    total = score(lambda *_: value, task, trajectory(evidence(6))).total
    assert total == float(value)
    assert type(total) is float


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (math.nan, "not finite, got nan"),
        (math.inf, "not finite, got inf"),
        (-math.inf, "not finite, got -inf"),
        (None, "not a number, got None"),
        ("1.0", "not a number, got '1.0'"),
        (True, "not a number, got True"),
        (1j, "not a number, got 1j"),
        (RewardNode(name="inner", score=math.nan), "node inner is not finite, got nan"),
    ],
)
def test_what_is_not_a_finite_number_is_masked_never_zero(task, evidence, trajectory, value, reason):
    scored = score(lambda *_: value, task, trajectory(evidence(6)))
    assert scored.total is None
    assert scored.reward.masked == reason


def test_an_exception_in_reward_code_is_masked_with_its_reason(task, evidence, trajectory):
    def broken(task, episode, judged):
        return 1 / 0

    scored = score(broken, task, trajectory(evidence(6)))
    assert scored.total is None
    assert scored.reward.masked == "raised ZeroDivisionError: division by zero"


def test_a_failed_trajectory_is_masked_and_the_reward_does_not_run(task, evidence, trajectory):
    ran = []
    failed = replace(
        trajectory(evidence(0)), stop=None, failure=Failure(boundary=Boundary.SANDBOX, message="box 3 is gone")
    )
    scored = score(lambda *_: ran.append(1) or 1.0, task, failed)
    assert scored.total is None
    assert scored.reward.masked == "sandbox: box 3 is gone"
    assert not ran


def test_masked_evidence_masks_the_total(task, evidence, trajectory):
    episode = trajectory(evidence(0, verdict=Verdict.MASKED, reason="lost"))
    assert score(lambda *_: 1.0, task, episode).reward.masked == "evidence: lost"


def test_one_broken_sibling_shifts_no_other_reward(task, evidence, trajectory):
    def brittle(task, episode, judged):
        return 1 / (judged.hidden.passed - 3)

    group = TrajectoryGroup(task=task, trajectories=tuple(trajectory(evidence(n)) for n in (2, 3, 4, 5)))
    scored = score_group(brittle, group)
    assert [one.total for one in scored.scored] == [-1.0, None, 1.0, 0.5]
    assert [one.trajectory for one in scored.scored] == list(group.trajectories)


def test_weighted_sum_ignores_masked_children_of_weight_zero_only():
    two = RewardNode(name="two", score=2.0, weight=0.5)
    assert weighted_sum("sum", [two, replace(masked("judge", "slow"), weight=0.0)]).score == 1.0
    counted = weighted_sum("sum", [two, masked("judge", "slow")])
    assert (counted.score, counted.masked) == (None, "judge: slow")


def test_per_turn_rewards_sum_to_the_total():
    inner = weighted_sum(
        "inner",
        [RewardNode(name="a", score=2.0, turn=0), RewardNode(name="b", score=-1.0, turn=1, weight=0.5)],
    )
    root = weighted_sum("total", [replace(inner, weight=2.0), RewardNode(name="end", score=0.25)])
    assert per_turn(root, 3) == (4.0, -1.0, 0.25)
    assert sum(per_turn(root, 3)) == root.score


def test_a_parent_that_is_no_sum_keeps_its_reward_in_its_own_turn():
    gate = RewardNode(name="gate", score=1.0, turn=1, children=(RewardNode(name="a", score=5.0, turn=0),))
    assert per_turn(gate, 2) == (0.0, 1.0)


def test_per_turn_refuses_what_it_cannot_share_out():
    with pytest.raises(RewardError, match=r"no total to share out, got masked \(slow\)"):
        per_turn(masked("total", "slow"), 1)
    with pytest.raises(RewardError, match="no turn to credit, got 0 turns"):
        per_turn(RewardNode(name="total", score=0.0), 0)
    with pytest.raises(RewardError, match=r"turn must lie in 0..1, got 2"):
        per_turn(RewardNode(name="total", score=1.0, turn=2), 2)

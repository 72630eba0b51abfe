from dataclasses import replace

import pytest

from rewards.base import RewardError, per_turn, score
from rewards.config import RewardConfig
from rewards.registry import build_reward
from rollout.types import Checks, Verdict

REWARD = build_reward(RewardConfig(name="tools", turn_penalty=0.0))


@pytest.fixture
def played(task, evidence, trajectory):
    """(solved, milestones reached after each turn of 4, failed calls of each turn, violations) -> scored."""

    def run(solved, reached, errors=None, violations=(), reward=REWARD):
        known = evidence(6 if solved else 0, well_formed=[True] * len(reached))
        turns = tuple(
            replace(
                turn,
                num_calls=4,
                num_call_errors=(errors or [0] * len(reached))[index],
                milestones=Checks(passed=reached[index], declared=4),
                violations=violations if index == 0 else (),
            )
            for index, turn in enumerate(known.turns)
        )
        verdict = Verdict.POLICY_FAILED if violations else known.verdict
        return score(reward, task, trajectory(replace(known, turns=turns, verdict=verdict)))

    return run


def test_progress_is_paid_in_the_turn_that_made_it(played):
    scored = played(False, [1, 1, 3])
    assert scored.total == pytest.approx(0.5 * 0.75)
    assert per_turn(scored.reward, 3) == pytest.approx((0.125, 0.0, 0.25))


def test_a_cycle_earns_nothing(played):
    scored = played(False, [2, 0, 2, 0])
    assert scored.total == 0.0
    assert per_turn(scored.reward, 4) == pytest.approx((0.25, -0.25, 0.25, -0.25))


def test_a_violation_leaves_nothing(played):
    scored = played(True, [4, 4], violations=("eve was paid",))
    assert scored.total == 0.0


def test_failed_calls_cost_solved_episodes_only_and_not_without_end(played):
    assert played(True, [2, 4], errors=[0, 2]).total == pytest.approx(1.5 - 0.1)
    assert per_turn(played(True, [2, 4], errors=[1, 0]).reward, 2) == pytest.approx((0.25 - 0.05, 1.25))
    assert played(True, [2, 4], errors=[5, 9]).total == pytest.approx(1.5 - 0.3)
    assert played(False, [2, 2], errors=[5, 9]).total == pytest.approx(0.25)


def test_penalties_may_not_outweigh_the_solution():
    with pytest.raises(RewardError, match=r"must stay below solved_weight 1.0 .with max_call_penalty., got 1.2"):
        build_reward(RewardConfig(name="tools", max_call_penalty=0.3))
    with pytest.raises(RewardError, match=r"reward.call_penalty: must be finite and not negative, got -1"):
        build_reward(RewardConfig(name="tools", turn_penalty=0.0, call_penalty=-1.0))

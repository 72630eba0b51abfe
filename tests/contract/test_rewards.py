"""Every reward of the registry keeps the order that training depends on, and the sum over turns."""

import pytest

from rewards.base import per_turn, score
from rewards.config import RewardConfig
from rewards.registry import REWARDS, build_reward
from rollout.types import (
    Boundary,
    Checks,
    Evidence,
    Failure,
    Message,
    Role,
    Segment,
    SpanOrigin,
    Split,
    StopReason,
    Task,
    TokenSpan,
    Trajectory,
    Turn,
    TurnEvidence,
    Verdict,
)

TASK = Task(id="t", messages=(Message(role=Role.USER, content="go"),), payload={}, split=Split.TRAIN, seed=0)


def _episode(passed, *well_formed, verdict=Verdict.VALID, stop=StopReason.TERMINATED, failure=None):
    turn = Turn(spans=(), message=Message(role=Role.ASSISTANT, content="answer"))
    return Trajectory(
        task_id="t",
        sample_index=0,
        segments=(Segment(opening=TokenSpan(origin=SpanOrigin.CONTEXT, ids=(1,)), turns=(turn,) * len(well_formed)),),
        stop=None if failure else stop,
        failure=failure,
        evidence=Evidence(
            verdict=verdict,
            turns=tuple(TurnEvidence(well_formed=ok, visible=Checks(passed=0, declared=6)) for ok in well_formed),
            hidden=Checks(passed=passed, declared=6),
        ),
        seconds=0.0,
    )


FAILED = Verdict.POLICY_FAILED
IDLE = {
    "did nothing": _episode(0, verdict=FAILED),
    "fell silent": _episode(0, False, False, verdict=FAILED),
    "was cut off": _episode(0, False, verdict=FAILED, stop=StopReason.TRUNCATED_TOKENS),
    "gave up after a try": _episode(0, True, False),
}
SOLVED = {"at once": _episode(6, True), "late": _episode(6, False, True), "very late": _episode(6, *[True] * 12)}
HONEST = _episode(0, True, True, stop=StopReason.TRUNCATED_TURNS)


@pytest.fixture(params=REWARDS)
def reward(request):
    # Turns of tasks with tools have no price of their own, as in conf/reward/tools.yaml.
    turn_penalty = 0.0 if request.param == "tools" else RewardConfig().turn_penalty
    return build_reward(RewardConfig(name=request.param, turn_penalty=turn_penalty))


@pytest.mark.parametrize("name", IDLE)
def test_not_trying_scores_zero_and_never_above_an_honest_failed_try(reward, name):
    idle = score(reward, TASK, IDLE[name]).total
    assert idle == 0.0
    assert score(reward, TASK, HONEST).total >= idle


@pytest.mark.parametrize("name", SOLVED)
def test_solving_always_beats_failing(reward, name):
    assert score(reward, TASK, SOLVED[name]).total > score(reward, TASK, HONEST).total


def test_an_infrastructure_failure_has_no_score(reward):
    lost = _episode(0, True, failure=Failure(boundary=Boundary.SANDBOX, message="gone"))
    assert score(reward, TASK, lost).total is None


@pytest.mark.parametrize("episode", [*SOLVED.values(), HONEST])
def test_per_turn_rewards_sum_to_the_total(reward, episode):
    scored = score(reward, TASK, episode)
    assert sum(per_turn(scored.reward, episode.num_turns)) == pytest.approx(scored.total, abs=1e-12)


def test_a_reward_is_a_pure_function(reward):
    first, second = (score(reward, TASK, SOLVED["late"]).reward for _ in range(2))
    assert [(node.name, node.score) for node in first.walk()] == [(node.name, node.score) for node in second.walk()]

import pytest

from rewards.base import RewardError, per_turn, score
from rewards.config import RewardConfig
from rewards.registry import build_reward
from rollout.types import StopReason, Verdict

REWARD = build_reward(RewardConfig())


def _nodes(scored):
    return {node.name: node.score for node in scored.reward.walk()}


@pytest.mark.parametrize(("num_turns", "total"), [(1, 1.0), (2, 0.85), (3, 0.7)])
def test_solved_costs_fifteen_hundredths_for_each_extra_turn(task, evidence, trajectory, num_turns, total):
    scored = score(REWARD, task, trajectory(evidence(6, well_formed=[True] * num_turns)))
    assert scored.total == pytest.approx(total, abs=1e-12)


@pytest.mark.parametrize("passed", [0, 3, 5])
def test_everything_unsolved_is_worth_zero_but_the_fraction_is_logged(task, evidence, trajectory, passed):
    scored = score(REWARD, task, trajectory(evidence(passed, well_formed=[True, True])))
    assert scored.total == 0.0
    assert _nodes(scored)["fraction"] == passed / 6
    assert _nodes(scored)["turn_penalty"] == 0.0


def test_a_tampered_or_failed_answer_is_worth_zero_whatever_it_claims(task, evidence, trajectory):
    assert score(REWARD, task, trajectory(evidence(6, tampered=True))).total == 0.0
    assert score(REWARD, task, trajectory(evidence(6, verdict=Verdict.POLICY_FAILED))).total == 0.0


def test_no_declared_check_is_not_a_solved_task(task, evidence, trajectory):
    assert score(REWARD, task, trajectory(evidence(0, declared=0))).total == 0.0


def test_every_term_is_a_named_timed_node(task, evidence, trajectory):
    scored = score(REWARD, task, trajectory(evidence(6, well_formed=[True, False])))
    assert [child.name for child in scored.reward.children] == ["solved", "turn_penalty", "fraction", "format"]
    assert [child.weight for child in scored.reward.children] == [1.0, 1.0, 0.0, 0.0]
    assert all(child.milliseconds > 0 for child in scored.reward.children)
    assert _nodes(scored)["format"] == 0.5


@pytest.mark.parametrize(
    "config",
    [
        RewardConfig(),
        RewardConfig(fraction_weight=0.3, format_weight=0.2),
        RewardConfig(turn_penalty=5.0),
    ],
)
def test_giving_up_silence_and_truncation_never_beat_an_honest_failed_try(task, evidence, trajectory, config):
    reward = build_reward(config)
    honest = [
        score(reward, task, trajectory(evidence(0, well_formed=[True, True]), stop=StopReason.TRUNCATED_TURNS)).total,
        score(reward, task, trajectory(evidence(3, well_formed=[True, True]), stop=StopReason.TRUNCATED_TURNS)).total,
    ]
    failed = Verdict.POLICY_FAILED
    idle = [
        trajectory(evidence(0, well_formed=[], verdict=failed)),
        trajectory(evidence(0, well_formed=[False, False], verdict=failed)),
        trajectory(evidence(0, well_formed=[False], verdict=failed), stop=StopReason.TRUNCATED_TOKENS),
        trajectory(evidence(0, well_formed=[], verdict=failed), num_turns=1, stop=StopReason.TRUNCATED_TOKENS),
    ]
    for episode in idle:
        assert score(reward, task, episode).total == 0.0
    assert min(honest) >= 0.0
    late = score(reward, task, trajectory(evidence(6, well_formed=[True] * 9))).total
    assert late >= 0.1 - 1e-12
    assert late > 0.0


def test_a_turn_that_was_cut_off_counts_as_malformed(task, evidence, trajectory):
    cut = trajectory(evidence(0, well_formed=[True]), num_turns=2, stop=StopReason.TRUNCATED_TOKENS)
    assert _nodes(score(REWARD, task, cut))["format"] == 0.5


def test_per_turn_rewards_of_a_late_solution(task, evidence, trajectory):
    reward = build_reward(RewardConfig(format_weight=0.3))
    scored = score(reward, task, trajectory(evidence(6, well_formed=[False, True, True])))
    parts = per_turn(scored.reward, 3)
    assert parts == pytest.approx((0.0, -0.15 + 0.1, 1.0 - 0.15 + 0.1))
    assert sum(parts) == pytest.approx(scored.total, abs=1e-12)


@pytest.mark.parametrize("name", ["solved_weight", "turn_penalty", "fraction_weight", "format_weight"])
@pytest.mark.parametrize("value", [-0.1, float("nan"), float("inf")])
def test_settings_that_would_reward_not_trying_are_refused(name, value):
    with pytest.raises(RewardError, match=f"reward.{name}: must be finite and not negative, got {value}"):
        build_reward(RewardConfig(**{name: value}))


def test_a_penalty_that_eats_the_whole_reward_is_refused():
    with pytest.raises(
        RewardError,
        match=r"reward.max_turn_penalty: must stay below solved_weight 1.0 .with max_call_penalty., got 1.0",
    ):
        build_reward(RewardConfig(max_turn_penalty=1.0))

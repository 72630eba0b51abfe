import pytest

from rewards.base import RewardError, score
from rewards.config import RewardConfig
from rewards.registry import build_reward


def brevity(task, trajectory, evidence, limit=40):
    return float(evidence.hidden.all_passed and trajectory.num_turns <= limit)


class Bonus:
    def __init__(self, *, size: float) -> None:
        self.size = size

    def __call__(self, task, trajectory, evidence):
        return self.size * evidence.hidden.fraction


def test_a_function_of_three_arguments_is_a_reward(task, evidence, trajectory):
    two_turns = trajectory(evidence(6, well_formed=[True, True]))
    assert score(build_reward(RewardConfig(name="custom"), brevity), task, two_turns).total == 1.0
    strict = build_reward(RewardConfig(name="custom", params={"limit": 1}), brevity)
    assert score(strict, task, two_turns).total == 0.0


def test_a_class_is_made_once_with_its_params(task, evidence, trajectory):
    reward = build_reward(RewardConfig(name="custom", params={"size": 3.0}), Bonus)
    assert score(reward, task, trajectory(evidence(2))).total == 1.0


def test_mistakes_name_the_key_the_value_and_the_remedy():
    with pytest.raises(RewardError, match=r"reward.name: unknown reward, got 'codng'; did you mean 'coding'\?"):
        build_reward(RewardConfig(name="codng"))
    with pytest.raises(RewardError, match=r"reward.name: unknown reward, got 'zzz'; choose one of \['coding', 'cust"):
        build_reward(RewardConfig(name="zzz"))
    with pytest.raises(RewardError, match=r"reward.target: missing, got reward.name=custom alone; set reward.target"):
        build_reward(RewardConfig(name="custom"))
    with pytest.raises(RewardError, match=r"reward.target: target and params belong to reward.name=custom"):
        build_reward(RewardConfig(target="a:b"))

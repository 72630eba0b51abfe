import dataclasses
import pickle

import numpy as np
import pytest
import torch

from rl.algorithms.base import Algorithm, AlgorithmError
from rl.algorithms.config import AlgorithmConfig
from rl.algorithms.grpo import Grpo
from rl.algorithms.registry import build_algorithm


def grpo(*, normalize: bool = False) -> Grpo:
    return Grpo(clip_low=0.2, clip_high=0.28, normalize=normalize)


def test_advantages_are_rewards_minus_their_mean_and_nothing_else():
    # Mean 0.5; the standard deviation (0.5) does not enter.
    np.testing.assert_array_equal(grpo().advantages(np.array([1.0, 0.0, 0.0, 1.0])), [0.5, -0.5, -0.5, 0.5])
    # Mean 0.1: a group of low variance is not blown up.
    np.testing.assert_allclose(grpo().advantages(np.array([0.1, 0.11, 0.09])), [0.0, 0.01, -0.01], atol=1e-15)


def test_normalize_divides_by_the_groups_standard_deviation():
    # Mean 2, deviations -2, 0, 2; population variance 8 / 3.
    advantages = grpo(normalize=True).advantages(np.array([0.0, 2.0, 4.0]))
    np.testing.assert_allclose(advantages, np.array([-2.0, 0.0, 2.0]) / np.sqrt(8 / 3), rtol=1e-15)


@pytest.mark.parametrize(
    "rewards",
    [
        [],
        [1.0],
        [0.7, 0.7, 0.7],
        # A weighted sum in two orders: equal but for rounding.
        [0.1 + 0.2 + 0.3, 0.3 + 0.2 + 0.1, 0.6],
    ],
)
@pytest.mark.parametrize("normalize", [False, True])
def test_a_group_without_variance_teaches_nothing(rewards: list[float], normalize: bool):
    assert grpo(normalize=normalize).advantages(np.array(rewards)) is None


@pytest.mark.parametrize("broken", [np.nan, np.inf, -np.inf])
def test_a_reward_that_is_not_finite_is_refused(broken: float):
    with pytest.raises(AlgorithmError, match=r"^grpo: rewards must be finite, got \[0\.0, .*\]; mask the broken ones$"):
        grpo().advantages(np.array([0.0, broken]))


def test_at_zero_update_the_loss_is_minus_the_advantage_and_nothing_is_clipped():
    logprobs, advantages = torch.tensor([-0.1, -2.0, -9.0]), torch.tensor([0.5, -0.25, 0.0])
    loss = grpo().token_loss(logprobs, logprobs.clone(), advantages)
    assert torch.equal(loss.loss_R, -advantages)
    assert loss.clipped_R.tolist() == [False, False, False]


def test_the_clip_binds_only_on_the_side_that_the_advantage_pushes_to():
    ratio = torch.tensor([0.5, 0.9, 1.2, 2.0], dtype=torch.float64)
    behavior = torch.full((4,), -1.0, dtype=torch.float64)
    good = grpo().token_loss(behavior + ratio.log(), behavior, torch.full((4,), 2.0, dtype=torch.float64))
    torch.testing.assert_close(good.loss_R, -2 * torch.tensor([0.5, 0.9, 1.2, 1.28], dtype=torch.float64))
    assert good.clipped_R.tolist() == [False, False, False, True]
    bad = grpo().token_loss(behavior + ratio.log(), behavior, torch.full((4,), -2.0, dtype=torch.float64))
    torch.testing.assert_close(bad.loss_R, 2 * torch.tensor([0.8, 0.9, 1.2, 2.0], dtype=torch.float64))
    assert bad.clipped_R.tolist() == [True, False, False, False]


@pytest.mark.parametrize(("low", "high"), [(0.0, 0.28), (1.0, 0.28), (0.2, 0.0), (float("nan"), 0.28)])
def test_a_clip_that_cannot_work_is_refused(low: float, high: float):
    with pytest.raises(AlgorithmError, match=r"^algorithm\.clip_low: needs 0 < clip_low < 1 and clip_high > 0, got "):
        Grpo(clip_low=low, clip_high=high, normalize=False)


def test_the_registry_builds_what_the_configuration_says():
    config = AlgorithmConfig(clip_low=0.5, clip_high=1.0, normalize_advantage=True)
    algorithm: Algorithm = pickle.loads(pickle.dumps(build_algorithm(config)))  # it travels to the learner's process
    np.testing.assert_allclose(algorithm.advantages(np.array([0.0, 0.1])), [-1.0, 1.0])
    ratio, ones = torch.tensor([0.1, 9.0]), torch.ones(2)
    assert algorithm.token_loss(ratio.log(), torch.zeros(2), ones).loss_R.tolist() == pytest.approx([-0.1, -2.0])
    assert algorithm.token_loss(ratio.log(), torch.zeros(2), -ones).loss_R.tolist() == pytest.approx([0.5, 9.0])
    with pytest.raises(
        AlgorithmError, match=r"^algorithm\.name: no such algorithm, got 'grop'; choose one of grpo, custom$"
    ):
        build_algorithm(dataclasses.replace(config, name="grop"))


class Mine:
    """A user's own algorithm: any class with the two methods."""

    def __init__(self, *, scale: float):
        self.scale = scale

    def advantages(self, rewards_G: np.ndarray) -> np.ndarray | None:
        return self.scale * rewards_G

    def token_loss(
        self, policy_logprobs_R: torch.Tensor, behavior_logprobs_R: torch.Tensor, advantages_R: torch.Tensor
    ):
        raise NotImplementedError


def test_a_users_own_algorithm_is_made_with_its_parameters():
    config = AlgorithmConfig(name="custom", target="my_pkg:Mine", params={"scale": 3.0})
    np.testing.assert_array_equal(build_algorithm(config, Mine).advantages(np.array([2.0])), [6.0])
    with pytest.raises(AlgorithmError, match=r"^algorithm\.target: missing, got algorithm\.name=custom alone; "):
        build_algorithm(config)


@pytest.mark.parametrize("extra", [{"target": "my_pkg:Mine"}, {"params": {"scale": 3.0}}])
def test_parameters_of_no_custom_algorithm_are_not_dropped_silently(extra):
    with pytest.raises(AlgorithmError, match=r"belong to algorithm\.name=custom, got them with 'grpo'"):
        build_algorithm(AlgorithmConfig(**extra))

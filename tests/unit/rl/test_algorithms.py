"""What every algorithm must do, and the registry."""

import dataclasses
import pickle

import numpy as np
import pytest
import torch

from rl.algorithms.base import Algorithm, AlgorithmError, CriticAlgorithm, TokenLoss, TokenStreams
from rl.algorithms.cispo import Cispo
from rl.algorithms.config import Aggregation, AlgorithmConfig
from rl.algorithms.registry import BUILDERS, aggregation_of, build_algorithm
from rl.algorithms.surrogate import Clip

NAMES = sorted(name for name, builder in BUILDERS.items() if not builder.has_critic)  # tests/numerics/test_ppo.py
GROUP_RELATIVE = sorted(set(NAMES) - {"reinforce_pp"})


def algorithm(name: str) -> Algorithm:
    built = build_algorithm(AlgorithmConfig(name=name))
    assert not isinstance(built, CriticAlgorithm)
    return built


def on_policy(advantages: torch.Tensor) -> TokenStreams:
    logprobs = torch.linspace(-9.0, -0.1, len(advantages), dtype=advantages.dtype)
    return TokenStreams(
        policy_logprobs_R=logprobs.clone().requires_grad_(),
        behavior_logprobs_R=logprobs,
        advantages_R=advantages,
        sequence_R=torch.arange(len(advantages)) // 2,
    )


@pytest.mark.parametrize("name", NAMES)
def test_at_zero_update_the_gradient_is_the_policy_gradient_and_nothing_is_clipped(name: str):
    streams = on_policy(torch.tensor([0.5, 0.5, -0.25, -0.25, 0.0]))
    loss = algorithm(name).token_loss(streams)
    loss.loss_R.sum().backward()
    assert torch.equal(streams.policy_logprobs_R.grad, -streams.advantages_R)
    assert not loss.clipped_R.any()


def test_grpos_advantages_are_rewards_minus_their_mean_and_nothing_else():
    one, low = algorithm("grpo").advantages([np.array([1.0, 0.0, 0.0, 1.0]), np.array([0.1, 0.11, 0.09])])
    # Mean 0.5; the standard deviation (0.5) does not enter.
    np.testing.assert_array_equal(one, [0.5, -0.5, -0.5, 0.5])
    # Mean 0.1: a group of low variance is not blown up.
    np.testing.assert_allclose(low, [0.0, 0.01, -0.01], atol=1e-15)


def test_normalize_divides_by_the_groups_standard_deviation():
    # Mean 2, deviations -2, 0, 2; population variance 8 / 3.
    (advantages,) = build_algorithm(AlgorithmConfig(normalize_advantage=True)).advantages([np.array([0.0, 2.0, 4.0])])
    np.testing.assert_allclose(advantages, np.array([-2.0, 0.0, 2.0]) / np.sqrt(8 / 3), rtol=1e-15)


@pytest.mark.parametrize("name", sorted(set(NAMES) - {"cispo"}))
def test_at_zero_update_the_loss_is_minus_the_advantage(name: str):
    streams = on_policy(torch.tensor([0.5, -0.25, 0.0]))
    assert torch.equal(algorithm(name).token_loss(streams).loss_R, -streams.advantages_R)


@pytest.mark.parametrize("name", ["dapo", "dr_grpo", "grpo", "gspo", "reinforce_pp", "reinforce_pp_baseline"])
def test_the_clip_binds_only_on_the_side_that_the_advantage_pushes_to(name: str):
    ratio = torch.tensor([0.5, 0.9, 1.2, 2.0], dtype=torch.float64)
    behavior = torch.full((4,), -1.0, dtype=torch.float64)

    def loss(advantage: float) -> TokenLoss:
        streams = TokenStreams(
            policy_logprobs_R=behavior + ratio.log(),
            behavior_logprobs_R=behavior,
            advantages_R=torch.full((4,), advantage, dtype=torch.float64),
            sequence_R=torch.arange(4),
        )
        return algorithm(name).token_loss(streams)

    torch.testing.assert_close(loss(2.0).loss_R, -2 * torch.tensor([0.5, 0.9, 1.2, 1.28], dtype=torch.float64))
    assert loss(2.0).clipped_R.tolist() == [False, False, False, True]
    torch.testing.assert_close(loss(-2.0).loss_R, 2 * torch.tensor([0.8, 0.9, 1.2, 2.0], dtype=torch.float64))
    assert loss(-2.0).clipped_R.tolist() == [True, False, False, False]


@pytest.mark.parametrize("name", NAMES)
def test_it_travels_to_the_process_of_the_learner(name: str):
    sent = pickle.loads(pickle.dumps(algorithm(name)))
    rewards = [np.array([0.0, 1.0, 1.0, 0.5])]
    np.testing.assert_array_equal(sent.advantages(rewards)[0], algorithm(name).advantages(rewards)[0])


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("broken", [np.nan, np.inf, -np.inf])
def test_a_reward_that_is_not_finite_is_refused(name: str, broken: float):
    with pytest.raises(
        AlgorithmError, match=rf"^{name}: rewards must be finite, got \[0\.0, .*\]; mask the broken ones$"
    ):
        algorithm(name).advantages([np.array([1.0, 2.0]), np.array([0.0, broken])])


@pytest.mark.parametrize("name", GROUP_RELATIVE)
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
def test_a_group_without_variance_teaches_nothing(name: str, rewards: list[float], normalize: bool):
    config = AlgorithmConfig(name=name, normalize_advantage=normalize)
    flat, usual = build_algorithm(config).advantages([np.array(rewards), np.array([0.0, 1.0])])
    assert flat is None
    assert usual is not None
    assert usual.sum() == 0


@pytest.mark.parametrize("name", NAMES)
def test_a_round_without_groups_or_without_variance_has_no_advantages(name: str):
    assert list(algorithm(name).advantages([])) == []
    assert list(algorithm(name).advantages([np.array([]), np.array([0.3, 0.3])])) == [None, None]


@pytest.mark.parametrize("name", NAMES)
def test_the_loss_of_a_sequence_does_not_depend_on_the_others(name: str):
    """So micro-batches, which hold whole sequences, change nothing."""
    g = torch.Generator().manual_seed(0)
    sequence_R = torch.arange(6).repeat_interleave(torch.tensor([3, 1, 7, 2, 2, 5]))
    behavior_R, moved_R, advantages_R = (torch.randn(20, generator=g, dtype=torch.float64) for _ in range(3))
    together = TokenStreams(
        policy_logprobs_R=behavior_R + 0.3 * moved_R,
        behavior_logprobs_R=behavior_R,
        advantages_R=advantages_R,
        sequence_R=sequence_R,
    )
    whole = algorithm(name).token_loss(together)
    for sequence in range(6):
        mine_R = sequence_R == sequence
        streams = [getattr(together, field.name)[mine_R] for field in dataclasses.fields(TokenStreams)[:3]]
        alone = TokenStreams(
            policy_logprobs_R=streams[0],
            behavior_logprobs_R=streams[1],
            advantages_R=streams[2],
            sequence_R=torch.zeros(len(streams[0]), dtype=torch.int64),
        )
        part = algorithm(name).token_loss(alone)
        torch.testing.assert_close(part.loss_R, whole.loss_R[mine_R], rtol=1e-14, atol=1e-14)
        assert torch.equal(part.clipped_R, whole.clipped_R[mine_R])


@pytest.mark.parametrize(("low", "high"), [(0.0, 0.28), (1.0, 0.28), (0.2, 0.0), (float("nan"), 0.28), (0.2, np.nan)])
def test_a_clip_that_cannot_work_is_refused(low: float, high: float):
    with pytest.raises(AlgorithmError, match=r"^algorithm\.clip_low: needs 0 < clip_low < 1 and clip_high > 0, got "):
        Clip(low, high)
    if low != 1.0:
        with pytest.raises(AlgorithmError, match=r"^algorithm\.clip_low: cispo needs 0 < clip_low <= 1 and "):
            Cispo(clip_low=low, clip_high=high)


def test_the_registry_builds_what_the_configuration_says():
    config = AlgorithmConfig(clip_low=0.5, clip_high=1.0, normalize_advantage=True)
    built = build_algorithm(config)
    np.testing.assert_allclose(built.advantages([np.array([0.0, 0.1])]), [[-1.0, 1.0]])
    streams = on_policy(torch.ones(2))
    streams = dataclasses.replace(
        streams, policy_logprobs_R=streams.behavior_logprobs_R + torch.tensor([0.1, 9.0]).log()
    )
    assert built.token_loss(streams).loss_R.tolist() == pytest.approx([-0.1, -2.0])
    bad = dataclasses.replace(streams, advantages_R=-torch.ones(2))
    assert built.token_loss(bad).loss_R.tolist() == pytest.approx([0.5, 9.0])
    with pytest.raises(AlgorithmError, match=r"^algorithm\.name: no such algorithm, got 'grop'; choose one of cispo, "):
        build_algorithm(dataclasses.replace(config, name="grop"))


def test_the_aggregation_is_the_algorithms_own_unless_one_is_chosen():
    assert aggregation_of(AlgorithmConfig(name="gspo")) is Aggregation.episode_mean
    assert aggregation_of(AlgorithmConfig(name="custom", target="my_pkg:Mine")) is Aggregation.token_mean
    chosen = AlgorithmConfig(name="gspo", aggregation=Aggregation.episode_sum)
    assert aggregation_of(chosen) is Aggregation.episode_sum
    assert Aggregation.own not in {builder.aggregation for builder in BUILDERS.values()}


class Mine:
    """A user's own algorithm: any class with the two methods."""

    def __init__(self, *, scale: float):
        self.scale = scale

    def advantages(self, rewards: list[np.ndarray]) -> list[np.ndarray]:
        return [self.scale * rewards_G for rewards_G in rewards]

    def token_loss(self, streams: TokenStreams) -> TokenLoss:
        loss_R = -streams.policy_logprobs_R * streams.advantages_R
        return TokenLoss(loss_R=loss_R, clipped_R=torch.zeros_like(loss_R, dtype=torch.bool))


def test_a_users_own_algorithm_is_made_with_its_parameters():
    config = AlgorithmConfig(name="custom", target="my_pkg:Mine", params={"scale": 3.0})
    np.testing.assert_array_equal(build_algorithm(config, Mine).advantages([np.array([2.0])]), [[6.0]])
    with pytest.raises(AlgorithmError, match=r"^algorithm\.target: missing, got algorithm\.name=custom alone; "):
        build_algorithm(config)


@pytest.mark.parametrize("extra", [{"target": "my_pkg:Mine"}, {"params": {"scale": 3.0}}])
def test_parameters_of_no_custom_algorithm_are_not_dropped_silently(extra):
    with pytest.raises(AlgorithmError, match=r"belong to algorithm\.name=custom, got them with 'grpo'"):
        build_algorithm(AlgorithmConfig(**extra))

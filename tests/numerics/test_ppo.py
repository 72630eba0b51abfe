"""PPO: advantages against the definition of GAE, losses against the papers' equations in NumPy, fp64.

What is left are roundings of sums in another order; central differences add step^2 |J'''| + 1e-16 / step.
"""

import dataclasses
import pickle

import numpy as np
import pytest
import torch

from rl.algorithms.base import AlgorithmError, CriticAlgorithm, CriticStreams, TokenStreams
from rl.algorithms.config import AlgorithmConfig, Credit
from rl.algorithms.gae import EpisodeStreams, estimate
from rl.algorithms.objective import Objective
from rl.algorithms.registry import build_algorithm, has_critic

STEP = 1e-6
REWARDS = np.array([0.0, -0.1, 0.0, 0.3, 0.0, 1.0])
VALUES = np.array([0.2, 0.5, -0.3, 0.1, 0.9, 0.4])
TURNS = np.array([0, 0, 2, 2, 2, 3])  # turn 1 said nothing


def episode(rewards: np.ndarray = REWARDS, values: np.ndarray = VALUES, turns: np.ndarray = TURNS) -> EpisodeStreams:
    return EpisodeStreams(rewards_N=rewards, values_N=values, turn_N=turns)


def gae(rewards: np.ndarray, values: np.ndarray, gamma: float, lam: float) -> np.ndarray:
    """arXiv 1506.02438 eq. 16: the sum over later steps."""
    after = np.append(values[1:], 0.0)
    delta = rewards + gamma * after - values
    n = len(rewards)
    return np.array([sum((gamma * lam) ** k * delta[t + k] for k in range(n - t)) for t in range(n)])


@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 1.0), (0.9, 0.0), (0.95, 0.8), (1.0, 0.95)])
def test_advantages_are_those_of_the_paper(gamma: float, lam: float):
    got = estimate(episode(), gamma=gamma, gae_lambda=lam, credit=Credit.token)
    np.testing.assert_allclose(got.advantages_N, gae(REWARDS, VALUES, gamma, lam), atol=1e-14)
    np.testing.assert_allclose(got.returns_N, got.advantages_N + VALUES, atol=1e-14)
    turn_rewards, turn_values = np.array([-0.1, 0.3, 1.0]), VALUES[[0, 2, 5]]
    across = gae(turn_rewards, turn_values, gamma, lam)
    got = estimate(episode(), gamma=gamma, gae_lambda=lam, credit=Credit.turn)
    np.testing.assert_allclose(got.advantages_N, across[[0, 0, 1, 1, 1, 2]], atol=1e-14)
    np.testing.assert_allclose(got.returns_N, (across + turn_values)[[0, 0, 1, 1, 1, 2]], atol=1e-14)


def test_without_discount_and_with_lambda_1_the_return_is_the_sum_of_what_follows():
    got = estimate(episode(), gamma=1.0, gae_lambda=1.0, credit=Credit.token)
    np.testing.assert_allclose(got.returns_N, REWARDS[::-1].cumsum()[::-1], atol=1e-14)


@pytest.mark.parametrize("credit", Credit)
def test_an_episode_of_one_token(credit: Credit):
    got = estimate(episode(np.ones(1), np.array([0.25]), np.zeros(1, int)), gamma=0.9, gae_lambda=0.9, credit=credit)
    assert (got.advantages_N.tolist(), got.returns_N.tolist()) == ([0.75], [1.0])


def ppo(**settings: object) -> CriticAlgorithm:
    config = AlgorithmConfig(name="ppo", **settings)  # pyright: ignore[reportArgumentType]
    assert has_critic(config)
    built = build_algorithm(config)
    assert isinstance(built, CriticAlgorithm)
    return pickle.loads(pickle.dumps(built))  # as it travels to the learner's process


def test_whitened_advantages_have_mean_0_and_variance_1_over_the_round_and_leave_the_returns():
    others = episode(-REWARDS[:3], VALUES[:3], TURNS[:3])
    white, raw = (
        ppo(gae_lambda=0.9, whiten_advantages=whiten).token_credit([episode(), others]) for whiten in (True, False)
    )
    together, plain = (np.concatenate([one.advantages_N for one in credits_]) for credits_ in (white, raw))
    assert together.mean() == pytest.approx(0, abs=1e-15)
    assert together.std() == pytest.approx(1)
    np.testing.assert_allclose(together, (plain - plain.mean()) / plain.std(), atol=1e-14)
    for one, other in zip(white, raw, strict=True):
        np.testing.assert_array_equal(one.returns_N, other.returns_N)
    np.testing.assert_allclose(raw[1].advantages_N, gae(-REWARDS[:3], VALUES[:3], 1.0, 0.9), atol=1e-14)


def test_advantages_that_are_all_equal_become_0_and_a_round_without_episodes_has_none():
    (flat,) = ppo().token_credit([episode(np.zeros(6), np.zeros(6))])
    assert (flat.advantages_N == 0).all()
    (single,) = ppo().token_credit([episode(np.array([0.0, 1.0]), np.array([0.5, 0.5]), np.zeros(2, int))])
    np.testing.assert_array_equal(single.advantages_N, [0.0, 0.0])  # 0.5 each, whatever the rounding
    assert list(ppo().token_credit([])) == []


@pytest.mark.parametrize("broken", [np.nan, np.inf])
def test_a_reward_or_a_value_that_is_not_finite_is_refused(broken: float):
    bad = np.array([0.0, broken, 0.0, 0.0, 0.0, 0.0])
    for streams in (episode(rewards=bad), episode(values=bad)):
        with pytest.raises(AlgorithmError, match=r"^ppo: rewards and values must be finite, got rewards \[0\.0, "):
            ppo().token_credit([episode(), streams])


OLD = np.linspace(-3.0, -0.5, 8)
POLICY = OLD + np.log([0.5, 0.9, 1.0, 1.1, 1.25, 2.0, 0.7, 1.35])
ADVANTAGES = np.array([1.0, -1.0, 0.5, -0.5, 1.0, 1.0, -2.0, 0.25])
OLD_VALUES = np.array([0.0, 0.5, -0.5, 1.0, 0.3, 0.2, 0.1, 0.0])
NOW = OLD_VALUES + np.array([0.1, 0.6, -0.4, -0.05, 0.3, -0.3, 0.0, 0.7])
RETURNS = np.array([1.0, 1.0, 0.0, 0.0, 0.5, 1.0, 0.5, -0.2])


def streams_of(policy: np.ndarray, values: np.ndarray) -> TokenStreams:
    return TokenStreams(
        policy_logprobs_R=torch.tensor(policy, requires_grad=True),
        behavior_logprobs_R=torch.tensor(OLD),
        advantages_R=torch.tensor(ADVANTAGES),
        sequence_R=torch.zeros(8, dtype=torch.int64),
        critic=CriticStreams(
            values_R=torch.tensor(values, requires_grad=True),
            old_values_R=torch.tensor(OLD_VALUES),
            returns_R=torch.tensor(RETURNS),
        ),
    )


@pytest.mark.parametrize("value_clip", [0.0, 0.2])
def test_the_loss_and_both_gradients_are_those_of_the_equations(value_clip: float):
    def negated(policy: np.ndarray, values: np.ndarray) -> float:
        ratio = np.exp(policy - OLD)
        surrogate = np.minimum(ratio * ADVANTAGES, np.clip(ratio, 0.8, 1.28) * ADVANTAGES)
        error = (values - RETURNS) ** 2
        if value_clip:
            kept = OLD_VALUES + np.clip(values - OLD_VALUES, -value_clip, value_clip)
            error = np.maximum(error, (kept - RETURNS) ** 2)
        return float((-surrogate + 0.7 * error / 2).sum())

    given = streams_of(POLICY, NOW)
    assert given.critic is not None
    loss = ppo(value_coef=0.7, value_clip=value_clip).token_loss(given)
    total = loss.total().sum()
    total.backward()
    assert float(total.detach()) == pytest.approx(negated(POLICY, NOW), rel=1e-13)
    steps = np.eye(8) * STEP
    of_policy = [(negated(POLICY + one, NOW) - negated(POLICY - one, NOW)) / (2 * STEP) for one in steps]
    of_values = [(negated(POLICY, NOW + one) - negated(POLICY, NOW - one)) / (2 * STEP) for one in steps]
    assert given.policy_logprobs_R.grad is not None
    assert given.critic.values_R.grad is not None
    np.testing.assert_allclose(given.policy_logprobs_R.grad, of_policy, atol=1e-8)
    np.testing.assert_allclose(given.critic.values_R.grad, of_values, atol=1e-8)
    assert {bool(gradient) for gradient in given.policy_logprobs_R.grad} == {True, False}
    cut = (given.critic.values_R.grad == 0).sum()
    assert (cut > 0) == bool(value_clip), "both sides of the clip are met"
    assert loss.terms.keys() == {"loss/value"}


def test_at_zero_update_the_ratio_is_exactly_1():
    given = streams_of(OLD, OLD_VALUES)
    loss = ppo().token_loss(given)
    assert torch.equal(loss.loss_R, -given.advantages_R)
    assert not loss.clipped_R.any()
    loss.loss_R.sum().backward()
    assert torch.equal(given.policy_logprobs_R.grad, -given.advantages_R)


def test_an_importance_correction_weighs_the_policy_and_not_the_critic():
    config = AlgorithmConfig(name="ppo")
    corrected = dataclasses.replace(config)
    corrected.importance = corrected.importance.truncate
    stale = dataclasses.replace(streams_of(POLICY, NOW), proximal_logprobs_R=torch.tensor(OLD + 0.3))
    plain, weighed = (Objective(ppo(), one).token_loss(stale) for one in (config, corrected))
    assert torch.equal(plain.terms["loss/value"], weighed.terms["loss/value"])
    torch.testing.assert_close(weighed.watched["importance/mean"], torch.full((8,), np.exp(0.3)).double())
    assert not torch.equal(plain.loss_R, weighed.loss_R)


def test_a_learner_without_a_critic_is_named():
    with pytest.raises(AlgorithmError, match=r"^ppo: needs the values of every token, got streams without; the learn"):
        ppo().token_loss(dataclasses.replace(streams_of(POLICY, NOW), critic=None))

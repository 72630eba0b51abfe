"""The loss of a whole minibatch against each paper's objective, written in NumPy from the equations, in fp64.

What is left are roundings of exp and of sums in another order. Gradients are compared with central differences of the
NumPy objective: an error of step^2 |J'''| + 1e-16 |J| / step, below 1e-8 for the ratios here.

Groups of two and of four episodes, of 1 to 7 tokens, whose ratios lie on both sides of every clip.
"""

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import pytest
import torch

from rl.advantage import Weighing
from rl.algorithms.base import TokenStreams
from rl.algorithms.config import Aggregation, AlgorithmConfig
from rl.algorithms.registry import aggregation_of, build_algorithm

Array = npt.NDArray[np.float64]
LOW, HIGH, UNIT = 0.2, 0.28, 16
REWARDS = [np.array([1.0, 0.0]), np.array([0.25, 0.5, 0.5, 2.0])]
LENGTHS = np.array([7, 1, 4, 2, 5, 3])
RATIOS = np.tile([0.1, 0.79, 0.81, 1.0, 1.27, 1.29, 3.0, 1.05, 0.95, 20.0, 0.5], 2)
OLD = np.linspace(-6.0, -0.1, LENGTHS.sum())
POLICY = OLD + np.log(RATIOS)
NEAR = OLD + 1e-4 * np.log(RATIOS) + np.array([1e-3, -1e-3, 0.0, -1e-3, 1e-3, 0.0]).repeat(LENGTHS)  # for GSPO's clip

STEP = 1e-6


def episodes(tokens: Array) -> list[Array]:
    return np.split(tokens, LENGTHS.cumsum()[:-1])


def clipped(ratio: Array, advantage: float, low: float = LOW, high: float = HIGH) -> Array:
    return np.minimum(ratio * advantage, np.clip(ratio, 1 - low, 1 + high) * advantage)


def relative(*, normalize: bool = False) -> Array:
    return np.concatenate([(r - r.mean()) / (r.std() if normalize else 1.0) for r in REWARDS])


def grpo(policy: Array) -> float:
    """arXiv 2402.03300 eq. 3 without KL: the mean over episodes of the mean over tokens."""
    pairs = zip(episodes(np.exp(policy - OLD)), relative(normalize=True), strict=True)
    return float(np.mean([clipped(ratio, advantage).mean() for ratio, advantage in pairs]))


def grpo_over_tokens(policy: Array) -> float:
    """arXiv 2503.14476 eq. 8, without the standard deviation."""
    pairs = zip(episodes(np.exp(policy - OLD)), relative(), strict=True)
    return float(np.concatenate([clipped(ratio, advantage) for ratio, advantage in pairs]).mean())


def dapo(policy: Array) -> float:
    """arXiv 2503.14476 eq. 8 and 9: the mean over tokens, advantages in units of the group's standard deviation."""
    pairs = zip(episodes(np.exp(policy - OLD)), relative(normalize=True), strict=True)
    return float(np.concatenate([clipped(ratio, advantage) for ratio, advantage in pairs]).mean())


def dr_grpo(policy: Array) -> float:
    """arXiv 2503.20783 section 3.2: sums of tokens over a constant, the mean over episodes."""
    pairs = zip(episodes(np.exp(policy - OLD)), relative(), strict=True)
    return float(np.mean([clipped(ratio, advantage).sum() / UNIT for ratio, advantage in pairs]))


def rloo(policy: Array) -> float:
    """arXiv 2402.14740 eq. 7, with importance weights."""
    others = [np.array([r[i] - np.delete(r, i).mean() for i in range(len(r))]) for r in REWARDS]
    pairs = zip(episodes(np.exp(policy - OLD)), np.concatenate(others), strict=True)
    return float(np.mean([(ratio * advantage).sum() / UNIT for ratio, advantage in pairs]))


def reinforce_pp(policy: Array) -> float:
    """arXiv 2501.03262: rewards normalised over the round."""
    all_rewards = np.concatenate(REWARDS)
    advantages = (all_rewards - all_rewards.mean()) / all_rewards.std()
    pairs = zip(episodes(np.exp(policy - OLD)), advantages, strict=True)
    return float(np.mean([clipped(ratio, advantage).mean() for ratio, advantage in pairs]))


def reinforce_pp_baseline(policy: Array) -> float:
    """The same with the group's mean as baseline."""
    pairs = zip(episodes(np.exp(policy - OLD)), relative() / relative().std(), strict=True)
    return float(np.mean([clipped(ratio, advantage).mean() for ratio, advantage in pairs]))


def gspo(policy: Array) -> float:
    """arXiv 2507.18071 eq. 5: one ratio a sequence."""
    ratios = [np.exp(one.mean()) for one in episodes(policy - OLD)]
    return float(np.mean([clipped(s, a, 3e-4, 4e-4) for s, a in zip(ratios, relative(), strict=True)]))


def cispo(policy: Array, low: float = 1.0) -> float:
    """arXiv 2506.13585 eq. 4, its weights those of `POLICY` whatever is varied: they carry no gradient."""
    weights = np.clip(np.exp(POLICY - OLD), 1 - low, 1 + HIGH)
    return float((weights * relative().repeat(LENGTHS) * policy).sum() / LENGTHS.sum())


def cispo_bounded_below(policy: Array) -> float:
    """The same with the lower bound of eq. 5."""
    return cispo(policy, LOW)


CASES: list[tuple[Callable[[Array], float], AlgorithmConfig, Array]] = [
    (grpo, AlgorithmConfig(normalize_advantage=True, aggregation=Aggregation.episode_mean), POLICY),
    (grpo_over_tokens, AlgorithmConfig(), POLICY),
    (dapo, AlgorithmConfig(name="dapo", normalize_advantage=True), POLICY),
    (dr_grpo, AlgorithmConfig(name="dr_grpo"), POLICY),
    (rloo, AlgorithmConfig(name="rloo"), POLICY),
    (reinforce_pp, AlgorithmConfig(name="reinforce_pp"), POLICY),
    (reinforce_pp_baseline, AlgorithmConfig(name="reinforce_pp_baseline"), POLICY),
    (gspo, AlgorithmConfig(name="gspo", clip_low=3e-4, clip_high=4e-4), NEAR),
    (cispo, AlgorithmConfig(name="cispo", clip_low=1.0), POLICY),
    (cispo_bounded_below, AlgorithmConfig(name="cispo"), POLICY),
]


def loss_and_gradient(config: AlgorithmConfig, policy: Array) -> tuple[float, Array, Array]:
    """As the learner adds it up, and which tokens are marked as clipped."""
    config.length_unit = UNIT
    algorithm = build_algorithm(config)
    weighing = Weighing(aggregation=aggregation_of(config), length_unit=config.length_unit)
    weights, masses = np.array([weighing.token(int(length)) for length in LENGTHS]).repeat(LENGTHS, axis=0).T
    advantages = np.concatenate([one for one in algorithm.advantages(REWARDS) if one is not None])
    policy_R = torch.tensor(policy, requires_grad=True)
    streams = TokenStreams(
        policy_logprobs_R=policy_R,
        behavior_logprobs_R=torch.tensor(OLD),
        advantages_R=torch.tensor(advantages.repeat(LENGTHS)),
        sequence_R=torch.arange(len(LENGTHS)).repeat_interleave(torch.tensor(LENGTHS)),
    )
    token_loss = algorithm.token_loss(streams)
    loss = torch.dot(token_loss.loss_R, torch.tensor(weights)) / masses.sum()
    loss.backward()
    assert policy_R.grad is not None
    return float(loss.detach()), policy_R.grad.numpy(), token_loss.clipped_R.numpy()


@pytest.mark.parametrize(("objective", "config", "policy"), CASES, ids=[case[0].__name__ for case in CASES])
def test_loss_and_gradient_are_those_of_the_papers_objective_negated(
    objective: Callable[[Array], float], config: AlgorithmConfig, policy: Array
):
    loss, gradient, _ = loss_and_gradient(config, policy)
    assert loss == pytest.approx(-objective(policy), rel=1e-12)
    moved = np.eye(len(policy)) * STEP
    differences = [(objective(policy + one) - objective(policy - one)) / (2 * STEP) for one in moved]
    np.testing.assert_allclose(gradient, -np.array(differences), rtol=1e-7, atol=1e-8)
    assert (gradient != 0).any()


@pytest.mark.parametrize(("objective", "config", "policy"), CASES, ids=[case[0].__name__ for case in CASES])
def test_both_sides_of_every_clip_are_met(objective: Callable[[Array], float], config: AlgorithmConfig, policy: Array):
    """So the comparison above could tell a clip that is missing, or on the wrong side."""
    _, gradient, marked = loss_and_gradient(config, policy)
    if objective in (rloo, cispo, cispo_bounded_below):
        assert (gradient != 0).all()  # nothing is taken out of the gradient
        lowest = {rloo: 0.0, cispo: 0.0, cispo_bounded_below: 1 - LOW}[objective]
        highest = np.inf if objective is rloo else 1 + HIGH
        np.testing.assert_array_equal(marked, (lowest > RATIOS) | (highest < RATIOS))
    else:
        advantages = relative().repeat(LENGTHS)
        assert {bool(value) for value in gradient[advantages > 0]} == {True, False}
        assert {bool(value) for value in gradient[advantages < 0]} == {True, False}
        np.testing.assert_array_equal(marked, gradient == 0)


def test_gspos_tokens_have_their_own_gradient_where_advantages_differ():
    """arXiv 2507.18071 eq. 13 and 14: the ratio of the sequence times the token's own advantage."""
    policy_R = torch.tensor([-1.0, -2.0, -3.0], dtype=torch.float64, requires_grad=True)
    behavior_R = torch.tensor([-1.1, -2.0, -2.95], dtype=torch.float64)
    advantages_R = torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64)
    streams = TokenStreams(
        policy_logprobs_R=policy_R,
        behavior_logprobs_R=behavior_R,
        advantages_R=advantages_R,
        sequence_R=torch.zeros(3, dtype=torch.int64),
    )
    loss_R = build_algorithm(AlgorithmConfig(name="gspo")).token_loss(streams).loss_R
    loss_R.sum().backward()
    expected = -np.exp((0.1 + 0.0 - 0.05) / 3) * advantages_R
    torch.testing.assert_close(loss_R.detach(), expected, rtol=1e-13, atol=0)
    torch.testing.assert_close(policy_R.grad, expected, rtol=1e-13, atol=0)

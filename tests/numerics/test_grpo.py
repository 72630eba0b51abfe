"""GRPO's token loss against the papers' equations in NumPy, and its gradient against that of the equations.

arXiv 2402.03300 eq. 3 and arXiv 2503.14476 eq. 8: J = mean over tokens of min(r A, clip(r, 1 - low, 1 + high) A) with
r = pi(o) / pi_old(o). fp64, so the differences left are roundings of exp.
"""

import numpy as np
import numpy.typing as npt
import pytest
import torch

from rl.algorithms.grpo import Grpo

LOW, HIGH = 0.2, 0.28
Array = npt.NDArray[np.float64]


def objective(policy: Array, old: Array, advantages: Array) -> Array:
    ratio = np.exp(policy) / np.exp(old)
    return np.minimum(ratio * advantages, np.clip(ratio, 1 - LOW, 1 + HIGH) * advantages)


def objective_gradient(policy: Array, old: Array, advantages: Array) -> Array:
    """d J / d log pi: r A while the unclipped term is the smaller one, else 0."""
    ratio = np.exp(policy - old)
    frozen = ((advantages > 0) & (ratio > 1 + HIGH)) | ((advantages < 0) & (ratio < 1 - LOW))
    return np.where(frozen, 0.0, ratio * advantages)


def tokens() -> tuple[Array, Array, Array]:
    """Ratios on both sides of both clips, each with a positive, a negative and no advantage."""
    ratio = np.array([0.1, 0.5, 0.79, 0.81, 1.0, 1.27, 1.29, 3.0, 20.0])
    old = np.linspace(-6.0, -0.01, 3 * len(ratio))
    policy = old + np.log(np.tile(ratio, 3))
    return policy, old, np.repeat([1.7, -0.6, 0.0], len(ratio))


def token_loss(policy: Array, old: Array, advantages: Array) -> tuple[Array, Array, Array]:
    """Loss, its gradient and the clip marks of the implementation."""
    logprobs = torch.tensor(policy, requires_grad=True)
    out = Grpo(clip_low=LOW, clip_high=HIGH, normalize=False).token_loss(
        logprobs, torch.tensor(old), torch.tensor(advantages)
    )
    out.loss_R.sum().backward()
    assert logprobs.grad is not None
    return out.loss_R.detach().numpy(), logprobs.grad.numpy(), out.clipped_R.numpy()


def test_loss_is_the_papers_objective_negated():
    loss, _, _ = token_loss(*tokens())
    np.testing.assert_allclose(loss, -objective(*tokens()), rtol=1e-13, atol=1e-15)


def test_gradient_is_that_of_the_equations_and_zero_where_clipped():
    _, gradient, clipped = token_loss(*tokens())
    np.testing.assert_allclose(gradient, -objective_gradient(*tokens()), rtol=1e-13, atol=1e-15)
    positive, negative, neutral = clipped.reshape(3, -1)
    assert positive.tolist() == [False] * 6 + [True] * 3  # only above 1.28
    assert negative.tolist() == [True] * 3 + [False] * 6  # only below 0.8
    assert not neutral.any()
    assert not gradient[clipped].any()


def test_gradient_agrees_with_finite_differences():
    policy, old, advantages = tokens()
    _, gradient, _ = token_loss(policy, old, advantages)
    step = 1e-6  # central: error ~ step^2 |J'''| + 1e-16 |J| / step, below 1e-8 for ratios up to 20
    above, below = objective(policy + step, old, advantages), objective(policy - step, old, advantages)
    np.testing.assert_allclose(gradient, -(above - below) / (2 * step), rtol=1e-7, atol=1e-8)


@pytest.mark.parametrize("advantage", [0.5, -0.5])
def test_at_ratio_one_the_gradient_is_the_policy_gradient(advantage: float):
    old = np.array([-0.5, -3.0])
    loss, gradient, clipped = token_loss(old, old, np.full(2, advantage))
    np.testing.assert_array_equal(loss, [-advantage] * 2)
    np.testing.assert_array_equal(gradient, [-advantage] * 2)
    assert not clipped.any()

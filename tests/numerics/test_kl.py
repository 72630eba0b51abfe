"""KL estimators and their gradient against the exact KL of a categorical distribution, over all of its outcomes, fp64.

The expectation is the sum over the vocabulary with the behavior's probabilities; what is left are roundings, and for
gradients the error of central differences, step^2 |KL'''| + 1e-16 / step, below 1e-9 here.
"""

import dataclasses

import numpy as np
import pytest
import torch

from rl.algorithms.base import AlgorithmError, TokenStreams
from rl.algorithms.config import AlgorithmConfig, KlEstimator, KlPlace
from rl.algorithms.kl import MAX_RATIO, kl_estimate, kl_loss
from rl.algorithms.objective import Objective
from rl.algorithms.registry import build_algorithm

STEP = 1e-5
LOGITS = np.array([0.3, -1.0, 0.8, 0.0, -0.4, 1.1])
REFERENCE = np.log(np.array([0.3, 0.2, 0.1, 0.15, 0.05, 0.2]))
NEAR = np.array([0.05, -0.1, 0.1, 0.0, 0.2, -0.15])


def logprobs(logits: np.ndarray) -> np.ndarray:
    return logits - np.log(np.exp(logits).sum())


def exact_kl(logits: np.ndarray) -> float:
    policy = logprobs(logits)
    return float((np.exp(policy) * (policy - REFERENCE)).sum())


def streams_of(policy_V: torch.Tensor, behavior: np.ndarray) -> TokenStreams:
    """Every outcome once."""
    return TokenStreams(
        policy_logprobs_R=policy_V,
        behavior_logprobs_R=torch.tensor(behavior),
        advantages_R=torch.zeros(len(behavior), dtype=torch.float64),
        sequence_R=torch.zeros(len(behavior), dtype=torch.int64),
        reference_logprobs_R=torch.tensor(REFERENCE),
    )


@pytest.mark.parametrize("moved", [np.zeros(6), NEAR], ids=["on policy", "off policy"])
@pytest.mark.parametrize("kind", KlEstimator)
def test_every_estimator_has_the_gradient_of_the_exact_kl(kind: KlEstimator, moved: np.ndarray):
    behavior = logprobs(LOGITS + moved)
    assert np.exp(logprobs(LOGITS) - behavior).max() < MAX_RATIO
    logits = torch.tensor(LOGITS, requires_grad=True)
    losses = kl_loss(streams_of(torch.log_softmax(logits, -1), behavior), kind)
    loss = torch.dot(torch.tensor(np.exp(behavior)), losses)
    loss.backward()
    steps = np.eye(6) * STEP
    expected = [(exact_kl(LOGITS + one) - exact_kl(LOGITS - one)) / (2 * STEP) for one in steps]
    np.testing.assert_allclose(logits.grad, expected, atol=1e-9)
    assert np.abs(expected).max() > 0.1
    if kind is not KlEstimator.k2:  # the biased one
        assert float(loss.detach()) == pytest.approx(exact_kl(LOGITS), rel=1e-12)


def test_the_estimates_are_schulmans():
    policy_R, reference_R = torch.tensor([-1.0, -2.0, -0.5]), torch.tensor([-1.5, -1.0, -0.5])
    d_R = np.array([0.5, -1.0, 0.0])
    expected = {KlEstimator.k1: d_R, KlEstimator.k2: d_R**2 / 2, KlEstimator.k3: np.exp(-d_R) - 1 + d_R}
    for kind, values in expected.items():
        np.testing.assert_allclose(kl_estimate(policy_R, reference_R, kind), values, atol=1e-7)
    assert (kl_estimate(policy_R, reference_R, KlEstimator.k3) >= 0).all()


def test_one_token_far_off_the_behavior_does_not_rule_the_penalty():
    policy_R = torch.tensor([-0.1, -0.1], requires_grad=True)
    streams = dataclasses.replace(
        streams_of(policy_R, np.array([-9.0, -0.1])), reference_logprobs_R=torch.tensor([-1.1, -1.1])
    )
    kl_loss(streams, KlEstimator.k1).sum().backward()
    torch.testing.assert_close(policy_R.grad, torch.tensor([MAX_RATIO, 1.0]))


def test_the_objective_adds_the_weighted_penalty_to_any_algorithm_and_watches_it():
    config = AlgorithmConfig(kl_coef=0.5, kl_estimator=KlEstimator.k1)
    algorithm = build_algorithm(config)
    streams = streams_of(torch.tensor(logprobs(LOGITS)), logprobs(LOGITS))
    alone, loss = algorithm.token_loss(streams), Objective(algorithm, config).token_loss(streams)
    kl_R = torch.tensor(logprobs(LOGITS) - REFERENCE)
    torch.testing.assert_close(loss.terms, {"loss/kl": 0.5 * kl_R})
    torch.testing.assert_close(loss.total(), alone.loss_R + 0.5 * kl_R)
    torch.testing.assert_close(loss.watched["kl/reference_policy"], (-kl_R).expm1() + kl_R)
    in_reward = Objective(algorithm, dataclasses.replace(config, kl_in=KlPlace.reward)).token_loss(streams)
    assert in_reward.terms == {}
    assert in_reward.watched.keys() == {"ratio/mean", "kl/reference_policy"}
    off = Objective(algorithm, AlgorithmConfig()).token_loss(dataclasses.replace(streams, reference_logprobs_R=None))
    assert torch.equal(off.total(), alone.loss_R)
    with pytest.raises(AlgorithmError, match=r"^algorithm\.kl_coef: needs the reference's logprobs of every token, "):
        Objective(algorithm, config).token_loss(dataclasses.replace(streams, reference_logprobs_R=None))

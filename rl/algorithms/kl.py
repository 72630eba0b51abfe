"""KL to the reference policy: three estimators from the sampled token (Schulman 2020, "Approximating KL Divergence").

    d = log policy - log reference     k1 = d     k2 = d^2 / 2     k3 = exp(-d) - 1 + d

As a reward, the estimator is a number. As a loss, its value is not enough: differentiating it does not give the
gradient of KL(policy || reference). On the policy's own samples the gradient of k1 has expectation 0, that of k3 is the
gradient of the other direction, KL(reference || policy), and only that of k2, d grad log policy, is right (Tang and
Munos 2025, arXiv 2506.09477; Liu et al. 2025, arXiv 2510.01555). So every estimator gives the value here, and all have
the gradient

    w d grad log policy,     w = min(policy / behavior, MAX_RATIO)

which is that of KL(policy || reference) on samples of the behavior policy, as far as the weight is not cut.

Differs from the paper: GRPO (arXiv 2402.03300, eq. 4) differentiates k3 itself, without the importance weight.

Shapes: R trainable tokens.
"""

from __future__ import annotations

import torch

from rl.algorithms.base import AlgorithmError, TokenStreams
from rl.algorithms.config import KlEstimator

MAX_RATIO = 2.0
"""Of the importance weight: a few tokens that the policy has moved towards may not rule the penalty."""


def kl_estimate(policy_logprobs_R: torch.Tensor, reference_logprobs_R: torch.Tensor, kind: KlEstimator) -> torch.Tensor:
    """The estimate of KL(policy || reference) at each token, in nats."""
    d_R = policy_logprobs_R - reference_logprobs_R
    if kind is KlEstimator.k1:
        return d_R
    return d_R.square() / 2 if kind is KlEstimator.k2 else (-d_R).expm1() + d_R


def kl_loss(streams: TokenStreams, kind: KlEstimator) -> torch.Tensor:
    """The weighted estimate at each token, with the gradient of KL(policy || reference).

    Raises AlgorithmError when the learner holds no reference.
    """
    reference_R = reference_of(streams)
    policy_R = streams.policy_logprobs_R.detach()
    weight_R = (policy_R - streams.behavior_logprobs_R).exp().clamp(max=MAX_RATIO)
    only_gradient_R = (policy_R - reference_R) * (streams.policy_logprobs_R - policy_R)
    return weight_R * (kl_estimate(policy_R, reference_R, kind) + only_gradient_R)


def reference_of(streams: TokenStreams) -> torch.Tensor:
    """The reference's logprobs. Raises AlgorithmError without."""
    if streams.reference_logprobs_R is None:
        raise AlgorithmError(
            "algorithm.kl_coef: needs the reference's logprobs of every token, got samples without them; run the "
            "parity gate of the round first"
        )
    return streams.reference_logprobs_R

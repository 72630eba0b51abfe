"""The loss of a token: what the algorithm says, and what the configuration adds to any algorithm.

    loss = algorithm + kl_coef KL(policy || reference)

A part whose coefficient is 0 computes nothing.
"""

from __future__ import annotations

from rl.algorithms.base import Loss, TokenLoss, TokenStreams
from rl.algorithms.config import AlgorithmConfig, KlEstimator, KlPlace
from rl.algorithms.kl import kl_estimate, kl_loss


class Objective:
    """An algorithm's loss with the additions of the configuration."""

    def __init__(self, algorithm: Loss, config: AlgorithmConfig):
        self._algorithm = algorithm
        self._kl_coef = config.kl_coef if config.kl_in is KlPlace.loss else 0.0
        self._estimator = config.kl_estimator

    def token_loss(self, streams: TokenStreams) -> TokenLoss:
        """The algorithm's loss, with the additions as its terms."""
        loss = self._algorithm.token_loss(streams)
        terms, watched = dict(loss.terms), dict(loss.watched)
        if self._kl_coef:
            terms["loss/kl"] = self._kl_coef * kl_loss(streams, self._estimator)
        if streams.reference_logprobs_R is not None:
            policy_R = streams.policy_logprobs_R.detach()
            watched["kl/reference_policy"] = kl_estimate(policy_R, streams.reference_logprobs_R, KlEstimator.k3)
        return TokenLoss(loss_R=loss.loss_R, clipped_R=loss.clipped_R, terms=terms, watched=watched)

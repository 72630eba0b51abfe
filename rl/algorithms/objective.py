"""The loss of a token: what the algorithm says, and what the configuration adds to any algorithm.

    loss = w algorithm(policy / proximal) + kl_coef KL(policy || reference) - entropy_coef H(policy)

`w` corrects for samples of another policy than the proximal one (`rl.algorithms.importance`); without a correction it
is 1, and the sampler's logprobs are the proximal ones. What the algorithm gives as terms of its own (the loss of a
critic) is not weighed. A part whose coefficient is 0 computes nothing: no entropy, and no graph for one.
"""

from __future__ import annotations

import dataclasses

from rl.algorithms.base import AlgorithmError, Loss, TokenLoss, TokenStreams
from rl.algorithms.config import AlgorithmConfig, Importance, KlEstimator, KlPlace
from rl.algorithms.importance import Correction, proximal_of
from rl.algorithms.kl import kl_estimate, kl_loss
from rl.algorithms.surrogate import ratio


class Objective:
    """An algorithm's loss with the additions of the configuration."""

    def __init__(self, algorithm: Loss, config: AlgorithmConfig):
        self._algorithm = algorithm
        self._kl_coef = config.kl_coef if config.kl_in is KlPlace.loss else 0.0
        self._estimator = config.kl_estimator
        self._entropy_coef = config.entropy_coef
        self._correction = (
            None
            if config.importance is Importance.none
            else Correction(config.importance, config.importance_level, config.importance_cap)
        )

    def token_loss(self, streams: TokenStreams) -> TokenLoss:
        """The algorithm's loss, with the additions as its terms."""
        loss = self._corrected(streams)
        terms, watched = dict(loss.terms), dict(loss.watched)
        if self._kl_coef:
            terms["loss/kl"] = self._kl_coef * kl_loss(streams, self._estimator)
        if self._entropy_coef:
            if streams.entropies is None:
                raise AlgorithmError(
                    "algorithm.entropy_coef: needs entropies, got streams without; set it to 0, or compute them"
                )
            terms["loss/entropy"] = -self._entropy_coef * streams.entropies()
        if streams.reference_logprobs_R is not None:
            policy_R = streams.policy_logprobs_R.detach()
            watched["kl/reference_policy"] = kl_estimate(policy_R, streams.reference_logprobs_R, KlEstimator.k3)
        return dataclasses.replace(loss, terms=terms, watched=watched)

    def _corrected(self, streams: TokenStreams) -> TokenLoss:
        """The algorithm's loss; with a correction, on the ratio policy / proximal and weighed."""
        if self._correction is None:
            loss = self._algorithm.token_loss(streams)
            return dataclasses.replace(loss, watched={**loss.watched, "ratio/mean": ratio(streams).detach()})
        weight_R, cut_R = self._correction.weights(streams)
        proximal = dataclasses.replace(streams, behavior_logprobs_R=proximal_of(streams))
        loss = self._algorithm.token_loss(proximal)
        watched = {"ratio/mean": ratio(proximal).detach(), "importance/mean": weight_R, "importance/cut_frac": cut_R}
        return dataclasses.replace(loss, loss_R=weight_R * loss.loss_R, watched={**loss.watched, **watched})

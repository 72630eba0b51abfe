"""What an update did, counted on each rank over its micro-batches and put together for the metrics of a round.

Shapes: R trainable tokens, L layers, E experts.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import torch

from rl.algorithms.base import TokenLoss
from rl.batch import Batch
from rl.learner.balance import RouterLossPart
from rl.machine import peak_memory_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateReport:
    """Means over the trainable tokens of the round, and over its steps for losses and norms.

    `expert_load_LE` is each expert's share of a layer's tokens, `rank_loads` what that means for the ranks, by metric
    (`rl.learner.placement.Placer`). `peak_bytes` is the most memory that a rank ever had resident, `None` where its
    kernel does not tell. `terms` and `watched` are the loss's own (`rl.algorithms.base.TokenLoss`), by metric: means
    over the steps, and over the tokens.
    """

    num_steps: int
    num_tokens: int
    policy_loss: float
    balance_loss: float
    router_z_loss: float
    clip_frac: float
    kl_behavior_policy: float
    grad_norm: float
    expert_load_LE: np.ndarray
    peak_bytes: int | None = None
    rank_loads: Mapping[str, float] = field(default_factory=dict[str, float])
    terms: Mapping[str, float] = field(default_factory=dict[str, float])
    watched: Mapping[str, float] = field(default_factory=dict[str, float])


class UpdateTotals:
    """Sums over the micro-batches of a round: those of this rank, and of the others once they are absorbed."""

    def __init__(self) -> None:
        self.num_steps = 0
        self._num_tokens = 0
        self._grad_norms = 0.0
        self._peak_bytes = 0
        self._sums: dict[str, float] = dict.fromkeys(("policy", "balance", "router_z", "clipped", "kl"), 0.0)
        self._terms: defaultdict[str, float] = defaultdict(float)
        self._watched: defaultdict[str, float] = defaultdict(float)
        self.load_LE: np.ndarray | None = None

    def add(
        self,
        batch: Batch,
        token_loss: TokenLoss,
        mass: float,
        of_router: RouterLossPart,
        logprobs_R: torch.Tensor,
    ) -> None:
        """Count a micro-batch."""
        log_ratio_R = logprobs_R - batch.behavior_logprobs_R
        self._sums["policy"] += float((token_loss.loss_R.detach() * batch.weights_R).sum() / mass)
        for name, term_R in token_loss.terms.items():
            self._terms[name] += float((term_R.detach() * batch.weights_R).sum() / mass)
        for name, value_R in token_loss.watched.items():
            self._watched[name] += float(value_R.sum())
        self._sums["balance"] += of_router.balance
        self._sums["router_z"] += of_router.router_z
        self._sums["clipped"] += float(token_loss.clipped_R.sum())
        # The k3 estimator of KL(behavior || policy), never negative (Schulman 2020).
        self._sums["kl"] += float((log_ratio_R.expm1() - log_ratio_R).sum())

    def add_step(self, grad_norm: float, num_tokens: int, counts_LE: torch.Tensor) -> None:
        """Count a step: norm and tokens are those of all ranks, the choices those of this one."""
        self.num_steps += 1
        self._peak_bytes = peak_memory_bytes() or 0
        self._num_tokens += num_tokens
        self._grad_norms += grad_norm
        self.load_LE = counts_LE.numpy() if self.load_LE is None else self.load_LE + counts_LE.numpy()

    def absorb(self, other: UpdateTotals) -> None:
        """Add what another rank counted in the same steps."""
        if other.load_LE is None:
            return
        assert self.load_LE is not None
        self.load_LE = self.load_LE + other.load_LE
        self._peak_bytes = max(self._peak_bytes, other._peak_bytes)
        self._sums = {name: value + other._sums[name] for name, value in self._sums.items()}
        for own, others in ((self._terms, other._terms), (self._watched, other._watched)):
            for name, value in others.items():  # a rank that had nothing but padding has no names
                own[name] += value

    def report(self, rank_loads: Mapping[str, float]) -> UpdateReport:
        """The means of what was counted; there was a step."""
        assert self.load_LE is not None
        return UpdateReport(
            num_steps=self.num_steps,
            num_tokens=self._num_tokens,
            policy_loss=self._sums["policy"] / self.num_steps,
            balance_loss=self._sums["balance"] / self.num_steps,
            router_z_loss=self._sums["router_z"] / self.num_steps,
            clip_frac=self._sums["clipped"] / self._num_tokens,
            kl_behavior_policy=self._sums["kl"] / self._num_tokens,
            grad_norm=self._grad_norms / self.num_steps,
            expert_load_LE=self.load_LE / self.load_LE.sum(axis=1, keepdims=True),
            peak_bytes=self._peak_bytes or None,
            rank_loads=rank_loads,
            terms={name: total / self.num_steps for name, total in self._terms.items()},
            watched={name: total / self._num_tokens for name, total in self._watched.items()},
        )

"""The router's losses of a minibatch, from its micro-batches, and the bias update that needs no loss.

The scope of the balance loss (`rl.algorithms.config.BalanceScope`) says over what f and P are means:

    global_batch   the minibatch, all ranks together (Qiu et al. 2025, arXiv 2501.11873): experts may specialise in
                   kinds of samples. f has to be known before the first micro-batch
    micro_batch    the micro-batch, weighted by its share of the tokens: depends on how the minibatch is cut
    sequence       each sequence (DeepSeek-V3)

Every token counts that a learner computes, and no padding.

Shapes: L layers with experts, E experts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from model.config import ModelConfig
from model.moe import Router
from model.moe_losses import (
    DispatchTotals,
    dispatch_totals,
    load_balancing_loss,
    router_sums,
    router_z_loss,
    sequence_balance_loss,
    update_selection_bias,
)
from model.transformer import Transformer
from rl.algorithms.config import BalanceScope
from rl.batch import Batch
from rl.learner.policy import PolicyOutput


@dataclass(frozen=True, slots=True, kw_only=True)
class BalanceSettings:
    """See `rl.algorithms.config.AlgorithmConfig`."""

    load_balance_coef: float = 0.0
    scope: BalanceScope = BalanceScope.micro_batch
    router_z_coef: float = 0.0
    bias_update_speed: float = 0.0


class RouterLossPart(NamedTuple):
    """Of one micro-batch: the weighted sum with its gradient, both losses unweighted, the choices; they add up."""

    weighted: torch.Tensor
    balance: float
    router_z: float
    dispatched: DispatchTotals


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterLoss:
    """The losses of one minibatch of `num_tokens` in `num_sequences`; `dispatched` belongs to `global_batch`."""

    settings: BalanceSettings
    model: ModelConfig
    num_tokens: int
    num_sequences: int
    dispatched: DispatchTotals | None

    def part(self, out: PolicyOutput, batch: Batch) -> RouterLossPart:
        """Those of one micro-batch; padding has none, and dispatches nothing."""
        if batch.is_padding:
            return RouterLossPart(torch.zeros(()), 0.0, 0.0, nothing_dispatched(self.model))
        own = count_dispatched(out.routes_TLK, self.model)
        every_T = torch.ones(batch.num_tokens, dtype=torch.bool)
        sums = router_sums(out.router_logits_TE, every_T, self.model.router_scores)
        share = batch.num_tokens / self.num_tokens
        if self.settings.scope is BalanceScope.sequence:
            scores = self.model.router_scores
            sum_S = sequence_balance_loss(out.router_logits_TE, out.routes_TLK, batch.cu_seqlens, scores)
            balance = sum_S / self.num_sequences
        elif self.dispatched is not None:
            balance = load_balancing_loss(sums, self.dispatched)
        else:
            balance = load_balancing_loss(sums, own) * share
        z_loss = router_z_loss(sums, own) * share
        weighted = self.settings.load_balance_coef * balance + self.settings.router_z_coef * z_loss
        return RouterLossPart(weighted, float(balance.detach()), float(z_loss.detach()), own)


def count_dispatched(routes_TLK: torch.Tensor, model: ModelConfig) -> DispatchTotals:
    """The choices of every token."""
    return dispatch_totals(routes_TLK, torch.ones(len(routes_TLK), dtype=torch.bool), model.num_experts)


def nothing_dispatched(model: ModelConfig) -> DispatchTotals:
    """What sums of counts begin with."""
    counts_LE = torch.zeros(len(model.moe_layers), model.num_experts, dtype=torch.int64)
    return DispatchTotals(counts_LE=counts_LE, num_tokens=0)


def update_selection_biases(model: Transformer, counts_LE: torch.Tensor, speed: float) -> None:
    """Move the selection bias of every router by `speed`, as the choices of a minibatch on all ranks say."""
    routers = [module for module in model.modules() if isinstance(module, Router)]
    for router, counts_E in zip(routers, counts_LE, strict=True):
        assert router.selection_bias is not None  # `rl.config_check` refuses a speed for a model without
        update_selection_bias(router.selection_bias, counts_E, speed)

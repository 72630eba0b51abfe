"""The Mixture-of-Experts layer: an fp32 router, the top-k choice, and the routed (and shared) experts.

The router's choice is returned, because a trajectory records it and the losses of `moe_losses` need it; a recorded
choice can be given back (`replay_TK`), so that a learner trains the experts that the sampler used.

    scores    softmax of the logits over all experts, or a sigmoid of each (DeepSeek-V3, section 2.1.2)
    choice    the K largest scores; with a selection bias the K largest of score + bias, within the groups whose two
              best sum highest (DeepSeek-V3: bias and groups take part in the choice only)
    weights   the chosen scores, divided by their sum if `normalize_topk`, times `routed_scaling`

Shapes: T packed tokens, D model dim, F expert dim, E experts, K experts a token, N groups of experts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import nn

from model.config import Activation, ModelConfig, RouterScores
from model.kernels.dispatch import ExpertsForward
from model.kernels.grouped_experts import eager
from model.kernels.grouped_experts.reference import Clamp
from model.layers import TORCH_DTYPE, Mlp
from model.low_rank import AdaptedKernels, LowRankExperts, PlainKernels, adapted_experts
from model.parallel.experts import ExpertExchange
from model.product import Product


class Routing(NamedTuple):
    """What the router decided: fp32 logits over all experts, int64 choices in rank order, fp32 weights."""

    logits_TE: torch.Tensor
    chosen_TK: torch.Tensor
    weights_TK: torch.Tensor


class ExpertParameters(NamedTuple):
    """The tensors of `Experts`, in the compute dtype."""

    gate_up_E2FD: torch.Tensor
    down_EDF: torch.Tensor
    gate_up_bias_E2F: torch.Tensor | None
    down_bias_ED: torch.Tensor | None


class Route(Protocol):
    """A kernel that chooses and weighs experts as a router is configured; `replay_TK` None: chooses."""

    def __call__(
        self, logits_TE: torch.Tensor, replay_TK: torch.Tensor | None, router: Router
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """int64 choices in rank order and fp32 weights, [T, K] each."""
        ...


class PackedExperts(Protocol):
    """A kernel that applies experts which were packed for it."""

    def __call__(
        self,
        x_TD: torch.Tensor,
        chosen_TK: torch.Tensor,
        weights_TK: torch.Tensor,
        parameters: Callable[[], ExpertParameters],
    ) -> torch.Tensor:
        """fp32 [T, D]; `parameters` are the tensors that take gradients, called only where one is computed."""
        ...

    def combine(self, rows_ND: torch.Tensor, row_TK: torch.Tensor, weights_TK: torch.Tensor) -> torch.Tensor:
        """See `model.parallel.experts.Combine`."""
        ...


class Router(nn.Module):
    """Scores of all experts and the K best of each token."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.top_k = config.num_experts_per_tok
        self.num_groups, self.top_groups = config.num_expert_groups, config.num_groups_per_tok
        self.scores = config.router_scores
        self.normalize, self.scaling = config.normalize_topk, config.routed_scaling
        self.weight = nn.Parameter(torch.empty(config.num_experts, config.hidden_size))
        self.bias = nn.Parameter(torch.empty(config.num_experts)) if config.router_bias else None
        self.selection_bias = None
        if config.router_selection_bias:  # no gradient reaches it: it only decides, and is not trained by a loss
            self.selection_bias = nn.Parameter(torch.empty(config.num_experts), requires_grad=False)
        self.product: Product | None = None
        self.route: Route | None = None

    def forward(self, x_TD: torch.Tensor, replay_TK: torch.Tensor | None) -> Routing:
        """Route each token, or weigh the recorded choice `replay_TK` (`None`: choose)."""
        if self.product is not None and self.route is not None:
            logits_TE = self.product(x_TD.float(), lambda: (self.weight, self.bias))
            return Routing(logits_TE, *self.route(logits_TE, replay_TK, self))
        bias = None if self.bias is None else self.bias.float()
        logits_TE = F.linear(x_TD.float(), self.weight.float(), bias)
        chosen_TK = self._choose(logits_TE) if replay_TK is None else replay_TK.long()
        return Routing(logits_TE, chosen_TK, self._weigh(logits_TE, chosen_TK))

    @torch.no_grad()
    def _choose(self, logits_TE: torch.Tensor) -> torch.Tensor:
        """The K best experts of each token, int64 [T, K], best first."""
        if self.selection_bias is None and self.num_groups == 1:
            return logits_TE.topk(self.top_k, dim=-1).indices  # scores grow with their logits
        scores_TE = logits_TE.sigmoid() if self.scores is RouterScores.sigmoid else logits_TE.softmax(-1)
        if self.selection_bias is not None:
            scores_TE = scores_TE + self.selection_bias.float()
        if self.num_groups > 1:
            grouped_TNE = scores_TE.unflatten(-1, (self.num_groups, -1))
            best_TN = grouped_TNE.topk(2, dim=-1).values.sum(-1).topk(self.top_groups, dim=-1).indices
            closed_TN = torch.ones_like(grouped_TNE[..., 0], dtype=torch.bool).scatter_(-1, best_TN, False)
            scores_TE = grouped_TNE.masked_fill(closed_TN.unsqueeze(-1), -torch.inf).flatten(-2)
        return scores_TE.topk(self.top_k, dim=-1).indices

    def _weigh(self, logits_TE: torch.Tensor, chosen_TK: torch.Tensor) -> torch.Tensor:
        """The factor of each choice, fp32 [T, K]."""
        if self.scores is RouterScores.sigmoid:
            weights_TK = logits_TE.gather(-1, chosen_TK).sigmoid()
            if self.normalize:
                weights_TK = weights_TK / (weights_TK.sum(-1, keepdim=True) + 1e-20)
        elif self.normalize:  # a softmax over all, divided by the chosen ones' sum, is a softmax over the chosen ones
            weights_TK = logits_TE.gather(-1, chosen_TK).softmax(-1)
        else:
            weights_TK = logits_TE.softmax(-1).gather(-1, chosen_TK)
        return weights_TK if self.scaling == 1.0 else weights_TK * self.scaling


class Experts(nn.Module):
    """The routed experts of a layer as two fused tensors, the ones that are stored in MXFP4, and their biases.

    All of them, or with `exchange` the share of one rank (`model/parallel/experts.py`).
    """

    def __init__(self, config: ModelConfig, experts_forward: ExpertsForward, expert_parallel: int) -> None:
        super().__init__()
        num, hidden, width = config.num_experts // expert_parallel, config.hidden_size, config.expert_hidden_size
        self.gate_up_proj = nn.Parameter(torch.empty(num, 2 * width, hidden))
        self.down_proj = nn.Parameter(torch.empty(num, hidden, width))
        self.gate_up_proj_bias = nn.Parameter(torch.empty(num, 2 * width)) if config.expert_bias else None
        self.down_proj_bias = nn.Parameter(torch.empty(num, hidden)) if config.expert_bias else None
        self.experts_forward = experts_forward
        self.clamp = None
        if config.expert_activation is Activation.clamped_swiglu:
            self.clamp = Clamp(limit=config.swiglu_limit, alpha=config.swiglu_alpha)
        self.packed: PackedExperts | None = None
        self.exchange: ExpertExchange | None = None
        self.gate_up_lora: LowRankExperts | None = None
        self.down_lora: LowRankExperts | None = None
        self.adapted: AdaptedKernels | None = None

    def forward(self, x_TD: torch.Tensor, routing: Routing) -> torch.Tensor:
        """fp32 [T, D]: the weighted sum of each token's chosen experts."""
        if self.exchange is None:
            return self._compute(x_TD, routing.chosen_TK, routing.weights_TK)
        combine = eager.combine if self.packed is None else self.packed.combine
        return self.exchange(x_TD, routing.chosen_TK, routing.weights_TK, self._compute_rows, combine)

    def _compute(self, x_TD: torch.Tensor, chosen_TK: torch.Tensor, weights_TK: torch.Tensor) -> torch.Tensor:
        if self.gate_up_lora is not None and self.down_lora is not None:
            biases = (self.gate_up_proj_bias, self.down_proj_bias)
            kernels = self.adapted or PlainKernels(self.gate_up_proj, self.down_proj, biases)
            adapters = (self.gate_up_lora, self.down_lora)
            return adapted_experts(kernels, self.clamp, *adapters, x_TD, chosen_TK, weights_TK)
        if self.packed is not None:
            return self.packed(x_TD, chosen_TK, weights_TK, lambda: self.parameters_as(x_TD.dtype))
        gate_up, down, gate_up_bias, down_bias = self.parameters_as(x_TD.dtype)
        return self.experts_forward(
            x_TD,
            gate_up,
            down,
            chosen_TK,
            weights_TK,
            gate_up_bias_E2F=gate_up_bias,
            down_bias_ED=down_bias,
            clamp=self.clamp,
        )

    def _compute_rows(self, x_MD: torch.Tensor, expert_M: torch.Tensor) -> torch.Tensor:
        chosen_M1 = expert_M.unsqueeze(-1)
        return self._compute(x_MD, chosen_M1, torch.ones(chosen_M1.shape, device=x_MD.device))

    def parameters_as(self, dtype: torch.dtype) -> ExpertParameters:
        """All tensors of this layer in `dtype`."""
        biases = (self.gate_up_proj_bias, self.down_proj_bias)
        gate_up_bias, down_bias = (None if bias is None else bias.to(dtype) for bias in biases)
        return ExpertParameters(self.gate_up_proj.to(dtype), self.down_proj.to(dtype), gate_up_bias, down_bias)


class MoE(nn.Module):
    """Router, routed experts and, when configured, the shared expert. Returns fp32 [T, D] and the routing."""

    def __init__(self, config: ModelConfig, experts_forward: ExpertsForward, expert_parallel: int) -> None:
        super().__init__()
        self.compute_dtype = TORCH_DTYPE[config.compute_dtype]
        self.router = Router(config)
        self.experts = Experts(config, experts_forward, expert_parallel)
        self.shared_experts = None
        if config.shared_expert_hidden_size:  # DeepSeekMoE (Dai et al. 2024, section 3.2): weight 1 for every token
            self.shared_experts = Mlp(config.hidden_size, config.shared_expert_hidden_size)

    def forward(self, x_TD: torch.Tensor, replay_TK: torch.Tensor | None = None) -> tuple[torch.Tensor, Routing]:
        """Apply the layer to normed fp32 inputs."""
        routing = self.router(x_TD, replay_TK)
        x_TD = x_TD.to(self.compute_dtype)
        y_TD = self.experts(x_TD, routing)
        if self.shared_experts is not None:
            y_TD = y_TD + self.shared_experts(x_TD).float()
        return y_TD, routing

"""The Mixture-of-Experts layer: an fp32 router, the top-k choice, and the routed (and shared) experts.

The router's choice is returned, because a trajectory records it and the losses of `moe_losses` need it; a recorded
choice can be given back (`replay_TK`), so that a learner trains the experts that the sampler used. Weights are a
softmax over the logits of the chosen experts only, in fp32.

Shapes: T packed tokens, D model dim, F expert dim, E experts, K experts a token.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from model.config import ModelConfig
from model.kernels.dispatch import ExpertsForward
from model.layers import TORCH_DTYPE, Linear


class Routing(NamedTuple):
    """What the router decided: fp32 logits over all experts, int64 choices in rank order, fp32 weights."""

    logits_TE: torch.Tensor
    chosen_TK: torch.Tensor
    weights_TK: torch.Tensor


class Router(nn.Module):
    """Scores of all experts and the K best of each token."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.top_k = config.num_experts_per_tok
        self.weight = nn.Parameter(torch.empty(config.num_experts, config.hidden_size))
        self.bias = nn.Parameter(torch.empty(config.num_experts)) if config.router_bias else None

    def forward(self, x_TD: torch.Tensor, replay_TK: torch.Tensor | None) -> Routing:
        """Route each token, or weigh the recorded choice `replay_TK` (`None`: choose)."""
        bias = None if self.bias is None else self.bias.float()
        logits_TE = F.linear(x_TD.float(), self.weight.float(), bias)
        if replay_TK is None:
            chosen_logits_TK, chosen_TK = logits_TE.topk(self.top_k, dim=-1)
        else:
            chosen_TK = replay_TK.long()
            chosen_logits_TK = logits_TE.gather(-1, chosen_TK)
        return Routing(logits_TE, chosen_TK, chosen_logits_TK.softmax(-1))


class Experts(nn.Module):
    """All routed experts of a layer as two fused tensors, the ones that are stored in MXFP4."""

    def __init__(self, config: ModelConfig, experts_forward: ExpertsForward) -> None:
        super().__init__()
        num, hidden, width = config.num_experts, config.hidden_size, config.expert_hidden_size
        self.gate_up_proj = nn.Parameter(torch.empty(num, 2 * width, hidden))
        self.down_proj = nn.Parameter(torch.empty(num, hidden, width))
        self.experts_forward = experts_forward

    def forward(self, x_TD: torch.Tensor, routing: Routing) -> torch.Tensor:
        """fp32 [T, D]: the weighted sum of each token's chosen experts."""
        gate_up, down = self.gate_up_proj.to(x_TD.dtype), self.down_proj.to(x_TD.dtype)
        return self.experts_forward(x_TD, gate_up, down, routing.chosen_TK, routing.weights_TK)


class SharedExpert(nn.Module):
    """An expert that every token passes with weight 1 (DeepSeekMoE, Dai et al. 2024, section 3.2)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gate_proj = Linear(config.hidden_size, config.shared_expert_hidden_size)
        self.up_proj = Linear(config.hidden_size, config.shared_expert_hidden_size)
        self.down_proj = Linear(config.shared_expert_hidden_size, config.hidden_size)

    def forward(self, x_TD: torch.Tensor) -> torch.Tensor:
        """[T, D] in the dtype of `x_TD`."""
        return self.down_proj(F.silu(self.gate_proj(x_TD)) * self.up_proj(x_TD))


class MoE(nn.Module):
    """Router, routed experts and, when configured, the shared expert. Returns fp32 [T, D] and the routing."""

    def __init__(self, config: ModelConfig, experts_forward: ExpertsForward) -> None:
        super().__init__()
        self.compute_dtype = TORCH_DTYPE[config.compute_dtype]
        self.router = Router(config)
        self.experts = Experts(config, experts_forward)
        self.shared_experts = SharedExpert(config) if config.shared_expert_hidden_size else None

    def forward(self, x_TD: torch.Tensor, replay_TK: torch.Tensor | None = None) -> tuple[torch.Tensor, Routing]:
        """Apply the layer to normed fp32 inputs."""
        routing = self.router(x_TD, replay_TK)
        x_TD = x_TD.to(self.compute_dtype)
        y_TD = self.experts(x_TD, routing)
        if self.shared_experts is not None:
            y_TD = y_TD + self.shared_experts(x_TD).float()
        return y_TD, routing

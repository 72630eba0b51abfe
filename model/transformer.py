"""The policy network: packed token ids in, final hidden states and routes out; logits on request.

Invariants: there is no batch dimension and no padding, every tensor is packed [T, ...] and only `attend` knows where a
sequence ends; the residual stream, norms, router, softmaxes and logits are fp32 whatever the compute dtype. Learner and
sampler run this one module: the learner through `torch.func.functional_call` with the published view of each parameter,
the sampler with that view loaded. Parameter names are those of the Hugging Face MoE families
(`model.layers.N.mlp.experts.gate_up_proj`), with experts as [out, in] matrices: MXFP4 blocks run along the input.

Shapes: T packed tokens, D model dim, L layers, E experts, K experts a token, V vocabulary.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass

import torch
from torch import nn

from model.attention import Attend, make_attention
from model.config import ConfigError, ModelConfig
from model.kernels.dispatch import ExpertsForward, grouped_experts
from model.layers import TORCH_DTYPE, Embedding, Linear, Mlp, RMSNorm, project_logits
from model.moe import MoE, Routing
from model.product import Product
from model.recompute import recomputed
from model.rope import RotationTable

EMBEDDING = "model.embed_tokens.weight"
LM_HEAD = "lm_head.weight"


@dataclass(frozen=True, slots=True, kw_only=True)
class TransformerOutput:
    """fp32 hidden states after the final norm, choices in rank order (`route_dtype`), and fp32 router logits.

    Layers count the ones with experts only.
    """

    hidden_TD: torch.Tensor
    routes_TLK: torch.Tensor
    router_logits_TE: tuple[torch.Tensor, ...]


class Block(nn.Module):
    """Pre-norm attention, then pre-norm experts (or a dense MLP), each added to the residual stream."""

    def __init__(
        self, config: ModelConfig, layer_index: int, experts_forward: ExpertsForward, expert_parallel: int
    ) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = make_attention(config, layer_index)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.compute_dtype = TORCH_DTYPE[config.compute_dtype]
        self.is_dense = layer_index in config.dense_layers
        if self.is_dense:
            self.mlp = Mlp(config.hidden_size, config.dense_hidden_size)
        else:
            self.mlp = MoE(config, experts_forward, expert_parallel)

    def forward(
        self, x_TD: torch.Tensor, by_T1h: torch.Tensor, attend: Attend, replay_TK: torch.Tensor | None
    ) -> tuple[torch.Tensor, Routing | None]:
        """The fp32 residual stream after this block, and its routing (`None` in a dense layer)."""
        x_TD = x_TD + self.self_attn(self.input_layernorm(x_TD), by_T1h, attend)
        normed_TD = self.post_attention_layernorm(x_TD)
        if self.is_dense:
            return x_TD + self.mlp(normed_TD.to(self.compute_dtype)), None
        y_TD, routing = self.mlp(normed_TD, replay_TK)
        return x_TD + y_TD, routing


class Backbone(nn.Module):
    """Embedding, blocks and final norm: what checkpoints call `model`."""

    def __init__(self, config: ModelConfig, experts_forward: ExpertsForward, expert_parallel: int) -> None:
        super().__init__()
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(
            Block(config, index, experts_forward, expert_parallel) for index in range(config.num_layers)
        )
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)


class Transformer(nn.Module):
    """The policy. Parameters are fp32 and uninitialised until `init_weights` or a checkpoint fills them."""

    def __init__(
        self, config: ModelConfig, *, experts: str = "eager", expert_parallel: int = 1, recompute_blocks: bool = False
    ) -> None:
        """Build the modules; `experts` names the version of the grouped expert MLP (`grouped_experts`).

        With `expert_parallel` P, each layer has E / P experts: those of one rank (`model/parallel/groups.py`). With
        `recompute_blocks` a forward with gradient keeps the inputs of blocks alone (`model/recompute.py`).

        Raises:
            ConfigError: The configuration is invalid, the vocabulary size is not set yet, or P does not divide E.
            KernelError: No such version.
        """
        super().__init__()
        config.validate()
        if config.vocab_size == 0:
            raise ConfigError(
                "model.vocab_size: must be set before the model is built, got 0; take it from the tokenizer"
            )
        if config.num_experts % expert_parallel:
            raise ConfigError(
                f"learner.expert_parallel: must divide the {config.num_experts} experts, got {expert_parallel}; "
                "each rank holds as many experts as every other"
            )
        self.config = config
        self.model = Backbone(config, grouped_experts(experts), expert_parallel)
        self.lm_head = None if config.tie_embeddings else Linear(config.hidden_size, config.vocab_size)
        self.unembed: Product | None = None
        self._recompute_blocks = recompute_blocks
        self._rotations = RotationTable(config.rotary_dim, config.rope)

    @property
    def output_name(self) -> str:
        """The name of the [V, D] parameter that makes logits, for callers who swap parameters."""
        return EMBEDDING if self.lm_head is None else LM_HEAD

    def forward(
        self,
        ids_T: torch.Tensor,
        positions_T: torch.Tensor,
        attend: Attend,
        replay_TLK: torch.Tensor | None = None,
    ) -> TransformerOutput:
        """Run all layers.

        Args:
            ids_T: int64 token ids of all sequences, one after the other.
            positions_T: int64, each sequence from 0 (or from its cached length).
            attend: Where the keys are.
            replay_TLK: Recorded routes to use instead of the router's own choice; the router still weighs them and
                gets gradient. `None`: the router chooses.
        """
        by_T1h = self._rotations(positions_T)
        x_TD = self.model.embed_tokens(ids_T)
        run = recomputed if self._recompute_blocks and torch.is_grad_enabled() else Block.__call__
        routings: list[Routing] = []
        for layer in self.model.layers:
            replay_TK = None if replay_TLK is None or layer.is_dense else replay_TLK[:, len(routings)]
            x_TD, routing = run(layer, x_TD, by_T1h, attend, replay_TK)
            if routing is not None:
                routings.append(routing)
        return TransformerOutput(
            hidden_TD=self.model.norm(x_TD),
            routes_TLK=torch.stack([routing.chosen_TK for routing in routings], dim=1).to(route_dtype(self.config)),
            router_logits_TE=tuple(routing.logits_TE for routing in routings),
        )

    @property
    def output_weight(self) -> nn.Parameter:
        """The [V, D] parameter that makes logits."""
        return self.model.embed_tokens.weight if self.lm_head is None else self.lm_head.weight

    def logits(self, hidden_TD: torch.Tensor, weight_VD: torch.Tensor | None = None) -> torch.Tensor:
        """fp32 logits [T, V] of the rows the caller chose.

        Under `functional_call` this method sees the module's own parameters: give the one called `output_name`.
        """
        weight_VD = self.output_weight if weight_VD is None else weight_VD
        if self.unembed is not None:
            return self.unembed(hidden_TD.float(), lambda: (weight_VD, None))
        return project_logits(hidden_TD, weight_VD)


def route_dtype(config: ModelConfig) -> torch.dtype:
    """The dtype of recorded choices: one byte while that can name every expert."""
    return torch.uint8 if config.num_experts <= 256 else torch.int16


def parameter_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Name and shape of every parameter, without allocating any."""
    with torch.device("meta"):
        model = Transformer(config, experts="reference")
    return {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}


@torch.no_grad()
def init_weights(model: nn.Module, seed: int) -> None:
    """Fill every parameter from `seed`; each has its own stream, keyed by its name.

    Norms are 1, biases and sinks 0, embeddings N(0, 0.05^2), expert matrices N(0, 1 / fan_in) with the down projection
    divided by 3 (residual branches start small), every other matrix U(+-1 / sqrt(fan_in)).
    """
    for name, parameter in model.named_parameters():
        key = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(key, "little") >> 1)
        fan_in = parameter.shape[-1]
        value = torch.empty(parameter.shape)
        if name.endswith(("bias", "sinks")):
            value.zero_()
        elif parameter.ndim == 1:
            value.fill_(1.0)
        elif name in (EMBEDDING, LM_HEAD):
            value.normal_(0.0, 0.05, generator=generator)
        elif parameter.ndim == 3:
            scale = 3.0 if name.endswith("down_proj") else 1.0
            value.normal_(0.0, 1.0 / math.sqrt(fan_in) / scale, generator=generator)
        else:
            bound = 1.0 / math.sqrt(fan_in)
            value.uniform_(-bound, bound, generator=generator)
        parameter.copy_(value)

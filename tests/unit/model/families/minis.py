"""One small configuration of every family, and random weights for it."""

from typing import Any

import torch

from model.config import Activation, Family, ModelConfig, QkNorm, RopeConfig, RopeScaling, RouterScores
from model.loaded import Weight
from model.snapshot import PackedTensor, published_view
from model.transformer import parameter_shapes

SMALL: dict[str, Any] = {
    "vocab_size": 7,
    "hidden_size": 32,
    "num_layers": 2,
    "num_heads": 2,
    "num_kv_heads": 1,
    "head_dim": 6,
}
SMALL |= {"expert_hidden_size": 64, "num_experts": 3, "tie_embeddings": False}
CONFIGS = {
    Family.mixtral: ModelConfig(family=Family.mixtral, **SMALL),
    Family.olmoe: ModelConfig(family=Family.olmoe, qk_norm=QkNorm.projection, **SMALL | {"head_dim": 16}),
    Family.qwen3_moe: ModelConfig(
        family=Family.qwen3_moe, qk_norm=QkNorm.head, dense_layers=[0], dense_hidden_size=32, **SMALL
    ),
    Family.gpt_oss: ModelConfig(
        family=Family.gpt_oss,
        attention_bias=True,
        attention_sinks=True,
        expert_bias=True,
        expert_activation=Activation.clamped_swiglu,
        router_bias=True,
        sliding_window=4,
        window_layers=[0],
        rope=RopeConfig(theta=150000.0, scaling=RopeScaling.yarn, factor=4.0, original_positions=64, truncate=False),
        **SMALL,
    ),
    Family.deepseek_v3: ModelConfig(
        family=Family.deepseek_v3,
        q_lora_rank=5,
        kv_lora_rank=9,
        qk_rope_head_dim=2,
        v_head_dim=4,
        shared_expert_hidden_size=64,
        dense_layers=[0],
        dense_hidden_size=32,
        router_scores=RouterScores.sigmoid,
        router_selection_bias=True,
        rope=RopeConfig(adjacent_pairs=True),
        **SMALL | {"num_kv_heads": 2},
    ),
}


def masters(config: ModelConfig, seed: int = 0) -> dict[str, torch.Tensor]:
    """fp32 parameters, all of them random."""
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator) for name, shape in parameter_shapes(config).items()}


def published(config: ModelConfig, seed: int = 0) -> dict[str, PackedTensor]:
    """The published bytes of `masters`."""
    return published_view(masters(config, seed))


def same(left: Weight, right: Weight) -> bool:
    """Whether two weights have the same form, dtype and bytes."""
    if isinstance(left, PackedTensor) and isinstance(right, PackedTensor):
        parts = ((left.payload, right.payload), (left.scales, right.scales))
        return (left.format, left.shape) == (right.format, right.shape) and all((a == b).all() for a, b in parts)
    if isinstance(left, PackedTensor) or isinstance(right, PackedTensor):
        return False
    return left.dtype == right.dtype and torch.equal(left, right)

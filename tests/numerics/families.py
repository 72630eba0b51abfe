"""One small configuration for each family of checkpoints, with everything that makes the family special."""

import torch

from model.config import (
    Activation,
    Family,
    ModelConfig,
    QkNorm,
    RopeConfig,
    RopeScaling,
    RouterScores,
)
from model.transformer import Transformer, init_weights

_COMMON = {"vocab_size": 40, "hidden_size": 64, "num_heads": 4, "expert_hidden_size": 32, "tie_embeddings": False}

MINI = {
    Family.mixtral: ModelConfig(
        **_COMMON, family=Family.mixtral, num_layers=3, num_kv_heads=2, head_dim=16, sliding_window=13,
        window_layers=[0, 1, 2],
    ),
    Family.olmoe: ModelConfig(
        **_COMMON, family=Family.olmoe, num_layers=2, num_kv_heads=4, head_dim=16, qk_norm=QkNorm.projection,
        normalize_topk=False, num_experts_per_tok=3,
    ),
    Family.qwen3_moe: ModelConfig(
        **_COMMON, family=Family.qwen3_moe, num_layers=3, num_kv_heads=1, head_dim=16, qk_norm=QkNorm.head,
        attention_bias=True, dense_layers=[1], dense_hidden_size=96,
    ),
    Family.gpt_oss: ModelConfig(
        **_COMMON, family=Family.gpt_oss, num_layers=4, num_kv_heads=2, head_dim=16, attention_bias=True,
        attention_sinks=True, sliding_window=5, window_layers=[0, 2], router_bias=True, expert_bias=True,
        expert_activation=Activation.clamped_swiglu, swiglu_limit=1.0,
        rope=RopeConfig(
            theta=150000.0, scaling=RopeScaling.yarn, factor=4.0, original_positions=16, truncate=False
        ),
    ),
    Family.deepseek_v3: ModelConfig(
        **_COMMON, family=Family.deepseek_v3, num_layers=3, num_kv_heads=4, head_dim=24, qk_rope_head_dim=8,
        v_head_dim=20, q_lora_rank=24, kv_lora_rank=28, dense_layers=[0], dense_hidden_size=96,
        shared_expert_hidden_size=32, router_scores=RouterScores.sigmoid, router_selection_bias=True,
        num_expert_groups=4, num_groups_per_tok=2, num_experts_per_tok=3, routed_scaling=2.5,
        rope=RopeConfig(
            scaling=RopeScaling.yarn, factor=4.0, original_positions=16, mscale=1.0, mscale_all_dim=1.0,
            adjacent_pairs=True,
        ),
    ),
}  # fmt: skip


def make_model(config: ModelConfig, seed: int = 0) -> Transformer:
    """A model whose biases, sinks and norms are drawn too: at their initial values some features do nothing."""
    model = Transformer(config)
    init_weights(model, seed)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("bias", "sinks")):
                parameter.normal_(0.0, 0.5, generator=generator)
            elif parameter.ndim == 1:
                parameter.uniform_(0.5, 1.5, generator=generator)
        if model.lm_head is not None:
            model.lm_head.weight.mul_(4.0)  # logits of a few units: neither flat nor certain
    return model.requires_grad_(False)

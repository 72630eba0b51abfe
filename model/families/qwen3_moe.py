"""Qwen3-MoE (Qwen3 technical report 2025, arXiv 2505.09388): RMSNorm over each query and key head, many small experts.

Quirks: the router is `mlp.gate`; a layer is dense when `mlp_only_layers` has it or when `decoder_sparse_step` does not
divide its number (counted from 1); the sliding window counts only with `use_sliding_window`, and then in every layer
(`transformers` does not read `max_window_layers` for this family); the weights of the chosen experts are renormalised
only with `norm_topk_prob`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from model.config import Family, ModelConfig, QkNorm
from model.families.base import FamilyFormat, Layout, per_expert, whole
from model.families.keys import Keys, common_keys, rope_parameters

_EXPERT = "model.layers.N.mlp.experts.J."
EXPERT_LAYOUT = Layout(
    rules={
        "model.layers.N.mlp.router.weight": whole("model.layers.N.mlp.gate.weight"),
        "model.layers.N.mlp.experts.gate_up_proj": per_expert(f"{_EXPERT}gate_proj.weight", f"{_EXPERT}up_proj.weight"),
        "model.layers.N.mlp.experts.down_proj": per_expert(f"{_EXPERT}down_proj.weight"),
    }
)
"""One tensor an expert and matrix, the router at `mlp.gate`; OLMoE and DeepSeek-V3 have it too."""


def read_config(values: Mapping[str, Any]) -> ModelConfig:
    """See `FamilyFormat.read_config`."""
    keys = Keys(values)
    keys.ignore("max_window_layers")
    fields = keys.common(rms_norm_eps=1e-6)
    num_layers = fields["num_layers"]
    window = keys.get("sliding_window", int, 0 if "sliding_window" in values else 4096)
    windowed = keys.get("use_sliding_window", bool, False) and window > 0
    only_mlp, step = keys.get("mlp_only_layers", list, []), keys.get("decoder_sparse_step", int, 1)
    dense = [index for index in range(num_layers) if index in only_mlp or step < 1 or (index + 1) % step]
    dense_hidden_size = keys.get("intermediate_size", int, 6144)
    return keys.finish(
        family=Family.qwen3_moe,
        **fields,
        rope=keys.rope(theta=1e4, max_positions=fields["max_positions"]),
        attention_bias=keys.get("attention_bias", bool, False),
        qk_norm=QkNorm.head,
        sliding_window=window if windowed else 0,
        window_layers=[*range(num_layers)] if windowed else [],
        expert_hidden_size=keys.get("moe_intermediate_size", int),
        num_experts=keys.get(keys.either("num_experts", "num_local_experts"), int),
        dense_layers=dense,
        dense_hidden_size=dense_hidden_size if dense else 0,
        normalize_topk=keys.get("norm_topk_prob", bool, False),
    )


def write_config(config: ModelConfig) -> dict[str, Any]:
    """See `FamilyFormat.write_config`."""
    return common_keys(config, architecture="Qwen3MoeForCausalLM", model_type="qwen3_moe") | {
        "attention_bias": config.attention_bias,
        "use_sliding_window": config.sliding_window > 0,
        "sliding_window": config.sliding_window or None,
        "moe_intermediate_size": config.expert_hidden_size,
        "num_experts": config.num_experts,
        "mlp_only_layers": config.dense_layers,
        "decoder_sparse_step": 1,
        "intermediate_size": config.dense_hidden_size or config.expert_hidden_size,
        "norm_topk_prob": config.normalize_topk,
        "rope_parameters": rope_parameters(config.rope),
    }


QWEN3_MOE = FamilyFormat(
    family=Family.qwen3_moe,
    model_types=("qwen3_moe",),
    read_config=read_config,
    write_config=write_config,
    layouts=(EXPERT_LAYOUT,),
)

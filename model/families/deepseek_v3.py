"""DeepSeek-V3 (arXiv 2412.19437) and Kimi-K2 (arXiv 2507.20534): latent attention, sigmoid routing, a shared expert.

Quirks: a query or key head is `qk_nope_head_dim` plain values and `qk_rope_head_dim` rotated ones, whose pairs are
neighbours unless `rope_interleave` is false, and config.json's `head_dim` (which `transformers` writes) is the rotated
part alone; the router's selection bias is `mlp.gate.e_score_correction_bias`, fp32; the first `first_k_dense_replace`
layers are dense; the shared experts are one MLP of `n_shared_experts` times the expert width; the layers after the
last one predict further tokens (`num_nextn_predict_layers`) and are not part of the policy.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from model.config import Family, ModelConfig, RouterScores
from model.families.base import FamilyFormat, Layout, whole
from model.families.keys import Keys, common_keys, rope_parameters
from model.families.qwen3_moe import EXPERT_LAYOUT


def read_config(values: Mapping[str, Any]) -> ModelConfig:
    """See `FamilyFormat.read_config`."""
    keys = Keys(values)
    keys.expect("scoring_func", "sigmoid")
    keys.expect("topk_method", "noaux_tc")
    keys.expect("moe_layer_freq", 1)
    keys.ignore("qk_head_dim")
    for further in ("num_nextn_predict_layers", "num_mtp_layers"):
        keys.get(further, int, 0)  # `skipped` reads it
    fields = keys.common(rms_norm_eps=1e-6)
    rotated = keys.get("qk_rope_head_dim", int)
    num_dense, expert_size = keys.get("first_k_dense_replace", int), keys.get("moe_intermediate_size", int)
    dense_hidden_size = keys.get("intermediate_size", int)
    rope = keys.rope(theta=1e4, max_positions=fields["max_positions"], latent=True)
    rope.adjacent_pairs = keys.get("rope_interleave", bool, True)
    return keys.finish(
        family=Family.deepseek_v3,
        **fields
        | {
            "num_kv_heads": fields["num_heads"],
            "head_dim": keys.get("qk_nope_head_dim", int) + rotated,
        },
        rope=rope,
        attention_bias=keys.get("attention_bias", bool, False),
        q_lora_rank=keys.get("q_lora_rank", int, 0),
        kv_lora_rank=keys.get("kv_lora_rank", int),
        qk_rope_head_dim=rotated,
        v_head_dim=keys.get("v_head_dim", int),
        expert_hidden_size=expert_size,
        num_experts=keys.get(keys.either("n_routed_experts", "num_local_experts"), int),
        shared_expert_hidden_size=keys.get("n_shared_experts", int) * expert_size,
        dense_layers=[*range(num_dense)],
        dense_hidden_size=dense_hidden_size if num_dense else 0,
        router_scores=RouterScores.sigmoid,
        router_selection_bias=True,
        num_expert_groups=keys.get("n_group", int),
        num_groups_per_tok=keys.get("topk_group", int),
        normalize_topk=keys.get("norm_topk_prob", bool),
        routed_scaling=keys.get("routed_scaling_factor", float),
    )


def write_config(config: ModelConfig) -> dict[str, Any]:
    """See `FamilyFormat.write_config`. Kimi-K2 is written as DeepSeek-V3, which computes the same."""
    return common_keys(config, architecture="DeepseekV3ForCausalLM", model_type="deepseek_v3") | {
        "head_dim": config.qk_rope_head_dim,
        "qk_nope_head_dim": config.head_dim - config.qk_rope_head_dim,
        "qk_rope_head_dim": config.qk_rope_head_dim,
        "v_head_dim": config.v_head_dim,
        "q_lora_rank": config.q_lora_rank or None,
        "kv_lora_rank": config.kv_lora_rank,
        "attention_bias": config.attention_bias,
        "intermediate_size": config.dense_hidden_size or config.expert_hidden_size,
        "moe_intermediate_size": config.expert_hidden_size,
        "n_routed_experts": config.num_experts,
        "n_shared_experts": config.shared_expert_hidden_size // config.expert_hidden_size,
        "first_k_dense_replace": len(config.dense_layers),
        "n_group": config.num_expert_groups,
        "topk_group": config.num_groups_per_tok,
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        "norm_topk_prob": config.normalize_topk,
        "routed_scaling_factor": config.routed_scaling,
        "num_nextn_predict_layers": 0,
        "rope_interleave": config.rope.adjacent_pairs,
        "rope_parameters": rope_parameters(config.rope, latent=True),
    }


def _further_layers(values: Mapping[str, Any]) -> tuple[str, ...]:
    """Prefixes of the layers that predict further tokens."""
    first = values["num_hidden_layers"]
    count = values.get("num_nextn_predict_layers") or values.get("num_mtp_layers") or 0
    return tuple(f"model.layers.{index}." for index in range(first, first + count))


_ROUTER = "model.layers.N.mlp.router."
DEEPSEEK_V3 = FamilyFormat(
    family=Family.deepseek_v3,
    model_types=("deepseek_v3", "kimi_k2"),
    read_config=read_config,
    write_config=write_config,
    layouts=(
        Layout(
            rules={
                **EXPERT_LAYOUT.rules,
                f"{_ROUTER}selection_bias": whole("model.layers.N.mlp.gate.e_score_correction_bias"),
            }
        ),
    ),
    skipped=_further_layers,
)

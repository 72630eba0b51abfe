"""OLMoE (Muennighoff et al. 2024, arXiv 2409.02060): RMSNorm over the whole query and key projections.

Quirks: the weights of the chosen experts are not renormalised unless `norm_topk_prob`; `clip_qkv` is not supported
(the published checkpoints have null); the expert width is called `intermediate_size`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from model.config import Family, ModelConfig, QkNorm
from model.families.base import FamilyFormat
from model.families.keys import Keys, common_keys, rope_parameters
from model.families.qwen3_moe import EXPERT_LAYOUT


def read_config(values: Mapping[str, Any]) -> ModelConfig:
    """See `FamilyFormat.read_config`."""
    keys = Keys(values)
    keys.expect("clip_qkv")
    fields = keys.common(rms_norm_eps=1e-5)
    return keys.finish(
        family=Family.olmoe,
        **fields,
        rope=keys.rope(theta=1e4, max_positions=fields["max_positions"]),
        attention_bias=keys.get("attention_bias", bool, False),
        qk_norm=QkNorm.projection,
        expert_hidden_size=keys.get("intermediate_size", int),
        num_experts=keys.get(keys.either("num_experts", "num_local_experts"), int),
        normalize_topk=keys.get("norm_topk_prob", bool, False),
    )


def write_config(config: ModelConfig) -> dict[str, Any]:
    """See `FamilyFormat.write_config`."""
    return common_keys(config, architecture="OlmoeForCausalLM", model_type="olmoe") | {
        "attention_bias": config.attention_bias,
        "clip_qkv": None,
        "intermediate_size": config.expert_hidden_size,
        "num_experts": config.num_experts,
        "norm_topk_prob": config.normalize_topk,
        "rope_parameters": rope_parameters(config.rope),
    }


OLMOE = FamilyFormat(
    family=Family.olmoe,
    model_types=("olmoe",),
    read_config=read_config,
    write_config=write_config,
    layouts=(EXPERT_LAYOUT,),
)

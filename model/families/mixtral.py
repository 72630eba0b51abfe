"""Mixtral (Jiang et al. 2024, arXiv 2401.04088): grouped-query attention, top-k of a softmax, renormalised.

Quirks: an expert's matrices are w1 (gate), w3 (up) and w2 (down) below `block_sparse_moe`; a sliding window, where set,
applies to every layer; the expert width is called `intermediate_size`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from model.config import Family, ModelConfig
from model.families.base import FamilyFormat, Layout, per_expert, whole
from model.families.keys import Keys, common_keys, rope_parameters

_EXPERT = "model.layers.N.block_sparse_moe.experts.J."


def read_config(values: Mapping[str, Any]) -> ModelConfig:
    """See `FamilyFormat.read_config`."""
    keys = Keys(values)
    fields = keys.common(rms_norm_eps=1e-5)
    window = keys.get("sliding_window", int, 0)
    return keys.finish(
        family=Family.mixtral,
        **fields,
        rope=keys.rope(theta=1e6, max_positions=fields["max_positions"]),
        sliding_window=window,
        window_layers=[*range(fields["num_layers"])] if window else [],
        expert_hidden_size=keys.get("intermediate_size", int),
        num_experts=keys.get(keys.either("num_local_experts", "num_experts"), int),
    )


def write_config(config: ModelConfig) -> dict[str, Any]:
    """See `FamilyFormat.write_config`."""
    return common_keys(config, architecture="MixtralForCausalLM", model_type="mixtral") | {
        "intermediate_size": config.expert_hidden_size,
        "num_local_experts": config.num_experts,
        "sliding_window": config.sliding_window or None,
        "rope_parameters": rope_parameters(config.rope),
    }


MIXTRAL = FamilyFormat(
    family=Family.mixtral,
    model_types=("mixtral",),
    read_config=read_config,
    write_config=write_config,
    layouts=(
        Layout(
            rules={
                "model.layers.N.mlp.router.weight": whole("model.layers.N.block_sparse_moe.gate.weight"),
                "model.layers.N.mlp.experts.gate_up_proj": per_expert(f"{_EXPERT}w1.weight", f"{_EXPERT}w3.weight"),
                "model.layers.N.mlp.experts.down_proj": per_expert(f"{_EXPERT}w2.weight"),
            }
        ),
    ),
)

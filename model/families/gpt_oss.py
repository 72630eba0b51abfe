"""gpt-oss (OpenAI 2025, arXiv 2508.10925): sinks, alternating windows, biases everywhere, clamped experts in MXFP4.

Quirks: gate and up rows of an expert alternate in the file (`gpt_oss/torch/model.py`: `swiglu` takes even and odd
columns), so do their biases; `transformers` writes unpacked experts as [in, out]; YaRN does not round its correction
range (`truncate` false). Besides the folder of `transformers` the one of OpenAI's own code is read (`original/`): other
names, one `qkv` projection, `mlp1_weight.blocks` and `.scales`, and a config.json without a model type.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from model.config import Activation, Family, ModelConfig, RopeConfig, RopeScaling
from model.families.base import FamilyFormat, Layout, Rule, interleaved, rows, whole
from model.families.keys import Keys, common_keys, rope_parameters

_ORIGINAL_MARKS = ("initial_context_length", "rope_scaling_factor", "rope_ntk_alpha", "num_experts")
_WINDOW, _FULL = "sliding_attention", "full_attention"
_FIXED = {
    "family": Family.gpt_oss,
    "attention_sinks": True,
    "expert_bias": True,
    "expert_activation": Activation.clamped_swiglu,
    "router_bias": True,
}


def read_config(values: Mapping[str, Any]) -> ModelConfig:
    """See `FamilyFormat.read_config`."""
    if _is_original(values):
        return _read_original_config(values)
    keys = Keys(values)
    keys.ignore("experts_per_token", "initial_context_length")  # repeat num_experts_per_tok and the rotary keys
    fields = keys.common(rms_norm_eps=1e-5)
    layer_types = keys.get("layer_types", list, _layer_types(fields["num_layers"]))
    if len(layer_types) != fields["num_layers"] or any(kind not in (_WINDOW, _FULL) for kind in layer_types):
        keys.problem("layer_types", f"must be {_WINDOW} or {_FULL} for each layer", layer_types, "correct the file")
    windowed = [index for index, kind in enumerate(layer_types) if kind == _WINDOW]
    window = keys.get("sliding_window", int, 0 if "sliding_window" in values else 128)
    if not values.get("rope_parameters") and not values.get("rope_scaling"):
        keys.problem("rope_parameters", "must be given for this family", None, "gpt-oss stretches its context by YaRN")
    rope = keys.rope(theta=150000.0, max_positions=fields["max_positions"])
    return keys.finish(
        **_FIXED,
        **fields,
        rope=rope,
        attention_bias=keys.get("attention_bias", bool, True),
        sliding_window=window if windowed else 0,
        window_layers=windowed,
        expert_hidden_size=keys.get("intermediate_size", int),
        num_experts=keys.get(keys.either("num_local_experts", "num_experts"), int),
        swiglu_limit=keys.get("swiglu_limit", float, 7.0),
        swiglu_alpha=keys.get("swiglu_alpha", float, 1.702),
    )


def _read_original_config(values: Mapping[str, Any]) -> ModelConfig:
    """The configuration of OpenAI's own code (`gpt_oss/torch/model.py`, `ModelConfig`)."""
    keys = Keys(values)
    num_layers, context = keys.get("num_hidden_layers", int), keys.get("initial_context_length", int, 4096)
    factor = keys.get("rope_scaling_factor", float, 32.0)
    return keys.finish(
        **_FIXED,
        vocab_size=keys.get("vocab_size", int),
        hidden_size=keys.get("hidden_size", int),
        num_layers=num_layers,
        num_heads=keys.get("num_attention_heads", int),
        num_kv_heads=keys.get("num_key_value_heads", int),
        head_dim=keys.get("head_dim", int, 64),
        attention_bias=True,
        sliding_window=keys.get("sliding_window", int, 128),
        window_layers=[*range(0, num_layers, 2)],
        rope=RopeConfig(
            theta=keys.get("rope_theta", float, 150000.0),
            scaling=RopeScaling.yarn,
            factor=factor,
            original_positions=context,
            beta_fast=keys.get("rope_ntk_beta", float, 32.0),
            beta_slow=keys.get("rope_ntk_alpha", float, 1.0),
            truncate=False,
        ),
        expert_hidden_size=keys.get("intermediate_size", int),
        num_experts=keys.get("num_experts", int),
        num_experts_per_tok=keys.get("experts_per_token", int, 4),
        swiglu_limit=keys.get("swiglu_limit", float, 7.0),
        rms_norm_eps=1e-5,
        tie_embeddings=False,
        max_positions=int(context * factor),
    )


def _is_original(values: Mapping[str, Any]) -> bool:
    return "model_type" not in values and any(key in values for key in _ORIGINAL_MARKS)


def write_config(config: ModelConfig) -> dict[str, Any]:
    """See `FamilyFormat.write_config`."""
    layer_types = [_WINDOW if index in config.window_layers else _FULL for index in range(config.num_layers)]
    return common_keys(config, architecture="GptOssForCausalLM", model_type="gpt_oss") | {
        "attention_bias": config.attention_bias,
        "layer_types": layer_types,
        "sliding_window": config.sliding_window or None,
        "intermediate_size": config.expert_hidden_size,
        "num_local_experts": config.num_experts,
        "swiglu_limit": config.swiglu_limit,
        "swiglu_alpha": config.swiglu_alpha,
        "rope_parameters": rope_parameters(config.rope),
    }


def _layer_types(num_layers: int) -> list[str]:
    return [_FULL if index % 2 else _WINDOW for index in range(num_layers)]


def _fused_rows(part: str) -> tuple[Rule, Rule]:
    """Weight and bias rules of one part of the fused `qkv` projection."""

    def place(config: ModelConfig) -> tuple[int, int]:
        queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        return {"q": 0, "k": queries, "v": queries + keys}[part], queries + 2 * keys

    return rows("block.N.attn.qkv.weight", place), rows("block.N.attn.qkv.bias", place)


def _original_layout() -> Layout:
    attention = {}
    for part in "qkv":
        weight, bias = _fused_rows(part)
        attention[f"model.layers.N.self_attn.{part}_proj.weight"] = weight
        attention[f"model.layers.N.self_attn.{part}_proj.bias"] = bias
    return Layout(
        rules=attention
        | {
            "model.embed_tokens.weight": whole("embedding.weight"),
            "model.norm.weight": whole("norm.scale"),
            "lm_head.weight": whole("unembedding.weight"),
            "model.layers.N.input_layernorm.weight": whole("block.N.attn.norm.scale"),
            "model.layers.N.self_attn.sinks": whole("block.N.attn.sinks"),
            "model.layers.N.self_attn.o_proj.weight": whole("block.N.attn.out.weight"),
            "model.layers.N.self_attn.o_proj.bias": whole("block.N.attn.out.bias"),
            "model.layers.N.post_attention_layernorm.weight": whole("block.N.mlp.norm.scale"),
            "model.layers.N.mlp.router.weight": whole("block.N.mlp.gate.weight"),
            "model.layers.N.mlp.router.bias": whole("block.N.mlp.gate.bias"),
            "model.layers.N.mlp.experts.gate_up_proj": interleaved("block.N.mlp.mlp1_weight"),
            "model.layers.N.mlp.experts.gate_up_proj_bias": interleaved("block.N.mlp.mlp1_bias"),
            "model.layers.N.mlp.experts.down_proj": whole("block.N.mlp.mlp2_weight"),
            "model.layers.N.mlp.experts.down_proj_bias": whole("block.N.mlp.mlp2_bias"),
        }
    )


def _transformers_layout() -> Layout:
    experts = "model.layers.N.mlp.experts."
    return Layout(
        rules={
            f"{experts}gate_up_proj": interleaved(f"{experts}gate_up_proj", transposed=True),
            f"{experts}gate_up_proj_bias": interleaved(f"{experts}gate_up_proj_bias"),
            f"{experts}down_proj": whole(f"{experts}down_proj", transposed=True),
        }
    )


GPT_OSS = FamilyFormat(
    family=Family.gpt_oss,
    model_types=("gpt_oss",),
    read_config=read_config,
    write_config=write_config,
    layouts=(_transformers_layout(), _original_layout()),
    recognises=_is_original,
)

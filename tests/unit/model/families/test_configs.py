"""config.json of the published models, as far as their keys matter, and what must be refused."""

import dataclasses

import pytest

from model.config import Activation, ConfigError, Family, ModelConfig, QkNorm, RopeConfig, RopeScaling, RouterScores
from model.families.registry import read_config, write_config

COMMON = {"hidden_act": "silu", "initializer_range": 0.02, "use_cache": True, "torch_dtype": "bfloat16"}
GPT_OSS_20B = COMMON | {
    "model_type": "gpt_oss",
    "attention_bias": True,
    "experts_per_token": 4,
    "head_dim": 64,
    "hidden_size": 2880,
    "initial_context_length": 4096,
    "intermediate_size": 2880,
    "layer_types": ["sliding_attention", "full_attention"] * 12,
    "max_position_embeddings": 131072,
    "num_attention_heads": 64,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 24,
    "num_key_value_heads": 8,
    "num_local_experts": 32,
    "rms_norm_eps": 1e-5,
    "rope_scaling": {
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "factor": 32.0,
        "original_max_position_embeddings": 4096,
        "rope_type": "yarn",
        "truncate": False,
    },
    "rope_theta": 150000,
    "sliding_window": 128,
    "swiglu_limit": 7.0,
    "tie_word_embeddings": False,
    "vocab_size": 201088,
    "quantization_config": {"quant_method": "mxfp4"},
}
GPT_OSS_20B_ORIGINAL = {
    "num_hidden_layers": 24,
    "num_experts": 32,
    "experts_per_token": 4,
    "vocab_size": 201088,
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "swiglu_limit": 7.0,
    "head_dim": 64,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "sliding_window": 128,
    "initial_context_length": 4096,
    "rope_theta": 150000,
    "rope_scaling_factor": 32.0,
    "rope_ntk_alpha": 1,
    "rope_ntk_beta": 32,
}
QWEN3_30B_A3B = COMMON | {
    "model_type": "qwen3_moe",
    "attention_bias": False,
    "decoder_sparse_step": 1,
    "head_dim": 128,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "max_position_embeddings": 40960,
    "max_window_layers": 48,
    "mlp_only_layers": [],
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "num_attention_heads": 32,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 48,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-6,
    "rope_scaling": None,
    "rope_theta": 1000000.0,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
MIXTRAL_8X7B = COMMON | {
    "model_type": "mixtral",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "max_position_embeddings": 32768,
    "num_attention_heads": 32,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "num_local_experts": 8,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1000000.0,
    "sliding_window": None,
    "vocab_size": 32000,
}
OLMOE_1B_7B = COMMON | {
    "model_type": "olmoe",
    "attention_bias": False,
    "clip_qkv": None,
    "hidden_size": 2048,
    "intermediate_size": 1024,
    "max_position_embeddings": 4096,
    "norm_topk_prob": False,
    "num_attention_heads": 16,
    "num_experts": 64,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 16,
    "num_key_value_heads": 16,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "vocab_size": 50304,
}
DEEPSEEK_V3 = COMMON | {
    "model_type": "deepseek_v3",
    "attention_bias": False,
    "ep_size": 1,
    "first_k_dense_replace": 3,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "kv_lora_rank": 512,
    "max_position_embeddings": 163840,
    "moe_intermediate_size": 2048,
    "moe_layer_freq": 1,
    "n_group": 8,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 61,
    "num_key_value_heads": 128,
    "num_nextn_predict_layers": 1,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-6,
    "rope_scaling": {
        "beta_fast": 32,
        "beta_slow": 1,
        "factor": 40,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096,
        "type": "yarn",
    },
    "rope_theta": 10000,
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "topk_group": 4,
    "topk_method": "noaux_tc",
    "v_head_dim": 128,
    "vocab_size": 129280,
}
KIMI_K2 = DEEPSEEK_V3 | {
    "model_type": "kimi_k2",
    "aux_loss_alpha": 0.001,
    "seq_aux": True,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
    "n_routed_experts": 384,
    "num_attention_heads": 64,
    "num_key_value_heads": 64,
    "num_nextn_predict_layers": 0,
    "routed_scaling_factor": 2.827,
    "vocab_size": 163840,
}
PUBLISHED = {
    "gpt-oss-20b": GPT_OSS_20B,
    "gpt-oss-20b/original": GPT_OSS_20B_ORIGINAL,
    "Qwen3-30B-A3B": QWEN3_30B_A3B,
    "Mixtral-8x7B": MIXTRAL_8X7B,
    "OLMoE-1B-7B": OLMOE_1B_7B,
    "DeepSeek-V3": DEEPSEEK_V3,
    "Kimi-K2": KIMI_K2,
}


def config_of(values):
    return read_config(values)[1]


def test_gpt_oss_20b_from_either_folder():
    config = config_of(GPT_OSS_20B)
    assert config == ModelConfig(
        family=Family.gpt_oss,
        vocab_size=201088,
        hidden_size=2880,
        num_layers=24,
        num_heads=64,
        num_kv_heads=8,
        head_dim=64,
        attention_bias=True,
        attention_sinks=True,
        sliding_window=128,
        window_layers=[*range(0, 24, 2)],
        rope=RopeConfig(theta=150000.0, scaling=RopeScaling.yarn, factor=32.0, original_positions=4096, truncate=False),
        expert_hidden_size=2880,
        num_experts=32,
        num_experts_per_tok=4,
        expert_bias=True,
        expert_activation=Activation.clamped_swiglu,
        router_bias=True,
        rms_norm_eps=1e-5,
        tie_embeddings=False,
        max_positions=131072,
    )
    assert config_of(GPT_OSS_20B_ORIGINAL) == config


def test_qwen3_30b_a3b():
    assert config_of(QWEN3_30B_A3B) == ModelConfig(
        family=Family.qwen3_moe,
        vocab_size=151936,
        hidden_size=2048,
        num_layers=48,
        num_heads=32,
        num_kv_heads=4,
        head_dim=128,
        qk_norm=QkNorm.head,
        rope=RopeConfig(theta=1e6),
        expert_hidden_size=768,
        num_experts=128,
        num_experts_per_tok=8,
        rms_norm_eps=1e-6,
        tie_embeddings=False,
        max_positions=40960,
    )


def test_deepseek_v3():
    assert config_of(DEEPSEEK_V3) == ModelConfig(
        family=Family.deepseek_v3,
        vocab_size=129280,
        hidden_size=7168,
        num_layers=61,
        num_heads=128,
        num_kv_heads=128,
        head_dim=192,
        q_lora_rank=1536,
        kv_lora_rank=512,
        qk_rope_head_dim=64,
        v_head_dim=128,
        rope=RopeConfig(
            theta=1e4,
            scaling=RopeScaling.yarn,
            factor=40.0,
            original_positions=4096,
            mscale=1.0,
            mscale_all_dim=1.0,
            adjacent_pairs=True,
        ),
        expert_hidden_size=2048,
        num_experts=256,
        num_experts_per_tok=8,
        shared_expert_hidden_size=2048,
        dense_layers=[0, 1, 2],
        dense_hidden_size=18432,
        router_scores=RouterScores.sigmoid,
        router_selection_bias=True,
        num_expert_groups=8,
        num_groups_per_tok=4,
        routed_scaling=2.5,
        tie_embeddings=False,
        max_positions=163840,
    )


def test_the_values_in_which_the_others_differ():
    mixtral, olmoe, kimi = config_of(MIXTRAL_8X7B), config_of(OLMOE_1B_7B), config_of(KIMI_K2)
    assert (mixtral.head_dim, mixtral.rope.theta, mixtral.expert_hidden_size) == (128, 1e6, 14336)
    assert (mixtral.normalize_topk, mixtral.window_layers, mixtral.qk_norm) == (True, [], QkNorm.none)
    assert (olmoe.normalize_topk, olmoe.qk_norm, olmoe.head_dim) == (False, QkNorm.projection, 128)
    assert (kimi.num_experts, kimi.num_expert_groups, kimi.dense_layers) == (384, 1, [0])
    assert (kimi.routed_scaling, kimi.num_heads) == (2.827, 64)


@pytest.mark.parametrize("name", PUBLISHED)
def test_what_is_written_reads_back(name):
    config = config_of(PUBLISHED[name])
    assert config_of(write_config(config)) == config


@pytest.mark.parametrize("name", [name for name in PUBLISHED if "original" not in name])
def test_both_styles_of_rotary_keys_mean_the_same(name):
    old = PUBLISHED[name]
    scaling = dict(old.get("rope_scaling") or {"rope_type": "default"})
    new = {key: value for key, value in old.items() if key not in ("rope_theta", "rope_scaling")}
    assert config_of(new | {"rope_parameters": {**scaling, "rope_theta": old["rope_theta"]}}) == config_of(old)


@pytest.mark.parametrize(
    ("scaling", "expected"),
    [
        ({"type": "linear", "factor": 4}, {"scaling": RopeScaling.linear, "factor": 4.0}),
        (
            {"rope_type": "llama3", "factor": 8, "low_freq_factor": 1, "high_freq_factor": 4,
             "original_max_position_embeddings": 8192},
            {"scaling": RopeScaling.llama3, "factor": 8.0, "original_positions": 8192},
        ),
        (
            {"rope_type": "yarn", "factor": 2.0, "attention_factor": 1.25},
            {"scaling": RopeScaling.yarn, "factor": 2.0, "original_positions": 32768, "attention_factor": 1.25},
        ),
        (
            {"rope_type": "yarn", "factor": None, "original_max_position_embeddings": 8192},
            {"scaling": RopeScaling.yarn, "factor": 4.0, "original_positions": 8192},
        ),
    ],
)  # fmt: skip
def test_stretched_rotations_are_read_and_written(scaling, expected):
    config = config_of(MIXTRAL_8X7B | {"rope_scaling": scaling})
    assert config.rope == RopeConfig(theta=1e6, **expected)
    assert config_of(write_config(config)) == config


def test_windows_follow_each_familys_rule():
    assert config_of(MIXTRAL_8X7B | {"sliding_window": 4096}).window_layers == [*range(32)]
    assert config_of(QWEN3_30B_A3B | {"sliding_window": 4096}).sliding_window == 0
    windowed = config_of(QWEN3_30B_A3B | {"sliding_window": 4096, "use_sliding_window": True})
    assert (windowed.sliding_window, windowed.window_layers) == (4096, [*range(48)])
    assert config_of(QWEN3_30B_A3B | {"sliding_window": None, "use_sliding_window": True}).window_layers == []
    full = config_of(GPT_OSS_20B | {"layer_types": ["full_attention"] * 24})
    assert (full.sliding_window, full.window_layers) == (0, [])


def test_dense_layers_of_qwen3():
    config = config_of(QWEN3_30B_A3B | {"mlp_only_layers": [3], "decoder_sparse_step": 2, "num_hidden_layers": 6})
    assert (config.dense_layers, config.dense_hidden_size) == ([0, 2, 3, 4], 6144)


def test_every_unsupported_key_is_named_at_once():
    values = OLMOE_1B_7B | {
        "clip_qkv": 8.0,
        "hidden_act": "gelu",
        "logit_softcapping": 30.0,
        "vocab_size": "many",
        "rope_scaling": {"rope_type": "dynamic", "factor": 2.0},
    }
    with pytest.raises(ConfigError) as error:
        config_of(values)
    lines = str(error.value).splitlines()
    assert [line.split(":")[1].strip() for line in lines] == [
        "clip_qkv",
        "hidden_act",
        "vocab_size",
        "rope_scaling.rope_type",
        "logit_softcapping",
    ]
    assert lines[0] == "config.json: clip_qkv: only null is supported, got 8.0; this network has no other"


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"rope_scaling": {"type": "yarn", "factor": 2.0, "mscale": 1.0}}, "rope_scaling.mscale: has no meaning"),
        ({"rope_scaling": {"type": "linear"}}, "rope_scaling.factor: linear rotation needs it"),
        ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}, "only 1 is supported"),
        ({"num_local_experts": 63}, r"num_experts: must agree with num_local_experts, got \[64, 63\]"),
        ({"num_experts_per_tok": None}, "num_experts_per_tok: must be of type int, got None"),
        ({"attention_bias": 1}, "attention_bias: must be of type bool, got 1"),
        ({"hidden_size": 2040}, "model.hidden_size: must be a multiple of 32"),
        ({"rope_theta": "1e4"}, r"rope_scaling\.rope_theta: must be a number, got 1e4"),
        ({"rope_scaling": {"type": ["yarn"]}}, r"rope_scaling\.rope_type: only .* are supported, got \['yarn'\]"),
        ({"rope_scaling": {"type": "yarn", "factor": [2.0]}}, r"rope_scaling\.factor: must be a number, got \[2\.0\]"),
        ({"rope_scaling": {"type": "yarn", "truncate": "no"}}, "truncate: must be true or false, got no"),
        (
            {"rope_scaling": {"type": "yarn", "original_max_position_embeddings": 0}},
            "original_positions: yarn needs the context length before stretching, got 0",
        ),
    ],
)
def test_single_problems(change, problem):
    assert config_of(OLMOE_1B_7B)
    with pytest.raises(ConfigError, match=problem):
        config_of(OLMOE_1B_7B | change)


@pytest.mark.parametrize(
    ("values", "key"),
    [(DEEPSEEK_V3, key) for key in ("n_group", "topk_group", "routed_scaling_factor", "n_shared_experts")]
    + [(GPT_OSS_20B, "rope_scaling"), (MIXTRAL_8X7B, "num_local_experts")],
)
def test_keys_whose_absence_would_be_a_guess_are_required(values, key):
    with pytest.raises(ConfigError, match=key.replace("rope_scaling", "rope_parameters: must be given")):
        config_of({name: value for name, value in values.items() if name != key})


@pytest.mark.parametrize("key", ["scoring_func", "topk_method", "moe_layer_freq"])
def test_other_routing_than_deepseek_v3s_is_refused(key):
    with pytest.raises(ConfigError, match=f"{key}: only .* is supported, got other"):
        config_of(DEEPSEEK_V3 | {key: "other"})


@pytest.mark.parametrize(
    ("values", "change", "problem"),
    [
        (GPT_OSS_20B, {"layer_types": [[1]] * 24}, "layer_types: must be sliding_attention or full_attention"),
        (DEEPSEEK_V3, {"num_nextn_predict_layers": "1"}, "num_nextn_predict_layers: must be of type int, got 1"),
    ],
)
def test_values_of_another_type_are_refused(values, change, problem):
    assert config_of(values)
    with pytest.raises(ConfigError, match=problem):
        config_of(values | change)


def test_an_unknown_family_is_refused():
    with pytest.raises(ConfigError, match=r"model_type: must be one of .*'qwen3_moe'.*, got llama"):
        read_config({"model_type": "llama"})


@pytest.mark.parametrize(
    ("family", "change", "field"),
    [
        (Family.mixtral, {"shared_expert_hidden_size": 64}, "shared_expert_hidden_size"),
        (Family.mixtral, {"normalize_topk": False}, "normalize_topk"),
        (Family.qwen3_moe, {"qk_norm": QkNorm.none}, "qk_norm"),
        (Family.gpt_oss, {"rope": RopeConfig(adjacent_pairs=True)}, "rope"),
        (Family.deepseek_v3, {"dense_layers": [1], "dense_hidden_size": 64}, "dense_layers"),
    ],
)
def test_a_family_refuses_what_it_cannot_hold(family, change, field):
    values = {Family.mixtral: MIXTRAL_8X7B, Family.qwen3_moe: QWEN3_30B_A3B, Family.gpt_oss: GPT_OSS_20B}
    config = config_of(values.get(family, DEEPSEEK_V3))
    assert write_config(config)
    with pytest.raises(ConfigError, match=rf"model\.{field}: a checkpoint of family {family} cannot hold it"):
        write_config(dataclasses.replace(config, **change))

import dataclasses
import json
import math
import subprocess
import sys

import pytest

from model.config import ComputeDtype, ConfigError, Family, ModelConfig, RopeConfig, RopeScaling


def test_the_defaults_are_valid_and_the_vocabulary_comes_later():
    config = ModelConfig()
    config.validate()
    assert config.vocab_size == 0
    assert config.compute_dtype is ComputeDtype.fp32


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("hidden_size", 100, "model.hidden_size: must be a multiple of 32 (the MXFP4 block), got 100; use 128"),
        (
            "expert_hidden_size",
            33,
            "model.expert_hidden_size: must be a multiple of 32 (the MXFP4 block), got 33; use 64",
        ),
        ("num_layers", 0, "model.num_layers: must be at least 1, got 0; give a positive number"),
        ("num_heads", 3, "model.num_heads: must be a multiple of num_kv_heads=2, got 3;"),
        ("num_kv_heads", 0, "model.num_kv_heads: must be at least 1, got 0;"),
        ("head_dim", 31, "model.head_dim: must be even (rotary pairs), got 31; use 32"),
        ("num_experts_per_tok", 9, "model.num_experts_per_tok: must not exceed num_experts=8, got 9;"),
        ("num_experts", 32769, "model.num_experts: must be at most 32768, got 32769; routes are 15-bit numbers"),
        ("vocab_size", -1, "model.vocab_size: must not be negative, got -1;"),
        ("shared_expert_hidden_size", -32, "model.shared_expert_hidden_size: must not be negative, got -32;"),
        ("rope", RopeConfig(theta=1.0), "model.rope.theta: must be above 1, got 1.0;"),
        ("rope", RopeConfig(theta=math.inf), "model.rope.theta: must be above 1, got inf;"),
        (
            "rope",
            RopeConfig(scaling=RopeScaling.linear, factor=math.inf),
            "model.rope.factor: must be at least 1, got inf;",
        ),
        (
            "rope",
            RopeConfig(scaling=RopeScaling.yarn, original_positions=64, beta_fast=0.5),
            "model.rope.beta_slow: must lie between 0 and beta_fast=0.5, got 1.0;",
        ),
        (
            "rope",
            RopeConfig(scaling=RopeScaling.yarn, original_positions=64, beta_slow=0.0),
            "model.rope.beta_slow: must lie between 0 and beta_fast=32.0, got 0.0;",
        ),
        ("rope", RopeConfig(attention_factor=math.nan), "model.rope.attention_factor: must be positive, got nan;"),
        ("rope", RopeConfig(scaling=RopeScaling.linear, factor=0.5), "model.rope.factor: must be at least 1, got 0.5;"),
        (
            "rope",
            RopeConfig(scaling=RopeScaling.yarn, factor=4.0),
            "model.rope.original_positions: yarn needs the context length before stretching, got 0;",
        ),
        ("window_layers", [-1], "model.window_layers: must be indices below num_layers=4, got -1;"),
        ("window_layers", [1], "model.sliding_window: window_layers need it, got 0;"),
        (
            "num_expert_groups",
            3,
            "model.num_expert_groups: must divide num_experts=8 into groups of two or more, got 3",
        ),
        ("num_expert_groups", 0, "model.num_expert_groups: must be at least 1, got 0;"),
        ("routed_scaling", 0.0, "model.routed_scaling: must be positive, got 0.0;"),
        ("rms_norm_eps", 0.0, "model.rms_norm_eps: must be positive, got 0.0;"),
        ("rms_norm_eps", float("nan"), "model.rms_norm_eps: must be positive, got nan;"),
    ],
)
def test_each_problem_is_one_clear_line(field, value, message):
    config = dataclasses.replace(
        ModelConfig(), **{"sliding_window": 8 * (field == "window_layers" and value != [1]), field: value}
    )
    with pytest.raises(ConfigError) as error:
        config.validate()
    (line,) = str(error.value).splitlines()
    assert line.startswith(message)


def test_all_problems_are_told_at_once():
    with pytest.raises(ConfigError) as error:
        ModelConfig(hidden_size=100, num_experts=4, num_experts_per_tok=5).validate()
    assert [line.split(":")[0] for line in str(error.value).splitlines()] == [
        "model.hidden_size",
        "model.num_experts_per_tok",
    ]


def test_a_typo_is_refused():
    config = ModelConfig()
    with pytest.raises(AttributeError):
        config.hiden_size = 64  # pyright: ignore


def test_reading_the_config_does_not_import_torch():
    code = "import sys, model.config; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_plain_values_give_the_configuration_back():
    config = ModelConfig(
        family=Family.gpt_oss,
        window_layers=[0, 2],
        sliding_window=128,
        rope=RopeConfig(scaling=RopeScaling.yarn, factor=32.0, original_positions=4096, attention_factor=None),
    )
    values = json.loads(json.dumps(config.to_dict()))
    again = ModelConfig.from_dict(values)
    assert again == config
    assert again.rope.scaling is RopeScaling.yarn
    with pytest.raises(
        ConfigError, match=r"model: keys must be exactly .* missing \['num_layers'\] and extra \['layers'\]"
    ):
        ModelConfig.from_dict({**{k: v for k, v in values.items() if k != "num_layers"}, "layers": 3})
    with pytest.raises(ConfigError, match=r"model\.rope\.scaling: must be one of .*, got ntk"):
        ModelConfig.from_dict({**values, "rope": {**values["rope"], "scaling": "ntk"}})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_layers": "4"}, "model.num_layers: must be a whole number, got '4'; correct the file"),
        ({"num_layers": True}, "model.num_layers: must be a whole number, got True; correct the file"),
        ({"attention_bias": 0}, "model.attention_bias: must be true or false, got 0; correct the file"),
        ({"rms_norm_eps": None}, "model.rms_norm_eps: must be a number, got None; correct the file"),
        ({"dense_layers": 0}, "model.dense_layers: must be a list, got 0; correct the file"),
        ({"rope": 10000}, "model.rope: must be a mapping, got 10000; restore the file"),
    ],
)
def test_values_of_another_type_are_refused(change, message):
    values = ModelConfig(rms_norm_eps=1).to_dict()
    assert ModelConfig.from_dict(values)  # a whole number is a number too
    with pytest.raises(ConfigError) as error:
        ModelConfig.from_dict(values | change)
    assert str(error.value) == message


def test_layers_are_named_by_whole_numbers():
    with pytest.raises(ConfigError, match=r"dense_layers: must be indices below num_layers=4, got \[1\]"):
        ModelConfig(dense_layers=[[1]], dense_hidden_size=32).validate()  # what a command line can give


def test_latent_attention_names_what_it_lacks():
    latent = ModelConfig(family=Family.deepseek_v3, kv_lora_rank=32, num_kv_heads=4, head_dim=48)
    with pytest.raises(ConfigError) as error:
        latent.validate()
    assert [line.split(":")[0] for line in str(error.value).splitlines()] == [
        "model.qk_rope_head_dim",
        "model.v_head_dim",
    ]
    dataclasses.replace(latent, qk_rope_head_dim=16, v_head_dim=32).validate()

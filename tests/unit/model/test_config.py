import dataclasses
import subprocess
import sys

import pytest

from model.config import ComputeDtype, ConfigError, ModelConfig


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
        ("num_experts", 257, "model.num_experts: must be at most 256, got 257; routes are uint8"),
        ("vocab_size", -1, "model.vocab_size: must not be negative, got -1;"),
        ("shared_expert_hidden_size", -32, "model.shared_expert_hidden_size: must not be negative, got -32;"),
        ("rope_theta", 1.0, "model.rope_theta: must be above 1, got 1.0;"),
        ("rms_norm_eps", 0.0, "model.rms_norm_eps: must be positive, got 0.0;"),
        ("rms_norm_eps", float("nan"), "model.rms_norm_eps: must be positive, got nan;"),
    ],
)
def test_each_problem_is_one_clear_line(field, value, message):
    config = dataclasses.replace(ModelConfig(), **{field: value})
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

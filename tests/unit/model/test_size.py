"""The formulas count what the network holds, and the published models have their published sizes."""

import dataclasses
import math
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from model.config import Family, ModelConfig, QkNorm
from model.size import ModelSize, Part, published_bits, tensors
from model.snapshot import Format, tensor_format
from model.transformer import parameter_shapes
from rl import overrides

PRESETS = overrides.group_options()["model"]
BITS = {Format.MXFP4: 4.25, Format.BF16: 16.0, Format.FP32: 32.0}


def preset(name: str) -> ModelConfig:
    config = overrides.compose_run([f"model={name}"]).model
    return dataclasses.replace(config, vocab_size=config.vocab_size or 512)


def sizes(config: ModelConfig) -> ModelSize:
    config.validate()
    return ModelSize.of(config)


def check_against_the_network(config: ModelConfig) -> None:
    counts = {name: math.prod(shape) for name, shape in parameter_shapes(config).items()}
    size = sizes(config)
    assert size.num_total == sum(counts.values())
    in_experts = sum(count for name, count in counts.items() if tensor_format(name) is Format.MXFP4)
    assert size.total[Part.experts] == in_experts
    biases = sum(count for name, count in counts.items() if name.endswith(("bias", "sinks")))
    assert size.total.get(Part.biases, 0) + size.total.get(Part.selection_bias, 0) == biases
    assert size.total[Part.norms] == sum(count for name, count in counts.items() if "norm.weight" in name)
    assert size.total[Part.router] == sum(count for name, count in counts.items() if name.endswith("router.weight"))
    published = sum(count * BITS[tensor_format(name)] for name, count in counts.items()) / 8
    assert size.published_bytes == published
    unread = sum(count for name, count in counts.items() if ".experts." in name) // config.num_experts
    unread *= config.num_experts - config.num_experts_per_tok
    assert size.num_active_with_embedding == size.num_total - unread


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_is_counted_exactly(name: str) -> None:
    check_against_the_network(preset(name))


@st.composite
def small_configs(draw: st.DrawFn, latent: bool) -> ModelConfig:
    num_layers = draw(st.integers(1, 4))
    kv_heads = draw(st.integers(1, 3))
    heads = kv_heads * draw(st.integers(1, 3))
    dense = sorted(draw(st.sets(st.integers(0, num_layers - 1), max_size=num_layers - 1)))
    experts = draw(st.integers(1, 9))
    switch = st.booleans()
    attention = (
        {
            "num_kv_heads": heads,
            "head_dim": draw(st.integers(9, 20)),
            "q_lora_rank": draw(st.sampled_from([0, 12])),
            "kv_lora_rank": draw(st.integers(1, 20)),
            "qk_rope_head_dim": 2 * draw(st.integers(1, 4)),
            "v_head_dim": draw(st.integers(1, 20)),
        }
        if latent
        else {
            "num_kv_heads": kv_heads,
            "head_dim": 2 * draw(st.integers(1, 9)),
            "qk_norm": draw(st.sampled_from(QkNorm)),
            "attention_sinks": draw(switch),
        }
    )
    return ModelConfig(
        vocab_size=draw(st.integers(1, 50)),
        hidden_size=32 * draw(st.integers(1, 3)),
        num_layers=num_layers,
        num_heads=heads,
        **attention,
        attention_bias=draw(switch),
        expert_hidden_size=32 * draw(st.integers(1, 3)),
        num_experts=experts,
        num_experts_per_tok=draw(st.integers(1, experts)),
        expert_bias=draw(switch),
        shared_expert_hidden_size=draw(st.integers(0, 40)),
        dense_layers=dense,
        dense_hidden_size=draw(st.integers(1, 40)) if dense else 0,
        router_bias=draw(switch),
        router_selection_bias=draw(switch),
        tie_embeddings=draw(switch),
    )


@settings(max_examples=60, deadline=None)
@given(small_configs(latent=False))
def test_grouped_query_models_are_counted_exactly(config: ModelConfig) -> None:
    check_against_the_network(config)


@settings(max_examples=60, deadline=None)
@given(small_configs(latent=True))
def test_latent_attention_models_are_counted_exactly(config: ModelConfig) -> None:
    check_against_the_network(config)


# Totals are the parameter counts of the published files. Active counts are the reports' figures, in their last digit:
# (figure in billions, half or a whole unit of the last digit, whether the embedding table is counted).
PUBLISHED = {
    "gpt_oss_20b": (20_914_757_184, 3.61, 0.005, False),
    "gpt_oss_120b": (116_829_156_672, 5.13, 0.005, False),
    "deepseek_v3": (671_026_419_200, 37, 0.5, False),
    "kimi_k2": (1_026_408_232_448, 32, 0.5, False),
    "qwen3_30b_a3b": (30_532_122_624, 3.3, 0.1, True),
    "mixtral_8x7b": (46_702_792_704, 12.9, 0.05, True),
    "olmoe_1b_7b": (6_919_161_856, 1.3, 0.05, True),
}


@pytest.mark.parametrize(("name", "published"), PUBLISHED.items())
def test_published_models_have_their_published_sizes(name: str, published: tuple[int, float, float, bool]) -> None:
    total, active, tolerance, with_embedding = published
    size = sizes(preset(name))
    assert size.num_total == total
    found = size.num_active_with_embedding if with_embedding else size.num_active
    assert abs(found / 1e9 - active) <= tolerance
    other = size.num_active if with_embedding else size.num_active_with_embedding
    assert abs(other / 1e9 - active) > tolerance, "the figure must tell the two ways of counting apart"


@pytest.mark.parametrize(("name", "total_size"), [("gpt_oss_20b", 13_761_264_768), ("gpt_oss_120b", 65_248_815_744)])
def test_the_published_view_of_gpt_oss_is_as_large_as_its_files(name: str, total_size: int) -> None:
    assert sizes(preset(name)).published_bytes == total_size  # `total_size` of model.safetensors.index.json


def test_the_largest_preset_meets_the_public_totals() -> None:
    size = sizes(preset("moe_2_8t"))
    assert size.num_total == pytest.approx(2.8e12, rel=0.01)
    assert size.num_active == pytest.approx(104e9, rel=0.01)
    assert size.num_active_with_embedding == pytest.approx(104e9, rel=0.01)
    assert size.total[Part.experts] / size.num_total == pytest.approx(0.982, abs=0.0005)
    assert size.bf16_bytes == pytest.approx(5.6e12, rel=0.01)
    assert size.published_bytes == pytest.approx(1.56e12, rel=0.01)


def test_a_small_model_by_hand() -> None:
    config = ModelConfig(
        family=Family.gpt_oss, vocab_size=10, hidden_size=32, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=4,
        attention_bias=True, attention_sinks=True, expert_hidden_size=64, num_experts=4, num_experts_per_tok=1,
        expert_bias=True, router_bias=True,
    )  # fmt: skip
    size = sizes(config)
    assert size.total == {
        Part.embedding: 10 * 32,
        Part.norms: 3 * 32,
        Part.attention: 32 * 8 + 2 * 32 * 4 + 8 * 32,
        Part.biases: (8 + 2 * 4 + 32) + 2 + 4 + 4 * (2 * 64 + 32),
        Part.router: 4 * 32,
        Part.experts: 4 * 3 * 32 * 64,
    }
    assert size.active[Part.experts] == 3 * 32 * 64
    assert size.active[Part.embedding] == 320  # tied: it makes the logits


def test_a_vocabulary_that_is_not_known_yet_counts_as_none() -> None:
    without, with_it = ModelSize.of(ModelConfig()), ModelSize.of(ModelConfig(vocab_size=7))
    assert with_it.num_total - without.num_total == 7 * ModelConfig().hidden_size


def test_bits_of_the_published_view() -> None:
    assert {part: published_bits(part) for part in Part if published_bits(part) != 16} == {
        Part.experts: 4.25,
        Part.selection_bias: 32,
    }
    assert {tensor.part for tensor in tensors(preset("deepseek_v3"))} == set(Part) - {Part.biases}


def test_counting_does_not_import_torch() -> None:
    code = "import sys, model.size; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0

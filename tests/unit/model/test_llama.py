import json

import pytest
import torch
from safetensors.torch import save_file

from model.config import ConfigError, RopeConfig, RopeScaling
from model.llama import LlamaError, from_llama, llama_config, llama_shapes, read_llama
from model.loaded import CheckpointError
from model.transformer import parameter_shapes

HF = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 40,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "rope_theta": 5000.0,
    "max_position_embeddings": 128,
    "tie_word_embeddings": True,
    "hidden_act": "silu",
}
EMBEDDING = "model.embed_tokens.weight"


def tensors(config):
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(shape, generator=generator) for name, shape in llama_shapes(config).items()}


def test_a_dense_llama_has_one_expert_that_is_its_mlp():
    config = llama_config(HF)
    assert (config.num_experts, config.num_experts_per_tok, config.expert_hidden_size) == (1, 1, 96)
    assert (config.head_dim, config.rope, config.rms_norm_eps) == (16, RopeConfig(theta=5000.0), 1e-5)
    given = tensors(config)
    masters = from_llama(config, given)
    assert {name: tuple(weight.shape) for name, weight in masters.items()} == parameter_shapes(config)
    experts = masters["model.layers.1.mlp.experts.gate_up_proj"]
    mlp = "model.layers.1.mlp"
    assert torch.equal(experts[0], torch.cat([given[f"{mlp}.gate_proj.weight"], given[f"{mlp}.up_proj.weight"]]))
    assert torch.equal(masters[f"{mlp}.experts.down_proj"][0], given[f"{mlp}.down_proj.weight"])


def test_llama3_scaling_and_a_mistral_window_are_read():
    scaling = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    scaled = llama_config({**HF, "rope_scaling": {**scaling, "original_max_position_embeddings": 64}})
    expected = RopeConfig(theta=5000.0, scaling=RopeScaling.llama3, factor=8.0, original_positions=64)
    assert scaled.rope == expected
    windowed = llama_config({**HF, "model_type": "mistral", "sliding_window": 16})
    assert [windowed.window(index) for index in range(2)] == [16, 16]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "gpt2"}, "config.json: model_type must be one of ['llama', 'mistral'], got gpt2; "),
        ({"mlp_bias": True}, "config.json: mlp_bias: only False is supported, got True; "),
        ({"attention_bias": True}, "config.json: attention_bias: only False is supported, got True; "),
        ({"hidden_act": "gelu"}, "config.json: hidden_act: only silu is supported, got gelu; "),
        ({"logit_scale": 2.0}, "config.json: logit_scale: an unknown key may change what the network computes, got 2"),
    ],
)
def test_what_a_plain_llama_lacks_is_an_error(change, message):
    with pytest.raises(ConfigError) as caught:
        llama_config({**HF, **change})
    assert str(caught.value).startswith(message)


def test_weights_of_bf16_become_fp32_and_a_tied_copy_is_dropped():
    config = llama_config(HF)
    given = {name: tensor.bfloat16() for name, tensor in tensors(config).items()}
    masters = from_llama(config, {**given, "lm_head.weight": given[EMBEDDING].clone()})
    assert "lm_head.weight" not in masters
    assert torch.equal(masters[EMBEDDING], given[EMBEDDING].float())
    with pytest.raises(LlamaError, match=r"lm_head.weight: must equal the embeddings that it is tied to"):
        from_llama(config, {**given, "lm_head.weight": given[EMBEDDING] + 1})


def test_untied_embeddings_need_their_own_output_matrix():
    config = llama_config({**HF, "tie_word_embeddings": False})
    given = tensors(config)
    assert torch.equal(from_llama(config, given)["lm_head.weight"], given["lm_head.weight"])
    del given["lm_head.weight"]
    with pytest.raises(LlamaError, match=r"got missing \['lm_head.weight'\] and extra \[\]"):
        from_llama(config, given)


def test_names_and_shapes_are_checked():
    config = llama_config(HF)
    given = tensors(config)
    with pytest.raises(LlamaError, match=r"got missing \[\] and extra \['model.layers.0.self_attn.q_proj.bias'\]"):
        from_llama(config, {**given, "model.layers.0.self_attn.q_proj.bias": torch.zeros(64)})
    with pytest.raises(LlamaError, match=r"^model.norm.weight: must be floating point of shape \(64,\), got .*\(65,\)"):
        from_llama(config, {**given, "model.norm.weight": torch.zeros(65)})
    with pytest.raises(LlamaError, match=r"^model.norm.weight: must be floating point .*got torch.int64"):
        from_llama(config, {**given, "model.norm.weight": torch.zeros(64, dtype=torch.int64)})


def test_a_sharded_folder_is_read(tmp_path):
    config = llama_config(HF)
    given = tensors(config)
    shards = {"a.safetensors": {EMBEDDING: given[EMBEDDING]}}
    shards["b.safetensors"] = {name: tensor.clone() for name, tensor in given.items() if name != EMBEDDING}
    for file, part in shards.items():
        save_file(part, tmp_path / file)
    weight_map = {name: file for file, part in shards.items() for name in part}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    (tmp_path / "config.json").write_text(json.dumps(HF))
    found, masters = read_llama(tmp_path)
    expected = from_llama(config, given)
    assert found == config
    assert masters.keys() == expected.keys()
    assert all(torch.equal(masters[name], expected[name]) for name in expected)

    whole = (tmp_path / "b.safetensors").read_bytes()
    (tmp_path / "b.safetensors").write_bytes(whole[:-4])
    with pytest.raises(CheckpointError, match=r"b.safetensors: must be a whole safetensors file"):
        read_llama(tmp_path)

import json

import numpy as np
import pytest
import torch

from model.config import RopeConfig, RopeScaling
from model.gguf_file import GGUFError, GGUFFile, half_split, packaged_gguf
from model.rope import adjacent_pairs
from tests.unit.model.small_gguf import CONFIG, TOKENS, values, write


def test_configuration_and_tensors_are_those_of_the_checkpoint(tmp_path):
    file = GGUFFile(write(tmp_path / "m.gguf"))
    assert file.config() == CONFIG
    tensors = file.tensors()
    expected = values()
    assert tensors.keys() == expected.keys()
    assert all(torch.equal(tensors[name], torch.from_numpy(expected[name])) for name in expected)
    assert torch.equal(
        file.masters()["model.layers.1.mlp.experts.down_proj"][0], tensors["model.layers.1.mlp.down_proj.weight"]
    )


def test_quantized_blocks_are_decoded(tmp_path):
    name = "model.layers.0.self_attn.q_proj.weight"
    tensor = GGUFFile(write(tmp_path / "m.gguf", quantized={name})).tensors()[name]
    exact = torch.from_numpy(values()[name])
    assert not torch.equal(tensor, exact)
    assert (tensor - exact).abs().max() <= exact.abs().max() / 127 / 2 * 1.01  # Q8_0: half a step of amax / 127


def test_the_row_order_is_the_inverse_of_the_rotary_one():
    weight = torch.arange(2 * 8 * 3.0).view(16, 3)
    assert torch.equal(half_split(adjacent_pairs(weight, 8), 8), weight)
    assert not torch.equal(half_split(weight, 8), weight)


def test_linear_scaling_is_read(tmp_path):
    scaling = {"rope.scaling.type": "linear", "rope.scaling.factor": 2.0}
    file = GGUFFile(write(tmp_path / "m.gguf", metadata=scaling))
    assert file.config().rope == RopeConfig(theta=5000.0, scaling=RopeScaling.linear, factor=2.0)


def test_the_tokenizer_splits_digits_and_knows_control_tokens(tmp_path):
    tokenizer = GGUFFile(write(tmp_path / "m.gguf")).tokenizer()
    assert tokenizer.encode("ab a12").tokens == ["ab", "Ġa", "1", "2"]
    assert tokenizer.encode("<|im_end|>a").ids == [1, 2]
    assert tokenizer.decode(tokenizer.encode("ab a12").ids) == "ab a12"
    assert tokenizer.get_vocab_size() == len(TOKENS)
    tokenizer.encode_special_tokens = True
    assert tokenizer.encode("<|im_end|>").ids[0] == TOKENS.index("<")


def test_the_chat_template_travels_with_the_names_of_the_control_tokens(tmp_path):
    files = GGUFFile(write(tmp_path / "m.gguf")).chat_files()
    assert files["chat_template.jinja"] == "{{ messages }}"
    config = json.loads(files["tokenizer_config.json"])
    assert config["eos_token"] == "<|im_end|>"
    assert "bos_token" not in config


@pytest.mark.parametrize(
    ("options", "read", "message"),
    [
        ({"arch": "qwen2"}, "config", r"architecture must be llama, got qwen2; only dense Llamas are read"),
        ({"metadata": {"rope.dimension_count": 8}}, "config", r"must be the head size 16, got 8"),
        ({"metadata": {"rope.scaling.type": "yarn"}}, "config", r"must be none or linear, got yarn"),
        ({"skip": {"attention.layer_norm_rms_epsilon"}}, "config", r"metadata llama.attention.layer_norm_rms_epsilon"),
        ({"skip": {"model.norm.weight"}}, "tensors", r"got missing \['output_norm.weight'\] and extra \[\]"),
        (
            {"extra": {"rope_freqs.weight": np.ones(8, np.float32)}},
            "tensors",
            r"got missing \[\] and extra \['rope_freqs.weight'\]",
        ),
        ({"skip": {"smollm"}}, "tokenizer", r"must be gpt2 with pre-tokenizer smollm, got gpt2 with llama-bpe"),
        ({"skip": {"template"}}, "chat_files", r"metadata tokenizer.chat_template is needed"),
    ],
)
def test_what_is_not_a_plain_llama_is_an_error(tmp_path, options, read, message):
    path = write(tmp_path / "m.gguf", **options)
    with pytest.raises(GGUFError, match=message) as caught:
        getattr(GGUFFile(path), read)()
    assert str(caught.value).startswith(str(path))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("content", [b"", b"GGUF", b"not a model at all" * 10])
def test_another_file_is_an_error(tmp_path, content):
    path = tmp_path / "m.gguf"
    path.write_bytes(content)
    with pytest.raises(GGUFError, match=r"m.gguf: must be a GGUF file, got .*; fetch it again"):
        GGUFFile(path)


def test_a_missing_file_and_a_missing_package_are_errors(tmp_path):
    with pytest.raises(GGUFError, match=r"must be a GGUF file"):
        GGUFFile(tmp_path / "none.gguf")
    with pytest.raises(GGUFError, match=r"no_such_package: must be installed and ship one GGUF file, got \[\]; "):
        packaged_gguf("no_such_package")
    with pytest.raises(GGUFError, match=r"json: must be installed and ship one GGUF file"):
        packaged_gguf("json")


def test_a_package_is_found_without_being_imported(tmp_path, monkeypatch):
    package = tmp_path / "ships_a_model"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('imported')")
    (package / "m.gguf").touch()
    monkeypatch.syspath_prepend(tmp_path)
    assert packaged_gguf("ships_a_model") == package / "m.gguf"

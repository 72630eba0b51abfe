"""Writing published folders: files, formats, what travels with them, and the errors."""

import dataclasses
import json

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from model.checkpoint import load_model
from model.config import ConfigError, Family
from model.hf.files import Folder
from model.hf.writer import HfFormat, save_hf
from model.loaded import CheckpointError
from model.mxfp4 import dequantize
from model.snapshot import plain_bytes, view
from tests.unit.model.families.minis import CONFIGS, masters, published, same


def metadata(path):
    with safe_open(path, "pt") as file:
        return file.metadata()


def tensor_bytes(path):
    return {name: (t.dtype, t.shape, plain_bytes(t).tobytes()) for name, t in load_file(path).items()}


@pytest.mark.parametrize("format", HfFormat)
@pytest.mark.parametrize("family", CONFIGS)
def test_every_family_comes_back_byte_for_byte(tmp_path, family, format):
    config, weights = CONFIGS[family], published(CONFIGS[family])
    save_hf(tmp_path, config, weights.items(), format)
    loaded = load_model(tmp_path)
    assert loaded.config == config
    if format is HfFormat.MXFP4:
        assert all(same(loaded.weights[name], weights[name]) for name in weights)
    else:
        assert all(torch.equal(loaded.masters()[name], view(weights[name])) for name in weights)
    (tmp_path / "again").mkdir()
    save_hf(tmp_path / "again", config, loaded.weights.items(), format, metadata=loaded.metadata)
    assert (tmp_path / "again" / "config.json").read_bytes() == (tmp_path / "config.json").read_bytes()
    first, again = (folder / "model.safetensors" for folder in (tmp_path, tmp_path / "again"))
    assert metadata(again) == metadata(first)  # in no fixed order, so the files may differ where their tensors do not
    assert tensor_bytes(again) == tensor_bytes(first)


def test_mxfp4_quantizes_masters_and_bf16_rounds_them(tmp_path):
    config, given = CONFIGS[Family.mixtral], masters(CONFIGS[Family.mixtral])
    for format in HfFormat:
        (tmp_path / format).mkdir()
        save_hf(tmp_path / format, config, given.items(), format)
    expected = published(config)
    assert all(same(w, expected[name]) for name, w in load_model(tmp_path / "mxfp4").weights.items())
    rounded = load_model(tmp_path / "bf16").masters()
    assert all(torch.equal(rounded[name], given[name].bfloat16().float()) for name in given)
    assert metadata(tmp_path / "bf16" / "model.safetensors") == {"format": "pt"}
    assert metadata(tmp_path / "mxfp4" / "model.safetensors") == {
        "format": "pt",
        "mxfp4_rule": "even",
        "mxfp4_version": "1",
    }


def test_gpt_oss_files_have_the_published_names_shapes_and_row_order(tmp_path):
    config, weights = CONFIGS[Family.gpt_oss], published(CONFIGS[Family.gpt_oss])
    for format in HfFormat:
        (tmp_path / format).mkdir()
        save_hf(tmp_path / format, config, weights.items(), format)
    packed, plain = (load_file(tmp_path / format / "model.safetensors") for format in HfFormat)
    name = "model.layers.1.mlp.experts.gate_up_proj"
    assert packed[f"{name}_blocks"].shape == (3, 128, 1, 16)
    assert packed[f"{name}_scales"].shape == (3, 128, 1)
    assert plain[name].shape == (3, 32, 128)
    stored = dequantize(packed[f"{name}_blocks"], packed[f"{name}_scales"])
    ours = view(weights[name])
    assert torch.equal(stored[:, 0::2], ours[:, :64])
    assert torch.equal(stored[:, 1::2], ours[:, 64:])
    assert torch.equal(plain[name].float(), stored.mT)
    bias = "model.layers.1.mlp.experts.gate_up_proj_bias"
    assert torch.equal(packed[bias][:, 1::2].float(), view(weights[bias])[:, 64:])
    quantization = json.loads((tmp_path / "mxfp4" / "config.json").read_text())["quantization_config"]
    assert quantization["quant_method"] == "mxfp4"
    assert "quantization_config" not in json.loads((tmp_path / "bf16" / "config.json").read_text())


def test_files_are_bounded_and_indexed(tmp_path):
    config = CONFIGS[Family.qwen3_moe]
    save_hf(tmp_path, config, published(config).items(), HfFormat.BF16, max_shard_bytes=10_000)
    files = sorted(file.name for file in tmp_path.glob("*.safetensors"))
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    stored = {file: load_file(tmp_path / file) for file in files}
    assert files == [f"model-{i:05d}-of-{len(files):05d}.safetensors" for i in range(1, len(files) + 1)]
    assert len(files) > 4
    sizes = [sum(tensor.nbytes for tensor in tensors.values()) for tensors in stored.values()]
    assert max(sizes) <= 10_000
    assert index["metadata"]["total_size"] == sum(sizes)
    assert index["weight_map"] == {name: file for file, tensors in stored.items() for name in tensors}
    assert not [*tmp_path.glob("*.partial")]


def test_a_tensor_larger_than_a_file_gets_its_own(tmp_path):
    config = CONFIGS[Family.qwen3_moe]
    save_hf(tmp_path, config, published(config).items(), HfFormat.BF16, max_shard_bytes=1)
    assert all(len(load_file(file)) == 1 for file in tmp_path.glob("*.safetensors"))


def test_tokenizer_template_and_token_ids_travel(tmp_path):
    source, target, config = tmp_path / "source", tmp_path / "target", CONFIGS[Family.mixtral]
    source.mkdir()
    target.mkdir()
    travelling = {"tokenizer.json": "{}", "chat_template.jinja": "{{ x }}", "generation_config.json": '{"eos": 3}'}
    for name, text in (travelling | {"README.md": "no", "modeling_x.py": "no", "model.safetensors": "no"}).items():
        (source / name).write_text(text)
    (source / "config.json").write_text('{"eos_token_id": [3, 4], "pad_token_id": null, "sliding_window": 7}')
    save_hf(target, config, published(config).items(), HfFormat.BF16, source=Folder(source))
    assert {p.name for p in target.iterdir()} == {*travelling, "config.json", "model.safetensors"}
    assert all((target / name).read_text() == text for name, text in travelling.items())
    written = json.loads((target / "config.json").read_text())
    assert (written["eos_token_id"], written["pad_token_id"], written["sliding_window"]) == ([3, 4], None, None)


def test_weights_must_be_exactly_the_parameters(tmp_path):
    config = CONFIGS[Family.mixtral]
    weights = published(config)
    norm = "model.norm.weight"
    with pytest.raises(CheckpointError, match=rf"save_hf: every parameter must be given, got none of \['{norm}'\]"):
        save_hf(tmp_path, config, [(n, w) for n, w in weights.items() if n != norm], HfFormat.BF16)
    with pytest.raises(CheckpointError, match=r"save_hf: x: must be a parameter of shape None, once, got \(32,\)"):
        save_hf(tmp_path, config, [("x", weights[norm])], HfFormat.BF16)
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight: must be a parameter of shape \(32,\), once"):
        save_hf(tmp_path, config, [(norm, weights[norm])] * 2, HfFormat.BF16)
    with pytest.raises(ConfigError, match="family mixtral cannot hold it"):
        save_hf(tmp_path, dataclasses.replace(config, attention_bias=True), [], HfFormat.BF16)

"""Reading published folders: files, names, shapes, encodings and ties; the reference is what `save_hf` was given."""

import dataclasses
import json
import random
import shutil

import fsspec
import fsspec.implementations.memory
import pytest
import torch
from safetensors.torch import load_file, save_file

from model.checkpoint import load_model
from model.config import ConfigError, Family
from model.hf.files import Folder
from model.hf.reader import open_hf
from model.hf.writer import HfFormat, save_hf
from model.loaded import CheckpointError, Form
from model.snapshot import Format, PackedTensor, view
from model.transformer import EMBEDDING, LM_HEAD
from tests.unit.model.families.minis import CONFIGS, masters, published, same

QWEN = CONFIGS[Family.qwen3_moe]
ONE_EXPERT = "model.layers.1.mlp.experts.2.down_proj.weight"
EXPERTS = "model.layers.1.mlp.experts.down_proj"


@pytest.fixture
def weights():
    return published(QWEN)


@pytest.fixture
def folder(tmp_path, weights):
    """A qwen3_moe checkpoint in MXFP4, in several files."""
    path = tmp_path / "source"
    path.mkdir()
    save_hf(path, QWEN, weights.items(), HfFormat.MXFP4, max_shard_bytes=6000)
    return path


def everything(folder):
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


def rewrite(folder, change):
    """The same checkpoint in one file, after a change of its tensors."""
    entries = everything(folder)
    change(entries)
    for file in folder.glob("model*"):
        file.unlink()
    save_file(entries, folder / "model.safetensors")


def reconfigure(folder, **values):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def test_several_files_come_back_byte_for_byte(folder, weights):
    assert len([*folder.glob("*.safetensors")]) > 3
    loaded = load_model(folder)
    assert (loaded.config, loaded.form, loaded.notes) == (QWEN, Form.FOREIGN, ())
    assert [*loaded.weights] == [*weights]
    assert all(same(loaded.weights[name], weights[name]) for name in weights)
    assert loaded.rounded() == {}
    assert loaded.metadata["mxfp4_rule"] == "even"


def test_the_assignment_to_files_plays_no_part(folder, weights):
    files = sorted(folder.glob("*.safetensors"))
    entries = everything(folder)
    draw = random.Random(0)
    index = {"weight_map": {name: draw.choice(files).name for name in entries}}
    index["weight_map"] |= {name: files[i].name for i, name in enumerate([*entries][: len(files)])}
    for file in files:
        mine = {name: tensor for name, tensor in entries.items() if index["weight_map"][name] == file.name}
        save_file(mine, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    loaded = load_model(folder)
    assert all(same(loaded.weights[name], weights[name]) for name in weights)


def test_one_file_and_files_without_an_index(folder, weights):
    (folder / "model.safetensors.index.json").unlink()
    assert all(same(load_model(folder).weights[name], weights[name]) for name in weights)
    rewrite(folder, lambda entries: None)
    assert [file.name for file in folder.glob("*.safetensors")] == ["model.safetensors"]
    assert all(same(load_model(folder).weights[name], weights[name]) for name in weights)


def test_a_folder_of_links_is_read_like_the_files(folder, weights, tmp_path):
    """What a download cache holds."""
    links = tmp_path / "links"
    links.mkdir()
    for file in folder.iterdir():
        (links / file.name).symlink_to(file)
    assert all(same(load_model(links).weights[name], weights[name]) for name in weights)


def test_a_url_is_read_like_a_path(folder, weights):
    assert all(same(load_model(f"file://{folder}").weights[name], weights[name]) for name in weights)
    memory = fsspec.filesystem("memory")
    memory.put(str(folder), "/published/model", recursive=True)
    try:
        loaded = load_model("memory://published/model")
        assert all(same(loaded.weights[name], weights[name]) for name in weights)
        memory.rm("/published/model/model.safetensors.index.json")
        memory.rm("/published/model/config.json")
        with pytest.raises(CheckpointError, match=r"memory://published/model: config\.json: must be a JSON object"):
            load_model("memory://published/model")
    finally:
        memory.rm("/published", recursive=True)
    with pytest.raises(CheckpointError, match="nosuch://x: must be a folder or a URL"):
        load_model("nosuch://x")


def test_what_a_plugin_raises_names_the_source(monkeypatch):
    class ClientError(Exception):
        pass

    def fail(*args, **kwargs):
        raise ClientError("no route to host")

    monkeypatch.setattr(fsspec.implementations.memory.MemoryFileSystem, "cat_file", fail)
    with pytest.raises(CheckpointError, match=r"memory://x: config\.json: .*, got ClientError\('no route to host'\)"):
        load_model("memory://x")


def test_remote_files_are_fetched_one_at_a_time_and_deleted(folder, tmp_path, monkeypatch):
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(scratch))
    seen = list[list[str]]()
    copy = Folder.copy

    def recorded(self, name, target):
        copy(self, name, target)
        seen.append([file.name for file in scratch.rglob("*.safetensors")])

    monkeypatch.setattr(Folder, "copy", recorded)
    memory = fsspec.filesystem("memory")
    memory.put(str(folder), "/remote/model", recursive=True)
    try:
        load_model("memory://remote/model")
    finally:
        memory.rm("/remote", recursive=True)
    assert seen == [[file.name] for file in sorted(folder.glob("*.safetensors"))]
    assert not [*scratch.iterdir()]


def test_missing_and_extra_tensors_are_listed_before_any_is_read(folder, monkeypatch):
    def change(entries):
        entries["model.layers.0.rotary"] = entries.pop(f"{ONE_EXPERT}_scale")

    rewrite(folder, change)
    monkeypatch.setattr("model.hf.reader.safe_open", None)
    with pytest.raises(CheckpointError) as error:
        load_model(folder)
    assert str(error.value) == (
        f"{folder}: tensors must be exactly those of config.json, got 1 missing ['{ONE_EXPERT}_scale'] and 1 extra "
        "['model.layers.0.rotary']; check that the files belong to this configuration"
    )


def test_long_lists_are_cut(folder):
    reconfigure(folder, num_experts=30)
    with pytest.raises(CheckpointError, match=r"got 81 missing \[.*\] and 69 more and 0 extra"):
        load_model(folder)


def test_wrong_shapes_and_dtypes_are_listed(folder):
    def change(entries):
        entries[f"{ONE_EXPERT}_packed"] = torch.zeros(32, 31, dtype=torch.uint8)
        entries["model.norm.weight"] = torch.zeros(64, dtype=torch.bfloat16)
        entries[f"{ONE_EXPERT}_scale"] = torch.zeros(32, 2)

    rewrite(folder, change)
    with pytest.raises(CheckpointError) as error:
        load_model(folder)
    assert f"{ONE_EXPERT}_packed U8 (32, 31) instead of U8 (32, 32)" in str(error.value)
    assert f"{ONE_EXPERT}_scale F32 (32, 2) instead of U8/F8_E8M0 (32, 2)" in str(error.value)
    assert "model.norm.weight BF16 (64,) instead of F32/F16/BF16 (32,)" in str(error.value)


def test_a_dtype_that_no_encoding_uses_is_refused(folder):
    rewrite(folder, lambda entries: entries.update({"model.norm.weight": torch.zeros(32, dtype=torch.int32)}))
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight: must be floating point.*, got dtype I32"):
        load_model(folder)


def test_damaged_files_are_named(folder):
    file = min(folder.glob("*.safetensors"))
    whole = file.read_bytes()
    for damaged in (whole[:-1], b"\xff" * 64, b""):
        file.write_bytes(damaged)
        with pytest.raises(CheckpointError, match=rf"{file.name}: must be a whole safetensors file"):
            open_hf(folder)
    file.unlink()
    with pytest.raises(CheckpointError, match=rf"needs {file.name}, got \["):
        open_hf(folder)


@pytest.mark.parametrize("index", [{}, {"weight_map": None}, {"weight_map": ["a"]}, {"weight_map": {"a": 3}}])
def test_a_damaged_index_is_named(folder, index):
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=r"index\.json: must have a weight_map of file names, got"):
        open_hf(folder)


def test_a_tensor_stored_twice_is_refused(folder):
    (folder / "model.safetensors.index.json").unlink()
    shutil.copy(min(folder.glob("*.safetensors")), folder / "model-again.safetensors")
    with pytest.raises(CheckpointError, match=r"a tensor must be stored once, got .* in model-00001-of"):
        open_hf(folder)


def test_unsupported_keys_and_methods_name_the_folder(folder):
    reconfigure(folder, quantization_config={"quant_method": "gptq"})
    with pytest.raises(CheckpointError, match=rf"{folder}: config.json: quantization_config.quant_method: .* got gptq"):
        open_hf(folder)
    reconfigure(folder, quantization_config={"quant_method": "compressed-tensors", "format": "pack-quantized"})
    with pytest.raises(CheckpointError, match="must be mxfp4-pack-quantized, got pack-quantized"):
        open_hf(folder)
    reconfigure(folder, soft_cap=3, hidden_act="gelu")
    with pytest.raises(ConfigError) as error:
        open_hf(folder)
    assert [line.split(": ")[:3] for line in str(error.value).splitlines()] == [
        [str(folder), "config.json", "hidden_act"],
        [str(folder), "config.json", "soft_cap"],
    ]


def test_a_stored_copy_of_a_tied_embedding_must_be_equal(tmp_path):
    config = dataclasses.replace(QWEN, tie_embeddings=True)
    save_hf(tmp_path, config, published(config).items(), HfFormat.MXFP4)
    assert load_model(tmp_path).notes == ()
    rewrite(tmp_path, lambda entries: entries.update({LM_HEAD: entries[EMBEDDING].clone()}))
    loaded = load_model(tmp_path)
    assert LM_HEAD not in loaded.weights
    assert loaded.notes == ("lm_head.weight is stored although it is tied; it must equal the embedding",)

    rewrite(tmp_path, lambda entries: entries[LM_HEAD][3, 5].neg_())
    with pytest.raises(CheckpointError, match=r"lm_head\.weight: must equal model\.embed_tokens\.weight"):
        load_model(tmp_path)


def test_layers_that_predict_further_tokens_are_skipped_with_a_note(tmp_path):
    config = CONFIGS[Family.deepseek_v3]
    save_hf(tmp_path, config, published(config).items(), HfFormat.BF16)
    extra = {f"model.layers.{layer}.eh_proj.weight": torch.zeros(2) for layer in (2, 3)}
    extra["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(1)
    rewrite(tmp_path, lambda entries: entries.update(extra))
    with pytest.raises(CheckpointError, match=r"2 extra \['model\.layers\.2\.eh_proj\.weight'"):
        load_model(tmp_path)
    reconfigure(tmp_path, num_nextn_predict_layers=1)
    with pytest.raises(CheckpointError, match=r"1 extra \['model\.layers\.3\.eh_proj\.weight'\]"):
        load_model(tmp_path)
    reconfigure(tmp_path, num_nextn_predict_layers=2)
    assert load_model(tmp_path).notes[0].startswith("3 tensors are no part of the policy and were skipped: [")


def test_bits_beyond_the_published_format_are_kept_and_counted(tmp_path):
    exact, given = published(QWEN), masters(QWEN)
    save_hf(tmp_path, QWEN, exact.items(), HfFormat.MXFP4)
    router = "model.layers.1.mlp.router.weight"
    rewrite(tmp_path, lambda entries: entries.update({"model.layers.1.mlp.gate.weight": given[router]}))
    loaded = load_model(tmp_path)
    assert torch.equal(loaded.masters()[router], given[router])
    assert loaded.notes == (
        f"1 parameters are stored as F32 and rounded where they are published as bf16: ['{router}']",
    )
    changed = int((given[router].bfloat16().float() != given[router]).sum())
    assert loaded.rounded() == {router: changed}
    assert changed > 0
    assert same(loaded.packed()[router], exact[router])


def test_experts_in_several_encodings_are_decoded_to_the_dtype_that_holds_all(folder, weights):
    values = masters(QWEN)[EXPERTS][2]

    def change(entries):
        del entries[f"{ONE_EXPERT}_packed"], entries[f"{ONE_EXPERT}_scale"]
        entries[ONE_EXPERT] = values

    rewrite(folder, change)
    loaded = load_model(folder).weights[EXPERTS]
    assert isinstance(loaded, torch.Tensor)
    assert torch.equal(loaded[2], values)
    assert torch.equal(loaded[:2], view(weights[EXPERTS])[:2])


def test_packed_weights_outside_the_experts_are_decoded_exactly(folder, weights):
    dense = "model.layers.0.mlp.down_proj.weight"
    assert weights[dense].format is Format.BF16
    blocks, scales = torch.randint(0, 256, (32, 16)).byte(), torch.randint(100, 140, (32, 1)).byte()

    def change(entries):
        del entries[dense]
        entries |= {f"{dense}_packed": blocks, f"{dense}_scale": scales}

    rewrite(folder, change)
    loaded = load_model(folder).weights[dense]
    assert isinstance(loaded, PackedTensor)
    assert loaded.format is Format.BF16
    lut = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
    codes = torch.stack([blocks & 15, blocks >> 4], -1).flatten(1).long()
    assert torch.equal(view(loaded), lut[codes] * 2.0 ** (scales.float() - 127))

import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from model.checkpoint import CONFIG_FILE, WEIGHTS_FILE, CheckpointError, Form, load_model, save_model
from model.config import ComputeDtype, ConfigError, ModelConfig
from model.snapshot import digest, published_view, view
from model.transformer import Transformer, init_weights

CONFIG = ModelConfig(
    vocab_size=24,
    hidden_size=32,
    num_layers=1,
    num_heads=2,
    num_kv_heads=1,
    expert_hidden_size=64,
    compute_dtype=ComputeDtype.bf16,
)
EXPERT = "model.layers.0.mlp.experts.gate_up_proj"


@pytest.fixture
def masters():
    model = Transformer(CONFIG)
    init_weights(model, 0)
    return model.state_dict()


def rewrite(folder, change):
    """Apply a change to the entries of a saved file, keeping its metadata."""
    from safetensors import safe_open

    path = folder / WEIGHTS_FILE
    with safe_open(path, "pt") as file:
        metadata = file.metadata()
    metadata.pop("blake2b")  # of the tensors as they were
    entries = load_file(path)
    change(entries, metadata)
    save_file(entries, path, metadata=metadata)


def digests(packed):
    return {name: digest(name, tensor) for name, tensor in packed.items()}


def test_masters_come_back_bit_for_bit(tmp_path, masters):
    save_model(tmp_path, CONFIG, masters, {"step": "7"})
    loaded = load_model(tmp_path)
    assert loaded.config == CONFIG
    assert loaded.form is Form.MASTER
    assert loaded.metadata == {"step": "7"}
    restored = loaded.masters()
    assert restored.keys() == masters.keys()
    assert all(torch.equal(restored[name], masters[name]) for name in masters)
    Transformer(loaded.config).load_state_dict(restored)
    assert digests(loaded.packed()) == digests(published_view(masters))


def test_published_bytes_come_back_byte_for_byte(tmp_path, masters):
    packed = published_view(masters)
    save_model(tmp_path, CONFIG, packed, {"version": "3"})
    loaded = load_model(tmp_path)
    assert loaded.form is Form.PUBLISHED
    assert loaded.metadata == {"version": "3"}
    for name, tensor in loaded.packed().items():
        assert np.array_equal(tensor.payload, packed[name].payload)
        assert np.array_equal(tensor.scales, packed[name].scales)
        assert torch.equal(loaded.masters()[name], view(packed[name]))
    assert digests(published_view(loaded.masters())) == digests(packed)


def test_published_files_use_the_names_and_dtypes_of_gpt_oss(tmp_path, masters):
    save_model(tmp_path, CONFIG, published_view(masters), {})
    entries = load_file(tmp_path / WEIGHTS_FILE)
    assert entries[f"{EXPERT}_blocks"].shape == (8, 128, 1, 16)
    assert entries[f"{EXPERT}_scales"].shape == (8, 128, 1)
    assert entries[f"{EXPERT}_scales"].dtype == torch.uint8
    assert torch.equal(entries["model.norm.weight"], torch.ones(32, dtype=torch.bfloat16))


@pytest.mark.parametrize("publish", [False, True])
def test_missing_and_extra_names_are_listed(tmp_path, masters, publish):
    save_model(tmp_path, CONFIG, published_view(masters) if publish else masters, {})
    gone = f"{EXPERT}_scales" if publish else EXPERT

    def change(entries, metadata):
        entries["lm_head.weight"] = entries.pop(gone)

    rewrite(tmp_path, change)
    with pytest.raises(CheckpointError, match=rf"missing \['{gone}'\] and extra \['lm_head.weight'\]"):
        load_model(tmp_path)


def test_saving_checks_names_dtypes_and_form(tmp_path, masters):
    packed = published_view(masters)
    with pytest.raises(CheckpointError, match=r"save_model: names must be .* missing \['model.norm.weight'\]"):
        save_model(tmp_path, CONFIG, {k: v for k, v in masters.items() if k != "model.norm.weight"}, {})
    with pytest.raises(CheckpointError, match="all fp32 or all packed, got 1 packed"):
        save_model(tmp_path, CONFIG, {**masters, EXPERT: packed[EXPERT]}, {})
    with pytest.raises(CheckpointError, match=r"a master must be fp32, got torch\.bfloat16"):
        save_model(tmp_path, CONFIG, {**masters, EXPERT: masters[EXPERT].bfloat16()}, {})
    assert not list(tmp_path.iterdir())


def test_a_wrong_shape_is_named(tmp_path, masters):
    save_model(tmp_path, CONFIG, masters, {})

    def change(entries, metadata):
        entries["model.norm.weight"] = torch.ones(64)

    rewrite(tmp_path, change)
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight: shape must be \(32,\), got \(64,\)"):
        load_model(tmp_path)


def test_another_quantization_rule_is_refused(tmp_path, masters):
    save_model(tmp_path, CONFIG, published_view(masters), {})
    rewrite(tmp_path, lambda entries, metadata: metadata.update(mxfp4_rule="rceil"))
    with pytest.raises(CheckpointError, match=r"must be written as .*'even'.* got .*'rceil'"):
        load_model(tmp_path)


def test_damaged_or_missing_files_are_named(tmp_path, masters):
    with pytest.raises(CheckpointError, match=rf"{CONFIG_FILE}: must be a JSON object"):
        load_model(tmp_path)
    save_model(tmp_path, CONFIG, masters, {})
    weights = (tmp_path / WEIGHTS_FILE).read_bytes()
    (tmp_path / WEIGHTS_FILE).write_bytes(weights[: len(weights) // 2])
    with pytest.raises(CheckpointError, match=rf"{WEIGHTS_FILE}: must be a safetensors file"):
        load_model(tmp_path)
    (tmp_path / WEIGHTS_FILE).unlink()
    with pytest.raises(CheckpointError, match=rf"{WEIGHTS_FILE}: must be a safetensors file"):
        load_model(tmp_path)
    save_file({"x": torch.ones(1)}, tmp_path / WEIGHTS_FILE)
    with pytest.raises(CheckpointError, match="metadata 'form' must be one of"):
        load_model(tmp_path)


@pytest.mark.parametrize("publish", [False, True])
def test_a_bit_that_changed_on_the_disk_is_named_and_never_loaded(tmp_path, masters, publish):
    save_model(tmp_path, CONFIG, published_view(masters) if publish else masters, {})
    load_model(tmp_path)  # the control
    path, stored = tmp_path / WEIGHTS_FILE, load_file(tmp_path / WEIGHTS_FILE)
    name = f"{EXPERT}_blocks" if publish else EXPERT
    whole, wanted = path.read_bytes(), stored[name].reshape(-1).view(torch.uint8).numpy().tobytes()
    damaged = bytearray(whole)
    damaged[whole.index(wanted) + 5] ^= 1
    path.write_bytes(damaged)
    with pytest.raises(CheckpointError, match=rf"{WEIGHTS_FILE}: {name}: digest must be \w+, got \w+; the file is "):
        load_model(tmp_path)
    assert len(damaged) == len(whole)


def test_the_configuration_is_checked(tmp_path, masters):
    save_model(tmp_path, CONFIG, masters, {})
    values = json.loads((tmp_path / CONFIG_FILE).read_text())
    (tmp_path / CONFIG_FILE).write_text(json.dumps({**values, "hiden_size": 3}))
    with pytest.raises(CheckpointError, match=r"extra \['hiden_size'\]"):
        load_model(tmp_path)
    (tmp_path / CONFIG_FILE).write_text(json.dumps({**values, "compute_dtype": "fp8"}))
    with pytest.raises(CheckpointError, match="compute_dtype"):
        load_model(tmp_path)
    (tmp_path / CONFIG_FILE).write_text(json.dumps({**values, "hidden_size": 33}))
    with pytest.raises(ConfigError, match="hidden_size"):
        load_model(tmp_path)

"""Adapters for other programs: PEFT's files applied as PEFT applies them, to `transformers`' model of the base."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file

from model.adapter_file import ADAPTERS_FILE, BASE_FOLDER, load_adapters, save_adapters
from model.checkpoint import load_model, save_model
from model.config import Family, LoraConfig, LoraTargets, ModelConfig
from model.export import main
from model.lora import base_digest, merged
from model.snapshot import digest, published_view, view
from tests.numerics.families import MINI, make_model
from tests.numerics.test_lora import EVERY_TARGETS, random_adapters
from tests.numerics.tolerances import U16

_AUTO = transformers.AutoModelForCausalLM


def write_checkpoint(config: ModelConfig, lora: LoraConfig, folder: Path) -> Path:
    """A checkpoint of adapters with its base beside it, as a learner writes them."""
    base = published_view({name: p.detach() for name, p in make_model(config).named_parameters()})
    checkpoint = folder / "round-000002"
    for inner in (folder / BASE_FOLDER, checkpoint):
        inner.mkdir(parents=True)
    save_model(folder / BASE_FOLDER, config, base, {})
    of_base = base_digest({name: digest(name, packed) for name, packed in base.items()})
    save_adapters(checkpoint, random_adapters(config, lora), lora, of_base)
    (checkpoint / "tokenizer.json").write_text("{}")
    return checkpoint


def export(source: Path, dest: Path, format: str) -> Path:
    assert main([str(source), str(dest), "--format", format]) == 0
    return dest


def delta(a: torch.Tensor, b: torch.Tensor, parameter: torch.Tensor, is_transposed: bool) -> torch.Tensor:
    """PEFT 0.21, `ParamWrapper.get_delta_weight`, or `Linear.get_delta_weight` of a matrix; without its factor."""
    if parameter.ndim == 2:
        return b @ a
    num_experts = len(parameter)
    a, b = a.reshape(num_experts, -1, a.shape[-1]), b.reshape(b.shape[0], -1, num_experts)
    return torch.einsum("o r e, e r i -> e i o" if is_transposed else "o r e, e r i -> e o i", b, a)


@pytest.mark.parametrize("lora", EVERY_TARGETS, ids=lambda lora: lora.targets.value)
@pytest.mark.parametrize("family", Family)
def test_peft_adds_what_we_merge(family: Family, lora: LoraConfig, tmp_path: Path):
    checkpoint = write_checkpoint(MINI[family], lora, tmp_path / "checkpoints")
    base, whole = (
        _AUTO.from_pretrained(export(source, tmp_path / name, "bf16"), dtype=torch.float32).state_dict()
        for source, name in ((checkpoint.parent / BASE_FOLDER, "base"), (checkpoint, "merged"))
    )
    peft = export(checkpoint, tmp_path / "peft", "peft")
    config = json.loads((peft / "adapter_config.json").read_text())
    entries = load_file(peft / "adapter_model.safetensors")
    assert (peft / "tokenizer.json").read_text() == "{}"
    assert (config["peft_type"], config["r"], config["lora_alpha"]) == ("LORA", lora.rank, lora.alpha)
    changed: set[str] = set()
    for name in [name for name in entries if ".lora_A." in name]:
        path = name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
        if "experts" in path:
            of = path.replace("experts.base_layer", "experts.gate_up_proj")
            of = of if of != path else f"{path}.down_proj"
            assert any(of.endswith(f".{target}") for target in config["target_parameters"])
        else:
            of = f"{path}.weight"
            assert path.rpartition(".")[2] in config["target_modules"]
        a, b = entries[name].float(), entries[name.replace("lora_A", "lora_B")].float()
        expected = base[of] + lora.alpha / lora.rank * delta(a, b, base[of], family is Family.gpt_oss)
        torch.testing.assert_close(whole[of], expected, rtol=U16, atol=1e-6)  # what is merged is stored in bf16
        assert not torch.allclose(whole[of], base[of], rtol=8 * U16)
        changed.add(of)
    for name, value in base.items():
        assert name in changed or torch.equal(whole[name], value), name
    touched = {
        "attention": any("self_attn" in name for name in changed),
        "experts": any(".experts." in name for name in changed),
    }
    assert touched == {part: lora.targets in (LoraTargets.all, part) for part in touched}


@pytest.mark.parametrize("format", ["native", "bf16", "mxfp4"])
def test_merged_weights_are_the_definition_in_every_format(format: str, tmp_path: Path):
    config, lora = MINI[Family.qwen3_moe], EVERY_TARGETS[0]
    checkpoint = write_checkpoint(config, lora, tmp_path / "checkpoints")
    base = load_model(checkpoint.parent / BASE_FOLDER).masters()
    expected = merged(base, load_adapters(checkpoint).masters, lora)
    loaded = load_model(export(checkpoint, tmp_path / format, format))
    assert loaded.weights.keys() == expected.keys()
    published = {name: view(packed) for name, packed in published_view(expected).items()}
    for name, value in loaded.masters().items():
        wanted = {"native": expected[name], "bf16": expected[name].bfloat16().float(), "mxfp4": published[name]}[format]
        assert torch.equal(value, wanted), name


def test_mistakes_are_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    config, lora = MINI[Family.mixtral], EVERY_TARGETS[0]
    checkpoint = write_checkpoint(config, lora, tmp_path / "checkpoints")
    base = checkpoint.parent / BASE_FOLDER

    def refusal(source: Path, format: str) -> str:
        assert main([str(source), str(tmp_path / "dest"), "--format", format]) == 2
        assert not (tmp_path / "dest").exists()
        line = capsys.readouterr().err
        assert line.count("\n") == 1
        return line.strip()

    assert refusal(base, "peft") == (
        f"{base}: must hold adapters for --format peft, got a folder without {ADAPTERS_FILE}; name a checkpoint of a "
        "run with learner.lora.rank"
    )
    base.rename(tmp_path / "elsewhere")
    assert refusal(checkpoint, "bf16") == (
        f"{checkpoint}: its adapters need their base in {base.resolve()}, got no such folder; keep both side by side"
    )
    (tmp_path / "elsewhere").rename(base)
    file = checkpoint / ADAPTERS_FILE
    damaged = bytearray(file.read_bytes())
    damaged[-1] ^= 1
    file.write_bytes(damaged)
    assert "digest must be" in refusal(checkpoint, "peft")

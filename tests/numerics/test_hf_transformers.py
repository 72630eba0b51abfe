"""Published folders against the programs that define them: `transformers` and compressed-tensors' own decoder.

Every comparison is of bytes or of equal values; nothing here has a tolerance.
"""

import fnmatch
import json

import pytest
import torch
import transformers
from compressed_tensors.compressors.mxfp4.base import MXFP4PackedCompressor
from compressed_tensors.quantization import QuantizationConfig
from compressed_tensors.utils.match import is_match
from safetensors.torch import load_file, save_file

from model.checkpoint import load_model
from model.config import Family
from model.export import main
from model.hf.reader import open_hf
from model.hf.writer import HfFormat, save_hf
from model.snapshot import PackedTensor, view
from tests.numerics.transformers_models import mini, write

SEEDS = [0, 1]
PER_EXPERT = [family for family in Family if family is not Family.gpt_oss]
_AUTO = transformers.AutoModelForCausalLM


@pytest.fixture(scope="module", params=[(family, seed) for family in Family for seed in SEEDS], ids=str)
def source(request, tmp_path_factory):
    """A folder that transformers wrote, in several files for odd seeds."""
    family, seed = request.param
    return write(mini(family, seed), tmp_path_factory.mktemp("source"), max_shard_size="40KB" if seed % 2 else "5GB")


def stored(folder):
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


def equal(left, right):
    """Equal names and values; a selection bias may be stored wider."""
    return left.keys() == right.keys() and all(torch.equal(left[name].float(), right[name].float()) for name in left)


def test_what_transformers_wrote_is_written_again_unchanged(source, tmp_path):
    checkpoint = open_hf(source)
    save_hf(tmp_path, checkpoint.config, checkpoint.read(), HfFormat.BF16, max_shard_bytes=50_000)
    assert equal(stored(tmp_path), stored(source))
    assert open_hf(tmp_path).config == checkpoint.config


def test_transformers_loads_our_bf16_export_with_the_same_state(source, tmp_path):
    checkpoint = open_hf(source)
    save_hf(tmp_path, checkpoint.config, checkpoint.read(), HfFormat.BF16, source=checkpoint.folder)
    theirs, report = _AUTO.from_pretrained(tmp_path, dtype=torch.bfloat16, output_loading_info=True)
    assert not any(report.values()), report
    assert equal(theirs.state_dict(), _AUTO.from_pretrained(source, dtype=torch.bfloat16).state_dict())
    before, after = (json.loads((folder / "config.json").read_text()) for folder in (source, tmp_path))
    kept = ("model_type", "bos_token_id", "eos_token_id", "pad_token_id")
    assert [after[key] for key in kept] == [before[key] for key in kept]


def random_mxfp4(folder, seed):
    """Turn the experts of a gpt-oss folder into any bytes at all, code 8 (-0) and the smallest scale included."""
    generator = torch.Generator().manual_seed(seed)
    entries = stored(folder)
    for name in [name for name in entries if name.endswith(("gate_up_proj", "down_proj"))]:
        num_experts, columns, rows = entries.pop(name).shape
        blocks = torch.randint(0, 256, (num_experts, rows, columns // 32, 16), generator=generator).byte()
        scales = torch.randint(0, 200, (num_experts, rows, columns // 32), generator=generator).byte()
        entries |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
    for file in folder.glob("model*"):
        file.unlink()
    save_file(entries, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]}
    (folder / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize("seed", SEEDS)
def test_gpt_oss_mxfp4_bytes_are_unchanged_and_load_in_transformers(tmp_path, seed):
    source, exported = write(mini(Family.gpt_oss, seed), tmp_path / "source"), tmp_path / "exported"
    random_mxfp4(source, seed)
    assert main([str(source), str(exported), "--format", "mxfp4", "--max-shard-bytes", "30000"]) == 0
    before, after = stored(source), stored(exported)
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert all(before[name].dtype == after[name].dtype for name in before)

    quantization = transformers.Mxfp4Config(dequantize=True)
    theirs = _AUTO.from_pretrained(exported, quantization_config=quantization, dtype=torch.bfloat16).state_dict()
    ours = load_model(exported)
    assert all(isinstance(weight, PackedTensor) for weight in ours.weights.values())
    for name, weight in ours.weights.items():
        expected = view(weight)
        if "gate_up_proj" in name:
            gate, up = expected.chunk(2, dim=1)
            expected = torch.stack([gate, up], dim=2).flatten(1, 2)
        if name.endswith(("gate_up_proj", "down_proj")):
            expected = expected.mT
        assert torch.equal(theirs[name].float(), expected), name


@pytest.mark.parametrize("family", PER_EXPERT)
def test_compressed_tensors_decodes_our_experts_to_our_values(family, tmp_path):
    model = mini(family, 0)
    source, exported = write(model, tmp_path / "source"), tmp_path / "exported"
    assert main([str(source), str(exported), "--format", "mxfp4"]) == 0
    quantization = json.loads((exported / "config.json").read_text())["quantization_config"]
    parsed = QuantizationConfig.model_validate(quantization)
    (scheme,) = parsed.config_groups.values()
    entries = stored(exported)

    packed = {name.removesuffix("_packed") for name in entries if name.endswith("_packed")}
    linear = {name for name in stored(source) if name.endswith("_proj.weight") or fnmatch.fnmatch(name, "*.w?.weight")}
    linear |= {name for name in stored(source) if fnmatch.fnmatch(name, "*gate.weight")} | {"lm_head.weight"}
    module = torch.nn.Linear(1, 1)
    targeted = {n for n in linear if is_match(n.removesuffix(".weight"), module, scheme.targets, parsed.ignore)}
    assert targeted == packed
    assert packed

    decoded = {}
    for name in packed:
        parts = {"weight_packed": entries[f"{name}_packed"], "weight_scale": entries[f"{name}_scale"]}
        decoded[name] = MXFP4PackedCompressor.decompress(parts, scheme)["weight"].float()
    (tmp_path / "decoded").mkdir()
    checkpoint = open_hf(exported)
    save_hf(tmp_path / "decoded", checkpoint.config, checkpoint.read(), HfFormat.BF16)
    ours = stored(tmp_path / "decoded")
    assert all(torch.equal(decoded[name], ours[name].float()) for name in packed)


@pytest.mark.parametrize("family", PER_EXPERT)
def test_compressed_tensors_bytes_are_unchanged_by_loading_and_saving(family, tmp_path):
    source, once, twice = write(mini(family, 1), tmp_path / "source"), tmp_path / "once", tmp_path / "twice"
    assert main([str(source), str(once), "--format", "mxfp4"]) == 0
    assert main([str(once), str(twice), "--format", "mxfp4", "--max-shard-bytes", "20000"]) == 0
    before, after = stored(once), stored(twice)
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    expected = load_model(source).packed()
    found = load_model(twice).packed()
    for name, weight in expected.items():
        assert (weight.payload == found[name].payload).all()
        assert (weight.scales == found[name].scales).all()

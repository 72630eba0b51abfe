"""The calibration against direct computation: whole models with one tensor replaced, and known figures."""

import dataclasses
import json
import math
import os
import subprocess
import sys
from itertools import accumulate

import pytest
import torch
import torch.nn.functional as F
import transformers

from model import calibrate
from model.calibration import divergence as divergence_module
from model.calibration import measure as measure_module
from model.calibration.divergence import divergences
from model.calibration.measure import Calibration
from model.calibration.weight_error import quantized, quantized_with_error
from model.checkpoint import save_model
from model.config import Family
from model.mxfp4 import ScaleRule
from model.packed_attention import PackedAttention
from model.snapshot import Format, tensor_format
from model.transformer import Transformer
from tests.numerics.families import MINI, make_model

LENGTHS = (30, 17, 2)
"""Across the windows and YaRN's border of the small models."""


def sequences(seed=1):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(40, (length,), generator=generator) for length in LENGTHS]


def final_hidden(model):
    """Final hidden states of `sequences()` in one ordinary forward."""
    positions_T = torch.cat([torch.arange(length) for length in LENGTHS])
    attend = PackedAttention([0, *accumulate(LENGTHS)])
    return model(torch.cat(sequences()), positions_T, attend).hidden_TD


def targets():
    return torch.cat([torch.cat([ids[1:], torch.tensor([-1])]) for ids in sequences()])


def expert_names(model):
    return [name for name, _ in model.named_parameters() if tensor_format(name) is Format.MXFP4]


def replaced(model, change, names):
    """A copy of the model with `change` applied to some parameters."""
    copy = Transformer(model.config)
    state = model.state_dict()
    copy.load_state_dict({name: change(value) if name in names else value for name, value in state.items()})
    return copy.requires_grad_(False)


def even(weight):
    return quantized(weight, ScaleRule.EVEN, "weight")


def direct(model, other):
    """The divergence of two models by two ordinary forwards."""
    output_VD = model.get_parameter(model.output_name)
    return divergences(output_VD, final_hidden(model), [final_hidden(other)], targets())[0]


@pytest.mark.parametrize("family", MINI)
def test_every_family_equals_whole_models_with_one_tensor_replaced(family):
    """The walk runs the model's own operations in the same order, so the figures are equal to the last bit."""
    model = make_model(MINI[family])
    names = expert_names(model)
    calibration = Calibration(model, sequences(), ScaleRule.EVEN)
    measured = calibration.measure()
    assert [tensor.name for tensor in measured.tensors] == names
    for tensor in measured.tensors:
        assert tensor.kl > 0
        assert tensor.divergence == direct(model, replaced(model, even, {tensor.name})), tensor.name
    for layer in measured.layers:
        both = {name for name in names if name.startswith(f"model.layers.{layer.layer}.")}
        assert layer.divergence == direct(model, replaced(model, even, both))
    assert measured.total == direct(model, replaced(model, even, names)) == calibration.mixture(set())
    assert [layer.layer for layer in measured.layers] == model.config.moe_layers


def test_the_output_error_is_that_of_the_moe_layer():
    model = make_model(MINI[Family.gpt_oss])
    tensor = Calibration(model, sequences(), ScaleRule.EVEN).measure().tensors[0]
    inputs = []
    model.model.layers[0].mlp.register_forward_hook(lambda module, args, output: inputs.append(args[0]))
    final_hidden(model)
    source_TD, changed_TD = (
        each.model.layers[0].mlp(inputs[0])[0] for each in (model, replaced(model, even, {tensor.name}))
    )
    expected = (changed_TD - source_TD).norm() / source_TD.norm()
    assert tensor.output_error == pytest.approx(float(expected), rel=1e-5)  # a norm of 3136 fp32 values
    assert tensor.output_error > 0.01


def test_experts_without_tokens_are_counted():
    """The routes of an ordinary forward, layer by layer."""
    model = make_model(MINI[Family.deepseek_v3])
    positions_T = torch.cat([torch.arange(length) for length in LENGTHS])
    attend = PackedAttention([0, *accumulate(LENGTHS)])
    routes_TLK = model(torch.cat(sequences()), positions_T, attend).routes_TLK
    for number, layer in enumerate(Calibration(model, sequences(), ScaleRule.EVEN).measure().layers):
        counts = routes_TLK[:, number].flatten().long().bincount(minlength=model.config.num_experts)
        assert layer.tokens_of_expert == tuple(counts.tolist())
        assert layer.num_unused == int((counts == 0).sum())


@pytest.mark.parametrize("family", MINI)
def test_a_model_on_the_grid_loses_exactly_nothing(family):
    source = make_model(MINI[family])
    model = replaced(source, even, expert_names(source))
    calibration = Calibration(model, sequences(), ScaleRule.EVEN)
    measured = calibration.measure()
    for found in (*measured.tensors, *measured.layers):
        assert found.output_error == 0.0
        assert (found.divergence.kl_mean, found.divergence.kl_max) == (0.0, 0.0)
        assert found.divergence.loss == found.divergence.source_loss
        assert found.divergence.top1_agreement == 1.0
    for tensor in measured.tensors:
        error = tensor.weight_error
        assert (error.relative_rms, error.saturated_frac, error.zeroed_frac) == (0.0, 0.0, 0.0)
        assert set(error.expert_relative_rms) == {0.0}
    assert measured.total.kl_max == 0.0
    assert calibration.mixture({measured.tensors[0].name}).kl_max == 0.0  # a value of the grid is one of bf16


def hostile(model):
    """A model with one outlier a block in one down projection, and the name of that tensor.

    The outlier meets an activation that is always 0, so the source does not feel it; but it sets the block's scale, and
    every other value of the block becomes 0.
    """
    name = "model.layers.1.mlp.experts.down_proj"
    weights = {key: value.clone() for key, value in model.state_dict().items()}
    weights[name.replace("down", "gate_up")][:, 0] = 0.0  # the gate of neuron 0
    weights[name][..., 0] = 96.0
    copy = Transformer(model.config)
    copy.load_state_dict(weights)
    return copy.requires_grad_(False), name


def test_a_hostile_tensor_is_ranked_first_although_its_weight_error_is_the_least():
    model, name = hostile(make_model(MINI[Family.mixtral]))
    ranked = Calibration(model, sequences(), ScaleRule.EVEN).measure().ranked()
    assert ranked[0].name == name
    assert ranked[0].kl > 2 * ranked[1].kl
    assert ranked[0].output_error == 1.0  # nothing is left of the layer's output
    assert ranked[0].weight_error.zeroed_frac == 31 / 32
    assert ranked[0].weight_error.relative_rms == min(tensor.weight_error.relative_rms for tensor in ranked)


@pytest.mark.parametrize("family", MINI)
def test_keeping_the_worst_tensors_helps(family):
    """The mixture is the whole model with the kept tensors in bf16; with everything kept only bf16's error is left."""
    model = make_model(MINI[family])
    calibration = Calibration(model, sequences(), ScaleRule.EVEN)
    measured = calibration.measure()
    kept = {tensor.name for tensor in measured.ranked()[: len(measured.tensors) // 2]}
    mixture = calibration.mixture(kept)
    quantized_rest = replaced(model, even, set(expert_names(model)) - kept)
    assert mixture == direct(model, replaced(quantized_rest, lambda w: w.bfloat16().float(), kept))
    assert mixture.kl_mean < measured.total.kl_mean
    assert calibration.mixture(set(expert_names(model))).kl_mean < mixture.kl_mean


def test_batches_do_not_matter(monkeypatch):
    """Each sequence in its own batch: other shapes of products, so only fp32's rounding (2^-24, times the depth)."""
    model = make_model(MINI[Family.olmoe])
    together = Calibration(model, sequences(), ScaleRule.EVEN).measure()
    monkeypatch.setattr(measure_module, "_BATCH_TOKENS", 20)
    alone = Calibration(model, sequences(), ScaleRule.EVEN).measure()
    assert alone.total.loss == pytest.approx(together.total.loss, rel=1e-5)
    for one, other in zip(together.tensors, alone.tensors, strict=True):
        assert other.kl == pytest.approx(one.kl, rel=1e-3)
        assert other.output_error == pytest.approx(one.output_error, rel=1e-4)
    assert [one.tokens_of_expert for one in together.layers] == [other.tokens_of_expert for other in alone.layers]


def test_divergence_equals_torchs_definition(monkeypatch):
    generator = torch.Generator().manual_seed(0)
    output_VD, source_TD, first_TD, second_TD = (torch.randn(rows, 8, generator=generator) for rows in (11, 23, 23, 23))
    targets_T = torch.randint(11, (23,), generator=generator)
    targets_T[[5, 22]] = -1
    found = divergences(output_VD, source_TD, [first_TD, second_TD], targets_T)
    source_TV = (source_TD @ output_VD.T).double().log_softmax(-1)
    for hidden_TD, got in zip((first_TD, second_TD), found, strict=True):
        logits_TV = (hidden_TD @ output_VD.T).double()
        kl_T = F.kl_div(logits_TV.log_softmax(-1), source_TV, log_target=True, reduction="none").sum(-1)
        assert got.kl_mean == pytest.approx(float(kl_T.mean()), rel=1e-5)  # fp32 logits, summed in another order
        assert got.kl_max == pytest.approx(float(kl_T.max()), rel=1e-5)
        assert got.loss == pytest.approx(float(F.cross_entropy(logits_TV, targets_T, ignore_index=-1)), rel=1e-6)
        assert got.source_loss == pytest.approx(float(F.nll_loss(source_TV, targets_T, ignore_index=-1)), rel=1e-6)
        assert got.top1_agreement == float((logits_TV.argmax(-1) == source_TV.argmax(-1)).double().mean())
    monkeypatch.setattr(divergence_module, "_CHUNK_VALUES", 5 * 11)
    chunked = divergences(output_VD, source_TD, [first_TD, second_TD], targets_T)
    for got, other in zip(found, chunked, strict=True):
        assert dataclasses.astuple(other) == pytest.approx(dataclasses.astuple(got), rel=1e-5)


@pytest.mark.parametrize(
    ("rule", "decibels", "zeroed"),
    [
        (ScaleRule.EVEN, (18.92, 19.07), (0.09, 0.10)),
        (ScaleRule.FLOOR, (18.57, 18.93), (0.08, 0.08)),
        (ScaleRule.RCEIL, (18.51, 18.77), (0.11, 0.12)),
    ],
)
def test_gaussian_weights_have_the_known_noise(rule, decibels, zeroed):
    """Over an octave of deviations: SQNR within 0.1 dB of its range, zeros (whole percents) on average."""
    generator = torch.Generator().manual_seed(0)
    zeros = []
    for exponent in (0.0, 0.25, 0.5, 0.75):
        weight = torch.randn(4, 64, 2880, generator=generator) * 0.02 * 2**exponent
        _, error = quantized_with_error(weight, rule, "weight")
        assert decibels[0] - 0.1 <= error.sqnr_db <= decibels[1] + 0.1
        assert (error.saturated_frac == 0) is (rule is ScaleRule.RCEIL)
        zeros.append(error.zeroed_frac)
    assert zeroed[0] - 0.005 <= sum(zeros) / len(zeros) <= zeroed[1] + 0.005


def row(text, start):
    """The cells of the first line of a table that starts so."""
    return next(line for line in text.splitlines() if line.startswith(start)).strip("┃│").replace("┃", "│").split("│")


def test_the_program(tmp_path):
    """In a process of its own, on a checkpoint with a hostile tensor."""
    model, name = hostile(make_model(MINI[Family.mixtral]))
    save_model(tmp_path, model.config, dict(model.named_parameters()), {})
    ids = tmp_path / "ids.jsonl"
    ids.write_text("".join(f"{sequence.tolist()}\n" for sequence in sequences()))
    out = tmp_path / "report.json"
    arguments = [str(tmp_path), "--data", str(ids), "--bits", "8.2", "--json", str(out)]
    done = subprocess.run(
        [sys.executable, "-m", "model.calibrate", *arguments],
        capture_output=True, text=True, check=False, timeout=120, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    report = json.loads(out.read_text())
    expected = Calibration(model, sequences(), ScaleRule.EVEN).measure()
    assert [tensor["name"] for tensor in report["tensors"]] == [tensor.name for tensor in expected.ranked()]
    assert report["tensors"][0]["divergence"]["kl_mean"] == pytest.approx(expected.ranked()[0].kl, rel=1e-4)
    assert report["data"]["num_tokens"] == sum(LENGTHS)
    choice = report["choice"]
    assert name in choice["kept"]
    assert 4.25 < choice["bits"] <= 8.2
    assert choice["measured"]["kl_mean"] < report["total"]["kl_mean"]
    assert math.isclose(
        choice["predicted_kl"],
        sum(t["divergence"]["kl_mean"] for t in report["tensors"] if t["name"] not in choice["kept"]),
    )
    assert all(kept in done.stdout for kept in choice["kept"])
    assert [cell.strip() for cell in row(done.stdout, "┃")][:4] == ["", "layer", "tensor", "KL"]
    assert [cell.strip() for cell in row(done.stdout, "│ 1 │")][:3] == ["1", "1", "down_proj"]
    assert "information" in done.stdout


def test_a_checkpoint_of_transformers(tmp_path, capsys):
    """Read as it is published; the loss of the source is the one that transformers computes."""
    torch.manual_seed(0)
    config = transformers.MixtralConfig(
        vocab_size=40, hidden_size=64, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, num_local_experts=4, max_position_embeddings=64, attn_implementation="eager",
    )  # fmt: skip
    transformers.MixtralForCausalLM(config).bfloat16().save_pretrained(tmp_path)
    other = transformers.MixtralForCausalLM.from_pretrained(tmp_path, dtype=torch.float32, attn_implementation="eager")
    ids, out = tmp_path / "ids.jsonl", tmp_path / "report.json"
    ids.write_text("".join(f"{sequence.tolist()}\n" for sequence in sequences()))
    assert calibrate.main([str(tmp_path), "--data", str(ids), "--length", "64", "--keep", "1", "--json", str(out)]) == 0
    report = json.loads(out.read_text())
    with torch.no_grad():
        losses = [F.cross_entropy(other(ids[None]).logits[0, :-1], ids[1:], reduction="sum") for ids in sequences()]
    expected = float(sum(losses)) / sum(length - 1 for length in LENGTHS)
    assert report["total"]["source_loss"] == pytest.approx(expected, rel=1e-5)
    assert report["total"]["kl_mean"] > report["choice"]["measured"]["kl_mean"] > 0
    assert "mixture: " in capsys.readouterr().out

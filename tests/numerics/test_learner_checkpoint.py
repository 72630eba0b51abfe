"""Folders that a learner must not go on from."""

import dataclasses
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from model.checkpoint import save_model
from model.snapshot import published_view
from model.transformer import Transformer, init_weights
from rl.learner.config import CodeRounding, QuantizationConfig
from rl.learner.learner import LearnerError
from rl.learner.published import MissingPublishedError
from tests.numerics import test_learner as common
from tests.numerics.test_learner import MODEL, MakeLearner, masters

start, make = common.start, common.make


def test_a_checkpoint_of_another_model_is_refused(make: MakeLearner, tmp_path: Path):
    other = dataclasses.replace(MODEL, num_experts=8)
    model = Transformer(other)
    init_weights(model, 0)
    save_model(tmp_path, other, dict(model.named_parameters()), {})
    learner = make()
    before = masters(learner)
    with pytest.raises(
        LearnerError, match=r"must be of the model of this run, got ModelConfig\(.*num_experts=8.*; use the"
    ):
        learner.load(tmp_path)
    assert all(torch.equal(before[name], master) for name, master in masters(learner).items())


def test_moments_of_other_parameters_are_refused(make: MakeLearner, tmp_path: Path):
    learner = make()
    learner.update([common.SAMPLES], common.GRPO, common.LR)
    learner.save(tmp_path)
    moments = load_file(tmp_path / "optimizer.safetensors")
    moments["exp_avg/model.other"] = moments.pop("exp_avg/model.norm.weight")
    save_file(moments, tmp_path / "optimizer.safetensors", metadata={"num_steps": "1"})
    with pytest.raises(
        LearnerError, match=r"optimizer\.safetensors must hold the moments of the \d+ trained parameters, "
    ):
        learner.load(tmp_path)


HYSTERESIS = QuantizationConfig(hysteresis=0.25)


def test_a_checkpoint_without_the_bytes_that_the_run_needs_is_refused(make: MakeLearner, tmp_path: Path):
    make().save(tmp_path)
    with pytest.raises(MissingPublishedError) as caught:
        make(quantization=HYSTERESIS).load(tmp_path)
    assert str(caught.value) == (
        f"learner.quantization: needs the published bytes that the checkpoint holds, got {tmp_path.name} without them; "
        "resume with the learner.quantization it was saved with"
    )


@pytest.mark.parametrize("what", ["another model", "masters"])
def test_published_bytes_of_something_else_are_refused(make: MakeLearner, tmp_path: Path, what: str):
    learner = make(quantization=HYSTERESIS)
    learner.save(tmp_path)
    config = MODEL if what == "masters" else dataclasses.replace(MODEL, num_experts=8)
    model = Transformer(config)
    init_weights(model, 0)
    weights = {name: master.detach() for name, master in model.named_parameters()}
    save_model(tmp_path / "published", config, weights if what == "masters" else published_view(weights), {})
    form = "master" if what == "masters" else "published"
    with pytest.raises(MissingPublishedError) as caught:
        learner.load(tmp_path)
    assert str(caught.value) == (
        f"checkpoint {tmp_path.name}: published must hold published bytes of the model of this run, got those of form "
        f"{form} of {config}; use the model settings it was saved with"
    )


def test_published_bytes_that_the_masters_do_not_give_again_are_refused(make: MakeLearner, tmp_path: Path):
    stochastic = QuantizationConfig(rounding=CodeRounding.stochastic)
    make(quantization=stochastic, seed=3).save(tmp_path)
    make(quantization=stochastic, seed=3).load(tmp_path)  # the control
    with pytest.raises(LearnerError) as caught:
        make(quantization=stochastic, seed=4).load(tmp_path)
    assert str(caught.value) == (
        f"checkpoint {tmp_path.name}: published must hold the bytes that its masters give again, got others in "
        "model.layers.0.mlp.experts.gate_up_proj; use the learner.quantization and run.seed it was saved with"
    )

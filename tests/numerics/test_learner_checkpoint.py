"""Folders that a learner must not go on from."""

import dataclasses
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from model.checkpoint import save_model
from model.transformer import Transformer, init_weights
from rl.learner.learner import LearnerError
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

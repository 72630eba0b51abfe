"""The frozen reference of a learner: what it scores, that it never moves, and that it survives a resume."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch

from model.checkpoint import load_model
from model.transformer import Transformer, init_weights
from rl.algorithms.config import AlgorithmConfig
from rl.algorithms.objective import Objective
from rl.algorithms.registry import build_algorithm
from rl.batch import BatchError, TrainSample, pack
from rl.learner.learner import Learner
from rl.learner.reference import MissingReferenceError
from rollout.types import WeightVersion
from tests.numerics import test_learner as shared

start, make = shared.start, shared.make
MakeLearner = shared.MakeLearner
LR, SAMPLES = shared.LR, shared.SAMPLES

KL = AlgorithmConfig(kl_coef=0.1)
WITH_KL = Objective(build_algorithm(KL), KL)


def routed(learner: Learner) -> list[TrainSample]:
    return shared.recorded(learner, SAMPLES)


def scored(learner: Learner, samples: list[TrainSample]) -> list[TrainSample]:
    """As the round does it: the gate's pass, then its scores on the samples."""
    scores = learner.parity(samples).scores
    assert scores.keys() == {each.key for each in samples}
    return [dataclasses.replace(each, scores=scores[each.key]) for each in samples]


def reference_logprobs(learner: Learner, samples: list[TrainSample]) -> dict[str, np.ndarray]:
    found: dict[str, np.ndarray] = {}
    for key, scores in learner.parity(samples).scores.items():
        assert scores.reference_logprobs_R is not None
        found[key] = scores.reference_logprobs_R
    return found


def assert_equal(left: dict[str, np.ndarray], right: dict[str, np.ndarray]) -> None:
    assert left.keys() == right.keys()
    assert all(np.array_equal(left[key], right[key]) for key in left)


def test_at_the_start_policy_and_reference_are_one_and_the_penalty_is_exactly_zero(make: MakeLearner):
    learner = make(reference=True, micro_batch_tokens=40)
    samples = scored(learner, routed(learner))
    for each in samples:
        assert each.scores is not None
        assert each.scores.reference_logprobs_R is not None
        assert np.array_equal(each.scores.reference_logprobs_R, each.scores.proximal_logprobs_R)
    report = learner.update([samples], WITH_KL, LR)
    assert report is not None
    assert report.terms["loss/kl"] == pytest.approx(0.0, abs=1e-9)
    assert report.watched["kl/reference_policy"] == pytest.approx(0.0, abs=1e-9)


def test_the_gates_scores_are_the_learners_own_logprobs(make: MakeLearner):
    learner = make(micro_batch_tokens=40)
    learner.update([SAMPLES], shared.GRPO, LR)
    samples = routed(learner)
    for each, there in zip(scored(learner, samples), samples, strict=True):
        assert each.scores is not None
        assert each.scores.reference_logprobs_R is None
        np.testing.assert_allclose(each.scores.proximal_logprobs_R, there.behavior_logprobs_R, atol=4e-6)


def test_the_reference_does_not_move_and_the_penalty_holds_the_policy_back(make: MakeLearner):
    free, held = make(reference=True), make(reference=True)
    config = AlgorithmConfig(kl_coef=10.0)
    at_start = reference_logprobs(held, routed(held))
    reports = []
    for learner, loss in ((free, shared.GRPO), (held, Objective(build_algorithm(config), config))):
        watched = Objective(build_algorithm(AlgorithmConfig()), AlgorithmConfig())
        for _ in range(4):
            learner.update([scored(learner, routed(learner))], loss, LR)
        reports.append(learner.update([scored(learner, routed(learner))], watched, LR))
    assert_equal(reference_logprobs(held, routed(held)), at_start)
    distances = [report.watched["kl/reference_policy"] for report in reports if report is not None]
    assert distances[0] > 0.01
    assert distances[1] < 0.5 * distances[0]


def test_the_gradient_of_the_penalty_is_that_of_plain_autograd(make: MakeLearner):
    """k2 alone (d grad log policy, importance weight 1): no advantage, so nothing else has a gradient."""
    learner = make(reference=True)
    learner.update([SAMPLES], shared.GRPO, LR)
    flat = [dataclasses.replace(each, advantages_R=np.zeros_like(each.advantages_R)) for each in routed(learner)]
    samples = scored(learner, flat)
    leaves, viewed = shared.straight_through(learner)
    batch = pack(samples)
    model = Transformer(shared.MODEL)
    attend = shared.PackedAttention(batch.cu_seqlens)
    out = torch.func.functional_call(model, viewed, (batch.ids_T, batch.positions_T, attend))
    logits_RV = shared.project_logits(out.hidden_TD[batch.rows_R], viewed["model.embed_tokens.weight"])
    chosen_R = torch.log_softmax(logits_RV, -1)[torch.arange(len(batch.rows_R)), batch.target_ids_R]
    (0.1 * (chosen_R - batch.reference_logprobs_R).square() / 2).mean().backward()
    before, _ = learner._engine.optimizer_state()
    learner.update([samples], WITH_KL, LR)
    after, _ = learner._engine.optimizer_state()
    for name, leaf in leaves.items():
        key = f"exp_avg/{name}"
        gradient = (after[key] - 0.9 * before[key]) / (1 - 0.9)
        assert leaf.grad is not None
        assert shared.relative_error(gradient, leaf.grad) < 2e-4, name  # the moment of before is 100 times as large
        assert leaf.grad.abs().max() > 0, name


def test_a_resumed_learner_keeps_the_reference_and_not_the_checkpoints_policy(make: MakeLearner, tmp_path: Path):
    learner = make(reference=True)
    at_start = learner.snapshot(WeightVersion(0))[0].digests
    learner.update([scored(learner, routed(learner))], WITH_KL, LR)
    samples = routed(learner)
    expected = reference_logprobs(learner, samples)
    learner.save(tmp_path)
    resumed = make(
        reference=True, start=tmp_path
    )  # a run resumes from the checkpoint's folder, whatever became of the start
    resumed.load(tmp_path)
    assert_equal(reference_logprobs(resumed, samples), expected)
    assert any(
        not np.array_equal(each.proximal_logprobs_R, expected[key])
        for key, each in resumed.parity(samples).scores.items()
    )
    for each in (learner, resumed):
        each.update([scored(each, samples)], WITH_KL, LR)
    assert learner.snapshot(WeightVersion(1))[0].digests == resumed.snapshot(WeightVersion(1))[0].digests
    # It is a model folder of its own, with the bytes of version 0.
    stored = load_model(tmp_path / "reference").weights
    digests = {name: shared.digest(name, packed) for name, packed in stored.items()}  # pyright: ignore[reportArgumentType]
    assert digests == at_start


def test_a_checkpoint_without_its_reference_or_of_another_model_is_refused(make: MakeLearner, tmp_path: Path):
    learner, plain = make(reference=True), make()
    (tmp_path / "plain").mkdir()
    plain.save(tmp_path / "plain")
    assert not (tmp_path / "plain" / "reference").exists()
    with pytest.raises(MissingReferenceError, match=r"^algorithm\.kl_coef: needs the reference that the checkpoint "):
        learner.load(tmp_path / "plain")
    (tmp_path / "other").mkdir()
    learner.save(tmp_path / "other")
    other = dataclasses.replace(shared.MODEL, num_experts=8)
    model = Transformer(other)
    init_weights(model, 0)
    shared.save_model(tmp_path / "other" / "reference", other, dict(model.named_parameters()), {})
    with pytest.raises(MissingReferenceError, match=r"^checkpoint other: its reference must be of the model of this"):
        learner.load(tmp_path / "other")


def test_samples_with_and_without_scores_are_not_packed_together(make: MakeLearner):
    learner = make(reference=True)
    samples = scored(learner, routed(learner))
    with pytest.raises(BatchError, match=r"^batch: all samples have a stream or none, got 1 of 2; score them together"):
        pack([samples[0], SAMPLES[1]])

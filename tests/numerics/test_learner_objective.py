"""The additions to a loss inside a learner: importance weights, the entropy bonus, and what they cost when off."""

import dataclasses

import numpy as np
import pytest
import torch

import rl.learner.learner as learner_module
from model.transformer import Transformer
from rl.algorithms.config import AlgorithmConfig, Importance, ImportanceLevel
from rl.algorithms.objective import Objective
from rl.algorithms.registry import build_algorithm
from rl.batch import TrainSample, pack
from rl.learner.learner import Learner
from tests.numerics import test_learner as shared

start, make = shared.start, shared.make
MakeLearner = shared.MakeLearner
LR = shared.LR


def objective(**settings: object) -> Objective:
    config = AlgorithmConfig(**settings)  # pyright: ignore[reportArgumentType]
    return Objective(build_algorithm(config), config)


def on_policy(learner: Learner) -> list[TrainSample]:
    """Sampled by the learner itself: behavior and proximal logprobs are the same numbers."""
    samples = shared.recorded(learner, shared.SAMPLES)
    scores = learner.parity(samples).scores
    return [
        dataclasses.replace(each, scores=scores[each.key], behavior_logprobs_R=scores[each.key].proximal_logprobs_R)
        for each in samples
    ]


@pytest.mark.parametrize("level", ImportanceLevel)
def test_on_policy_a_correction_changes_no_bit(make: MakeLearner, level: ImportanceLevel):
    plain, corrected = make(), make()
    reports = [
        learner.update([on_policy(learner)], loss, LR)
        for learner, loss in (
            (plain, objective()),
            (corrected, objective(importance=Importance.truncate, importance_level=level)),
        )
    ]
    assert reports[1] is not None
    ratio = pytest.approx(1.0, abs=1e-5)  # the gate packs the samples otherwise
    assert reports[1].watched == {"ratio/mean": ratio, "importance/mean": 1.0, "importance/cut_frac": 0.0}
    left, right = shared.masters(plain), shared.masters(corrected)
    assert all(torch.equal(left[name], right[name]) for name in left)


@pytest.mark.parametrize("limit", [70, 37, 1])
def test_micro_batches_change_nothing_with_all_additions(make: MakeLearner, limit: int):
    settings = {
        "kl_coef": 0.1,
        "entropy_coef": 0.05,
        "importance": Importance.mask,
        "importance_level": ImportanceLevel.geometric,
    }
    whole, cut = make(reference=True), make(reference=True, micro_batch_tokens=limit)
    reports = []
    for learner in (whole, cut):
        learner._reference._policy.read(shifted(learner))
        samples = on_policy(learner)
        stale = [
            dataclasses.replace(each, behavior_logprobs_R=each.behavior_logprobs_R + np.float32(0.7 * (i % 3 - 1)))
            for i, each in enumerate(samples)
        ]
        reports.append(learner.update([stale], objective(**settings), LR))
    expected, got = shared.first_gradients(whole), shared.first_gradients(cut)
    for name in expected:
        assert shared.relative_error(got[name], expected[name]) < shared.GRADIENT, name
    for part in ("terms", "watched"):
        values = getattr(reports[0], part)
        assert getattr(reports[1], part) == pytest.approx(values, abs=1e-6)
        assert all(values.values()), "the control: everything takes part"
    assert set(reports[0].terms) == {"loss/kl", "loss/entropy"}


def shifted(learner: Learner) -> dict:
    """The bytes of another policy of the same shape."""
    other = Transformer(shared.MODEL)
    shared.init_weights(other, 11)
    from model.snapshot import published_view

    return published_view(dict(other.named_parameters()), learner._kernels.quantize)


def test_the_gradient_of_the_entropy_bonus_is_that_of_plain_autograd(make: MakeLearner):
    learner = make()
    leaves, viewed = shared.straight_through(learner)
    flat = [
        dataclasses.replace(each, advantages_R=np.zeros_like(each.advantages_R), temperature=0.8)
        for each in shared.SAMPLES
    ]
    batch = pack(flat)
    attend = shared.PackedAttention(batch.cu_seqlens)
    out = torch.func.functional_call(Transformer(shared.MODEL), viewed, (batch.ids_T, batch.positions_T, attend))
    logits_RV = shared.project_logits(out.hidden_TD[batch.rows_R], viewed["model.embed_tokens.weight"])
    entropy = torch.distributions.Categorical(logits=logits_RV / 0.8).entropy().mean()
    (-0.3 * entropy).backward()
    report = learner.update([flat], objective(entropy_coef=0.3), LR)
    assert report is not None
    assert report.terms == {"loss/entropy": pytest.approx(-0.3 * float(entropy.detach()), abs=1e-5)}
    assert report.policy_loss == 0.0
    for name, gradient in shared.first_gradients(learner).items():
        leaf = leaves[name]
        assert leaf.grad is not None
        assert shared.relative_error(gradient, leaf.grad) < shared.GRADIENT, name


def test_without_a_bonus_no_entropy_is_computed(make: MakeLearner, monkeypatch: pytest.MonkeyPatch):
    calls: list[int] = []
    original = learner_module.row_entropies
    monkeypatch.setattr(learner_module, "row_entropies", lambda *arguments: calls.append(1) or original(*arguments))
    learner = make()
    learner.update([shared.SAMPLES], objective(entropy_coef=0.0), LR)
    assert calls == []
    learner.update([shared.SAMPLES], objective(entropy_coef=0.1), LR)
    assert calls == [1]


def test_the_proximal_logprobs_are_those_of_the_routes_that_the_update_replays(make: MakeLearner):
    """Samples of an older router: the ratio is 1 before the first step, although the router would choose others."""
    learner = make(router_replay=True)
    samples = shared.recorded(learner, shared.SAMPLES)
    older = [dataclasses.replace(each, routes_TLK=(each.routes_TLK + 1) % shared.MODEL.num_experts) for each in samples]
    own, replayed = (learner.parity(some).scores for some in (samples, older))
    assert learner.parity(older).num_flipped > 0, "the gate still compares the router's own choice"
    some = [dataclasses.replace(each, scores=replayed[each.key]) for each in older]
    assert all(np.abs(replayed[key].proximal_logprobs_R - own[key].proximal_logprobs_R).max() > 1e-4 for key in own)
    report = learner.update([some], objective(importance=Importance.truncate, importance_cap=100.0), 0.0)
    assert report is not None
    log_ratio = np.concatenate([s.scores.proximal_logprobs_R - s.behavior_logprobs_R for s in some if s.scores])
    advantages = np.concatenate([each.advantages_R for each in some])
    assert report.policy_loss == pytest.approx(-float((np.exp(log_ratio) * advantages).mean()), abs=1e-6)
    assert report.clip_frac == 0.0

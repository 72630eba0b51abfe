"""The value head inside a learner: what it reads, its gradient, its optimizer, and that it survives a resume."""

import dataclasses
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from model.transformer import Transformer, parameter_shapes
from rl.algorithms.config import AlgorithmConfig
from rl.algorithms.registry import build_algorithm
from rl.batch import TrainSample, pack
from rl.learner.learner import Learner
from rl.learner.value_head import ValueHead, ValueHeadError
from rollout.types import WeightVersion
from tests.numerics import test_learner as shared

start, make = shared.start, shared.make
MakeLearner = shared.MakeLearner
LR, VALUE_LR = shared.LR, 0.05
PPO = build_algorithm(AlgorithmConfig(name="ppo", value_coef=0.7))


def credited(learner: Learner, samples: list[TrainSample] | None = None) -> list[TrainSample]:
    """Samples with scores, and with returns of their own."""
    routed = shared.recorded(learner, shared.SAMPLES if samples is None else samples)
    scores = learner.parity(routed).scores
    return [
        dataclasses.replace(
            each,
            scores=scores[each.key],
            returns_R=np.random.default_rng(int(each.key)).normal(1.0, 0.5, len(each.targets_R)).astype(np.float32),
        )
        for each in routed
    ]


def head_of(learner: Learner) -> ValueHead:
    assert learner._value_head is not None
    return learner._value_head


def filled(learner: Learner) -> None:
    """A head that is not 0, so that it has a gradient to give to the trunk."""
    with torch.no_grad():
        head_of(learner).weight.copy_(torch.linspace(-0.3, 0.4, shared.MODEL.hidden_size))
        head_of(learner).bias.fill_(0.25)


def state(learner: Learner) -> dict[str, torch.Tensor]:
    head = head_of(learner)
    moments = {
        f"{moment}/{name}": head._optimizer.state[p][moment]
        for name, p in head.named_parameters()
        if p in head._optimizer.state
        for moment in ("exp_avg", "exp_avg_sq", "step")
    }
    return {name: value.detach().clone() for name, value in [*head.named_parameters(), *moments.items()]}


def test_values_start_at_0_and_belong_to_the_state_before_the_token(make: MakeLearner):
    learner = make(value_lr=VALUE_LR, micro_batch_tokens=40)
    for each in credited(learner):
        assert each.scores is not None
        assert each.scores.values_R is not None
        assert (each.scores.values_R == 0).all()
    filled(learner)
    (each,) = credited(learner, shared.SAMPLES[:1])
    batch = pack([each])
    with torch.no_grad():
        attend = shared.PackedAttention(batch.cu_seqlens)
        out = torch.func.functional_call(
            Transformer(shared.MODEL), shared.published_values(learner), (batch.ids_T, batch.positions_T, attend)
        )
        before_R = out.hidden_TD[torch.from_numpy(each.targets_R - 1)]
        expected = before_R @ head_of(learner).weight + 0.25
    assert each.scores is not None
    np.testing.assert_allclose(each.scores.values_R, expected, atol=1e-5)


def test_the_gradients_of_head_and_trunk_are_those_of_plain_autograd(make: MakeLearner):
    learner = make(value_lr=VALUE_LR)
    filled(learner)
    flat = [dataclasses.replace(each, advantages_R=np.zeros_like(each.advantages_R)) for each in credited(learner)]
    leaves, viewed = shared.straight_through(learner)
    weight, bias = (p.detach().clone().requires_grad_() for p in head_of(learner).parameters())
    batch = pack(flat)
    attend = shared.PackedAttention(batch.cu_seqlens)
    out = torch.func.functional_call(Transformer(shared.MODEL), viewed, (batch.ids_T, batch.positions_T, attend))
    values_R = out.hidden_TD[batch.rows_R] @ weight + bias
    loss = 0.7 * (values_R - batch.returns_R).square().mean() / 2  # at the old values, the clip is the identity
    loss.backward()
    report = learner.update([flat], PPO, LR)
    assert report is not None
    assert report.policy_loss == 0.0
    assert report.terms == {"loss/value": pytest.approx(float(loss.detach()), rel=1e-4)}
    # The unembedding has no part in it; it is tied to the embedding here, which has one.
    for name, gradient in shared.first_gradients(learner).items():
        leaf = leaves[name]
        assert leaf.grad is not None
        assert shared.relative_error(gradient, leaf.grad) < 4 * shared.GRADIENT, name
        assert leaf.grad.abs().max() > 0, name
    for name, leaf in (("weight", weight), ("bias", bias)):
        assert leaf.grad is not None
        assert shared.relative_error(state(learner)[f"exp_avg/{name}"] / 0.1, leaf.grad) < 4 * shared.GRADIENT, name


def test_the_first_step_moves_the_head_by_its_own_learning_rate_and_a_trunk_of_rate_0_not_at_all(make: MakeLearner):
    learner = make(value_lr=VALUE_LR)
    before = shared.masters(learner)
    learner.update([credited(learner)], PPO, 0.0)
    moved = state(learner)["weight"].abs()
    torch.testing.assert_close(moved, torch.full_like(moved, VALUE_LR), rtol=1e-3, atol=0)
    assert all(torch.equal(before[name], master) for name, master in shared.masters(learner).items())


def test_values_learn_their_returns(make: MakeLearner):
    learner = make(value_lr=VALUE_LR)
    losses = []
    for _ in range(30):
        report = learner.update([credited(learner)], PPO, 0.0)
        assert report is not None
        losses.append(report.terms["loss/value"])
    assert losses[-1] < 0.4 * losses[0]


@pytest.mark.parametrize("limit", [70, 37, 1])
def test_micro_batches_change_nothing(make: MakeLearner, limit: int):
    whole, cut = make(value_lr=VALUE_LR), make(value_lr=VALUE_LR, micro_batch_tokens=limit)
    for learner in (whole, cut):
        filled(learner)
    samples = credited(whole)
    reports = [learner.update([samples], PPO, LR) for learner in (whole, cut)]
    expected, got = shared.first_gradients(whole), shared.first_gradients(cut)
    for name in expected:
        assert shared.relative_error(got[name], expected[name]) < shared.GRADIENT, name
    for name, value in state(whole).items():
        torch.testing.assert_close(state(cut)[name], value, rtol=1e-4, atol=1e-6)
    assert reports[0] is not None
    assert reports[1] is not None
    assert reports[1].terms == {"loss/value": pytest.approx(reports[0].terms["loss/value"], abs=1e-6)}


def test_what_follows_the_last_answer_changes_neither_loss_nor_gradient(make: MakeLearner):
    """An observation that no later answer reads."""
    low = np.random.default_rng(0).integers(0, 20, 24)
    results = []
    for tail in (np.arange(20, 28), np.arange(30, 38)):
        learner = make(value_lr=VALUE_LR)
        filled(learner)
        ids = np.concatenate([low[:16], tail])
        (each,) = credited(learner, [shared.sample(0, 24, ids=ids, targets=range(8, 16))])
        report = learner.update([[each]], PPO, LR)
        assert report is not None
        results.append(
            (report.terms["loss/value"], report.policy_loss, shared.first_gradients(learner), state(learner))
        )
    assert results[0][:2] == pytest.approx(results[1][:2], abs=1e-6)
    name = "model.layers.0.self_attn.q_proj.weight"
    assert shared.relative_error(results[1][2][name], results[0][2][name]) < shared.GRADIENT
    torch.testing.assert_close(results[0][3], results[1][3], rtol=1e-4, atol=1e-6)


def test_the_head_is_not_published_and_no_part_of_the_model_folder(make: MakeLearner, tmp_path: Path):
    learner = make(value_lr=VALUE_LR)
    snapshot, _ = learner.snapshot(WeightVersion(0))
    assert snapshot.tensors.keys() == parameter_shapes(shared.MODEL).keys()
    learner.save(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "config.json", "model.safetensors", "optimizer.safetensors", "value_head.safetensors"
    ]  # fmt: skip


CONTINUE = """
import sys, json, torch
from pathlib import Path
torch.set_num_threads(1)
from tests.numerics import test_learner as t
from rl.learner.balance import BalanceSettings
from tests.numerics import test_value_head as v
spec = t.LearnerSpec(
    model=t.MODEL, start=Path(sys.argv[3]), num_threads=1, micro_batch_tokens=10_000,
    balance=BalanceSettings(load_balance_coef=0.01), value_lr=v.VALUE_LR,
    optimizer=t.OptimizerSettings(beta1=0.9, beta2=0.95, weight_decay=0.1, max_grad_norm=0.5, zero_stage=1),
)
learner = t.Learner(spec, t.Rendezvous(rank=0, world_size=1, address="127.0.0.1", port=int(sys.argv[2])))
learner.load(Path(sys.argv[1]))
samples = v.credited(learner)
learner.update([samples[:4], samples[4:]], v.PPO, t.LR)
out = Path(sys.argv[4])
out.mkdir()
learner.save(out)
learner.close()
"""


def test_a_fresh_process_goes_on_to_the_last_bit(make: MakeLearner, start: Path, tmp_path: Path):
    learner = make(value_lr=VALUE_LR, load_balance_coef=0.01, weight_decay=0.1, max_grad_norm=0.5)
    samples = credited(learner)
    learner.update([samples[4:], samples[:4]], PPO, LR)
    saved, here, there = tmp_path / "saved", tmp_path / "here", tmp_path / "there"
    for folder in (saved, here):
        folder.mkdir()
    learner.save(saved)
    samples = credited(learner)
    learner.update([samples[:4], samples[4:]], PPO, LR)
    learner.save(here)
    subprocess.run(
        [sys.executable, "-c", CONTINUE, str(saved), str(shared.free_port()), str(start), str(there)],
        check=True, capture_output=True, text=True, timeout=200,
    )  # fmt: skip
    for name in ("model.safetensors", "optimizer.safetensors", "value_head.safetensors"):
        assert (there / name).read_bytes() == (here / name).read_bytes(), name
    assert (saved / "value_head.safetensors").read_bytes() != (here / "value_head.safetensors").read_bytes()


def test_loading_into_a_used_learner_forgets_what_its_head_did(make: MakeLearner, tmp_path: Path):
    learner, fresh = make(value_lr=VALUE_LR), make(value_lr=VALUE_LR)
    learner.save(tmp_path)
    learner.update([credited(learner)], PPO, LR)
    learner.load(tmp_path)
    for each in (learner, fresh):
        each.update([credited(each)], PPO, LR)
    left, right = state(learner), state(fresh)
    assert left.keys() == right.keys()
    assert all(torch.equal(left[name], right[name]) for name in left)


def test_a_checkpoint_without_a_head_or_with_another_models_is_refused(make: MakeLearner, tmp_path: Path):
    make().save(tmp_path)
    with pytest.raises(ValueHeadError, match=r"must hold the value head of the run, got no value_head\.safetensors; "):
        make(value_lr=VALUE_LR).load(tmp_path)
    ValueHead(8, lr=1.0, beta1=0.9, beta2=0.9, max_grad_norm=1.0).save(tmp_path)
    with pytest.raises(ValueHeadError, match=r"its value head must read 32 numbers, got 8; use the model settings"):
        make(value_lr=VALUE_LR).load(tmp_path)

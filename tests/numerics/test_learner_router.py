"""What a learner does with its routers: replay, the scopes of the balance loss, the bias update without a loss."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch

from model.checkpoint import save_model
from model.config import RouterScores
from model.transformer import Transformer, init_weights
from rl.algorithms.config import BalanceScope
from rl.batch import TrainSample
from rl.learner.balance import BalanceSettings
from rl.learner.deepspeed import OptimizerSettings, Rendezvous
from rl.learner.learner import Learner, LearnerError, LearnerSpec
from tests.numerics import test_learner as common
from tests.numerics.test_learner import (
    GRADIENT,
    GRPO,
    LR,
    MODEL,
    SAMPLES,
    MakeLearner,
    first_gradients,
    free_port,
    masters,
    reference_loss,
    straight_through,
)
from tests.numerics.tolerances import relative_error

start, make = common.start, common.make


def routed(samples: list[TrainSample], seed: int = 0) -> list[TrainSample]:
    """The samples with recorded routes that no router would choose."""
    rng = np.random.default_rng(seed)
    layers, top_k = len(MODEL.moe_layers), MODEL.num_experts_per_tok

    def routes(sample: TrainSample) -> np.ndarray:
        rows = [rng.permutation(MODEL.num_experts)[:top_k] for _ in range(layers * (sample.num_tokens - 1))]
        return np.array(rows, np.uint8).reshape(-1, layers, top_k)

    return [dataclasses.replace(one, routes_TLK=routes(one)) for one in samples]


def test_replay_trains_the_recorded_experts_with_the_routers_weights_of_now(make: MakeLearner):
    samples = routed(SAMPLES)
    learner = make(router_replay=True, load_balance_coef=0.5, router_z_coef=0.25, scope=BalanceScope.global_batch)
    leaves, viewed = straight_through(learner)
    loss = reference_loss(viewed, samples, 0.5, 0.25, replay=True)
    loss.backward()
    report = learner.update([samples], GRPO, LR)
    for name, gradient in first_gradients(learner).items():
        assert leaves[name].grad is not None
        assert relative_error(gradient, leaves[name].grad) < GRADIENT, name
    assert report is not None
    counts_LE = np.zeros((2, 4))
    for one in samples:
        for layer in range(2):
            counts_LE[layer] += np.bincount(one.routes_TLK[: one.num_inputs, layer].reshape(-1), minlength=4)
    np.testing.assert_allclose(report.expert_load_LE, counts_LE / counts_LE.sum(-1, keepdims=True))
    # The routers' own choice is another one, and so is its gradient.
    free = make(load_balance_coef=0.5, router_z_coef=0.25, scope=BalanceScope.global_batch)
    free.update([samples], GRPO, LR)
    gate_up = "model.layers.0.mlp.experts.gate_up_proj"
    assert relative_error(first_gradients(free)[gate_up], leaves[gate_up].grad) > 0.1
    assert first_gradients(learner)["model.layers.0.mlp.router.weight"].abs().max() > 0


@pytest.mark.parametrize("shape", [(0, 0, 0), (3, 2, 2), (30, 1, 2), (30, 2, 1)])
def test_replay_without_routes_for_every_token_and_layer_is_refused(make: MakeLearner, shape: tuple[int, ...]):
    learner = make(router_replay=True)
    bad = dataclasses.replace(SAMPLES[0], routes_TLK=np.zeros(shape, np.uint8))
    before = masters(learner)
    with pytest.raises(LearnerError, match=r"^router replay: sample 000 needs the routes of 10 tokens in 2 layers, "):
        learner.update([[*routed(SAMPLES[1:]), bad]], GRPO, LR)
    assert all(torch.equal(before[name], master) for name, master in masters(learner).items())


@pytest.mark.parametrize("replay", [False, True])
@pytest.mark.parametrize("scope", list(BalanceScope))
def test_the_balance_loss_of_a_minibatch_does_not_depend_on_its_cut(make: MakeLearner, replay: bool, scope):
    """But with the scope micro_batch, which is why it is not the default."""
    samples = routed(SAMPLES)
    settings = {"router_replay": replay, "load_balance_coef": 0.5, "router_z_coef": 0.25, "scope": scope}
    whole, cut = make(**settings), make(**settings, micro_batch_tokens=37)
    reports = [learner.update([samples], GRPO, LR) for learner in (whole, cut)]
    expected, got = first_gradients(whole), first_gradients(cut)
    worst = max(relative_error(got[name], expected[name]) for name in expected)
    assert (worst < GRADIENT) is (scope is not BalanceScope.micro_batch)
    same_loss = reports[0].balance_loss == pytest.approx(reports[1].balance_loss, rel=1e-6)
    assert same_loss is (scope is not BalanceScope.micro_batch)
    assert reports[0].router_z_loss == pytest.approx(reports[1].router_z_loss, rel=1e-6)


def test_the_bias_update_moves_every_routers_bias_against_its_load_and_is_published(tmp_path: Path):
    model = dataclasses.replace(MODEL, router_scores=RouterScores.sigmoid, router_selection_bias=True)
    transformer = Transformer(model)
    init_weights(transformer, 3)
    save_model(tmp_path, model, dict(transformer.named_parameters()), {})
    spec = LearnerSpec(
        model=model, start=tmp_path, num_threads=1, micro_batch_tokens=37,
        optimizer=OptimizerSettings(beta1=0.9, beta2=0.95, weight_decay=0.0, max_grad_norm=1e9, zero_stage=1),
        balance=BalanceSettings(bias_update_speed=0.125),
    )  # fmt: skip
    learner = Learner(spec, Rendezvous(rank=0, world_size=1, address="127.0.0.1", port=free_port()))
    names = [f"model.layers.{layer}.mlp.router.selection_bias" for layer in range(2)]
    before = masters(learner)
    report = learner.update([SAMPLES], GRPO, LR)
    assert report is not None
    for layer, name in enumerate(names):
        load_E = torch.from_numpy(report.expert_load_LE[layer])
        expected = before[name] + 0.125 * torch.sign(load_E.mean() - load_E).float()
        torch.testing.assert_close(masters(learner)[name], expected, rtol=0, atol=0)
        assert expected.abs().max() > 0
        assert torch.equal(learner._policy._views[name], expected)

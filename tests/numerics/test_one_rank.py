"""A learner of one rank, which DeepSpeed runs without ZeRO, against the same learner with ZeRO: the same bits."""

from typing import Any

import pytest
import torch

import rl.learner.learner as learner_module
from rl.learner.deepspeed import DeepSpeedEngine, OneRankEngine, global_norm
from rl.learner.learner import Learner
from tests.numerics.test_learner import GRPO, LR, SAMPLES, MakeLearner, make, masters, start

__all__ = ["make", "start"]  # fixtures

STEPS = [SAMPLES[:3], SAMPLES[3:5], SAMPLES[5:]]


@pytest.fixture(params=[1, 2])
def zero_stage(request: pytest.FixtureRequest) -> int:
    return request.param


def with_zero(make: MakeLearner, monkeypatch: pytest.MonkeyPatch, **changes: Any) -> Learner:
    with monkeypatch.context() as patch:
        patch.setattr(learner_module, "make_engine", DeepSpeedEngine)
        learner = make(**changes)
    assert type(learner._engine) is DeepSpeedEngine
    return learner


@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize("limit", [1e9, 0.05])
def test_steps_are_those_of_zero(
    make: MakeLearner, monkeypatch: pytest.MonkeyPatch, zero_stage: int, limit: float, offload: bool
):
    settings: dict[str, Any] = {"max_grad_norm": limit, "micro_batch_tokens": 30, "weight_decay": 0.1}
    alone = make(**settings)
    partitioned = with_zero(make, monkeypatch, **settings, zero_stage=zero_stage, offload=offload)
    assert type(alone._engine) is OneRankEngine
    reports = [learner.update(STEPS, GRPO, LR) for learner in (alone, partitioned)]
    assert reports[0] is not None
    assert reports[1] is not None
    assert reports[0].grad_norm == pytest.approx(reports[1].grad_norm, rel=1e-6)
    (moments, num_steps), (expected, _) = (learner._engine.optimizer_state() for learner in (alone, partitioned))
    assert num_steps == len(STEPS)
    for ours, theirs in ((masters(alone), masters(partitioned)), (moments, expected)):
        assert ours.keys() == theirs.keys()
        for name, tensor in theirs.items():
            if limit > 1:
                assert torch.equal(ours[name], tensor), name
            else:  # two norms: their last bits scale every gradient, and AdamW divides by what it sums of them
                torch.testing.assert_close(ours[name], tensor, rtol=1e-5, atol=1e-7)


def test_a_parameter_without_a_gradient_decays_as_in_a_partition(make: MakeLearner, monkeypatch: pytest.MonkeyPatch):
    alone, partitioned = (build(weight_decay=0.1) for build in (make, lambda **k: with_zero(make, monkeypatch, **k)))
    for learner in (alone, partitioned):
        learner.update([SAMPLES[:3]], GRPO, LR)
        router = next(name for name in learner._engine.trained if "router" in name)
        weight = learner._engine.trained[router]
        learner._engine.backward((weight * weight).sum())
        learner._engine.step(LR)
    ours, theirs = masters(alone), masters(partitioned)
    assert all(torch.equal(ours[name], tensor) for name, tensor in theirs.items())


@pytest.mark.parametrize("shapes", [[(1,)], [(3, 5), (4096,)], [(4097,), (8192,), (3, 70, 91)], [(5000,), ()]])
def test_the_global_norm_is_that_of_all_elements(shapes: list[tuple[int, ...]]):
    generator = torch.Generator().manual_seed(1)
    grads = [torch.randn(shape, generator=generator) * 10.0 ** (3 * i - 3) for i, shape in enumerate(shapes)]
    expected = torch.cat([grad.double().reshape(-1) for grad in grads]).norm()
    assert global_norm(grads) == pytest.approx(float(expected), rel=1e-6)
    assert global_norm([grad.t() if grad.dim() == 2 else grad for grad in grads]) == pytest.approx(
        float(expected), rel=1e-6
    )


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_the_global_norm_of_what_is_not_finite_is_not(bad: float):
    grad = torch.ones(5000)
    grad[4999] = bad
    assert not torch.tensor(global_norm([torch.ones(3), grad])).isfinite()


def test_one_rank_holds_no_copy_of_the_masters(make: MakeLearner):
    learner = make()
    learner.update([SAMPLES], GRPO, LR)
    parameters = {id(parameter) for parameter in learner._engine.trained.values()}
    groups = learner._engine._adamw.param_groups
    assert {id(tensor) for group in groups for tensor in group["params"]} == parameters

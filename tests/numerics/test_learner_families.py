"""Every family goes through the same engine and the same learner: sample, gate, update, publish, sample again."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch

from model.checkpoint import save_model
from model.config import ComputeDtype, Family, KernelChoice, ModelConfig
from model.kernels.cpu.isa import available_isas
from model.kernels.dispatch import resolve_kernels
from rl.algorithms.grpo import Grpo
from rl.algorithms.surrogate import Clip
from rl.batch import TrainSample
from rl.learner.balance import BalanceSettings
from rl.learner.deepspeed import OptimizerSettings, Rendezvous
from rl.learner.learner import Learner, LearnerSpec
from rl.parity import BOUNDS, EXACT
from rollout.config import EngineConfig
from rollout.engine.engine import Engine
from rollout.types import SampleRequest, SamplingParams, WeightVersion
from tests.numerics.families import MINI, make_model
from tests.ports import free_port

pytestmark = pytest.mark.usefixtures("own_environment")

GRPO = Grpo(clip=Clip(0.2, 0.28), normalize=False)
NUM_SAMPLES, PROMPT, ANSWER = 6, 12, 16


def make_learner(config: ModelConfig, start: Path, kernels: KernelChoice = KernelChoice.auto) -> Learner:
    optimizer = OptimizerSettings(beta1=0.9, beta2=0.95, weight_decay=0.0, max_grad_norm=1.0, zero_stage=1)
    spec = LearnerSpec(
        model=config, optimizer=optimizer, start=start, num_threads=1, micro_batch_tokens=60,
        balance=BalanceSettings(load_balance_coef=0.01, router_z_coef=0.001), kernels=kernels, router_replay=True,
    )  # fmt: skip
    return Learner(spec, Rendezvous(rank=0, world_size=1, address="127.0.0.1", port=free_port()))


def write_start(config: ModelConfig, folder: Path) -> Path:
    folder.mkdir()
    save_model(folder, config, dict(make_model(config).named_parameters()), {})
    return folder


def publish(learner: Learner, engine: Engine, config: ModelConfig, version: int) -> None:
    snapshot, _ = learner.snapshot(WeightVersion(version))
    engine.swap_weights(snapshot.version, snapshot.tensors)


def sampled(engine: Engine, version: int) -> list[TrainSample]:
    """Answers to random prompts, as a rollout records them; advantages of both signs."""
    rng = np.random.default_rng(version)
    requests = [
        SampleRequest(
            session=100 * version + i,
            prompt_ids=tuple(rng.integers(0, 40, PROMPT + i).tolist()),
            params=SamplingParams(max_tokens=ANSWER),
            seed=i,
        )
        for i in range(NUM_SAMPLES)
    ]
    samples = []
    for i, (request, generation) in enumerate(zip(requests, engine.sample(requests), strict=True)):
        engine.close_session(request.session)
        ids = np.array(request.prompt_ids + generation.ids)
        samples.append(
            TrainSample(
                key=f"{i}",
                ids_T=ids,
                targets_R=np.arange(len(request.prompt_ids), len(ids)),
                behavior_logprobs_R=generation.logprobs_T,
                advantages_R=np.full(ANSWER, (-1.0) ** i, np.float32),
                routes_TLK=generation.routes_TLK,
                weight_version=version,
                trained=True,
            )
        )
    return samples


@pytest.mark.parametrize("family", Family)
def test_two_rounds_of_grpo_pass_the_parity_gate_and_move_every_trained_tensor(family: Family, tmp_path: Path):
    config = MINI[family]
    learner = make_learner(config, write_start(config, tmp_path / "start"))
    engine = Engine(config, EngineConfig(max_batch_size=NUM_SAMPLES, max_seq_len=64), stop_ids=())
    before = {name: p.detach().clone() for name, p in learner._policy.model.named_parameters()}
    for version in range(2):
        publish(learner, engine, config, version)
        samples = sampled(engine, version)
        report = learner.parity(samples)
        assert report.num_tokens == NUM_SAMPLES * ANSWER
        assert report.violation(BOUNDS[config.compute_dtype]) is None
        assert report.num_flipped == 0
        assert report.max_abs_nats == 0.0 or not engine.batch_invariant
        update = learner.update([samples], GRPO, 1e-3)
        assert update is not None
        assert update.expert_load_LE.shape == (len(config.moe_layers), config.num_experts)
    for name, parameter in learner._policy.model.named_parameters():
        moved = not torch.equal(parameter, before[name])
        assert moved == parameter.requires_grad, name
    assert {n for n, p in learner._policy.model.named_parameters() if not p.requires_grad} == {
        n for n in before if n.endswith("selection_bias")
    }


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ComputeDtype)
@pytest.mark.parametrize("kernels", [KernelChoice(isa.value) for isa in available_isas()])
@pytest.mark.parametrize("family", Family)
def test_rounds_without_any_difference(family: Family, kernels: KernelChoice, dtype: ComputeDtype, tmp_path: Path):
    config = dataclasses.replace(MINI[family], compute_dtype=dtype)
    learner = make_learner(config, write_start(config, tmp_path / "start"), kernels)
    engine = Engine(
        config, EngineConfig(max_batch_size=4, max_seq_len=64), stop_ids=(), kernels=resolve_kernels(kernels)
    )
    is_best = kernels.value == available_isas()[-1].value
    for version in range(20 if is_best else 3):
        publish(learner, engine, config, version)
        samples = sampled(engine, version)
        assert learner.parity(samples).violation(EXACT) is None, version
        assert learner.update([samples], GRPO, 1e-2) is not None


@pytest.mark.parametrize("family", Family)
def test_fitting_lowers_the_loss_and_the_state_comes_back_to_the_last_bit(family: Family, tmp_path: Path):
    config = MINI[family]
    learner = make_learner(config, write_start(config, tmp_path / "start"))
    engine = Engine(config, EngineConfig(max_batch_size=NUM_SAMPLES, max_seq_len=64), stop_ids=())
    publish(learner, engine, config, 0)
    samples = sampled(engine, 0)
    losses = [learner.fit(samples, 1e-2) for _ in range(12)]
    assert losses[-1] < 0.7 * losses[0]
    saved = tmp_path / "saved"
    saved.mkdir()
    learner.save(saved)
    expected = [learner.fit(samples, 1e-2) for _ in range(2)]
    other = make_learner(config, tmp_path / "start")
    other.load(saved)
    assert [other.fit(samples, 1e-2) for _ in range(2)] == expected
    assert other.digests() == learner.digests()


def test_routes_of_more_than_256_experts_are_kept_whole(tmp_path: Path):
    config = dataclasses.replace(MINI[Family.mixtral], num_experts=300, num_layers=1, window_layers=[0])
    learner = make_learner(config, write_start(config, tmp_path / "start"))
    engine = Engine(config, EngineConfig(max_batch_size=NUM_SAMPLES, max_seq_len=64), stop_ids=())
    publish(learner, engine, config, 0)
    samples = sampled(engine, 0)
    assert max(int(each.routes_TLK.max()) for each in samples) > 255
    assert learner.parity(samples).num_flipped == 0

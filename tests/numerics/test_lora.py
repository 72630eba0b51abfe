"""Adapters against the definition: the model whose matrices are `W + s B A`, in plain torch, forward and gradient."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
import torch

from model.adapter_file import ADAPTERS_FILE, BASE_FOLDER
from model.checkpoint import load_model, save_model
from model.config import ComputeDtype, Family, KernelChoice, LoraConfig, LoraTargets, ModelConfig
from model.kernels.cpu.isa import available_isas
from model.kernels.dispatch import resolve_kernels
from model.loaded import CheckpointError, Form, LoadedModel
from model.lora import adapted_name, adapter_shapes, initial_adapters, merged
from model.packed_attention import PackedAttention
from model.parallel.groups import Ranks
from model.size import num_adapter_parameters
from model.snapshot import SnapshotError, WeightSnapshot, published_view, view
from model.transformer import Transformer, parameter_shapes
from rl.batch import TrainSample, pack
from rl.learner.balance import BalanceSettings
from rl.learner.deepspeed import MOMENTS, OptimizerSettings, Rendezvous
from rl.learner.learner import Learner, LearnerSpec
from rl.learner.lora import AdapterPolicy
from rl.parity import BOUNDS, EXACT
from rollout.config import EngineConfig
from rollout.engine.engine import Engine
from rollout.subscribe import Subscriber
from rollout.types import WeightVersion
from tests.numerics.families import MINI, make_model
from tests.numerics.test_learner_families import ANSWER, GRPO, NUM_SAMPLES, sampled, write_start
from tests.numerics.tolerances import TRANSFORMER_PACKING, relative_error, summed
from tests.ports import free_port

pytestmark = pytest.mark.usefixtures("own_environment")

LORA = LoraConfig(rank=4, alpha=8.0)
EVERY_TARGETS = [LoraConfig(rank=4, alpha=8.0, targets=targets) for targets in LoraTargets]

GRADIENT = 4 * 8 * summed(128)
"""At most 4 layers of 8 chained products, forward and backward, of sums of at most 128 terms; B A is one matrix or two
products."""


def random_adapters(config: ModelConfig, lora: LoraConfig) -> dict[str, torch.Tensor]:
    """Adapters that have learned something: B is as large as A. Values that bf16 holds."""
    generator = torch.Generator().manual_seed(7)
    masters = initial_adapters(config, lora, 3)
    for name, master in masters.items():
        if name.endswith(".B"):
            master.normal_(0.0, 0.2, generator=generator)
    return {name: master.bfloat16().float() for name, master in masters.items()}


def policy_with(config: ModelConfig, lora: LoraConfig, kernels: KernelChoice, masters: dict[str, torch.Tensor]):
    """A policy of these adapters on a mini model, and the values of its base."""
    base = published_view({name: p.detach() for name, p in make_model(config).named_parameters()})
    policy = AdapterPolicy(config, resolve_kernels(kernels), Ranks(), lora, 0)
    policy.own_masters(LoadedModel(config=config, form=Form.PUBLISHED, weights=base, metadata={}))
    with torch.no_grad():
        for name, parameter in policy.masters().items():
            parameter.copy_(masters[name])
    policy.refresh()
    return policy, {name: view(packed) for name, packed in base.items()}


def some_samples(config: ModelConfig) -> list[TrainSample]:
    rng = np.random.default_rng(5)
    samples: list[TrainSample] = []
    for number, length in enumerate((9, 14, 6)):
        targets_R = np.arange(3, length)
        zeros_R = np.zeros(len(targets_R), np.float32)
        samples.append(
            TrainSample(
                key=f"{number}", ids_T=rng.integers(0, config.vocab_size, length), targets_R=targets_R,
                behavior_logprobs_R=zeros_R, advantages_R=zeros_R, routes_TLK=np.zeros((0, 0, 0), np.uint8),
                weight_version=0, trained=True,
            )
        )  # fmt: skip
    return samples


@pytest.mark.parametrize("kernels", [KernelChoice.auto, KernelChoice.torch])
@pytest.mark.parametrize("lora", EVERY_TARGETS, ids=lambda lora: lora.targets.value)
@pytest.mark.parametrize("family", Family)
def test_forward_and_gradient_are_those_of_the_merged_matrices(family: Family, lora: LoraConfig, kernels: KernelChoice):
    config = MINI[family]
    masters = random_adapters(config, lora)
    policy, base = policy_with(config, lora, kernels, masters)
    batch = pack(some_samples(config))
    out = policy(batch)
    upstream_RD = torch.randn(out.hidden_RD.shape, generator=torch.Generator().manual_seed(1))
    (out.hidden_RD * upstream_RD).sum().backward()

    leaves = {name: master.clone().requires_grad_() for name, master in masters.items()}
    definition = Transformer(config, experts="reference")
    attend = PackedAttention(batch.cu_seqlens)
    inputs = (batch.ids_T, batch.positions_T, attend, out.routes_TLK)
    expected = torch.func.functional_call(definition, merged(base, leaves, lora), inputs)
    (expected.hidden_TD[batch.rows_R] * upstream_RD).sum().backward()

    assert relative_error(out.hidden_RD.detach(), expected.hidden_TD[batch.rows_R].detach()) < TRANSFORMER_PACKING
    assert policy.masters().keys() == leaves.keys() == adapter_shapes(config, lora).keys()
    for name, leaf in leaves.items():
        grad, expected_grad = policy.masters()[name].grad, leaf.grad
        assert grad is not None
        assert expected_grad is not None
        assert relative_error(grad, expected_grad) < GRADIENT, name
        assert expected_grad.abs().max() > 0, name
    # The control: the adapters matter, far beyond the tolerance.
    alone = torch.func.functional_call(definition, base, inputs).hidden_TD[batch.rows_R]
    assert relative_error(alone, out.hidden_RD.detach()) > 0.05


def test_only_the_adapters_are_parameters_and_every_adapted_name_is_one_of_the_model():
    for family in Family:
        config = MINI[family]
        shapes = parameter_shapes(config)
        found = adapter_shapes(config, LORA)
        for name, shape in found.items():
            whole = shapes[adapted_name(name)]
            assert shape == ((*whole[:-2], 4, whole[-1]) if name.endswith(".A") else (*whole[:-1], 4)), name
        adapted = {adapted_name(name).rpartition("layers.")[2].partition(".")[2] for name in found}
        assert {"mlp.experts.gate_up_proj", "mlp.experts.down_proj", "self_attn.o_proj.weight"} <= adapted
        assert not any(part in name for name in adapted for part in ("router", "norm", "kv_b_proj", "bias", "shared"))
        policy = AdapterPolicy(config, resolve_kernels(KernelChoice.auto), Ranks(), LORA, 0)
        assert sum(p.numel() for p in policy.parameters()) == sum(int(np.prod(shape)) for shape in found.values())
        for lora in EVERY_TARGETS:
            counted = sum(int(np.prod(shape)) for shape in adapter_shapes(config, lora).values())
            assert num_adapter_parameters(config, lora) == counted


def make_learner(config: ModelConfig, start: Path, lora: LoraConfig, kernels: KernelChoice = KernelChoice.auto):
    optimizer = OptimizerSettings(beta1=0.9, beta2=0.95, weight_decay=0.0, max_grad_norm=1.0, zero_stage=1)
    spec = LearnerSpec(
        model=config, optimizer=optimizer, start=start, num_threads=1, micro_batch_tokens=60, kernels=kernels,
        balance=BalanceSettings(load_balance_coef=0.01, router_z_coef=0.001), router_replay=True, lora=lora,
        reference=True, value_lr=1e-2,
    )  # fmt: skip
    return Learner(spec, Rendezvous(rank=0, world_size=1, address="127.0.0.1", port=free_port()))


def snapshot_of(learner: Learner, version: int) -> tuple[WeightSnapshot, Mapping[str, tuple[int, int]]]:
    made = learner.snapshot(WeightVersion(version))
    assert made is not None
    return made


def make_worker(config: ModelConfig, lora: LoraConfig, kernels: KernelChoice = KernelChoice.auto):
    engine = Engine(config, EngineConfig(max_batch_size=4, max_seq_len=64), kernels=resolve_kernels(kernels), lora=lora)
    return engine, Subscriber(config, engine, lora)


def carry_out_rounds(
    config: ModelConfig, lora: LoraConfig, kernels: KernelChoice, folder: Path, *, num_rounds: int
) -> None:
    learner = make_learner(config, write_start(config, folder / "start"), lora, kernels)
    engine, subscriber = make_worker(config, lora, kernels)
    bounds = EXACT if engine.batch_invariant else BOUNDS[config.compute_dtype]
    base = {name: packed for name, packed in learner._policy.packed.items() if name not in learner._policy.masters()}
    before = {name: master.detach().clone() for name, master in learner._policy.masters().items()}
    for version in range(num_rounds):
        snapshot, changed = snapshot_of(learner, version)
        travels = adapter_shapes(config, lora).keys() | (base.keys() if version == 0 else set())
        assert snapshot.tensors.keys() == travels
        assert subscriber.receive(snapshot) == learner.digests()
        assert learner.view_differences(engine.running_views()) == {}
        assert changed == {}, "no code of the base moves"
        samples = sampled(engine, version)
        report = learner.parity(samples)
        assert report.num_tokens == NUM_SAMPLES * ANSWER
        assert report.violation(bounds) is None, version
        for scores in report.scores.values():  # the reference is the base, to the last bit where the adapters are 0
            assert scores.reference_logprobs_R is not None
            same = np.array_equal(scores.reference_logprobs_R, scores.proximal_logprobs_R)
            assert same == (version == 0)
        update = learner.update([samples], GRPO, 1e-2)
        assert update is not None
        assert update.kl_behavior_policy == 0 or not engine.batch_invariant, "with a gradient, the same bits"
        assert update.grad_norm > 0
    for name, master in learner._policy.masters().items():
        assert not torch.equal(master, before[name]), name
    for name, packed in base.items():
        assert learner._policy.packed[name] is packed, name


@pytest.mark.parametrize("lora", EVERY_TARGETS, ids=lambda lora: lora.targets.value)
@pytest.mark.parametrize("family", Family)
def test_rounds_pass_the_gate_and_only_adapters_travel(family: Family, lora: LoraConfig, tmp_path: Path):
    carry_out_rounds(MINI[family], lora, KernelChoice.auto, tmp_path, num_rounds=3)


BACKENDS = [
    (KernelChoice.torch, ComputeDtype.fp32),  # torch's bf16 products of latent attention miss the gate by themselves
    *((KernelChoice(isa.value), dtype) for isa in available_isas() for dtype in ComputeDtype),
]


@pytest.mark.slow
@pytest.mark.parametrize(("kernels", "dtype"), BACKENDS)
@pytest.mark.parametrize("family", Family)
def test_rounds_on_every_kernel(family: Family, kernels: KernelChoice, dtype: ComputeDtype, tmp_path: Path):
    config = dataclasses.replace(MINI[family], compute_dtype=dtype)
    carry_out_rounds(config, LORA, kernels, tmp_path, num_rounds=4)


def test_the_optimizer_has_state_for_the_adapters_alone(tmp_path: Path):
    config = MINI[Family.gpt_oss]
    learner = make_learner(config, write_start(config, tmp_path / "start"), LORA)
    engine, subscriber = make_worker(config, LORA)
    subscriber.receive(snapshot_of(learner, 0)[0])
    samples = sampled(engine, 0)
    learner.update([samples], GRPO, 1e-2)
    moments, num_steps = learner._engine.optimizer_state()
    assert num_steps == 1
    assert moments.keys() == {f"{moment}/{name}" for name in adapter_shapes(config, LORA) for moment in MOMENTS}
    kept = [p for p in learner._policy.model.parameters() if p.dtype == torch.float32 and p.device.type == "cpu"]
    matrices = [p for p in kept if p.ndim > 1 and not p.requires_grad]
    assert matrices == [], "no fp32 copy of a frozen matrix"
    assert not any(p.grad is not None for p in learner._policy.model.parameters() if not p.requires_grad)


@pytest.mark.parametrize("family", Family)
def test_a_checkpoint_holds_the_adapters_and_goes_on_to_the_last_bit(family: Family, tmp_path: Path):
    config = MINI[family]
    learner = make_learner(config, write_start(config, tmp_path / "start"), LORA)
    engine, subscriber = make_worker(config, LORA)
    subscriber.receive(snapshot_of(learner, 0)[0])
    samples = sampled(engine, 0)
    losses = [learner.fit(samples, 1e-2) for _ in range(12)]
    assert losses[-1] < 0.9 * losses[0]
    saved = tmp_path / "checkpoints" / "round-000001"
    saved.mkdir(parents=True)
    learner.save(saved)
    assert load_model(saved.parent / BASE_FOLDER).form is Form.PUBLISHED
    assert not (saved / "model.safetensors").exists()
    expected = [learner.fit(samples, 1e-2) for _ in range(2)]
    # From the start, and (as a resumed run does) from the checkpoint alone.
    for start in (tmp_path / "start", saved):
        other = make_learner(config, start, LORA)
        other.load(saved)
        assert [other.fit(samples, 1e-2) for _ in range(2)] == expected
        assert other.digests() == learner.digests()
    # A new worker gets everything again, the old one knows its base.
    subscriber.receive(snapshot_of(learner, 1)[0])
    first, _ = snapshot_of(other, 2)
    assert first.base_version is None
    assert make_worker(config, LORA)[1].receive(first) == learner.digests()


def test_adapters_on_another_base_are_one_line(tmp_path: Path):
    config = MINI[Family.mixtral]
    learner = make_learner(config, write_start(config, tmp_path / "start"), LORA)
    saved = tmp_path / "checkpoints" / "round-000001"
    saved.mkdir(parents=True)
    learner.save(saved)
    other = published_view({n: p.detach() for n, p in make_model(config, seed=1).named_parameters()})
    save_model(saved.parent / BASE_FOLDER, config, other, {})
    with pytest.raises(CheckpointError) as caught:
        learner.load(saved)
    assert "adapters belong to the base with digest " in str(caught.value)
    assert str(caught.value).endswith("; restore the base that the run started from")
    assert "\n" not in str(caught.value)
    beside = tmp_path / "checkpoints" / "round-000002"
    beside.mkdir()
    with pytest.raises(CheckpointError, match=r"base: must be the base with digest \w{32} that this run"):
        learner.save(beside)
    write = tmp_path / "again" / "round-000001"
    write.mkdir(parents=True)
    learner.save(write)
    smaller = make_learner(config, tmp_path / "start", dataclasses.replace(LORA, rank=2))
    with pytest.raises(CheckpointError, match=r"its adapters must have the learner\.lora of this run, got LoraConfig"):
        smaller.load(write)
    (write / ADAPTERS_FILE).unlink()
    with pytest.raises(CheckpointError, match=r"must be a safetensors file of adapters.*; resume with"):
        learner._policy.own_masters(load_model(tmp_path / "start"), write)


def test_a_worker_with_another_base_says_so(tmp_path: Path):
    config = MINI[Family.mixtral]
    learner = make_learner(config, write_start(config, tmp_path / "start"), LORA)
    other_start = tmp_path / "other"
    other_start.mkdir()
    save_model(other_start, config, dict(make_model(config, seed=1).named_parameters()), {})
    other = make_learner(config, other_start, LORA)
    _, subscriber = make_worker(config, LORA)
    snapshot_of(learner, 0)
    adapters, _ = snapshot_of(learner, 1)
    with pytest.raises(SnapshotError, match=r"its adapters belong to the base of version 0, got a base with .* other"):
        subscriber.receive(adapters)
    full, _ = snapshot_of(other, 0)
    running = subscriber.receive(full)
    with pytest.raises(SnapshotError, match="snapshot 1: its adapters belong to the base of version 0"):
        subscriber.receive(adapters)
    assert running == other.digests(), "and nothing was swapped"


def test_a_rows_bits_do_not_depend_on_its_batch():
    """Whole sequences together and one at a time: learner and sampler never see the same batch."""
    for family in (Family.gpt_oss, Family.deepseek_v3):
        config = MINI[family]
        policy, _ = policy_with(config, LORA, KernelChoice.auto, random_adapters(config, LORA))
        samples = some_samples(config)
        with torch.no_grad():
            together = policy(pack(samples)).hidden_RD
            alone = torch.cat([policy(pack([one])).hidden_RD for one in samples])
        assert resolve_kernels(KernelChoice.auto).batch_invariant
        assert torch.equal(together, alone)

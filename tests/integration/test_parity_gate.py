"""Sampler and learner in one process on a fitted model: the gate is open when nothing is wrong, and only then.

The engine decodes token by token on its KV cache, the learner computes whole packed episodes: equal logprobs mean that
the published bytes and the mathematics are the same on both sides.
"""

import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch

from model.checkpoint import save_model
from model.config import ComputeDtype, ModelConfig
from model.snapshot import Format, PackedTensor, SnapshotError, WeightSnapshot, digest
from model.transformer import Transformer, init_weights
from rl.algorithms.grpo import Grpo
from rl.algorithms.surrogate import Clip
from rl.batch import TrainSample
from rl.held_back import HeldBack
from rl.learner.balance import BalanceSettings
from rl.learner.deepspeed import OptimizerSettings, Rendezvous
from rl.learner.learner import Learner, LearnerSpec
from rl.parity import BOUNDS as BOUNDS_OF
from rl.parity import ParityError, ParityReport
from rl.publish import Publisher
from rollout.config import EngineConfig
from rollout.engine.engine import Engine
from rollout.subscribe import Subscriber
from rollout.types import SampleRequest, SamplingParams, WeightVersion
from tests.ports import free_port

MODEL = ModelConfig(
    vocab_size=48, hidden_size=32, num_layers=2, num_heads=2, num_kv_heads=1, head_dim=16,
    expert_hidden_size=32, num_experts=4, num_experts_per_tok=2, max_positions=64,
)  # fmt: skip
STOP = 1
EPISODES = 24
GRPO = Grpo(clip=Clip(0.2, 0.28), normalize=False)
BOUNDS = BOUNDS_OF[ComputeDtype.fp32]

SUCCESSORS = np.random.default_rng(0).integers(2, MODEL.vocab_size, (MODEL.vocab_size, 3))
"""The language that the model is fitted to: three successors of each token, of unequal weight."""


def sentence(key: tuple[int, ...], num_tokens: int) -> list[int]:
    rng = np.random.default_rng(key)
    ids = [int(rng.integers(2, MODEL.vocab_size))]
    while len(ids) < num_tokens:
        ids.append(int(SUCCESSORS[ids[-1], rng.choice(3, p=[0.85, 0.1, 0.05])]))
    return ids


def demonstration(number: int) -> TrainSample:
    ids = np.array([*sentence((1, number), 23), STOP])
    targets = np.arange(3, len(ids))
    zeros = np.zeros(len(targets), np.float32)
    return TrainSample(
        key=str(number), ids_T=ids, targets_R=targets, behavior_logprobs_R=zeros, advantages_R=zeros,
        routes_TLK=np.zeros((0, 0, 0), np.uint8), weight_version=-1, trained=True,
    )  # fmt: skip


@dataclass
class Loop:
    """A learner, an engine fed by it, and the versions between them."""

    learner: Learner
    engine: Engine
    subscriber: Subscriber
    version: int = -1

    def publish(self, *, damage: "Damage | None" = None, redigest: bool = False) -> WeightSnapshot:
        """Send the learner's weights as the next version, with one nibble changed on the way."""
        self.version += 1
        snapshot, _ = self.learner.snapshot(WeightVersion(self.version))
        if damage is not None:
            snapshot = damage.apply(snapshot, redigest=redigest)
        self.subscriber.receive(snapshot)
        return snapshot

    def rollout(self, number: int, temperature: float = 1.0) -> list[TrainSample]:
        """Episodes of two turns with an observation between them."""
        params = SamplingParams(temperature=temperature, max_tokens=16)
        prompts = [tuple(sentence((2, number, i), 3)) for i in range(EPISODES)]
        first = self._generate(prompts, params, number)
        seen = [tuple(sentence((3, number, i), 6)) for i in range(EPISODES)]
        longer = [p + g.ids + o for p, g, o in zip(prompts, first, seen, strict=True)]
        second = self._generate(longer, params, number)
        samples: list[TrainSample] = []
        for i, (prompt, said, context, more) in enumerate(zip(prompts, first, longer, second, strict=True)):
            ids = np.array(context + more.ids)
            start = len(prompt)
            targets = np.r_[start : start + len(said.ids), len(context) : len(ids)]
            samples.append(
                TrainSample(
                    key=f"{i:04d}",
                    ids_T=ids,
                    targets_R=targets,
                    behavior_logprobs_R=np.concatenate([said.logprobs_T, more.logprobs_T]),
                    advantages_R=np.where(np.arange(len(targets)) % 2, 1.0, -1.0).astype(np.float32),
                    routes_TLK=np.concatenate([said.routes_TLK, more.routes_TLK]),
                    weight_version=said.weight_version,
                    trained=True,
                    temperature=temperature or 1.0,
                )
            )
            self.engine.close_session(i)
        return samples

    def _generate(self, prompts: list[tuple[int, ...]], params: SamplingParams, number: int) -> list[Any]:
        return self.engine.sample(
            [
                SampleRequest(session=i, prompt_ids=prompt, params=params, seed=1000 * number + i)
                for i, prompt in enumerate(prompts)
            ]
        )


@dataclass(frozen=True)
class Damage:
    """One 4-bit group of a tensor's payload, exclusive-or `bits`."""

    tensor: str
    byte: int
    bits: int

    def apply(self, snapshot: WeightSnapshot, *, redigest: bool) -> WeightSnapshot:
        packed = snapshot.tensors[self.tensor]
        payload = packed.payload.copy()
        payload.reshape(-1)[self.byte] ^= self.bits
        damaged: PackedTensor = replace(packed, payload=payload)
        digests = dict(snapshot.digests)
        if redigest:
            digests[self.tensor] = digest(self.tensor, damaged)
        return replace(snapshot, tensors={**snapshot.tensors, self.tensor: damaged}, digests=digests)


@pytest.fixture(scope="module")
def loop(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Loop]:
    """Fitted for some steps, so that the policy is peaked as after a warm start. The learner is never closed:
    DeepSpeed can use a process group again, but not a second one in the same process."""
    environment, threads = dict(os.environ), torch.get_num_threads()
    start = tmp_path_factory.mktemp("start")
    model = Transformer(MODEL)
    init_weights(model, 0)
    save_model(start, MODEL, dict(model.named_parameters()), {})
    spec = LearnerSpec(
        model=MODEL,
        optimizer=OptimizerSettings(beta1=0.9, beta2=0.95, weight_decay=0.0, max_grad_norm=1.0, zero_stage=1),
        start=start,
        num_threads=1,
        micro_batch_tokens=512,
        balance=BalanceSettings(load_balance_coef=0.01),
    )
    learner = Learner(spec, Rendezvous(rank=0, world_size=1, address="127.0.0.1", port=free_port()))
    for step in range(40):
        loss = learner.fit([demonstration(32 * step + i) for i in range(32)], 1e-2 * min(1.0, (step + 1) / 10))
    assert loss < 2.0  # of log 48 = 3.9 at the start
    engine = Engine(MODEL, EngineConfig(max_batch_size=EPISODES, max_seq_len=MODEL.max_positions), stop_ids={STOP})
    yield Loop(learner, engine, Subscriber(MODEL, engine))
    os.environ.clear()
    os.environ.update(environment)
    torch.set_num_threads(threads)


def assert_open(report: ParityReport) -> None:
    assert report.violation(BOUNDS) is None
    assert report.mean_abs_nats <= 1e-6
    assert report.max_abs_nats <= 1e-4
    assert report.num_tokens > 10 * EPISODES


@pytest.mark.parametrize("temperature", [1.0, 0.6, 0.0])
def test_the_gate_is_open_on_just_sampled_tokens(loop: Loop, temperature: float):
    loop.publish()
    samples = loop.rollout(0, temperature)
    report = loop.learner.parity(samples)
    assert_open(report)
    assert 0.1 < report.entropy < 2.5  # neither uniform (3.9) nor certain


def test_zero_learning_rate_for_twenty_rounds_keeps_every_bit_and_the_gate_open(loop: Loop):
    digests = loop.publish().digests
    for number in range(20):
        samples = loop.rollout(100 + number)
        assert {sample.weight_version for sample in samples} == {loop.version}
        assert_open(loop.learner.parity(samples))
        update = loop.learner.update([samples[::2], samples[1::2]], GRPO, 0.0)
        assert update is not None
        assert update.grad_norm > 0
        assert update.clip_frac == 0.0
        assert update.kl_behavior_policy < 1e-9
        assert loop.publish().digests == digests


def test_training_moves_the_weights_and_keeps_the_gate_open(loop: Loop):
    before = loop.publish().digests
    for number in range(3):
        samples = loop.rollout(200 + number)
        assert_open(loop.learner.parity(samples))
        loop.learner.update([samples], GRPO, 1e-3)
        after = loop.publish().digests
        assert after != before
    # The samples of the version before: the gate sees an update that the sampler did not get.
    assert loop.learner.parity(samples).violation(BOUNDS) is not None


def test_one_nibble_changed_in_transit_is_refused_by_its_digest(loop: Loop):
    held = loop.publish()
    name = "model.layers.1.mlp.experts.down_proj"
    with pytest.raises(SnapshotError, match=rf"^snapshot {loop.version + 1}: {name}: digest must be [0-9a-f]+, got "):
        loop.publish(damage=Damage(tensor=name, byte=77, bits=0x10))
    assert loop.engine.weight_version == held.version  # nothing of the damaged snapshot is in use
    assert loop.learner.view_differences(loop.engine.running_views()) == {}


def damages(snapshot: WeightSnapshot, count: int) -> Iterator[Damage]:
    """Nibbles at random, half of them in experts, half elsewhere; never one that leaves the value (0 and -0), nor one
    that makes it so large that logits overflow, which the engine itself refuses while it samples."""
    rng = np.random.default_rng(9)
    names = {
        kind: sorted(name for name, packed in snapshot.tensors.items() if packed.format is kind) for kind in Format
    }
    for number in range(count):
        kind = Format.MXFP4 if number % 2 else Format.BF16
        name = str(rng.choice(names[kind]))
        payload = snapshot.tensors[name].payload.reshape(-1)
        byte, shift = int(rng.integers(payload.size)), int(rng.choice([0, 4]))
        code = int(payload[byte] >> shift) & 0x0F
        changes = [bits << shift for bits in range(1, 16)]
        if kind is Format.BF16:
            choices = [bits for bits in changes if _bf16_after(payload, byte, bits) < 1e9]
        else:
            choices = [bits for bits in changes if {code, code ^ bits >> shift} != {0, 8}]
        yield Damage(tensor=name, byte=byte, bits=int(rng.choice(choices)))


def _bf16_after(payload: np.ndarray, byte: int, bits: int) -> float:
    """The magnitude of a bf16 value one of whose two bytes is exclusive-or `bits`."""
    pair = payload[byte & ~1 : (byte | 1) + 1].copy()
    pair[byte & 1] ^= bits
    value = abs(float(torch.from_numpy(pair).view(torch.bfloat16)))
    return value if value == value else float("inf")


class _Pool:
    """One worker, in this process."""

    def __init__(self, engine: Engine, received: WeightSnapshot):
        self._engine = engine
        self.received = received

    def digests(self) -> list[dict[str, str]]:
        return [{name: digest(name, packed) for name, packed in self.received.tensors.items()}]

    def running_views(self) -> list[dict[str, np.ndarray]]:
        return [self._engine.running_views()]


def refusal_of(gate: Publisher, samples: list[TrainSample]) -> str | None:
    try:
        gate.check_parity(samples)
    except ParityError as error:
        return str(error)
    return None


def test_a_nibble_changed_behind_the_digests_closes_the_gate_which_names_the_tensor(loop: Loop):
    """40 nibbles of a sender that computed its digests after the damage, so that every worker finds it in order."""
    learners: Any = loop.learner
    sent = list(damages(loop.publish(), 40))
    num_seen_in_logprobs = 0
    for number, damage in enumerate(sent):
        received = loop.publish(damage=damage, redigest=True)
        pool: Any = _Pool(loop.engine, received)
        gate = Publisher(learners, pool, BOUNDS, HeldBack(MODEL, 0))
        samples = loop.rollout(300 + number)
        refusal = refusal_of(gate, samples)
        assert refusal is not None, damage
        assert f"worker 0 runs another {damage.tensor} than was published" in refusal
        num_seen_in_logprobs += "nats" in refusal
    assert num_seen_in_logprobs >= 30, "most show in the logprobs alone, before any bytes are compared"
    pool = _Pool(loop.engine, loop.publish())
    assert (
        refusal_of(Publisher(learners, pool, BOUNDS, HeldBack(MODEL, 0)), loop.rollout(400)) is None
    )  # the control: undamaged, it is open

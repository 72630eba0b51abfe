"""Learners on several ranks for the tests: `run` starts the processes, this module is what each of them runs.

A job is a list of cases, carried out one after the other on one process group. Rank 0 keeps what each of them found.
"""

from __future__ import annotations

import dataclasses
import pickle
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from model.config import KernelChoice, LoraConfig, ModelConfig
from model.snapshot import PackedTensor
from rl.algorithms.config import AlgorithmConfig
from rl.algorithms.objective import Objective
from rl.algorithms.registry import build_algorithm, has_critic
from rl.batch import TrainSample, pack
from rl.learner import deepspeed as engine_module
from rl.learner.balance import BalanceSettings
from rl.learner.config import ActivationCheckpointing, PlacementConfig, QuantizationConfig
from rl.learner.deepspeed import OptimizerSettings, Rendezvous
from rl.learner.learner import Learner, LearnerSpec
from rl.learner.streams import batch_logprobs
from rl.parity import ParityReport
from rollout.types import WeightVersion
from tests.ports import free_port

TIMEOUT_S = 300


@dataclass(frozen=True, kw_only=True)
class Case:
    """One learner and what it does: parity, then `num_steps` steps on all of `samples`.

    `sgd` replaces AdamW, which amplifies rounding where a gradient is nearly 0. `load` and `save` are folders. With
    `record` the samples come back as a sampler that agrees with the learner to the last bit would have recorded them.
    `algorithm` has what it asks for: a reference, a value head (whose returns are the advantages), scores.
    """

    name: str
    model: ModelConfig
    start: Path
    samples: tuple[TrainSample, ...]
    expert_parallel: int = 1
    zero_stage: int = 1
    offload: bool = False
    max_grad_norm: float = 1e9
    num_steps: int = 1
    lr: float = 1e-2
    sgd: bool = False
    replay: bool = False
    balance: BalanceSettings = field(default_factory=BalanceSettings)
    micro_batch_tokens: int = 60
    kernels: KernelChoice = KernelChoice.auto
    load: Path | None = None
    save: Path | None = None
    record: bool = False
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    quantization: QuantizationConfig = field(default_factory=QuantizationConfig)
    placement: PlacementConfig = field(default_factory=PlacementConfig)
    lora: LoraConfig = field(default_factory=LoraConfig)
    activation_checkpointing: ActivationCheckpointing = ActivationCheckpointing.none


@dataclass(frozen=True, kw_only=True)
class Found:
    """What rank 0 saw; of a step's loss the policy's, the balance and the z-loss. `moments` are AdamW's.

    `digests` are those of the snapshot, `digests_again` what the learner tells after it, with that many gathers, and
    `digests_damaged` what it tells once the last rank's part of `damaged_tensor` has another byte.
    """

    losses: list[tuple[float, float, float]]
    grad_norms: list[float]
    loads_LE: list[np.ndarray]
    masters: dict[str, torch.Tensor]
    moments: dict[str, torch.Tensor]
    parity: ParityReport | None
    digests: dict[str, str]
    published: dict[str, PackedTensor]
    num_gathers: int
    digests_again: dict[str, str]
    digests_damaged: dict[str, str]
    num_own_parameters: int
    recorded: tuple[TrainSample, ...]
    terms: list[dict[str, float]]
    watched: list[dict[str, float]]
    head: dict[str, torch.Tensor]
    rank_loads: list[dict[str, float]]
    expert_LS: np.ndarray

    def gradients(self) -> dict[str, torch.Tensor]:
        """Those of the only step, after clipping: AdamW's first moment is then (1 - beta1) g."""
        assert len(self.losses) == 1
        return {n.removeprefix("exp_avg/"): m / (1 - 0.9) for n, m in self.moments.items() if "exp_avg/" in n}


def run(cases: list[Case], num_ranks: int, folder: Path) -> dict[str, Found]:
    """Carry the cases out on `num_ranks` processes; fails with their output when one of them does."""
    folder.mkdir(parents=True, exist_ok=True)
    job, out = folder / "job.pickle", folder / "found.pickle"
    job.write_bytes(pickle.dumps(cases))
    port = free_port()
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.numerics.ranks", str(rank), str(num_ranks), str(port), str(job), str(out)],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for rank in range(num_ranks)
    ]  # fmt: skip
    try:
        outputs = [process.communicate(timeout=TIMEOUT_S)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert all(process.returncode == 0 for process in processes), "\n".join(o[-3000:] for o in outputs)
    return pickle.loads(out.read_bytes())


def carry_out(case: Case, rendezvous: Rendezvous) -> Found:
    """One case on this rank."""
    learner = Learner(
        LearnerSpec(
            model=case.model,
            optimizer=OptimizerSettings(
                beta1=0.9,
                beta2=0.95,
                weight_decay=0.0,
                max_grad_norm=case.max_grad_norm,
                zero_stage=case.zero_stage,
                offload=case.offload,
            ),
            start=case.start,
            num_threads=1,
            micro_batch_tokens=case.micro_batch_tokens,
            balance=case.balance,
            kernels=case.kernels,
            router_replay=case.replay,
            expert_parallel=case.expert_parallel,
            reference=case.algorithm.kl_coef > 0,
            value_lr=case.algorithm.value_lr if has_critic(case.algorithm) else None,
            quantization=case.quantization,
            placement=case.placement,
            lora=case.lora,
            activation_checkpointing=case.activation_checkpointing,
        ),
        rendezvous,
    )
    if case.load is not None:
        learner.load(case.load)
    has_routes = all(len(sample.routes_TLK) for sample in case.samples)
    parity = learner.parity(case.samples) if has_routes else None
    recorded = tuple(record(learner, sample) for sample in case.samples) if case.record else ()
    samples = case.samples if parity is None else scored(case, parity)
    loss = Objective(build_algorithm(case.algorithm), case.algorithm)
    reports = [learner.update([samples], loss, case.lr) for _ in range(case.num_steps)]
    moments = {} if case.sgd else learner._gathered(learner._engine.optimizer_state()[0])
    if case.save is not None:
        learner.save(case.save)
    masters = learner._gathered({name: master.detach().clone() for name, master in learner._policy.masters().items()})
    snapshot = learner.snapshot(WeightVersion(0))
    with counted_gathers(learner) as gathers:
        undamaged = learner.digests()
    num_gathers = len(gathers)
    own = learner._policy.packed[damaged_tensor(case.model)].payload.reshape(-1)
    bits = rendezvous.rank == rendezvous.world_size - 1
    own[0] ^= bits
    damaged = learner.digests()
    own[0] ^= bits
    return Found(
        losses=[(r.policy_loss, r.balance_loss, r.router_z_loss) for r in reports],
        grad_norms=[r.grad_norm for r in reports],
        loads_LE=[r.expert_load_LE for r in reports],
        masters=masters,
        moments=moments,
        parity=parity,
        digests={} if snapshot is None else dict(snapshot[0].digests),
        published={} if snapshot is None else dict(snapshot[0].tensors),
        num_gathers=num_gathers,
        digests_again=undamaged or {},
        digests_damaged=damaged or {},
        num_own_parameters=sum(master.numel() for master in learner._policy.masters().values()),
        recorded=recorded,
        terms=[dict(r.terms) for r in reports],
        watched=[dict(r.watched) for r in reports],
        head={} if learner._value_head is None else dict(learner._value_head.state_dict()),
        rank_loads=[dict(r.rank_loads) for r in reports],
        expert_LS=learner._placer.placement.expert_LS,
    )


def damaged_tensor(model: ModelConfig) -> str:
    return f"model.layers.{model.moe_layers[-1]}.mlp.experts.down_proj"


@contextmanager
def counted_gathers(learner: Learner) -> Iterator[list[str]]:
    """The names of the tensors that are gathered inside, in order."""
    policy, names = learner._policy, list[str]()
    original = policy.gather
    policy.gather = lambda name, own: names.append(name) or original(name, own)
    yield names
    del policy.gather


def scored(case: Case, parity: ParityReport) -> tuple[TrainSample, ...]:
    returns = [sample.advantages_R if has_critic(case.algorithm) else None for sample in case.samples]
    return tuple(
        dataclasses.replace(sample, scores=parity.scores[sample.key], returns_R=returns_R)
        for sample, returns_R in zip(case.samples, returns, strict=True)
    )


@torch.no_grad()
def record(learner: Learner, sample: TrainSample) -> TrainSample:
    """The sample with the logprobs and routes of the learner itself; one rank only."""
    batch = pack([sample])
    out = learner._policy(batch)
    logprobs_R = batch_logprobs(out, batch, learner._kernels)
    return dataclasses.replace(sample, behavior_logprobs_R=logprobs_R.numpy(), routes_TLK=out.routes_TLK.numpy())


def use_sgd(enabled: bool) -> None:
    """Swap the optimizer of the engines to come: plain gradient descent, whose steps are linear in the gradients."""
    settled = ORIGINAL_CONFIG

    def with_sgd(settings: OptimizerSettings) -> dict[str, Any]:
        optimizer = {"type": "SGD", "params": {"lr": 0.0}}
        return settled(settings) | {"optimizer": optimizer, "zero_allow_untested_optimizer": True}

    engine_module._deepspeed_config = with_sgd if enabled else settled


ORIGINAL_CONFIG = engine_module._deepspeed_config


def main(rank: int, num_ranks: int, port: int, job: Path, out: Path) -> None:
    torch.set_num_threads(1)
    found: dict[str, Found] = {}
    for case in pickle.loads(job.read_bytes()):
        use_sgd(case.sgd)
        rendezvous = Rendezvous(rank=rank, world_size=num_ranks, address="127.0.0.1", port=port)
        found[case.name] = carry_out(case, rendezvous)
    if rank == 0:
        out.write_bytes(pickle.dumps(found))
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    from tests.numerics import ranks  # the pickles name this module so, not `__main__`

    ranks.main(int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4]), Path(sys.argv[5]))

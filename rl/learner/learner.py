"""The learner: parity gate, policy update, supervised fine-tuning, publishing and its own state.

A plain class; `rl.learner.actor` puts it into a Ray process, `rl.learner.deepspeed` runs its optimizer. It is blind to
the algorithm: it computes logprobs, asks for the loss of each token, and adds them up with the weights that the samples
carry over the mass of the whole minibatch, so a micro-batch boundary changes nothing in it but the order of sums.

Of several ranks each is one of these, called with the same arguments at the same time; each computes its share of the
micro-batches, and all return the same (what is told otherwise, rank 0 alone returns).

The routers' choices are those that the sampler recorded (`router_replay`), weighed by the router as it is now: the
experts that an update trains are the ones that acted (R3, arXiv 2510.11370). Hence the dispatch counts of a minibatch
are known before its first micro-batch, and its balance loss does not depend on how it is cut. Without replay a pass
without gradient counts them first.

Shapes: T packed tokens, R trainable tokens, V vocabulary, L layers, K experts of a token, E experts.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np
import torch

from model.checkpoint import PUBLISHED_FOLDER
from model.config import KernelChoice, LoraConfig, ModelConfig
from model.kernels.dispatch import resolve_kernels
from model.moe_losses import DispatchTotals
from model.snapshot import CodeChanges, WeightSnapshot
from rl.algorithms.base import Loss
from rl.algorithms.config import BalanceScope
from rl.algorithms.registry import has_critic
from rl.batch import Batch, TrainSample, micro_batches
from rl.config import RunConfig
from rl.learner.balance import (
    BalanceSettings,
    RouterLoss,
    count_dispatched,
    nothing_dispatched,
    update_selection_biases,
)
from rl.learner.config import ActivationCheckpointing, PlacementConfig, QuantizationConfig
from rl.learner.counted_file import load_counted, save_counted
from rl.learner.deepspeed import MOMENTS, OptimizerSettings, Rendezvous, join, make_engine
from rl.learner.lora import make_policy, make_reference
from rl.learner.placement import Placer, with_absolute_file
from rl.learner.policy import PolicyOutput
from rl.learner.published import differing, load_published, save_published
from rl.learner.streams import batch_logprobs, logprobs_and_entropies, row_entropies, token_streams
from rl.learner.update_report import UpdateReport, UpdateTotals
from rl.learner.value_head import ValueHead
from rl.parity import ParityReport, SampleParity
from rl.scores import SampleScores
from rollout.types import WeightVersion

OPTIMIZER_FILE = "optimizer.safetensors"


class LearnerError(ValueError):
    """State that does not belong to this learner, or a step that produced a value which is not finite."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnerSpec:
    """Everything a learner needs; picklable. `start` is the model folder to start from.

    With `reference` the learner keeps the start policy, frozen, and scores every sample with it; with `value_lr` it has
    a value head that learns at this rate. `seed` keys random rounding. With `lora` the start is frozen, and is its own
    reference (`rl.learner.lora`). `keep_memory` is of its process (`rl/learner/allocator.py`).
    """

    model: ModelConfig
    optimizer: OptimizerSettings
    start: Path
    num_threads: int
    micro_batch_tokens: int
    balance: BalanceSettings = field(default_factory=BalanceSettings)
    kernels: KernelChoice = KernelChoice.auto
    activation_checkpointing: ActivationCheckpointing = ActivationCheckpointing.none
    router_replay: bool = False
    expert_parallel: int = 1
    reference: bool = False
    value_lr: float | None = None
    quantization: QuantizationConfig = field(default_factory=QuantizationConfig)
    placement: PlacementConfig = field(default_factory=PlacementConfig)
    seed: int = 0
    lora: LoraConfig = field(default_factory=LoraConfig)
    keep_memory: bool = True

    @classmethod
    def of(cls, config: RunConfig, *, model: ModelConfig, start: Path, num_threads: int) -> LearnerSpec:
        """The learner of a run; `model` is the configured one with its vocabulary."""
        settings = config.learner
        return cls(
            model=model,
            optimizer=OptimizerSettings(
                beta1=settings.beta1,
                beta2=settings.beta2,
                weight_decay=settings.weight_decay,
                max_grad_norm=settings.max_grad_norm,
                zero_stage=settings.zero_stage,
                offload=settings.offload_optimizer,
            ),
            start=start.resolve(),
            kernels=config.cluster.kernels,
            num_threads=num_threads,
            micro_batch_tokens=settings.micro_batch_tokens,
            balance=BalanceSettings(
                load_balance_coef=config.algorithm.load_balance_coef,
                scope=config.algorithm.load_balance_scope,
                router_z_coef=config.algorithm.router_z_coef,
                bias_update_speed=config.algorithm.bias_update_speed,
            ),
            activation_checkpointing=settings.activation_checkpointing,
            router_replay=settings.router_replay,
            expert_parallel=settings.expert_parallel,
            reference=config.algorithm.kl_coef > 0,
            value_lr=config.algorithm.value_lr if has_critic(config.algorithm) else None,
            quantization=settings.quantization,
            placement=with_absolute_file(settings.placement),
            seed=config.run.seed,
            lora=settings.lora,
            keep_memory=settings.keep_memory,
        )


class Learner:
    """One rank."""

    def __init__(self, spec: LearnerSpec, rendezvous: Rendezvous):
        torch.set_num_threads(spec.num_threads)
        self._spec = spec
        self._kernels = resolve_kernels(spec.kernels)
        self._ranks = join(rendezvous, expert_parallel=spec.expert_parallel)
        self._policy = make_policy(
            spec.model,
            self._kernels,
            self._ranks,
            spec.quantization,
            spec.lora,
            spec.seed,
            spec.activation_checkpointing,
        )
        self._placer = Placer(spec.placement, spec.model, self._ranks)
        self._policy.place(self._placer.placement)
        self._num_steps = 0
        masters, experts = self._policy.masters(), self._policy.experts
        self._engine = make_engine(self._policy, masters, spec.optimizer, self._ranks, experts)
        self._engine.restore(self._policy.own_masters(self._policy.open(spec.start)), {}, 0)
        self._policy.refresh()
        self._reference = make_reference(self._policy, self._kernels, self._ranks) if spec.reference else None
        if self._reference is not None:
            self._reference.place(self._placer.placement)
        self._value_head = None if spec.value_lr is None else _value_head(spec, spec.value_lr)

    @torch.no_grad()
    def parity(self, samples: Sequence[TrainSample]) -> ParityReport:
        """Behavior against policy logprobs of every sample under the weights that sampled it, and its scores."""
        reports: list[SampleParity] = []
        entropy_sum = 0.0
        for batch in self._share(samples):
            out = self._policy(batch)
            logprobs_R, entropies_R = logprobs_and_entropies(out, batch, self._kernels)
            scores = self._scores(batch, out, logprobs_R)
            if not batch.is_padding:
                entropy_sum += float(entropies_R.sum())
                reports += _sample_parities(batch, logprobs_R, out.routes_TLK, scores)
        shares = self._ranks.gather((reports, entropy_sum))
        return ParityReport.of(
            [report for reports, _ in shares for report in reports],
            entropy_sum=math.fsum(entropy_sum for _, entropy_sum in shares),
        )

    def update(self, minibatches: Sequence[Sequence[TrainSample]], algorithm: Loss, lr: float) -> UpdateReport | None:
        """One optimizer step a minibatch; `None` when no sample is trained on (every group without variance)."""
        totals = UpdateTotals()
        for samples in minibatches:
            if samples:
                self._minibatch(samples, algorithm, lr, totals)
        for rank, others in enumerate(self._ranks.gather(totals)):
            if rank != self._ranks.rank:
                totals.absorb(others)
        if totals.load_LE is None:
            return None
        self._placer.observe(totals.load_LE)
        return totals.report(self._placer.rank_loads(totals.load_LE))

    def fit(self, samples: Sequence[TrainSample], lr: float) -> float:
        """One step of maximum likelihood on the samples' trainable tokens; the mean loss in nats a token."""
        num_tokens = sum(len(sample.targets_R) for sample in samples)
        router_loss, loss_sum = self._router_loss(samples, None), 0.0
        for batch in self._share(samples):
            out = self._engine.forward(batch)
            loss = -batch_logprobs(out, batch, self._kernels).sum() * batch.counted / num_tokens
            self._engine.backward(loss + router_loss.part(out, batch).weighted)
            loss_sum += float(loss.detach())
        self._step(lr)
        self._policy.refresh(self._num_steps)
        return math.fsum(self._ranks.gather(loss_sum))

    def snapshot(self, version: WeightVersion) -> tuple[WeightSnapshot, Mapping[str, CodeChanges]] | None:
        """The bytes that the forward reads now, and what changed in each MXFP4 tensor since the last snapshot.

        On rank 0; `None` on the others.
        """
        return self._policy.snapshot(version)

    def digests(self) -> dict[str, str] | None:
        """See `PublishedPolicy.digests`."""
        return self._policy.digests()

    def view_differences(self, running: Mapping[str, np.ndarray]) -> dict[str, float]:
        """Largest absolute difference of each tensor that `running` (what a worker decodes with) holds differently."""
        largest: dict[str, float] = {}
        for differences in self._ranks.gather(self._policy.view_differences(running)):
            for name, difference in differences.items():
                largest[name] = max(difference, largest.get(name, 0.0))
        return largest

    def save(self, folder: Path) -> None:
        """Write the masters as a model folder into `folder` (which exists), the optimizer beside them.

        Rank 0 writes the whole model, so the folder does not tell how many ranks there were.
        """
        moments, num_steps = self._engine.optimizer_state()
        masters = self._gathered({name: master.detach() for name, master in self._policy.masters().items()})
        moments = self._gathered(moments)
        self._policy.save(folder, masters)
        if self._ranks.rank == 0:
            save_counted(folder / OPTIMIZER_FILE, moments, num_steps)
        self._placer.save(folder)
        if not self._policy.is_function_of_masters:
            save_published(self._policy, self._spec.model, folder)
        if self._reference is not None:
            self._reference.save(folder)
        if self._value_head is not None and self._ranks.rank == 0:  # it is the same on all
            self._value_head.save(folder)

    def load(self, folder: Path) -> None:
        """Continue from what `save` wrote, to the last bit. Raises LearnerError when it is another model's."""
        loaded = self._policy.open(folder)
        if loaded.config != self._spec.model:
            raise LearnerError(
                f"checkpoint {folder.name}: must be of the model of this run, got {loaded.config}; "
                "use the model settings it was saved with"
            )
        moments, num_steps = load_counted(folder / OPTIMIZER_FILE)
        names = {f"{moment}/{name}" for name in self._engine.trained for moment in MOMENTS}
        if num_steps and moments.keys() != names:
            raise LearnerError(
                f"checkpoint {folder.name}: {OPTIMIZER_FILE} must hold the moments of the {len(self._engine.trained)} "
                f"trained parameters, got {len(moments)} tensors of other names; it was written by another release"
            )
        self._placer.load(folder)
        self._policy.place(self._placer.placement)
        if self._reference is not None:
            self._reference.place(self._placer.placement)
            self._reference.load(folder)
        if self._value_head is not None:
            self._value_head.load(folder)
        saved = None if self._policy.is_function_of_masters else load_published(self._policy, self._spec.model, folder)
        self._engine.restore(self._policy.own_masters(loaded, folder), self._own_part(moments), num_steps)
        self._num_steps = num_steps
        self._policy.refresh(num_steps, saved)
        if saved is not None and (changed := differing(saved, self._policy.packed)):
            raise LearnerError(
                f"checkpoint {folder.name}: {PUBLISHED_FOLDER} must hold the bytes that its masters give again, got "
                f"others in {changed[0]}; use the learner.quantization and run.seed it was saved with"
            )

    def close(self) -> None:
        """Leave the process group."""
        self._engine.close()

    def _own_part(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Of what is stored for the whole model, this rank's; `<what>/<name>` belongs to the parameter `<name>`."""
        return {key: self._policy.own_part(key.rpartition("/")[2], tensor) for key, tensor in tensors.items()}

    def _gathered(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The reverse of `_own_part`, on rank 0."""
        whole = {key: self._policy.gather(key.rpartition("/")[2], tensor) for key, tensor in tensors.items()}
        return {key: tensor for key, tensor in whole.items() if tensor is not None}

    def _share(self, samples: Sequence[TrainSample]) -> list[Batch]:
        """This rank's micro-batches; as many as every other rank's."""
        ranks = self._ranks
        return micro_batches(samples, self._spec.micro_batch_tokens, rank=ranks.rank, num_ranks=ranks.num_ranks)

    def _minibatch(self, samples: Sequence[TrainSample], algorithm: Loss, lr: float, totals: UpdateTotals) -> None:
        num_tokens = sum(len(sample.targets_R) for sample in samples)
        mass = math.fsum(sample.mass for sample in samples)
        share = self._share(samples)
        router_loss = self._router_loss(samples, self._dispatched(samples, share))
        dispatched = nothing_dispatched(self._spec.model)
        for batch in share:
            out = self._engine.forward(batch, self._replayed(batch))
            logprobs_R = batch_logprobs(out, batch, self._kernels)
            entropies = partial(row_entropies, out, batch, self._kernels)
            values_R = None if self._value_head is None else self._value_head(out.hidden_RD)
            token_loss = algorithm.token_loss(token_streams(batch, logprobs_R, entropies, values_R))
            loss = (token_loss.total() * batch.weights_R).sum() * batch.counted / mass
            of_router = router_loss.part(out, batch)
            self._engine.backward(loss + of_router.weighted)
            dispatched += of_router.dispatched
            if not batch.is_padding:
                totals.add(batch, token_loss, mass, of_router, logprobs_R.detach())
        totals.add_step(self._step(lr), num_tokens, dispatched.counts_LE)
        if self._value_head is not None:
            self._value_head.step(self._ranks)
        if speed := self._spec.balance.bias_update_speed:
            update_selection_biases(self._policy.model, self._ranks.total(dispatched.counts_LE.clone()), speed)
        self._policy.refresh(self._num_steps)

    def _replayed(self, batch: Batch) -> torch.Tensor | None:
        """The recorded routes of a batch; `None` when the router shall choose."""
        if not self._spec.router_replay:
            return None
        for sample in batch.samples:
            self._recorded(sample)
        return batch.routes_TLK

    def _recorded(self, sample: TrainSample) -> np.ndarray:
        """The recorded routes of the tokens that are computed. Raises LearnerError where any is missing."""
        model = self._spec.model
        expected = (len(model.moe_layers), model.num_experts_per_tok)
        found = sample.routes_TLK.shape
        if found[0] < sample.num_inputs or found[1:] != expected:
            raise LearnerError(
                f"router replay: sample {sample.key} needs the routes of {sample.num_inputs} tokens in "
                f"{expected[0]} layers, {expected[1]} experts each, got {found}; record them, or set "
                "learner.router_replay=false"
            )
        return sample.routes_TLK[: sample.num_inputs]

    def _scores(self, batch: Batch, out: PolicyOutput, logprobs_R: torch.Tensor) -> SampleScores:
        """What an update would compute of a batch before its first step; `out` is on the router's own routes.

        Where those are not the recorded ones (older samples, near-ties), an update with replay computes something else:
        then the batch runs once more. All ranks do, or none.
        """
        if self._spec.router_replay:
            recorded_TLK = batch.routes_TLK
            if recorded_TLK is not None and recorded_TLK.shape != out.routes_TLK.shape:
                recorded_TLK = None  # the gate will say so
            differs = recorded_TLK is not None and not torch.equal(recorded_TLK, out.routes_TLK)
            if int(self._ranks.total(torch.tensor(int(differs)))):
                out = self._policy(batch, recorded_TLK)
                logprobs_R = batch_logprobs(out, batch, self._kernels)
        reference_R = (
            None if self._reference is None else batch_logprobs(self._reference(batch), batch, self._kernels).numpy()
        )
        values_R = None if self._value_head is None else self._value_head(out.hidden_RD).numpy()
        return SampleScores(proximal_logprobs_R=logprobs_R.numpy(), reference_logprobs_R=reference_R, values_R=values_R)

    def _router_loss(self, samples: Sequence[TrainSample], dispatched: DispatchTotals | None) -> RouterLoss:
        return RouterLoss(
            settings=self._spec.balance,
            model=self._spec.model,
            num_tokens=sum(sample.num_inputs for sample in samples),
            num_sequences=len(samples),
            dispatched=dispatched,
        )

    @torch.no_grad()
    def _dispatched(self, samples: Sequence[TrainSample], share: Sequence[Batch]) -> DispatchTotals | None:
        """How often a minibatch chooses each expert, all ranks together; `None` where no loss asks for it."""
        settings, model = self._spec.balance, self._spec.model
        if settings.scope is not BalanceScope.global_batch or not settings.load_balance_coef:
            return None
        if self._spec.router_replay:
            routes_TLK = np.concatenate([self._recorded(sample) for sample in samples])
            return count_dispatched(torch.from_numpy(routes_TLK), model)
        own = nothing_dispatched(model)
        for batch in share:
            routes_TLK = self._policy(batch).routes_TLK
            if not batch.is_padding:
                own += count_dispatched(routes_TLK, model)
        num_tokens = sum(sample.num_inputs for sample in samples)
        return DispatchTotals(counts_LE=self._ranks.total(own.counts_LE), num_tokens=num_tokens)

    def _step(self, lr: float) -> float:
        grad_norm = self._engine.step(lr)
        self._num_steps += 1
        if not np.isfinite(grad_norm):
            raise LearnerError(
                f"learner: the gradient must be finite, got norm {grad_norm}; lower algorithm.lr or look at the batch"
            )
        return grad_norm


def _sample_parities(
    batch: Batch, logprobs_R: torch.Tensor, routes_TLK: torch.Tensor, scores: SampleScores
) -> list[SampleParity]:
    """Cut a batch's logprobs and routes into its samples and compare each with what its sampler recorded."""
    reports: list[SampleParity] = []
    logprobs, routes = logprobs_R.numpy(), routes_TLK.numpy()
    token = row = 0
    for sample in batch.samples:
        rows = slice(row, row + len(sample.targets_R))
        of_sample = routes[token : token + sample.num_inputs]
        reports.append(SampleParity.of(sample, logprobs[rows], of_sample, scores.part(rows)))
        token, row = token + sample.num_inputs, rows.stop
    return reports


def _value_head(spec: LearnerSpec, lr: float) -> ValueHead:
    settings = spec.optimizer
    return ValueHead(
        spec.model.hidden_size,
        lr=lr,
        beta1=settings.beta1,
        beta2=settings.beta2,
        max_grad_norm=settings.max_grad_norm,
    )

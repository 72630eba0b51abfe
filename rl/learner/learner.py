"""The learner: parity gate, policy update, supervised fine-tuning, publishing and its own state.

A plain class; `rl.learner.actor` puts it into a Ray process, `rl.learner.deepspeed` runs its optimizer. It is blind to
the algorithm: it computes logprobs, asks for the loss of each token, and adds them up with the weights that the samples
carry over the mass of the whole minibatch, so a micro-batch boundary changes nothing in it but the order of sums. The
router losses take their dispatch counts from the micro-batch (one pass instead of two), weighted by its share of the
minibatch's tokens.

Shapes: T packed tokens, R trainable tokens, V vocabulary, L layers, K experts of a token, E experts.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from model.checkpoint import load_model, save_model
from model.config import KernelChoice, ModelConfig
from model.kernels.dispatch import resolve_kernels
from model.moe_losses import dispatch_totals, load_balancing_loss, router_sums, router_z_loss
from model.snapshot import WeightSnapshot
from rl.algorithms.base import Loss, TokenLoss
from rl.algorithms.registry import has_critic
from rl.batch import Batch, TrainSample, micro_batches
from rl.config import RunConfig
from rl.learner.deepspeed import DeepSpeedEngine, OptimizerSettings, Rendezvous
from rl.learner.policy import PolicyOutput, PublishedPolicy
from rl.learner.reference import Reference
from rl.learner.streams import row_entropies, token_streams
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
    a value head that learns at this rate.
    """

    model: ModelConfig
    optimizer: OptimizerSettings
    start: Path
    num_threads: int
    micro_batch_tokens: int
    load_balance_coef: float
    router_z_coef: float
    kernels: KernelChoice = KernelChoice.auto
    reference: bool = False
    value_lr: float | None = None

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
            ),
            start=start.resolve(),
            kernels=config.cluster.kernels,
            num_threads=num_threads,
            micro_batch_tokens=settings.micro_batch_tokens,
            load_balance_coef=config.algorithm.load_balance_coef,
            router_z_coef=config.algorithm.router_z_coef,
            reference=config.algorithm.kl_coef > 0,
            value_lr=config.algorithm.value_lr if has_critic(config.algorithm) else None,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateReport:
    """Means over the trainable tokens of the round, and over its steps for losses and norms.

    `expert_load_LE` is each expert's share of a layer's tokens. `terms` and `watched` are the loss's own
    (`rl.algorithms.base.TokenLoss`), by metric: means over the steps, and over the tokens.
    """

    num_steps: int
    num_tokens: int
    policy_loss: float
    balance_loss: float
    router_z_loss: float
    clip_frac: float
    kl_behavior_policy: float
    grad_norm: float
    expert_load_LE: np.ndarray
    terms: Mapping[str, float] = field(default_factory=dict[str, float])
    watched: Mapping[str, float] = field(default_factory=dict[str, float])


class Learner:
    """One rank."""

    def __init__(self, spec: LearnerSpec, rendezvous: Rendezvous):
        torch.set_num_threads(spec.num_threads)
        self._spec = spec
        self._kernels = resolve_kernels(spec.kernels)
        self._policy = PublishedPolicy(spec.model, self._kernels)
        self._engine = DeepSpeedEngine(self._policy, spec.optimizer, rendezvous)
        self._engine.restore(_prefixed(load_model(spec.start).masters()), {}, 0)
        self._policy.refresh()
        self._reference = Reference(spec.model, self._kernels, self._policy.packed) if spec.reference else None
        self._value_head = None if spec.value_lr is None else _value_head(spec, spec.value_lr)

    @torch.no_grad()
    def parity(self, samples: Sequence[TrainSample]) -> ParityReport:
        """Behavior against policy logprobs of every sample under the weights that sampled it, and its scores."""
        reports: list[SampleParity] = []
        entropy_sum = 0.0
        for batch in micro_batches(samples, self._spec.micro_batch_tokens):
            out = self._policy(batch)
            logprobs_R, entropies_R = self._kernels.logprobs_with_entropies(
                out.logits_RV, batch.target_ids_R, batch.temperatures_R
            )
            entropy_sum += float(entropies_R.sum())
            reference_R = None if self._reference is None else self._logprobs(self._reference(batch), batch).numpy()
            values_R = None if self._value_head is None else self._value_head(out.hidden_RD).numpy()
            scores = SampleScores(
                proximal_logprobs_R=logprobs_R.numpy(), reference_logprobs_R=reference_R, values_R=values_R
            )
            reports += _sample_parities(batch, scores, out.routes_TLK)
        return ParityReport.of(reports, entropy_sum=entropy_sum)

    def update(self, minibatches: Sequence[Sequence[TrainSample]], algorithm: Loss, lr: float) -> UpdateReport | None:
        """One optimizer step a minibatch; `None` when no sample is trained on (every group without variance)."""
        totals = _Totals()
        for samples in minibatches:
            if samples:
                self._minibatch(samples, algorithm, lr, totals)
        return totals.report() if totals.num_steps else None

    def fit(self, samples: Sequence[TrainSample], lr: float) -> float:
        """One step of maximum likelihood on the samples' trainable tokens; the mean loss in nats a token."""
        num_tokens = sum(len(sample.targets_R) for sample in samples)
        num_packed = sum(sample.num_tokens for sample in samples)
        loss_sum = 0.0
        for batch in micro_batches(samples, self._spec.micro_batch_tokens):
            out = self._engine.forward(batch)
            loss = -self._logprobs(out, batch).sum() / num_tokens
            self._engine.backward(loss + self._router_loss(out, batch, num_packed)[0])
            loss_sum += float(loss.detach())
        self._step(lr)
        return loss_sum

    def snapshot(self, version: WeightVersion) -> tuple[WeightSnapshot, Mapping[str, tuple[int, int]]]:
        """The bytes that the forward reads now, and how many codes of each tensor changed since the last snapshot."""
        return self._policy.snapshot(version)

    def digests(self) -> dict[str, str]:
        """See `PublishedPolicy.digests`."""
        return self._policy.digests()

    def view_differences(self, running: Mapping[str, np.ndarray]) -> dict[str, float]:
        """Largest absolute difference of each tensor that `running` (what a worker decodes with) holds differently."""
        return self._policy.view_differences(running)

    def save(self, folder: Path) -> None:
        """Write the masters as a model folder into `folder` (which exists), the optimizer beside them."""
        moments, num_steps = self._engine.optimizer_state()
        save_model(folder, self._spec.model, dict(self._policy.model.named_parameters()), {})
        save_file(moments, folder / OPTIMIZER_FILE, metadata={"num_steps": str(num_steps)})
        if self._reference is not None:
            self._reference.save(folder)
        if self._value_head is not None:
            self._value_head.save(folder)

    def load(self, folder: Path) -> None:
        """Continue from what `save` wrote, to the last bit. Raises LearnerError when it is another model's."""
        loaded = load_model(folder)
        if loaded.config != self._spec.model:
            raise LearnerError(
                f"checkpoint {folder.name}: must be of the model of this run, got {loaded.config}; "
                "use the model settings it was saved with"
            )
        if self._reference is not None:
            self._reference.load(folder)
        if self._value_head is not None:
            self._value_head.load(folder)
        self._engine.restore(_prefixed(loaded.masters()), *_load_moments(folder / OPTIMIZER_FILE))
        self._policy.refresh()

    def close(self) -> None:
        """Leave the process group."""
        self._engine.close()

    def _minibatch(self, samples: Sequence[TrainSample], algorithm: Loss, lr: float, totals: _Totals) -> None:
        num_tokens = sum(len(sample.targets_R) for sample in samples)
        num_packed = sum(sample.num_tokens for sample in samples)
        mass = math.fsum(sample.mass for sample in samples)
        for batch in micro_batches(samples, self._spec.micro_batch_tokens):
            out = self._engine.forward(batch)
            logprobs_R = self._logprobs(out, batch)
            entropies = partial(row_entropies, out.logits_RV, batch.temperatures_R)
            values_R = None if self._value_head is None else self._value_head(out.hidden_RD)
            token_loss = algorithm.token_loss(token_streams(batch, logprobs_R, entropies, values_R))
            loss = (token_loss.total() * batch.weights_R).sum() / mass
            router_loss, balance, router_z_loss = self._router_loss(out, batch, num_packed)
            self._engine.backward(loss + router_loss)
            totals.add(batch, out, token_loss, mass, balance, router_z_loss, logprobs_R.detach())
        totals.add_step(self._step(lr), num_tokens)
        if self._value_head is not None:
            self._value_head.step()

    def _logprobs(self, out: PolicyOutput, batch: Batch) -> torch.Tensor:
        """Logprob of each trainable token at the temperature it was sampled at, as the behavior logprobs are."""
        return self._kernels.logprobs(out.logits_RV, batch.target_ids_R, batch.temperatures_R)

    def _step(self, lr: float) -> float:
        grad_norm = self._engine.step(lr)
        if not np.isfinite(grad_norm):
            raise LearnerError(
                f"learner: the gradient must be finite, got norm {grad_norm}; lower algorithm.lr or look at the batch"
            )
        self._policy.refresh()
        return grad_norm

    def _router_loss(self, out: PolicyOutput, batch: Batch, num_packed: int) -> tuple[torch.Tensor, float, float]:
        """Weighted router losses of a micro-batch, times its share of the minibatch's tokens; and both unweighted."""
        share = batch.num_tokens / num_packed
        real_T = torch.ones(batch.num_tokens, dtype=torch.bool)  # packed: every token is real
        totals = dispatch_totals(out.routes_TLK, real_T, self._spec.model.num_experts)
        sums = router_sums(out.router_logits_TE, real_T, self._spec.model.router_scores)
        balance = load_balancing_loss(sums, totals) * share
        z_loss = router_z_loss(sums, totals) * share
        weighted = self._spec.load_balance_coef * balance + self._spec.router_z_coef * z_loss
        return weighted, float(balance.detach()), float(z_loss.detach())


class _Totals:
    """Sums over the micro-batches of a round."""

    def __init__(self) -> None:
        self.num_steps = 0
        self._num_tokens = 0
        self._sums = dict.fromkeys(("policy", "balance", "router_z", "clipped", "kl", "grad_norm"), 0.0)
        self._terms: defaultdict[str, float] = defaultdict(float)
        self._watched: defaultdict[str, float] = defaultdict(float)
        self._load_LE: np.ndarray | None = None

    def add(
        self,
        batch: Batch,
        out: PolicyOutput,
        token_loss: TokenLoss,
        mass: float,
        balance: float,
        router_z_loss: float,
        logprobs_R: torch.Tensor,
    ) -> None:
        log_ratio_R = logprobs_R - batch.behavior_logprobs_R
        self._sums["policy"] += float((token_loss.loss_R.detach() * batch.weights_R).sum() / mass)
        for name, term_R in token_loss.terms.items():
            self._terms[name] += float((term_R.detach() * batch.weights_R).sum() / mass)
        for name, value_R in token_loss.watched.items():
            self._watched[name] += float(value_R.sum())
        self._sums["balance"] += balance
        self._sums["router_z"] += router_z_loss
        self._sums["clipped"] += float(token_loss.clipped_R.sum())
        # The k3 estimator of KL(behavior || policy), never negative (Schulman 2020).
        self._sums["kl"] += float((log_ratio_R.expm1() - log_ratio_R).sum())
        num_experts = out.router_logits_TE[0].shape[-1]
        counts_LE = np.stack(
            [np.bincount(layer.reshape(-1), minlength=num_experts) for layer in out.routes_TLK.numpy().swapaxes(0, 1)]
        )
        self._load_LE = counts_LE if self._load_LE is None else self._load_LE + counts_LE

    def add_step(self, grad_norm: float, num_tokens: int) -> None:
        self.num_steps += 1
        self._num_tokens += num_tokens
        self._sums["grad_norm"] += grad_norm

    def report(self) -> UpdateReport:
        assert self._load_LE is not None
        return UpdateReport(
            num_steps=self.num_steps,
            num_tokens=self._num_tokens,
            policy_loss=self._sums["policy"] / self.num_steps,
            balance_loss=self._sums["balance"] / self.num_steps,
            router_z_loss=self._sums["router_z"] / self.num_steps,
            clip_frac=self._sums["clipped"] / self._num_tokens,
            kl_behavior_policy=self._sums["kl"] / self._num_tokens,
            grad_norm=self._sums["grad_norm"] / self.num_steps,
            expert_load_LE=self._load_LE / self._load_LE.sum(axis=1, keepdims=True),
            terms={name: total / self.num_steps for name, total in self._terms.items()},
            watched={name: total / self._num_tokens for name, total in self._watched.items()},
        )


def _sample_parities(batch: Batch, scores: SampleScores, routes_TLK: torch.Tensor) -> list[SampleParity]:
    """Cut a batch's scores and routes into its samples and compare each with what its sampler recorded."""
    reports: list[SampleParity] = []
    routes = routes_TLK.numpy()
    token = row = 0
    for sample in batch.samples:
        num_rows = len(sample.targets_R)
        reports.append(SampleParity.of(sample, scores.part(row, num_rows), routes[token : token + sample.num_tokens]))
        token, row = token + sample.num_tokens, row + num_rows
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


def _prefixed(masters: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Files hold the transformer's own names; the engine's module wraps it as `model`."""
    return {f"model.{name}": tensor for name, tensor in masters.items()}


def _load_moments(file: Path) -> tuple[dict[str, torch.Tensor], int]:
    with safe_open(file, framework="pt") as stored:
        num_steps = int(stored.metadata()["num_steps"])
    return load_file(file), num_steps

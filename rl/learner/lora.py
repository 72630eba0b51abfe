"""The policy as low-rank adapters on a frozen base (`learner.lora`, `model/lora.py`).

The base is held as a sampler holds it: published bytes and what the kernels pack of them. It has no fp32 masters, no
gradient and no optimizer state, and its dequantized experts exist one at a time, in the backward. The engine sees the
adapters alone; an expert's adapter lives on the rank of its expert.

The first snapshot holds everything, every later one the adapters and the digest of each tensor, so that a worker whose
base is another one says so. A checkpoint holds the adapters, and the base once for all checkpoints beside it.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from model.adapter_file import (
    BASE_DIGEST,
    BASE_FOLDER,
    check_base,
    check_beside,
    has_adapters,
    load_adapters,
    load_base,
    save_adapters,
)
from model.binding import Binder, load_published
from model.checkpoint import appearing_whole, load_model, save_model
from model.config import LoraConfig, ModelConfig
from model.kernels.dispatch import Kernels
from model.loaded import CheckpointError, LoadedModel
from model.lora import adapters, add_adapters, base_digest, initial_adapters, without_adapters
from model.parallel.groups import Ranks
from model.parallel.placement import ExpertPlacement
from model.snapshot import (
    CodeChanges,
    PackedTensor,
    StraightThrough,
    WeightSnapshot,
    digests,
    publish_tensor,
    view,
)
from rl.batch import Batch
from rl.checkpoint import seal
from rl.learner.config import ActivationCheckpointing, QuantizationConfig
from rl.learner.policy import PolicyOutput, PublishedPolicy
from rl.learner.reference import Reference
from rollout.types import WeightVersion


class AdapterPolicy(PublishedPolicy):
    """`PublishedPolicy` whose masters are those of the adapters. `seed` draws their start.

    Of its parameters as a module, which an engine reduces and steps, the adapters are the only ones; the transformer
    is an attribute beside them.
    """

    def __init__(
        self,
        config: ModelConfig,
        kernels: Kernels,
        ranks: Ranks,
        lora: LoraConfig,
        seed: int,
        checkpointing: ActivationCheckpointing = ActivationCheckpointing.none,
    ):
        with torch.device("meta"):
            super().__init__(config, kernels, ranks, checkpointing=checkpointing)
        model = self.model
        del self.model
        self.__dict__["model"] = model  # not as a module of this one
        model.requires_grad_(False)
        add_adapters(model, lora)
        self._lora, self._seed, self._config = lora, seed, config
        self._adapters: dict[str, nn.Parameter] = {}
        for path, adapter in adapters(model).items():
            adapter.A, adapter.B = (nn.Parameter(torch.empty(factor.shape)) for factor in (adapter.A, adapter.B))
            self._adapters |= {f"{path}.{name}": master for name, master in adapter.named_parameters()}
        self._registered = nn.ParameterList(self._adapters.values())
        self._binder = None
        if kernels.layers is not None:
            self._binder = Binder(config, kernels.layers, ranks.expert_parallel, frozen=True)
        self.place(ExpertPlacement.contiguous(len(config.moe_layers), config.num_experts, ranks.expert_parallel))
        self._base: dict[str, PackedTensor] = {}
        self._base_digests: dict[str, str] = {}
        self._output: dict[str, torch.Tensor] = {}
        self._base_version: WeightVersion | None = None

    def open(self, folder: Path) -> LoadedModel:
        """See `PublishedPolicy.open`; of a folder of adapters, their base."""
        return load_base(folder, load_adapters(folder)) if has_adapters(folder) else load_model(folder)

    @torch.no_grad()
    def own_masters(self, loaded: LoadedModel, folder: Path | None = None) -> dict[str, torch.Tensor]:
        """See `PublishedPolicy.own_masters`: takes `loaded` as the base; with a folder its adapters, else new ones.

        Raises:
            CheckpointError: The folder has no adapters, or others than this run's settings ask for.
        """
        base = loaded.packed()
        base_digests = digests(base)
        if folder is None:
            masters: Mapping[str, torch.Tensor] = initial_adapters(self._config, self._lora, self._seed)
        else:
            stored = load_adapters(folder)
            if stored.lora != self._lora:
                raise CheckpointError(
                    f"checkpoint {folder.name}: its adapters must have the learner.lora of this run, got {stored.lora};"
                    " resume with the settings it was saved with"
                )
            check_base(folder, stored, base_digests)
            masters = stored.masters
        self._hold(base, base_digests)
        return {name: self.own_part(name, master) for name, master in masters.items()}

    def _hold(self, whole: Mapping[str, PackedTensor], base_digests: Mapping[str, str]) -> None:
        """Compute with this base from now on; `whole` has all experts."""
        self._base_digests = dict(base_digests)
        self._base_version = None
        experts = {name: own for name, own in self._experts.items() if name in whole}
        self._base = dict(whole) | {name: whole[name].take(own) for name, own in experts.items()}
        output = self.model.output_name
        if self._binder is not None:
            load_published(self.model, self._base, self._binder)
            held = {output: view(self._base[output], torch.bfloat16)}  # the backward of the logits reads it
        else:
            held = {n: view(packed, self._dtype, self._kernels.dequantize) for n, packed in self._base.items()}
        self.model.load_state_dict(held, strict=False, assign=True)
        self._output = {output: self.model.output_weight.detach()}

    @torch.no_grad()
    def refresh(self, num_steps: int = 0, previous: Mapping[str, PackedTensor] | None = None) -> None:
        """Publish every adapter's master anew; call after each change of them."""
        published = {name: publish_tensor(name, master) for name, master in self._adapters.items()}
        self._packed = self._base | published
        self._views = {name: view(packed, self._dtype) for name, packed in published.items()} | self._output
        if self._binder is not None:
            self._binder.bind_adapters(self.model, published)

    def masters(self) -> dict[str, nn.Parameter]:
        """The adapters' fp32 masters."""
        return dict(self._adapters)

    @property
    def experts(self) -> list[str]:
        """See `PublishedPolicy.experts`; the adapters of the experts."""
        return [name for name in self._experts if name in self._adapters]

    @property
    def is_function_of_masters(self) -> bool:
        """See `PublishedPolicy.is_function_of_masters`."""
        return True

    def snapshot(self, version: WeightVersion) -> tuple[WeightSnapshot, Mapping[str, CodeChanges]] | None:
        """See `PublishedPolicy.snapshot`; after the first one of a base, the adapters alone travel.

        No MXFP4 code of the base ever changes, and adapters have none.
        """
        is_first = self._base_version is None
        own = self.whole(self._published_adapters())
        base = self.whole(self._base) if is_first else {}
        if is_first:
            self._base_version = version
        if own is None or base is None:
            return None
        snapshot = WeightSnapshot(
            version=version,
            tensors=base | own,
            digests=self._base_digests | digests(own),
            base_version=None if is_first else self._base_version,
        )
        return snapshot, {}

    def digests(self) -> dict[str, str] | None:
        """See `PublishedPolicy.digests`."""
        own = self.whole(self._published_adapters())
        if own is None:
            return None
        return self._base_digests | digests(own)

    def save(self, folder: Path, masters: Mapping[str, torch.Tensor]) -> None:
        """See `PublishedPolicy.save`; the base is written beside `folder` by the first that is saved there."""
        digest_of_base = base_digest(self._base_digests)
        beside = folder.parent / BASE_FOLDER
        if self._ranks.gather(beside.is_dir())[0]:
            check_beside(beside, digest_of_base)
        else:
            whole = self.whole(self._base)
            if whole is not None:
                with appearing_whole(beside) as partial:
                    save_model(partial, self._config, whole, {BASE_DIGEST: digest_of_base})
                    seal(partial)
        if self._ranks.rank == 0:
            save_adapters(folder, masters, self._lora, digest_of_base)

    def _published_adapters(self) -> dict[str, PackedTensor]:
        return {name: self._packed[name] for name in self._adapters}

    def _readable(self) -> dict[str, torch.Tensor]:
        if not torch.is_grad_enabled():
            return self._views
        through: dict[str, Any] = {
            name: StraightThrough.apply(master, self._views[name]) for name, master in self._adapters.items()
        }
        return through | self._output


class BaseReference:
    """The reference of a policy that is adapters on a base: the base. Nothing more is held, saved or loaded for it."""

    def __init__(self, policy: AdapterPolicy):
        self._policy = policy

    def place(self, placement: ExpertPlacement) -> None:
        """The experts are the policy's."""

    @torch.no_grad()
    def __call__(self, batch: Batch) -> PolicyOutput:
        """What the base makes of a batch, without gradient; the adapters' steps are left out, no other."""
        with without_adapters(self._policy.model):
            return self._policy(batch)

    def save(self, folder: Path) -> None:
        """The policy saves the base."""

    def load(self, folder: Path) -> None:
        """The policy loads the base."""


def make_policy(
    config: ModelConfig,
    kernels: Kernels,
    ranks: Ranks,
    quantization: QuantizationConfig,
    lora: LoraConfig,
    seed: int,
    checkpointing: ActivationCheckpointing = ActivationCheckpointing.none,
) -> PublishedPolicy:
    """The policy that `lora` and `quantization` ask for."""
    if lora.rank:
        return AdapterPolicy(config, kernels, ranks, lora, seed, checkpointing)
    return PublishedPolicy(config, kernels, ranks, quantization, seed, checkpointing)


def make_reference(policy: PublishedPolicy, kernels: Kernels, ranks: Ranks) -> Reference | BaseReference:
    """What `policy` is now, frozen; of adapters, their base."""
    if isinstance(policy, AdapterPolicy):
        return BaseReference(policy)
    return Reference(policy.model.config, kernels, ranks, policy.packed)

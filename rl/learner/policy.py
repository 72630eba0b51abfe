"""The policy as the learner sees it: fp32 masters, read only through their published view.

`refresh` quantizes every master once an optimizer step; the forward reads those bytes with the kernels that a sampler
runs, its gradient goes straight through to the masters, and `snapshot` publishes the same bytes. What is trained on is
what is published, unless `learner.quantization.enabled=false`: then the forward reads the masters, in torch's
arithmetic, and they are quantized when they are published.

Shapes: T packed tokens, R rows whose next token is trained, D model dim, L layers,
K experts of a token, E experts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from model.attention import Attend
from model.binding import Binder
from model.checkpoint import load_model, save_model
from model.config import ModelConfig
from model.kernel_attention import KernelAttention
from model.kernels.dispatch import Kernels
from model.layers import TORCH_DTYPE
from model.loaded import LoadedModel
from model.logprobs import Unembedding
from model.moe import Experts
from model.packed_attention import PackedAttention
from model.parallel.experts import ExpertExchange
from model.parallel.groups import Ranks
from model.parallel.placement import ExpertPlacement
from model.requantize import ClippedStraightThrough
from model.snapshot import (
    CodeChanges,
    Format,
    PackedTensor,
    StraightThrough,
    WeightSnapshot,
    as_tensor,
    codes_changed,
    digests,
    make_snapshot,
    tensor_format,
    view,
)
from model.transformer import Transformer
from rl.batch import Batch
from rl.learner.config import ActivationCheckpointing, QuantizationConfig
from rl.learner.requantizer import Requantizer
from rollout.types import WeightVersion


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyOutput:
    """Hidden states of the rows that predict trainable tokens, how they become logits (`rl.learner.streams` makes
    those chunk by chunk), and what the routers did with every token.
    """  # noqa: D205

    hidden_RD: torch.Tensor
    unembedding: Unembedding
    routes_TLK: torch.Tensor
    router_logits_TE: tuple[torch.Tensor, ...]


class PublishedPolicy(nn.Module):
    """A transformer whose forward reads the published view of its parameters; its experts are those of this rank.

    `quantization` says how its masters become bytes, `seed` keys what is random in it.
    """

    def __init__(
        self,
        config: ModelConfig,
        kernels: Kernels,
        ranks: Ranks,
        quantization: QuantizationConfig | None = None,
        seed: int = 0,
        checkpointing: ActivationCheckpointing = ActivationCheckpointing.none,
    ):
        super().__init__()
        self.model = Transformer(
            config,
            expert_parallel=ranks.expert_parallel,
            recompute_blocks=checkpointing is ActivationCheckpointing.block,
        )
        self._kernels = kernels
        self._experts: dict[str, npt.NDArray[np.int64]] = {}
        self._slots: dict[str, torch.Tensor | None] = {}
        self._requantizer = Requantizer(
            quantization or QuantizationConfig(), seed=seed, nearest=kernels.quantize, experts=self._experts
        )
        self._binder = None
        if kernels.layers is not None and not self._requantizer.reads_masters:
            self._binder = Binder(config, kernels.layers, ranks.expert_parallel)
        self._ranks = ranks
        self.place(ExpertPlacement.contiguous(len(config.moe_layers), config.num_experts, ranks.expert_parallel))
        self._dtype = TORCH_DTYPE[config.compute_dtype]
        self._packed: dict[str, PackedTensor] = {}
        self._views: dict[str, torch.Tensor] = {}
        self._inside: dict[str, torch.Tensor] = {}
        self._published: dict[str, PackedTensor] = {}
        self._digests: dict[str, str] = {}
        self._own_digests: dict[str, str] = {}

    def place(self, placement: ExpertPlacement) -> None:
        """Hold the experts that `placement` gives this rank; their masters and bytes are to be put in after that.

        Outside of this class experts keep their own numbers: in routes, in what `whole` and `gather` return, in the
        arguments of `own_part` and `own_packed`.
        """
        modules = [(path, module) for path, module in self.model.named_modules() if isinstance(module, Experts)]
        for layer, (path, module) in enumerate(modules):
            slot_E = None if placement.is_contiguous else torch.from_numpy(placement.slots(layer))
            if self._ranks.expert_group is not None:
                module.exchange = ExpertExchange(self._ranks.expert_group, placement.expert_LS.shape[1], slot_E)
            names = [f"{path}.{name}" for name, _ in module.named_parameters()]
            own = placement.experts(layer, self._ranks.expert_rank)
            self._experts |= dict.fromkeys(names, own)  # in place: the requantizer reads it
            self._slots |= dict.fromkeys(names, slot_E)

    @torch.no_grad()
    def refresh(self, num_steps: int = 0, previous: Mapping[str, PackedTensor] | None = None) -> None:
        """Requantize every master; call after each change of the masters, of which optimizer step `num_steps` was one.

        `previous` are the bytes of this rank that hysteresis goes by, if not those read until now.
        """
        masters = dict(self.model.named_parameters())
        if self._requantizer.reads_masters:
            self._packed = {}
            self._views = {name: self._as_computed(name, master.detach()) for name, master in masters.items()}
            return
        self.read(self._requantizer(masters, num_steps, self._packed if previous is None else previous))
        self._inside = self._requantizer.inside(masters, self._packed)

    @torch.no_grad()
    def read(self, packed: Mapping[str, PackedTensor]) -> None:
        """Read these published bytes of this rank from now on."""
        self._packed = dict(packed)
        self._views = {
            name: view(packed, self._dtype, self._kernels.dequantize) for name, packed in self._packed.items()
        }
        if self._binder is not None:
            self._binder.bind(self.model, self._packed)

    def forward(self, batch: Batch, replay_TLK: torch.Tensor | None = None) -> PolicyOutput:
        """Run the packed batch; only `batch.rows_R` are for projecting to the vocabulary."""
        weights = self._readable()
        inputs = (batch.ids_T, batch.positions_T, self._attend(batch), replay_TLK)
        out = torch.func.functional_call(self.model, weights, inputs)
        return PolicyOutput(
            hidden_RD=out.hidden_TD[batch.rows_R],
            unembedding=Unembedding(self.model.logits, weights[self.model.output_name]),
            routes_TLK=out.routes_TLK,
            router_logits_TE=out.router_logits_TE,
        )

    @property
    def packed(self) -> Mapping[str, PackedTensor]:
        """The published bytes that the forward reads now; of the experts, this rank's."""
        if not self._packed and self._requantizer.reads_masters:
            self._packed = self._requantizer(dict(self.model.named_parameters()), 0, {})
        return self._packed

    @property
    def is_function_of_masters(self) -> bool:
        """Whether the published bytes follow from the masters alone, so that a checkpoint need not hold them."""
        return self._requantizer.is_pure

    def snapshot(self, version: WeightVersion) -> tuple[WeightSnapshot, Mapping[str, CodeChanges]] | None:
        """The packed bytes as version `version`, and what changed in each MXFP4 tensor since the last snapshot.

        On rank 0; `None` on the others, whose experts travel to it.
        """
        packed = self.whole()
        snapshot = None if packed is None else make_snapshot(version, packed)
        self._digests = {} if snapshot is None else dict(snapshot.digests)
        self._own_digests = self._digests if self._ranks.num_ranks == 1 else digests(self.packed)
        if packed is None or snapshot is None:
            return None
        changed = codes_changed(self._published, packed) if self._published else {}
        self._published = packed
        return snapshot, changed

    def digests(self) -> dict[str, str] | None:
        """On rank 0, the digest of every tensor that the forward reads now (`model.snapshot.digest`).

        Always of the bytes as they are now: each rank digests its own, and only where one of them differs from what
        `snapshot` gathered are they gathered again.
        """
        own = digests(self.packed)
        if not int(self._ranks.total(torch.tensor(int(own != self._own_digests)))):
            return dict(self._digests) if self._ranks.rank == 0 else None
        packed = self.whole()
        return None if packed is None else digests(packed)

    def view_differences(self, running: Mapping[str, npt.NDArray[np.float32]]) -> dict[str, float]:
        """Largest absolute difference of each tensor that `running` holds differently from the view read here."""
        differences: dict[str, float] = {}
        for name, packed in self.packed.items():
            viewed = view(packed, self._dtype, self._kernels.dequantize)
            if name not in running:
                differences[name] = float("inf")
                continue
            other = torch.from_numpy(running[name][self._experts.get(name, ...)].copy())
            if not torch.equal(other, own := viewed.float()):
                differences[name] = float((other - own).abs().nan_to_num(nan=float("inf"), posinf=float("inf")).max())
        return differences

    def masters(self) -> dict[str, nn.Parameter]:
        """This rank's fp32 masters under the transformer's names; its experts are a slice of each layer's."""
        return dict(self.model.named_parameters())

    @property
    def experts(self) -> list[str]:
        """Names of the parameters of which this rank holds a part, or would with more ranks."""
        return list(self._experts)

    def open(self, folder: Path) -> LoadedModel:
        """The model of a start or of a checkpoint of this policy."""
        return load_model(folder)

    def own_masters(self, loaded: LoadedModel, folder: Path | None = None) -> dict[str, torch.Tensor]:
        """This rank's masters in what `open` gave: of a start, or of the checkpoint `folder`. All ranks call it."""
        return {name: self.own_part(name, master) for name, master in loaded.masters().items()}

    def save(self, folder: Path, masters: Mapping[str, torch.Tensor]) -> None:
        """Write the whole model's `masters`, which rank 0 alone has, into a checkpoint's folder. All ranks call it."""
        if self._ranks.rank == 0:
            save_model(folder, self.model.config, masters, {})

    def own_part(self, name: str, whole: torch.Tensor) -> torch.Tensor:
        """Of a parameter of the whole model (or what has its shape), the part that this rank holds."""
        return whole[torch.from_numpy(self._experts[name])] if name in self._experts else whole

    def gather(self, name: str, own: torch.Tensor) -> torch.Tensor | None:
        """What `own_part` was taken of, on rank 0; `None` on the others. All ranks call it."""
        if name in self._experts:
            by_slot, slot_E = self._ranks.gather_experts(own), self._slots[name]
            return by_slot if by_slot is None or slot_E is None else by_slot[slot_E]
        return own if self._ranks.rank == 0 else None

    def own_packed(self, whole: Mapping[str, PackedTensor]) -> dict[str, PackedTensor]:
        """Of the published bytes of a whole model, the part that this rank holds."""
        return dict(whole) | {name: whole[name].take(experts) for name, experts in self._experts.items()}

    def whole(self, own: Mapping[str, PackedTensor] | None = None) -> dict[str, PackedTensor] | None:
        """The packed bytes of the whole model, on rank 0; `None` on the others. All ranks call it.

        `own` are those of this rank (`None`: all that the forward reads).
        """
        whole: dict[str, PackedTensor] = {}
        for name, packed in (self.packed if own is None else own).items():
            payload, scales = self.gather(name, as_tensor(packed.payload)), as_tensor(packed.scales)
            if packed.format is Format.MXFP4:
                scales = self.gather(name, scales)
            if payload is None or scales is None:
                continue
            shape = (len(payload), *packed.shape[1:]) if name in self._experts else packed.shape
            whole[name] = PackedTensor(
                format=packed.format, shape=shape, payload=payload.numpy(), scales=scales.numpy()
            )
        return whole if self._ranks.rank == 0 else None

    def _attend(self, batch: Batch) -> Attend:
        """Attention within the sequences; with kernels, what an engine computes on its cache, latents included."""
        if self._binder is None:
            return PackedAttention(batch.cu_seqlens)
        return KernelAttention(batch.cu_seqlens, self._kernels.attention, keeps_keys=True)

    def _readable(self) -> dict[str, torch.Tensor]:
        """The views, with the gradient going straight through to the masters."""
        if not torch.is_grad_enabled():
            return self._views
        masters = self.model.named_parameters()
        if self._requantizer.reads_masters:
            return {name: self._as_computed(name, master) for name, master in masters}
        return {name: self._straight_through(name, master) for name, master in masters}

    def _straight_through(self, name: str, master: torch.Tensor) -> torch.Tensor:
        if name in self._inside:
            return ClippedStraightThrough.apply(master, self._views[name], self._inside[name])
        return StraightThrough.apply(master, self._views[name])

    def _as_computed(self, name: str, master: torch.Tensor) -> torch.Tensor:
        """A master in the dtype of the forward."""
        return master if tensor_format(name) is Format.FP32 else master.to(self._dtype)

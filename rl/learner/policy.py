"""The policy as the learner sees it: fp32 masters, read only through their published view.

`refresh` quantizes every master once an optimizer step; the forward reads those bytes with the kernels that a sampler
runs, its gradient goes straight through to the masters, and `snapshot` publishes the same bytes. What is trained on is
what is published.

Shapes: T packed tokens, R rows whose next token is trained, V vocabulary, L layers, K experts of a token, E experts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from model.attention import Attend
from model.binding import Binder
from model.config import ModelConfig
from model.kernel_attention import KernelAttention
from model.kernels.dispatch import Kernels
from model.layers import TORCH_DTYPE
from model.packed_attention import PackedAttention
from model.snapshot import (
    PackedTensor,
    StraightThrough,
    WeightSnapshot,
    codes_changed,
    digest,
    make_snapshot,
    published_view,
    view,
)
from model.transformer import Transformer
from rl.batch import Batch
from rollout.types import WeightVersion


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyOutput:
    """Logits and hidden states of the rows that predict trainable tokens, and what the routers did with every token."""

    logits_RV: torch.Tensor
    hidden_RD: torch.Tensor
    routes_TLK: torch.Tensor
    router_logits_TE: tuple[torch.Tensor, ...]


class PublishedPolicy(nn.Module):
    """A transformer whose forward reads the published view of its parameters."""

    def __init__(self, config: ModelConfig, kernels: Kernels):
        super().__init__()
        self.model = Transformer(config)
        self._kernels = kernels
        self._binder = None if kernels.layers is None else Binder(config, kernels.layers)
        self._dtype = TORCH_DTYPE[config.compute_dtype]
        self._packed: dict[str, PackedTensor] = {}
        self._views: dict[str, torch.Tensor] = {}
        self._published: dict[str, PackedTensor] = {}

    @torch.no_grad()
    def refresh(self) -> None:
        """Requantize every master; call after each change of the masters."""
        self.read(published_view(dict(self.model.named_parameters()), self._kernels.quantize))

    @torch.no_grad()
    def read(self, packed: Mapping[str, PackedTensor]) -> None:
        """Read these published bytes from now on."""
        self._packed = dict(packed)
        self._views = {
            name: view(packed, self._dtype, self._kernels.dequantize) for name, packed in self._packed.items()
        }
        if self._binder is not None:
            self._binder.bind(self.model, self._packed)

    def forward(self, batch: Batch) -> PolicyOutput:
        """Run the packed batch; only `batch.rows_R` are projected to the vocabulary."""
        weights = self._readable()
        out = torch.func.functional_call(self.model, weights, (batch.ids_T, batch.positions_T, self._attend(batch)))
        hidden_RD = out.hidden_TD[batch.rows_R]
        return PolicyOutput(
            logits_RV=self.model.logits(hidden_RD, weights[self.model.output_name]),
            hidden_RD=hidden_RD,
            routes_TLK=out.routes_TLK,
            router_logits_TE=out.router_logits_TE,
        )

    @property
    def packed(self) -> Mapping[str, PackedTensor]:
        """The published bytes that the forward reads now."""
        return self._packed

    def snapshot(self, version: WeightVersion) -> tuple[WeightSnapshot, Mapping[str, tuple[int, int]]]:
        """The packed bytes as version `version`, and (changed, all) codes of each tensor since the last snapshot."""
        changed = codes_changed(self._published, self._packed) if self._published else {}
        self._published = self._packed
        return make_snapshot(version, self._packed), changed

    def digests(self) -> dict[str, str]:
        """The digest of every tensor that the forward reads now (`model.snapshot.digest`)."""
        return {name: digest(name, packed) for name, packed in self._packed.items()}

    def view_differences(self, running: Mapping[str, npt.NDArray[np.float32]]) -> dict[str, float]:
        """Largest absolute difference of each tensor that `running` holds differently from the view read here."""
        differences: dict[str, float] = {}
        for name, viewed in self._views.items():
            if name not in running:
                differences[name] = float("inf")
            elif not torch.equal(other := torch.from_numpy(running[name].copy()), own := viewed.float()):
                differences[name] = float((other - own).abs().nan_to_num(nan=float("inf"), posinf=float("inf")).max())
        return differences

    def _attend(self, batch: Batch) -> Attend:
        """Attention within the sequences; with kernels, what an engine computes on its cache, latents included."""
        if self._binder is None:
            return PackedAttention(batch.cu_seqlens)
        return KernelAttention(batch.cu_seqlens, self._kernels.attention, keeps_keys=True)

    def _readable(self) -> dict[str, torch.Tensor]:
        """The views, with the gradient going straight through to the masters."""
        if not torch.is_grad_enabled():
            return self._views
        return {
            name: StraightThrough.apply(master, self._views[name]) for name, master in self.model.named_parameters()
        }

"""Give a transformer the kernels of this machine and its published weights packed for them.

`bind` is the one place that knows which layer runs on which kernel. Where a layer of the model reads several weights at
once (queries, keys and values; gate and up), they are packed as one product: the bits of an output column do not depend
on the other columns. The kernels take the published bytes, so what a bound model computes with is what was published.

A sampler has only the packed weights, and its other parameters stay empty; a learner has both, and its gradient goes
through the parameters (the straight-through views of the same bytes).

Shapes: T packed tokens, D model dim, H query heads, d head dim, K experts a token, E experts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from model.attention import Attention, LatentAttention
from model.config import ModelConfig
from model.kernels.dispatch import LayerKernels
from model.kernels.grouped_experts.cpu import PackedExperts
from model.kernels.linear.cpu import PackedLinear
from model.layers import HeadNorm, Linear, Mlp, Parameters, RMSNorm, side_by_side
from model.moe import ExpertParameters, Experts, Router
from model.snapshot import Format, PackedTensor, as_tensor, view
from model.transformer import EMBEDDING, Transformer


@dataclass(frozen=True, slots=True, eq=False)
class BoundProduct:
    """A packed weight and its kernel; see `model.layers.Product`."""

    kernels: LayerKernels
    packed: PackedLinear
    bias: torch.Tensor | None

    def __call__(self, x: torch.Tensor, parameters: Parameters) -> torch.Tensor:
        """See `model.layers.Product`."""
        if torch.is_grad_enabled():
            weight, bias = parameters()
            return self.kernels.linear(x, self.packed, bias, weight=weight)
        return self.kernels.linear(x, self.packed, self.bias)


@dataclass(frozen=True, slots=True, eq=False)
class BoundExperts:
    """The packed experts of a layer and their kernel; see `model.moe.PackedExperts`."""

    kernels: LayerKernels
    packed: PackedExperts
    experts: Experts

    def __call__(
        self,
        x_TD: torch.Tensor,
        chosen_TK: torch.Tensor,
        weights_TK: torch.Tensor,
        parameters: Callable[[], ExpertParameters],
    ) -> torch.Tensor:
        """See `model.moe.PackedExperts`."""
        views = parameters() if torch.is_grad_enabled() else None
        return self.kernels.experts(x_TD, self.packed, chosen_TK, weights_TK, clamp=self.experts.clamp, views=views)

    def combine(self, rows_ND: torch.Tensor, row_TK: torch.Tensor, weights_TK: torch.Tensor) -> torch.Tensor:
        """See `model.moe.PackedExperts`."""
        return self.kernels.experts.combine(rows_ND, row_TK, weights_TK)


@dataclass(frozen=True, slots=True, eq=False)
class BoundRoute:
    """The routing kernel; see `model.moe.Route`."""

    kernels: LayerKernels
    selection_bias_E: torch.Tensor | None

    def __call__(
        self, logits_TE: torch.Tensor, replay_TK: torch.Tensor | None, router: Router
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `model.moe.Route`."""
        weighing: dict[str, Any] = {
            "scores": router.scores,
            "normalize": router.normalize,
            "scaling": router.scaling,
        }
        if replay_TK is not None:
            chosen_TK = replay_TK.long()
            return chosen_TK, self.kernels.route.weigh(logits_TE, chosen_TK, **weighing)
        return self.kernels.route(
            logits_TE,
            top_k=router.top_k,
            selection_bias=self.selection_bias_E,
            num_groups=router.num_groups,
            top_groups=router.top_groups,
            **weighing,
        )


@dataclass(frozen=True, slots=True, eq=False)
class BoundTurn:
    """The rotary kernel with the norms' weights in its order; see `model.attention.Turn`."""

    kernels: LayerKernels
    weights: Mapping[HeadNorm, torch.Tensor]

    def __call__(self, x_THd: torch.Tensor, by_T1h: torch.Tensor, norm: HeadNorm | None) -> torch.Tensor:
        """See `model.attention.Turn`."""
        if norm is None:
            return self.kernels.rotary(x_THd, by_T1h)
        weight = norm.packed_weight() if torch.is_grad_enabled() else self.weights[norm]
        return self.kernels.rotary(x_THd, by_T1h, weight, norm.eps, together=norm.together)


class Binder:
    """Packs the published weights of one configuration for kernels; `bind` again for each version.

    `expert_parallel` as the model's.
    """

    def __init__(self, config: ModelConfig, kernels: LayerKernels, expert_parallel: int = 1) -> None:
        self._kernels = kernels
        with torch.device("meta"):
            self._values = Transformer(config, expert_parallel=expert_parallel)

    def bind(self, model: Transformer, tensors: Mapping[str, PackedTensor]) -> None:
        """Give every layer of `model` its kernel and what `tensors` publishes for it."""
        plain = {
            name: view(packed, torch.bfloat16) for name, packed in tensors.items() if packed.format != Format.MXFP4
        }
        self._values.load_state_dict(plain, strict=False, assign=True)
        for (path, layer), values in zip(model.named_modules(), self._values.modules(), strict=True):
            match layer, values:
                case Transformer(), Transformer():
                    layer.unembed = self._product(values.output_weight)
                case Attention(), Attention():
                    self._attention(layer, values)
                case LatentAttention(), LatentAttention():
                    self._latent_attention(layer, values)
                case Mlp(), Mlp():
                    layer.gate_up = self._product(*side_by_side(values.gate_proj, values.up_proj)())
                    layer.down_proj.product = self._product(values.down_proj.weight)
                    layer.gated_unit = self._kernels.gated_unit
                case RMSNorm(), RMSNorm():
                    layer.kernel = self._kernels.rms_norm
                case Router(), Router():
                    layer.product = self._product(values.weight, values.bias)
                    selection_bias = values.selection_bias
                    layer.route = BoundRoute(self._kernels, None if selection_bias is None else selection_bias.float())
                case Experts(), Experts():
                    layer.packed = self._experts(layer, values, path, tensors)
                case _:
                    pass

    def _attention(self, layer: Attention, values: Attention) -> None:
        layer.qkv = self._product(*side_by_side(values.q_proj, values.k_proj, values.v_proj)())
        layer.o_proj.product = self._product(values.o_proj.weight, values.o_proj.bias)
        norms: dict[HeadNorm, torch.Tensor] = {}
        for norm, its_values in ((layer.q_norm, values.q_norm), (layer.k_norm, values.k_norm)):
            if norm is not None and its_values is not None:
                norms[norm] = its_values.packed_weight()
        layer.turn = BoundTurn(self._kernels, norms)

    def _latent_attention(self, layer: LatentAttention, values: LatentAttention) -> None:
        for name, part in values.named_children():
            if isinstance(part, Linear) and part is not values.kv_b_proj:
                getattr(layer, name).product = self._product(part.weight, part.bias)
        to_key_HpR, to_value_HeR = values.maps()
        layer.to_key, layer.to_value = self._product(to_key_HpR.mT), self._product(to_value_HeR)
        layer.turn = BoundTurn(self._kernels, {})

    def _experts(self, layer: Experts, values: Experts, path: str, tensors: Mapping[str, PackedTensor]) -> BoundExperts:
        gate_up, down = (tensors[f"{path}.{name}"] for name in ("gate_up_proj", "down_proj"))
        biases = (values.gate_up_proj_bias, values.down_proj_bias)
        gate_up_bias, down_bias = (None if bias is None else bias.float() for bias in biases)
        packed = self._kernels.experts.pack(
            *(as_tensor(array) for array in (gate_up.payload, gate_up.scales, down.payload, down.scales)),
            gate_up_bias=gate_up_bias,
            down_bias=down_bias,
        )
        return BoundExperts(self._kernels, packed, layer)

    def _product(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> BoundProduct:
        packed = self._kernels.linear.pack(weight)
        return BoundProduct(self._kernels, packed, None if bias is None else bias.float())


def load_published(model: Transformer, tensors: Mapping[str, PackedTensor], binder: Binder) -> None:
    """Make `model`, whose parameters may be empty, run `tensors`: packed, and the few that are read as they are."""
    binder.bind(model, tensors)
    plain: dict[str, torch.Tensor] = {}
    for path, layer in model.named_modules():
        if isinstance(layer, RMSNorm):
            plain[f"{path}.weight"] = view(tensors[f"{path}.weight"])
        elif isinstance(layer, Attention) and layer.sinks is not None:
            plain[f"{path}.sinks"] = view(tensors[f"{path}.sinks"])
    plain[EMBEDDING] = view(tensors[EMBEDDING], torch.bfloat16)
    model.load_state_dict(plain, strict=False, assign=True)

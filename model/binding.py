"""Give a transformer the kernels of this machine and its published weights packed for them.

`bind` is the one place that knows which layer runs on which kernel. Where a layer of the model reads several weights at
once (queries, keys and values; gate and up), they are packed as one product: the bits of an output column do not depend
on the other columns. The kernels take the published bytes, so what a bound model computes with is what was published.

A sampler has only the packed weights, and its other parameters stay empty; a learner has both, and its gradient goes
through the parameters (the straight-through views of the same bytes).

Shapes: T packed tokens, D model dim, H query heads, d head dim, K experts a token, E experts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from model.attention import Attention, LatentAttention
from model.config import ModelConfig
from model.kernels.dispatch import LayerKernels
from model.kernels.grouped_experts.cpu import GroupedExperts, PackedExperts, PackedMatrix
from model.kernels.linear.cpu import Linear as KernelLinear
from model.kernels.linear.cpu import PackedLinear
from model.layers import HeadNorm, Linear, Mlp, Parameters, RMSNorm, side_by_side
from model.lora import adapters
from model.low_rank import LowRank
from model.moe import ExpertParameters, Experts, Router
from model.mxfp4 import dequantize
from model.snapshot import Format, PackedTensor, as_tensor, view
from model.transformer import EMBEDDING, Transformer


@dataclass(frozen=True, slots=True, eq=False)
class BoundProduct:
    """A packed weight and its kernel; see `model.layers.Product`."""

    kernels: LayerKernels
    packed: PackedLinear
    bias: torch.Tensor | None
    frozen: bool = False

    def __call__(self, x: torch.Tensor, parameters: Parameters) -> torch.Tensor:
        """See `model.layers.Product`; of a frozen weight the gradient is that of `x` alone."""
        if torch.is_grad_enabled() and not self.frozen:
            weight, bias = parameters()
            return self.kernels.linear(x, self.packed, bias, weight=weight)
        return self.kernels.linear(x, self.packed, self.bias)


@dataclass(frozen=True, slots=True, eq=False)
class BoundExperts:
    """The packed experts of a layer and their kernel; see `model.moe.PackedExperts`."""

    kernels: LayerKernels
    packed: PackedExperts
    experts: Experts
    frozen: bool = False

    def __call__(
        self,
        x_TD: torch.Tensor,
        chosen_TK: torch.Tensor,
        weights_TK: torch.Tensor,
        parameters: Callable[[], ExpertParameters],
    ) -> torch.Tensor:
        """See `model.moe.PackedExperts`."""
        clamp, views = self.experts.clamp, parameters() if torch.is_grad_enabled() and not self.frozen else None
        return self.kernels.experts(
            x_TD, self.packed, chosen_TK, weights_TK, clamp=clamp, views=views, frozen=self.frozen
        )

    def combine(self, rows_ND: torch.Tensor, row_TK: torch.Tensor, weights_TK: torch.Tensor) -> torch.Tensor:
        """See `model.moe.PackedExperts`."""
        return self.kernels.experts.combine(rows_ND, row_TK, weights_TK)


@dataclass(frozen=True, slots=True, eq=False)
class BoundMatrices:
    """The packed matrices of one kind, one an expert; see `model.low_rank.ExpertMatrices`."""

    kernel: GroupedExperts
    packed_E: Sequence[PackedMatrix]

    def multiply(self, expert: int, x_nI: torch.Tensor) -> torch.Tensor:
        """See `model.low_rank.ExpertMatrices`."""
        return self.kernel.multiply(x_nI, self.packed_E[expert])

    def matrix(self, expert: int) -> torch.Tensor:
        """See `model.low_rank.ExpertMatrices`."""
        return dequantize(*self.kernel.unpack_matrix(self.packed_E[expert]), torch.float32)[0]


@dataclass(frozen=True, slots=True, eq=False)
class BoundFactors:
    """The packed A, or B, of an adapter of every expert; see `model.low_rank.ExpertMatrices`."""

    kernel: KernelLinear
    packed_E: Sequence[PackedLinear]

    def multiply(self, expert: int, x_nI: torch.Tensor) -> torch.Tensor:
        """See `model.low_rank.ExpertMatrices`."""
        return self.kernel.forward(x_nI, self.packed_E[expert], None, torch.float32)

    def matrix(self, expert: int) -> torch.Tensor:
        """See `model.low_rank.ExpertMatrices`."""
        return self.packed_E[expert].weight()[0].float()


class BoundAdapted:
    """The experts of a layer for adapters beside them, and its kernels; see `model.low_rank.AdaptedKernels`."""

    def __init__(self, kernels: LayerKernels, packed: PackedExperts) -> None:
        self.gate_up = BoundMatrices(kernels.experts, packed.gate_up.split())
        self.down = BoundMatrices(kernels.experts, packed.down.split())
        self.biases = (packed.gate_up_bias_E2F, packed.down_bias_ED)
        self.gated_unit, self.combine = kernels.gated_unit, kernels.experts.combine


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
    frozen: bool = False

    def __call__(self, x_THd: torch.Tensor, by_T1h: torch.Tensor, norm: HeadNorm | None) -> torch.Tensor:
        """See `model.attention.Turn`."""
        if norm is None:
            return self.kernels.rotary(x_THd, by_T1h)
        weight = norm.packed_weight() if torch.is_grad_enabled() and not self.frozen else self.weights[norm]
        return self.kernels.rotary(x_THd, by_T1h, weight, norm.eps, together=norm.together)


class Binder:
    """Packs the published weights of one configuration for kernels; `bind` again for each version.

    `expert_parallel` as the model's. `frozen` weights take no gradient, so that their parameters may be empty.
    """

    def __init__(
        self, config: ModelConfig, kernels: LayerKernels, expert_parallel: int = 1, *, frozen: bool = False
    ) -> None:
        self._kernels = kernels
        self._frozen = frozen
        with torch.device("meta"):
            self._values = Transformer(config, expert_parallel=expert_parallel)

    def bind(self, model: Transformer, tensors: Mapping[str, PackedTensor]) -> None:
        """Give every layer of `model` its kernel and what `tensors` publishes for it."""
        plain = {
            name: view(packed, torch.bfloat16) for name, packed in tensors.items() if packed.format != Format.MXFP4
        }
        self._values.load_state_dict(plain, strict=False, assign=True)
        all_values = dict(self._values.named_modules())
        for path, layer in model.named_modules():
            values = all_values.get(path)
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
                    layer.packed = bound = self._experts(layer, values, path, tensors)
                    if layer.gate_up_lora is not None:
                        layer.adapted = BoundAdapted(self._kernels, bound.packed)
                case _:
                    pass

    def bind_adapters(self, model: Transformer, tensors: Mapping[str, PackedTensor]) -> None:
        """Give every adapter of `model` what `tensors` publishes for it; the layers stay as they were bound."""
        for path, adapter in adapters(model).items():
            a, b = (view(tensors[f"{path}.{factor}"], torch.bfloat16) for factor in "AB")
            if isinstance(adapter, LowRank):
                packed_a, packed_b = (self._kernels.linear.pack(factor) for factor in (a, adapter.packed_b(b)))
                adapter.products = (
                    BoundProduct(self._kernels, packed_a, None),
                    BoundProduct(self._kernels, packed_b, None),
                )
            else:
                linear = self._kernels.linear
                adapter.products = (
                    BoundFactors(linear, linear.pack(a).split()),
                    BoundFactors(linear, linear.pack(b).split()),
                )

    def _attention(self, layer: Attention, values: Attention) -> None:
        layer.qkv = self._product(*side_by_side(values.q_proj, values.k_proj, values.v_proj)())
        layer.o_proj.product = self._product(values.o_proj.weight, values.o_proj.bias)
        norms: dict[HeadNorm, torch.Tensor] = {}
        for norm, its_values in ((layer.q_norm, values.q_norm), (layer.k_norm, values.k_norm)):
            if norm is not None and its_values is not None:
                norms[norm] = its_values.packed_weight()
        layer.turn = BoundTurn(self._kernels, norms, self._frozen)

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
        return BoundExperts(self._kernels, packed, layer, self._frozen)

    def _product(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> BoundProduct:
        packed = self._kernels.linear.pack(weight)
        return BoundProduct(self._kernels, packed, None if bias is None else bias.float(), self._frozen)


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

"""Every tensor's own damage: the network with that tensor alone in MXFP4, against the network as it is stored.

    layer by layer, with the source's own activations as the layer's input:
        for each variant (one expert tensor in MXFP4, or all of the layer's)
            the layer, then the untouched rest of the network -> final hidden states -> logits -> KL
    beside it one stream with everything in MXFP4

The output projection is never quantized, so hidden states stand for logits, which exist for some rows at a time.
Invariants: a weight that MXFP4 holds exactly gives 0 in every column, because both sides run the same operations; the
model is not written to. Memory: the model, one layer's expert tensors again, and a few activations a token. Time: L
layers with experts cost about 1.5 L forwards of the calibration tokens, and 4 L products with the output projection.

Shapes: T packed tokens, D model dim, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import nn
from torch.func import functional_call

from model.attention import Attend
from model.calibration.divergence import Divergence, divergences
from model.calibration.tokens import CalibrationError
from model.calibration.weight_error import (
    WeightError,
    quantized,
    quantized_with_error,
    root_ratio,
    square_sum,
)
from model.config import ModelConfig
from model.moe import Routing
from model.mxfp4 import ScaleRule
from model.packed_attention import PackedAttention
from model.rope import rotation
from model.snapshot import Format, tensor_format
from model.transformer import Block, Transformer

_BATCH_TOKENS = 4096
"""Sequences are run together up to so many tokens, or alone."""

Weights = Mapping[str, torch.Tensor]
"""Replacements for parameters of one block, under their names within it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorResult:
    """One tensor in MXFP4, all others as they are. `output_error` is relative RMS of its MoE layer's output."""

    name: str
    layer: int
    num_values: int
    weight_error: WeightError
    output_error: float
    divergence: Divergence

    @property
    def kl(self) -> float:
        """Mean KL, nats a token: what the tensor is ranked by."""
        return self.divergence.kl_mean


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerResult:
    """All expert tensors of one layer in MXFP4. `tokens_of_expert` counts the calibration tokens of each expert."""

    layer: int
    output_error: float
    divergence: Divergence
    tokens_of_expert: tuple[int, ...]

    @property
    def num_unused(self) -> int:
        """Experts without a token: nothing was measured of them but their weights."""
        return self.tokens_of_expert.count(0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurements:
    """Tensors and layers in the model's order, and everything in MXFP4."""

    tensors: tuple[TensorResult, ...]
    layers: tuple[LayerResult, ...]
    total: Divergence

    def ranked(self) -> list[TensorResult]:
        """The most damaging tensors first; equals keep the model's order."""
        return sorted(self.tensors, key=lambda tensor: -tensor.kl)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Batch:
    """Packed sequences. `targets_T` is the next token, or -1 where a sequence ends."""

    ids_T: torch.Tensor
    targets_T: torch.Tensor
    by_T1h: torch.Tensor
    attend: Attend


class Calibration:
    """A model and its calibration tokens, with the source's final hidden states."""

    @torch.inference_mode()
    def __init__(self, model: Transformer, sequences: Sequence[torch.Tensor], rule: ScaleRule) -> None:
        """Run the source once.

        Raises:
            CalibrationError: Its hidden states are not finite.
        """
        self._rule = rule
        self._num_experts = model.config.num_experts
        self._layers: list[Block] = list(model.model.layers)  # pyright: ignore[reportAttributeAccessIssue]
        self._embed, self._norm = model.model.embed_tokens, model.model.norm
        self._output_VD = model.get_parameter(model.output_name)
        self._batches = [_pack(model.config, group) for group in _grouped(sequences)]
        self._targets_T = torch.cat([batch.targets_T for batch in self._batches])
        self._source_TD = self._hidden(lambda index: {})
        if not self._source_TD.isfinite().all():
            raise CalibrationError(
                "the model: final hidden states must be finite, got NaN or infinity; check the checkpoint before "
                "quantizing it"
            )

    @torch.inference_mode()
    def measure(self, report: Callable[[LayerResult, int], None] = lambda layer, num_layers: None) -> Measurements:
        """All figures; `report` is told of each measured layer and of the number of layers."""
        tensors: list[TensorResult] = []
        layers: list[LayerResult] = []
        streams = [self._embed(batch.ids_T) for batch in self._batches]
        damaged = list(streams)
        for index, block in enumerate(self._layers):
            masters = _expert_tensors(index, block)
            if not masters:
                streams, damaged = self._advance(block, {}, streams), self._advance(block, {}, damaged)
                continue
            weights, errors = dict[str, torch.Tensor](), dict[str, WeightError]()
            for local, master in masters.items():
                weights[local], errors[local] = quantized_with_error(master, self._rule, _full_name(index, local))
            variants: list[Weights] = [*({local: weight} for local, weight in weights.items()), weights]
            damaged = self._advance(block, weights, damaged)
            streams, output_errors, hiddens, counts = self._layer(index, variants, streams)
            *found, both = divergences(self._output_VD, self._source_TD, hiddens, self._targets_T)
            for local, output_error, divergence in zip(masters, output_errors, found, strict=False):
                tensors.append(
                    TensorResult(
                        name=_full_name(index, local),
                        layer=index,
                        num_values=masters[local].numel(),
                        weight_error=errors[local],
                        output_error=output_error,
                        divergence=divergence,
                    )
                )
            layers.append(
                LayerResult(
                    layer=index, output_error=output_errors[-1], divergence=both, tokens_of_expert=tuple(counts)
                )
            )
            report(layers[-1], len(self._layers))
        return Measurements(tensors=tuple(tensors), layers=tuple(layers), total=self._divergence(self._finish(damaged)))

    @torch.inference_mode()
    def mixture(self, kept: AbstractSet[str]) -> Divergence:
        """Everything in MXFP4 except the tensors called `kept`, which are rounded to bf16."""

        def weights(index: int) -> Weights:
            return {
                local: master.bfloat16().float()
                if (name := _full_name(index, local)) in kept
                else quantized(master, self._rule, name)
                for local, master in _expert_tensors(index, self._layers[index]).items()
            }

        return self._divergence(self._hidden(weights))

    def _divergence(self, hidden_TD: torch.Tensor) -> Divergence:
        return divergences(self._output_VD, self._source_TD, [hidden_TD], self._targets_T)[0]

    def _hidden(self, weights_of: Callable[[int], Weights]) -> torch.Tensor:
        """Final hidden states with some parameters replaced; a layer's replacements live as long as it runs."""
        streams = [self._embed(batch.ids_T) for batch in self._batches]
        for index, block in enumerate(self._layers):
            streams = self._advance(block, weights_of(index), streams)
        return self._finish(streams)

    def _advance(self, block: Block, weights: Weights, streams: list[torch.Tensor]) -> list[torch.Tensor]:
        return [_run(block, weights, batch, x_TD)[0] for batch, x_TD in zip(self._batches, streams, strict=True)]

    def _finish(self, streams: list[torch.Tensor]) -> torch.Tensor:
        return torch.cat([self._norm(x_TD) for x_TD in streams])

    def _layer(
        self, index: int, variants: Sequence[Weights], streams: list[torch.Tensor]
    ) -> tuple[list[torch.Tensor], list[float], list[torch.Tensor], list[int]]:
        """The source's next residual streams; each variant's output error and final hidden states; experts' tokens."""
        block, rest = self._layers[index], self._layers[index + 1 :]
        signal, noise = 0.0, [0.0] * len(variants)
        nexts: list[torch.Tensor] = []
        hiddens: list[list[torch.Tensor]] = [[] for _ in variants]
        counts = torch.zeros(self._num_experts, dtype=torch.int64)
        for batch, x_TD in zip(self._batches, streams, strict=True):
            source_TD, output_TD, routing = _run_moe(block, {}, batch, x_TD)
            signal += square_sum(output_TD)
            counts += routing.chosen_TK.flatten().bincount(minlength=self._num_experts)
            nexts.append(source_TD)
            for number, weights in enumerate(variants):
                y_TD, changed_TD, _ = _run_moe(block, weights, batch, x_TD)
                noise[number] += square_sum(changed_TD - output_TD)
                for later in rest:
                    y_TD, _ = _run(later, {}, batch, y_TD)
                hiddens[number].append(self._norm(y_TD))
        return (
            nexts,
            [root_ratio(each, signal) for each in noise],
            [torch.cat(each) for each in hiddens],
            counts.tolist(),
        )


def _expert_tensors(index: int, block: nn.Module) -> dict[str, torch.Tensor]:
    """The parameters of a block that are published in MXFP4, under their names within it."""
    return {
        local: parameter
        for local, parameter in block.named_parameters()
        if tensor_format(_full_name(index, local)) is Format.MXFP4
    }


def _full_name(index: int, local: str) -> str:
    return f"model.layers.{index}.{local}"


def _run(block: Block, weights: Weights, batch: _Batch, x_TD: torch.Tensor) -> tuple[torch.Tensor, Routing | None]:
    """One block, some of its parameters replaced: the residual stream after it, and its routing."""
    return functional_call(block, dict(weights), (x_TD, batch.by_T1h, batch.attend, None))


def _run_moe(
    block: Block, weights: Weights, batch: _Batch, x_TD: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, Routing]:
    """As `_run`, with the MoE layer's own output in the middle, caught on its way into the residual stream."""
    caught: list[tuple[torch.Tensor, Routing]] = []

    def catch(module: nn.Module, inputs: Any, output: Any) -> None:
        caught.append(output)

    handle = block.mlp.register_forward_hook(catch)
    try:
        x_TD, _ = _run(block, weights, batch, x_TD)
    finally:
        handle.remove()
    return x_TD, *caught[0]


def _grouped(sequences: Sequence[torch.Tensor]) -> list[list[torch.Tensor]]:
    groups: list[list[torch.Tensor]] = []
    room = 0
    for sequence in sequences:
        if not groups or len(sequence) > room:
            groups.append([])
            room = _BATCH_TOKENS
        groups[-1].append(sequence)
        room -= len(sequence)
    return groups


def _pack(config: ModelConfig, sequences: Sequence[torch.Tensor]) -> _Batch:
    targets = [torch.cat([sequence[1:], sequence.new_tensor([-1])]) for sequence in sequences]
    positions_T = torch.cat([torch.arange(len(sequence)) for sequence in sequences])
    return _Batch(
        ids_T=torch.cat(list(sequences)),
        targets_T=torch.cat(targets),
        by_T1h=rotation(positions_T, config.rotary_dim, config.rope),
        attend=PackedAttention([0, *accumulate(map(len, sequences))]),
    )

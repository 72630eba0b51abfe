"""Low-rank adapters on a frozen, quantized model: `W + s B A` with s = alpha / rank (Hu et al. 2021, equation 3).

The base is the published view of a model (`model/snapshot.py`): MXFP4 experts and bf16 for the rest, never changed, as
in QLoRA (Dettmers et al. 2023, equation 5; there NF4, and double quantization). Only A and B are trained, from fp32
masters; their published view is bf16, which is what learner and sampler compute with.

Router, norms, biases, embedding, output matrix, dense and shared MLPs have no adapters.

Differs from the paper: no dropout; A starts uniform in +-1 / sqrt(inputs), as in its code, not normal.

Shapes: E experts, I inputs, O outputs, r rank.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import nn

from model.attention import Attention, LatentAttention
from model.config import LoraConfig, LoraTargets, ModelConfig
from model.layers import HeadLinear, Linear
from model.low_rank import LowRank, LowRankExperts
from model.moe import Experts
from model.snapshot import PackedTensor, view
from model.transformer import Transformer

_FUSED = {"gate_up_lora": "gate_up_proj", "down_lora": "down_proj"}
"""The adapters of the experts, by the parameter of the same module that each is beside."""

_NO_ADAPTER = ("kv_b_proj",)
"""Of latent attention: its cache folds this map into query and output, so that no product of it is ever computed."""


def add_adapters(model: Transformer, lora: LoraConfig) -> None:
    """Give `model` the adapters, uninitialised, on its parameters' device; rank 0: none. Nothing is frozen here."""
    if not lora.rank:
        return
    for module in list(model.modules()):
        if isinstance(module, Attention | LatentAttention) and lora.targets is not LoraTargets.experts:
            for name, layer in module.named_children():
                if isinstance(layer, Linear) and name not in _NO_ADAPTER:
                    layer.lora = _adapter_of(layer, lora)
        elif isinstance(module, Experts) and lora.targets is not LoraTargets.attention:
            for name, of in _FUSED.items():
                num_experts, outputs, inputs = getattr(module, of).shape
                with torch.device(getattr(module, of).device):
                    setattr(module, name, LowRankExperts(num_experts, inputs, outputs, lora))


def _adapter_of(layer: Linear, lora: LoraConfig) -> LowRank:
    outputs, inputs = layer.weight.shape
    head_dim = layer.head_dim if isinstance(layer, HeadLinear) and not layer.adjacent else 0
    with torch.device(layer.weight.device):
        return LowRank(inputs, outputs, lora, head_dim)


def adapters(model: nn.Module) -> dict[str, LowRank | LowRankExperts]:
    """Every adapter of a model, by its path."""
    return {path: module for path, module in model.named_modules() if isinstance(module, LowRank | LowRankExperts)}


def adapter_shapes(config: ModelConfig, lora: LoraConfig) -> dict[str, tuple[int, ...]]:
    """Name and shape of every parameter of the adapters, without allocating any."""
    with torch.device("meta"):
        model = Transformer(config)
    add_adapters(model, lora)
    return {
        f"{path}.{name}": tuple(parameter.shape)
        for path, adapter in adapters(model).items()
        for name, parameter in adapter.named_parameters()
    }


def initial_adapters(config: ModelConfig, lora: LoraConfig, seed: int) -> dict[str, torch.Tensor]:
    """fp32 masters before the first step: the model is its base. Each tensor's stream is keyed by its name."""
    masters: dict[str, torch.Tensor] = {}
    for name, shape in adapter_shapes(config, lora).items():
        masters[name] = torch.zeros(shape)
        if name.endswith(".A"):
            key = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8).digest()
            generator = torch.Generator().manual_seed(int.from_bytes(key, "little") >> 1)
            bound = 1.0 / math.sqrt(shape[-1])
            masters[name].uniform_(-bound, bound, generator=generator)
    return masters


@contextmanager
def without_adapters(model: nn.Module) -> Iterator[None]:
    """The base inside, with the very operations around it that it has with adapters."""
    off = list(adapters(model).values())
    for adapter in off:
        adapter.enabled = False
    try:
        yield
    finally:
        for adapter in off:
            adapter.enabled = True


def adapted_name(adapter: str) -> str:
    """The base's parameter that an adapter's A and B are beside, by the adapter's path or a name of one of the two."""
    path = adapter.removesuffix(".A").removesuffix(".B")
    module, _, name = path.rpartition(".")
    return f"{module}.{_FUSED[name]}" if name in _FUSED else f"{module}.weight"


def merged(
    base: Mapping[str, torch.Tensor], adapter_values: Mapping[str, torch.Tensor], lora: LoraConfig
) -> dict[str, torch.Tensor]:
    """The definition: fp32 `W + s B A` of every adapted parameter, and every other one as it is.

    `base` and `adapter_values` are what is computed with, by the parameters' names.
    """
    whole = {name: value.float() for name, value in base.items()}
    for name, a in adapter_values.items():
        if name.endswith(".A"):
            b = adapter_values[f"{name.removesuffix('A')}B"]
            of = adapted_name(name)
            whole[of] = whole[of] + (lora.alpha / lora.rank) * (b.float() @ a.float())
    return whole


def base_digest(digests: Mapping[str, str]) -> str:
    """One hex BLAKE2b-128 of the digests of a base's tensors."""
    listed = "\n".join(f"{name} {digests[name]}" for name in sorted(digests))
    return hashlib.blake2b(listed.encode(), digest_size=16).hexdigest()


def values(packed: Mapping[str, PackedTensor]) -> dict[str, torch.Tensor]:
    """fp32 values of published bytes."""
    return {name: view(tensor) for name, tensor in packed.items()}

"""How many parameters a configuration has, by formula: total and active for each token, by part.

No tensor is made and torch is not imported, so that checks before a run can ask. Invariant: `tensors` names what
`model.transformer.parameter_shapes` would hold, layer by layer; a test keeps the two equal for every family.

"Experts" are the matrices of the routed experts, the ones that are published in MXFP4 (`model/snapshot.py`); their
biases and the shared expert are not among them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

from model.config import MXFP4_BLOCK, LoraConfig, LoraTargets, ModelConfig, QkNorm


class Part(StrEnum):
    """What a parameter belongs to."""

    embedding = "embedding"
    output = "output matrix"
    attention = "attention"
    router = "router"
    experts = "routed experts"
    shared_expert = "shared expert"
    dense_layers = "dense layers"
    norms = "norms"
    biases = "biases and sinks"
    selection_bias = "selection bias"


class Split(StrEnum):
    """What a tensor is divided along when several GPUs hold a layer; `whole`: each holds all of it."""

    whole = "whole"
    heads = "heads"
    kv_heads = "key-value heads"
    width = "width"
    vocabulary = "vocabulary"
    experts = "experts"


@dataclass(frozen=True, slots=True)
class TensorSize:
    """One tensor of the model, or several of a layer that behave alike."""

    part: Part
    split: Split
    parameters: int


BF16_BITS = 16.0
MXFP4_BITS = 4 + 8 / MXFP4_BLOCK
"""A four-bit code, and its share of the block's scale byte."""


def published_bits(part: Part) -> float:
    """Bits of a parameter in the published view (`model.snapshot.tensor_format`)."""
    return {Part.experts: MXFP4_BITS, Part.selection_bias: 32.0}.get(part, BF16_BITS)


def embedding_tensor(config: ModelConfig) -> TensorSize:
    """The table of token vectors, [V, D]."""
    return TensorSize(Part.embedding, Split.vocabulary, config.vocab_size * config.hidden_size)


def head_tensors(config: ModelConfig) -> Iterator[TensorSize]:
    """The final norm, and the output matrix [V, D] unless it is the embedding."""
    yield TensorSize(Part.norms, Split.whole, config.hidden_size)
    if not config.tie_embeddings:
        yield TensorSize(Part.output, Split.vocabulary, config.vocab_size * config.hidden_size)


def layer_tensors(config: ModelConfig, layer_index: int) -> Iterator[TensorSize]:
    """Everything in one layer."""
    yield TensorSize(Part.norms, Split.whole, 2 * config.hidden_size)
    yield from _latent_attention(config) if config.is_latent else _attention(config)
    yield from _dense_mlp(config) if layer_index in config.dense_layers else _moe(config)


def tensors(config: ModelConfig) -> Iterator[TensorSize]:
    """Everything in the model; a vocabulary of 0, not known yet, counts as none."""
    yield embedding_tensor(config)
    for index in range(config.num_layers):
        yield from layer_tensors(config, index)
    yield from head_tensors(config)


def _attention(config: ModelConfig) -> Iterator[TensorSize]:
    dim, q_dim, kv_dim = config.hidden_size, *(n * config.head_dim for n in (config.num_heads, config.num_kv_heads))
    yield TensorSize(Part.attention, Split.heads, 2 * dim * q_dim)  # queries and output
    yield TensorSize(Part.attention, Split.kv_heads, 2 * dim * kv_dim)
    if config.attention_bias:
        yield TensorSize(Part.biases, Split.heads, q_dim)
        yield TensorSize(Part.biases, Split.kv_heads, 2 * kv_dim)
        yield TensorSize(Part.biases, Split.whole, dim)
    if config.attention_sinks:
        yield TensorSize(Part.biases, Split.heads, config.num_heads)
    if config.qk_norm is QkNorm.head:
        yield TensorSize(Part.norms, Split.whole, 2 * config.head_dim)
    elif config.qk_norm is QkNorm.projection:
        yield TensorSize(Part.norms, Split.heads, q_dim)
        yield TensorSize(Part.norms, Split.kv_heads, kv_dim)


def _latent_attention(config: ModelConfig) -> Iterator[TensorSize]:
    dim, q_dim = config.hidden_size, config.num_heads * config.head_dim
    plain_dim = config.head_dim - config.qk_rope_head_dim
    down_dim = config.kv_lora_rank + config.qk_rope_head_dim
    norm_dim = config.kv_lora_rank
    if config.q_lora_rank:
        yield TensorSize(Part.attention, Split.whole, dim * config.q_lora_rank)
        yield TensorSize(Part.attention, Split.heads, config.q_lora_rank * q_dim)
        norm_dim += config.q_lora_rank
    else:
        yield TensorSize(Part.attention, Split.heads, dim * q_dim)
    yield TensorSize(Part.norms, Split.whole, norm_dim)
    yield TensorSize(Part.attention, Split.whole, dim * down_dim)
    up_dim = config.num_heads * (plain_dim + config.v_head_dim)
    yield TensorSize(Part.attention, Split.heads, config.kv_lora_rank * up_dim)
    yield TensorSize(Part.attention, Split.heads, config.num_heads * config.v_head_dim * dim)
    if config.attention_bias:  # of the two down projections and the output
        yield TensorSize(Part.biases, Split.whole, config.q_lora_rank + down_dim + dim)


def _dense_mlp(config: ModelConfig) -> Iterator[TensorSize]:
    yield TensorSize(Part.dense_layers, Split.width, 3 * config.hidden_size * config.dense_hidden_size)


def _moe(config: ModelConfig) -> Iterator[TensorSize]:
    dim, width, num = config.hidden_size, config.expert_hidden_size, config.num_experts
    yield TensorSize(Part.router, Split.whole, num * dim)
    if config.router_bias:
        yield TensorSize(Part.biases, Split.whole, num)
    if config.router_selection_bias:
        yield TensorSize(Part.selection_bias, Split.whole, num)
    yield TensorSize(Part.experts, Split.experts, num * 3 * dim * width)
    if config.expert_bias:
        yield TensorSize(Part.biases, Split.experts, num * (2 * width + dim))
    if config.shared_expert_hidden_size:
        yield TensorSize(Part.shared_expert, Split.width, 3 * dim * config.shared_expert_hidden_size)


def num_adapter_parameters(config: ModelConfig, lora: LoraConfig) -> int:
    """Parameters of the adapters (`model/lora.py`): rank times inputs and outputs of each adapted matrix."""
    dim, q_dim = config.hidden_size, config.num_heads * config.head_dim
    if config.is_latent:
        down_dim, out_dim = config.kv_lora_rank + config.qk_rope_head_dim, config.num_heads * config.v_head_dim
        queries = config.q_lora_rank and dim + 2 * config.q_lora_rank + q_dim
        attention = (queries or dim + q_dim) + (dim + down_dim) + (out_dim + dim)
    else:
        attention = 2 * (dim + q_dim) + 2 * (dim + config.num_kv_heads * config.head_dim)
    experts = config.num_experts * ((dim + 2 * config.expert_hidden_size) + (config.expert_hidden_size + dim))
    total = 0
    if lora.targets is not LoraTargets.experts:
        total += config.num_layers * attention
    if lora.targets is not LoraTargets.attention:
        total += len(config.moe_layers) * experts
    return lora.rank * total


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSize:
    """Parameters by part.

    `active` are those that the arithmetic of one token reads: of the routed experts and their biases the chosen ones,
    of the embedding nothing (one row is looked up) unless it is the output matrix too. gpt-oss and DeepSeek-V3 report
    it so; reports of other families add the table (`active_with_embedding`).
    """

    total: dict[Part, int]
    active: dict[Part, int]

    @classmethod
    def of(cls, config: ModelConfig) -> ModelSize:
        """Count a valid configuration."""
        total, active = Counter[Part](), Counter[Part]()
        for tensor in tensors(config):
            total[tensor.part] += tensor.parameters
            if tensor.split is Split.experts:
                active[tensor.part] += tensor.parameters // config.num_experts * config.num_experts_per_tok
            elif tensor.part is not Part.embedding or config.tie_embeddings:
                active[tensor.part] += tensor.parameters
        return cls(total=dict(total), active=dict(active))

    @property
    def num_total(self) -> int:
        """All parameters."""
        return sum(self.total.values())

    @property
    def num_active(self) -> int:
        """Parameters that one token's arithmetic reads."""
        return sum(self.active.values())

    @property
    def num_active_with_embedding(self) -> int:
        """`num_active` with the whole embedding table, however it is used."""
        return self.num_active - self.active.get(Part.embedding, 0) + self.total[Part.embedding]

    @property
    def bf16_bytes(self) -> int:
        """Bytes of all parameters at 16 bit."""
        return self.num_total * 2

    @property
    def published_bytes(self) -> int:
        """Bytes of the published view: experts in MXFP4, the selection bias in fp32, the rest in bf16."""
        return round(sum(count * published_bits(part) for part, count in self.total.items()) / 8)

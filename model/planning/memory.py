"""Memory of one GPU, for sampling and for learning, by formula. Bytes throughout.

Layers are cut into `pp` stages of consecutive layers, the first ones one layer longer where they do not divide; the
first stage holds the embedding, the last the final norm and the output matrix (tied: both hold the table). Of a stage a
GPU holds 1 / tp of everything that is divided by heads, width or vocabulary, 1 / ep of the routed experts, and all of
the rest (norms, routers, the down projections of latent attention). A key-value head is copied where `tp` exceeds their
number. Each figure is that of the stage that needs most.

Sampler
    weights      bf16, or the published view (experts in MXFP4)
    KV cache     batch x cached tokens x values x 2 bytes for each layer; a layer with a window keeps `sliding_window`
                 tokens at most. Values a token: 2 x key-value heads x head_dim / tp; latent attention keeps
                 kv_lora_rank + qk_rope_head_dim, the same on all `tp` GPUs
    activations  one layer's values for a piece of a prompt, and fp32 logits of `batch` tokens
Learner (`rl/learner`: the masters are the module's fp32 parameters, which ZeRO 1 and 2 leave whole)
    fp32 masters    4 bytes a parameter
    published view  2 bytes: its values in bf16, which the forward pass reads
    gradients       4 bytes; ZeRO 2 divides them among the copies
    optimizer       12 bytes, divided among the copies: its fp32 partition and two moments
    activations     the fp32 input of each layer of the stage for every micro-batch under way (pp minus the stage's
                    index), one layer's values and their gradients, and on the last stage three fp32 tensors of logits.
                    Without `recompute` every layer keeps its values instead of its input
A parameter of an expert has tp x dp / ep copies, any other has dp. Values of a layer: `_layer_values`. Buffers of
communication, workspaces and fragmentation are not included; leave a tenth of the memory for them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from model.config import ModelConfig
from model.planning.config import PlanConfig
from model.size import BF16_BITS, Part, Split, TensorSize, embedding_tensor, head_tensors, layer_tensors, published_bits

_BF16_BYTES, _FP32_BYTES = 2, 4
_OPTIMIZER_BYTES = 3 * _FP32_BYTES
_MAX_SEQUENCES = 1 << 20

BitsOf = Callable[[Part], float]
"""Bits of a stored parameter by what it belongs to: `model.size.published_bits`, or `bf16_bits`."""


def bf16_bits(part: Part) -> float:
    """Bits of a parameter in a checkpoint of 16 bit."""
    return BF16_BITS


@dataclass(frozen=True, slots=True)
class Stage:
    """Consecutive layers on the same GPUs."""

    index: int
    layers: range
    is_last: bool


@dataclass(frozen=True, slots=True)
class GpuMemory:
    """Bytes by what they hold, on a GPU of the stage that needs most."""

    stage: Stage
    parts: dict[str, int]

    @property
    def total(self) -> int:
        """All of it."""
        return sum(self.parts.values())


def stages(num_layers: int, pp: int) -> list[Stage]:
    """The layers of each pipeline stage."""
    size, longer = divmod(num_layers, pp)
    bounds = [index * size + min(index, longer) for index in range(pp + 1)]
    return [Stage(index, range(bounds[index], bounds[index + 1]), index == pp - 1) for index in range(pp)]


def sampler_memory(model: ModelConfig, plan: PlanConfig, bits_of: BitsOf = published_bits) -> GpuMemory:
    """What a sampling GPU holds, for a resolved plan."""

    def parts(stage: Stage) -> dict[str, int]:
        held = sum(_per_gpu(model, plan, tensor) * bits_of(tensor.part) for tensor in _tensors(model, stage))
        layer = max(_layer_values(model, plan, index) for index in stage.layers)
        activations = _BF16_BYTES * layer * plan.micro_batch_tokens
        if stage.is_last:
            activations += _FP32_BYTES * plan.batch * model.vocab_size / plan.tp
        return {
            "weights": round(held / 8),
            "KV cache": plan.batch * sum(_cache_bytes(model, plan, index) for index in stage.layers),
            "activations": round(activations),
        }

    return _fullest(model, plan, parts)


def learner_memory(model: ModelConfig, plan: PlanConfig) -> GpuMemory:
    """What a learning GPU holds, for a resolved plan."""

    def parts(stage: Stage) -> dict[str, int]:
        held = owned = 0.0
        for tensor in _tensors(model, stage):
            count = _per_gpu(model, plan, tensor)
            held += count
            owned += count / (plan.tp * plan.dp / plan.ep if tensor.split is Split.experts else plan.dp)
        return {
            "fp32 masters": round(_FP32_BYTES * held),
            "published view": round(_BF16_BYTES * held),
            "gradients": round(_FP32_BYTES * (owned if plan.zero_stage == 2 else held)),
            "optimizer": round(_OPTIMIZER_BYTES * owned),
            "activations": round(_learner_activations(model, plan, stage)),
        }

    return _fullest(model, plan, parts)


def most_sequences(model: ModelConfig, plan: PlanConfig, memory_bytes: float, bits_of: BitsOf = published_bits) -> int:
    """Sequences of `context` tokens that a sampler with so much memory a GPU keeps at once (0: none)."""

    def fits(batch: int) -> bool:
        return sampler_memory(model, replace(plan, batch=batch), bits_of).total <= memory_bytes

    return _largest(fits, _MAX_SEQUENCES)


def longest_context(model: ModelConfig, plan: PlanConfig, memory_bytes: float, bits_of: BitsOf = published_bits) -> int:
    """Tokens of each of `batch` sequences that such a sampler keeps (0: none), at most `max_positions`."""

    def fits(context: int) -> bool:
        return sampler_memory(model, replace(plan, context=context), bits_of).total <= memory_bytes

    return _largest(fits, model.max_positions)


def _largest(fits: Callable[[int], bool], at_most: int) -> int:
    """The largest number up to `at_most` that fits, 0 when 1 does not; `fits` must not come back once it is false."""
    low, high = 0, at_most
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low


def _fullest(model: ModelConfig, plan: PlanConfig, parts: Callable[[Stage], dict[str, int]]) -> GpuMemory:
    found = [GpuMemory(stage, parts(stage)) for stage in stages(model.num_layers, plan.pp)]
    return max(found, key=lambda memory: memory.total)


def _tensors(model: ModelConfig, stage: Stage) -> Iterator[TensorSize]:
    if stage.index == 0:
        yield embedding_tensor(model)
    for index in stage.layers:
        yield from layer_tensors(model, index)
    if stage.is_last:
        yield from head_tensors(model)
        if model.tie_embeddings and stage.index > 0:
            yield embedding_tensor(model)


def _per_gpu(model: ModelConfig, plan: PlanConfig, tensor: TensorSize) -> float:
    """Parameters of a tensor that one GPU of its stage holds."""
    match tensor.split:
        case Split.whole:
            return tensor.parameters
        case Split.experts:
            return tensor.parameters / plan.ep
        case Split.kv_heads:
            return tensor.parameters / min(plan.tp, model.num_kv_heads)
        case Split.heads | Split.width | Split.vocabulary:
            return tensor.parameters / plan.tp


def _cache_bytes(model: ModelConfig, plan: PlanConfig, layer_index: int) -> int:
    """Bytes of one sequence's keys and values in one layer."""
    window = model.window(layer_index)
    tokens = min(plan.context, window) if window else plan.context
    if model.is_latent:
        values = model.kv_lora_rank + model.qk_rope_head_dim
    else:
        values = 2 * model.head_dim * max(1, model.num_kv_heads // plan.tp)
    return _BF16_BYTES * tokens * values


def _layer_values(model: ModelConfig, plan: PlanConfig, layer_index: int) -> float:
    """Values of bf16 size that one token's forward pass through a layer makes on one GPU.

    Two normed inputs and two outputs of D; queries, keys, values and outputs of the heads at hand; three F of a gated
    MLP of width F (gate, up, product). A token visits K experts, whose inputs and outputs (D each) and values are
    spread evenly over the `tp` GPUs that share its attention: routing is taken to be balanced.
    """
    dim, num_heads = model.hidden_size, model.num_heads + max(model.num_kv_heads, plan.tp)
    values = 4 * dim + num_heads * (model.head_dim + model.value_head_dim) / plan.tp
    if layer_index in model.dense_layers:
        return values + 3 * model.dense_hidden_size / plan.tp
    routed = model.num_experts_per_tok * (2 * dim + 3 * model.expert_hidden_size)
    return values + (routed + 3 * model.shared_expert_hidden_size) / plan.tp


def _learner_activations(model: ModelConfig, plan: PlanConfig, stage: Stage) -> float:
    """Bytes that the backward pass needs, for the micro-batches under way."""
    layers = [_BF16_BYTES * _layer_values(model, plan, index) for index in stage.layers]
    under_way = plan.pp - stage.index
    if plan.recompute:
        kept = under_way * len(layers) * _FP32_BYTES * model.hidden_size + 2 * max(layers)
    else:
        kept = under_way * sum(layers) + max(layers)
    if stage.is_last:
        kept += 3 * _FP32_BYTES * model.vocab_size / plan.tp
    return kept * plan.micro_batch_tokens

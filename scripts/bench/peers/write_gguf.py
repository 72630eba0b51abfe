"""Published MXFP4 checkpoints as GGUF files, llama.cpp's format, for Qwen3-MoE and gpt-oss.

    mode        expert matrices   other matrices   router, norms, biases
    f32         F32               F32              F32
    bf16        BF16              BF16             F32
    q8_0        Q8_0              Q8_0             F32
    mxfp4       MXFP4             BF16             F32     byte for byte what was published
    mxfp4_q8_0  MXFP4             Q8_0             F32     llama.cpp's own file type MXFP4_MOE

The last column is what llama.cpp's converter keeps in fp32. There is no tokenizer: ids go in and ids come out.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import gguf
import numpy as np
import numpy.typing as npt
import torch
from gguf.quants import quantize

from model.checkpoint import open_model
from model.config import Family, ModelConfig, RopeScaling
from model.loaded import Weight, master_of
from model.mxfp4_layouts import to_gguf
from model.snapshot import Format, PackedTensor, as_tensor

_TYPE = gguf.GGMLQuantizationType
GGUF_MODES = {
    "f32": (_TYPE.F32, _TYPE.F32),
    "bf16": (_TYPE.BF16, _TYPE.BF16),
    "q8_0": (_TYPE.Q8_0, _TYPE.Q8_0),
    "mxfp4": (_TYPE.MXFP4, _TYPE.BF16),
    "mxfp4_q8_0": (_TYPE.MXFP4, _TYPE.Q8_0),
}
"""Types of expert matrices and of other matrices."""

_ARCHITECTURES = {Family.qwen3_moe: gguf.MODEL_ARCH.QWEN3MOE, Family.gpt_oss: gguf.MODEL_ARCH.GPT_OSS}
_KEPT_F32 = re.compile(r"router|norm|sinks|bias")


def write_gguf(source: Path, path: Path, mode: str) -> None:
    """Write the published checkpoint in folder `source` to the file `path`; it appears complete or not at all."""
    opened = open_model(source)
    config = opened.config
    architecture = _ARCHITECTURES[config.family]
    partial = path.with_suffix(".partial")
    writer = gguf.GGUFWriter(partial, gguf.MODEL_ARCH_NAMES[architecture])
    _write_keys(writer, config)
    names = gguf.get_tensor_name_map(architecture, config.num_layers)
    for name, weight in opened.weights:
        for part_name, part in _parts(name, weight):
            stored = names.get_name(part_name, try_suffixes=(".weight", ".bias"))
            if stored is None:
                raise ValueError(f"{part_name}: {architecture.name} must have this tensor, got none; extend _parts")
            kind = _kind(name, mode)
            stored += "" if stored.endswith((".weight", ".bias")) else ".weight"  # of the sinks
            writer.add_tensor(stored, _encoded(part, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    partial.rename(path)


def _write_keys(writer: gguf.GGUFWriter, config: ModelConfig) -> None:
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("none")
    writer.add_block_count(config.num_layers)
    writer.add_context_length(config.max_positions)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.expert_hidden_size)
    writer.add_head_count(config.num_heads)
    writer.add_head_count_kv(config.num_kv_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope.theta)
    writer.add_expert_count(config.num_experts)
    writer.add_expert_used_count(config.num_experts_per_tok)
    writer.add_expert_feed_forward_length(config.expert_hidden_size)
    if config.sliding_window:
        writer.add_sliding_window(config.sliding_window)
    if config.rope.scaling is RopeScaling.yarn:
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(config.rope.factor)
        writer.add_rope_scaling_orig_ctx_len(config.rope.original_positions)


def _kind(name: str, mode: str) -> gguf.GGMLQuantizationType:
    experts, others = GGUF_MODES[mode]
    if _KEPT_F32.search(name):
        return _TYPE.F32
    return experts if "experts" in name else others


def _parts(name: str, weight: Weight) -> Iterator[tuple[str, Weight]]:
    """The tensors that llama.cpp makes of a parameter, under names that gguf's table knows: gate and up are two."""
    if "experts" not in name:
        yield name, weight
        return
    stem = name.removesuffix("_bias")
    suffix = ".bias" if stem != name else ".weight"
    if not stem.endswith("gate_up_proj"):
        yield stem + suffix, weight
        return
    half = weight.shape[1] // 2
    for proj, rows in (("gate_proj", slice(None, half)), ("up_proj", slice(half, None))):
        yield stem.replace("gate_up_proj", proj) + suffix, _rows(weight, rows)


def _rows(weight: Weight, rows: slice) -> Weight:
    if isinstance(weight, torch.Tensor):
        return weight[:, rows]
    if weight.format is not Format.MXFP4:
        return master_of(weight)[:, rows]
    payload, scales = weight.payload[:, rows], weight.scales[:, rows]
    shape = (weight.shape[0], payload.shape[1], *weight.shape[2:])
    return PackedTensor(format=weight.format, shape=shape, payload=payload, scales=scales)


def _encoded(weight: Weight, kind: gguf.GGMLQuantizationType) -> npt.NDArray[np.uint8]:
    """The bytes of a tensor, [..., bytes of a row]."""
    if kind is _TYPE.MXFP4:
        if not isinstance(weight, PackedTensor):
            raise ValueError(f"experts: must be published bytes to be written as MXFP4, got {weight.dtype}")
        return to_gguf(as_tensor(weight.payload), as_tensor(weight.scales)).numpy()
    values = np.ascontiguousarray(master_of(weight).numpy())
    return quantize(values, kind).view(np.uint8)

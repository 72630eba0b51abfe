"""A dense Llama-type checkpoint as a Mixture of Experts with one expert, which every token chooses with weight 1.

Invariant: the network of `llama_config` with the weights of `from_llama` is the dense model. So a dense checkpoint runs
here as any other, and `upcycle` makes more experts of the one. `read_llama` reads Hugging Face's folders, `gguf_file`
the same from a GGUF file.

Names are those of Hugging Face's `LlamaForCausalLM` (Touvron et al. 2023, with grouped-query attention); rotary pairs
are half a head apart. Biases and other activations are errors, never ignored.

Shapes: D model dim, F neurons of an MLP.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import torch
from safetensors.torch import load_file

from model.config import ConfigError, Family, ModelConfig
from model.families.keys import Keys
from model.hf.files import CONFIG_FILE, Folder
from model.transformer import EMBEDDING, LM_HEAD, parameter_shapes

_MODEL_TYPES = ("llama", "mistral")


class LlamaError(ValueError):
    """Tensors that are not those of a dense Llama of the given configuration."""


def read_llama(source: str | os.PathLike[str]) -> tuple[ModelConfig, dict[str, torch.Tensor]]:
    """Configuration and fp32 masters, with one expert, of a published dense checkpoint: a folder or any fsspec URL.

    Raises:
        CheckpointError: A file is missing or damaged.
        ConfigError, LlamaError: As `llama_config` and `from_llama`.
    """
    folder = Folder(source)
    config = llama_config(folder.read_json(CONFIG_FILE))
    tensors: dict[str, torch.Tensor] = {}
    for file in folder.weight_files():
        folder.header(file)  # a damaged file is named here
        with folder.local_copy(file) as path:
            tensors |= load_file(path)
    return config, from_llama(config, tensors)


def llama_config(values: Mapping[str, Any]) -> ModelConfig:
    """The configuration with one expert of a `config.json` of Hugging Face.

    Raises:
        ConfigError: Another architecture, or one line for each key that is missing or that a plain Llama lacks.
    """
    if values.get("model_type") not in _MODEL_TYPES:
        raise ConfigError(
            f"config.json: model_type must be one of {[*_MODEL_TYPES]}, got {values.get('model_type')}; "
            "give a dense Llama-type checkpoint"
        )
    keys = Keys({**values, "num_experts_per_tok": 1})
    fields = keys.common(rms_norm_eps=1e-6)
    window = keys.get("sliding_window", int, 0)
    for key in ("attention_bias", "mlp_bias", "rope_interleaved"):
        keys.expect(key, False)
    keys.ignore("is_llama_config")
    return keys.finish(
        family=Family.mixtral,
        **fields,
        rope=keys.rope(theta=1e4, max_positions=fields["max_positions"]),
        sliding_window=window,
        window_layers=[*range(fields["num_layers"])] if window else [],
        expert_hidden_size=keys.get("intermediate_size", int),
        num_experts=1,
    )


def llama_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor of the dense checkpoint that `config` (with one expert) describes."""
    shapes = {name: shape for name, shape in parameter_shapes(config).items() if ".mlp." not in name}
    hidden, width = config.hidden_size, config.expert_hidden_size
    for index in range(config.num_layers):
        for part, shape in (("gate", (width, hidden)), ("up", (width, hidden)), ("down", (hidden, width))):
            shapes[f"model.layers.{index}.mlp.{part}_proj.weight"] = shape
    return shapes


def from_llama(config: ModelConfig, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """fp32 masters of the network with one expert.

    Args:
        config: With one expert, as `llama_config` gives it.
        tensors: Every tensor of the checkpoint, in any floating dtype. A second copy of tied embeddings under
            `lm_head.weight` is allowed.

    Raises:
        LlamaError: Lists missing and extra names, or names the tensor at fault.
    """
    shapes = llama_shapes(config)
    found = dict(tensors)
    copy = found.pop(LM_HEAD, None) if config.tie_embeddings else None
    if copy is not None and not torch.equal(copy, found.get(EMBEDDING, copy)):
        raise LlamaError(
            f"{LM_HEAD}: must equal the embeddings that it is tied to, got other values; "
            "set tie_word_embeddings to false in config.json"
        )
    missing, extra = sorted(shapes.keys() - found.keys()), sorted(found.keys() - shapes.keys())
    if missing or extra:
        raise LlamaError(
            f"tensors: must be exactly those of the configuration, got missing {missing} and extra {extra}; "
            "check that the checkpoint is a plain Llama and complete"
        )
    for name, shape in shapes.items():
        if tuple(found[name].shape) != shape or not found[name].is_floating_point():
            raise LlamaError(
                f"{name}: must be floating point of shape {shape}, got {found[name].dtype} of shape "
                f"{tuple(found[name].shape)}; configuration and weights are of two models"
            )
    masters = {name: tensor.float() for name, tensor in found.items() if ".mlp." not in name}
    for index in range(config.num_layers):
        mlp = f"model.layers.{index}.mlp"
        gate_FD, up_FD, down_DF = (found[f"{mlp}.{part}_proj.weight"].float() for part in ("gate", "up", "down"))
        masters[f"{mlp}.router.weight"] = torch.zeros(1, config.hidden_size)
        masters[f"{mlp}.experts.gate_up_proj"] = torch.cat([gate_FD, up_FD]).unsqueeze(0)
        masters[f"{mlp}.experts.down_proj"] = down_DF.unsqueeze(0)
    return masters

"""A dense Llama-type checkpoint in memory: its configuration and its weights, both checked. What `upcycle` starts from.

Invariant: a `DenseModel` holds exactly the tensors of `DenseConfig.shapes`, under the names of Hugging Face's
`LlamaForCausalLM`, in fp32, with the rotary pairs of a head half a head apart. `dense_from_hf` makes one of a
`config.json` and its tensors, `gguf_file` of a GGUF file.

Architecture: Touvron et al. 2023 (RMSNorm before attention and MLP, rotary positions, SwiGLU), with grouped-query
attention. Biases, sliding windows and other activations are errors, never ignored.

Shapes: V vocabulary, D model dim, F neurons of an MLP, H query heads, G key-value heads, d head dim.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from model.config import RopeConfig, RopeScaling

_MODEL_TYPES = ("llama", "mistral")
_MEANS_PLAIN: Mapping[str, tuple[Any, ...]] = {
    "hidden_act": ("silu", "swish"),
    "attention_bias": (False,),
    "mlp_bias": (False,),
    "sliding_window": (None,),
}
"""Keys of a Hugging Face configuration that change the network, with the values that leave it as it is here."""


class DenseModelError(ValueError):
    """A checkpoint that is not a plain Llama, or whose tensors are not those of its configuration."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DenseConfig:
    """The shape of a dense Llama; `mlp_size` is F."""

    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    mlp_size: int
    rope: RopeConfig
    rms_norm_eps: float
    tie_embeddings: bool
    max_positions: int

    @classmethod
    def from_hf(cls, values: Mapping[str, Any]) -> DenseConfig:
        """Read a `config.json` of Hugging Face, of transformers 4 (`rope_theta`) or 5 (`rope_parameters`).

        Raises:
            DenseModelError: Another architecture, a missing key, or a feature that plain Llamas lack.
        """
        if values.get("model_type") not in _MODEL_TYPES:
            raise DenseModelError(
                f"config.json: model_type must be one of {[*_MODEL_TYPES]}, got {values.get('model_type')}; "
                "only dense Llama-type checkpoints can be upcycled"
            )
        for key, plain in _MEANS_PLAIN.items():
            if values.get(key, plain[0]) not in plain:
                raise DenseModelError(
                    f"config.json: {key} must be {plain[0]}, got {values[key]}; upcycling knows plain Llamas only"
                )
        try:
            num_heads = int(values["num_attention_heads"])
            return cls(
                vocab_size=int(values["vocab_size"]),
                hidden_size=int(values["hidden_size"]),
                num_layers=int(values["num_hidden_layers"]),
                num_heads=num_heads,
                num_kv_heads=int(values.get("num_key_value_heads") or num_heads),
                head_dim=int(values.get("head_dim") or values["hidden_size"] // num_heads),
                mlp_size=int(values["intermediate_size"]),
                rope=_rope(values),
                rms_norm_eps=float(values["rms_norm_eps"]),
                tie_embeddings=bool(values.get("tie_word_embeddings", False)),
                max_positions=int(values["max_position_embeddings"]),
            )
        except KeyError as error:
            raise DenseModelError(
                f"config.json: {error.args[0]} is needed, got {len(values)} keys without it; restore the file"
            ) from None

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Name and shape of every tensor."""
        hidden, q_rows, kv_rows = self.hidden_size, self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        layer = {
            "input_layernorm": (hidden,),
            "post_attention_layernorm": (hidden,),
            "self_attn.q_proj": (q_rows, hidden),
            "self_attn.k_proj": (kv_rows, hidden),
            "self_attn.v_proj": (kv_rows, hidden),
            "self_attn.o_proj": (hidden, q_rows),
            "mlp.gate_proj": (self.mlp_size, hidden),
            "mlp.up_proj": (self.mlp_size, hidden),
            "mlp.down_proj": (hidden, self.mlp_size),
        }
        shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (self.vocab_size, hidden)}
        for index in range(self.num_layers):
            shapes |= {f"model.layers.{index}.{name}.weight": shape for name, shape in layer.items()}
        shapes["model.norm.weight"] = (hidden,)
        if not self.tie_embeddings:
            shapes["lm_head.weight"] = (self.vocab_size, hidden)
        return shapes


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DenseModel:
    """Configuration and fp32 weights that belong together.

    Raises:
        DenseModelError: Names, shapes or dtypes are not those of the configuration.
    """

    config: DenseConfig
    weights: Mapping[str, torch.Tensor]

    def __post_init__(self) -> None:
        """Check the invariant."""
        shapes = self.config.shapes()
        missing, extra = sorted(shapes.keys() - self.weights.keys()), sorted(self.weights.keys() - shapes.keys())
        if missing or extra:
            raise DenseModelError(
                f"dense model: tensors must be exactly those of its configuration, got missing {missing} and "
                f"extra {extra}; check that it is a plain Llama and complete"
            )
        for name, shape in shapes.items():
            weight = self.weights[name]
            if tuple(weight.shape) != shape or weight.dtype != torch.float32:
                raise DenseModelError(
                    f"dense model: {name}: must be float32 of shape {shape}, got {weight.dtype} of shape "
                    f"{tuple(weight.shape)}; configuration and weights are of two models"
                )


def dense_from_hf(config: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> DenseModel:
    """The dense model of a Hugging Face checkpoint: its `config.json` and its tensors in any floating dtype.

    A copy of tied embeddings under `lm_head.weight` is dropped.

    Raises:
        DenseModelError: As `DenseConfig.from_hf` and `DenseModel`, or the tied copy differs.
    """
    dense = DenseConfig.from_hf(config)
    weights = {name: tensor.float() for name, tensor in tensors.items()}
    if dense.tie_embeddings and (head := weights.pop("lm_head.weight", None)) is not None:
        embedding = weights.get("model.embed_tokens.weight")
        if embedding is None or not torch.equal(head, embedding):
            raise DenseModelError(
                "dense model: lm_head.weight must equal the embeddings that config.json ties it to, got another "
                "tensor; set tie_word_embeddings to false"
            )
    return DenseModel(config=dense, weights=weights)


def _rope(values: Mapping[str, Any]) -> RopeConfig:
    """Rotary settings; the base lies beside the scaling in one layout and apart from it in the other."""
    scaling = values.get("rope_parameters") or values.get("rope_scaling") or {}
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    theta = float(scaling.get("rope_theta", values.get("rope_theta", 10000.0)))
    match kind:
        case "default":
            return RopeConfig(theta=theta)
        case "linear":
            return RopeConfig(theta=theta, scaling=RopeScaling.linear, factor=float(scaling["factor"]))
        case "llama3":
            return RopeConfig(
                theta=theta,
                scaling=RopeScaling.llama3,
                factor=float(scaling["factor"]),
                original_positions=int(scaling["original_max_position_embeddings"]),
                low_freq_factor=float(scaling["low_freq_factor"]),
                high_freq_factor=float(scaling["high_freq_factor"]),
            )
        case _:
            raise DenseModelError(
                f"config.json: rope_type must be default, linear or llama3, got {kind}; convert the checkpoint first"
            )

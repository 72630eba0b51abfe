"""The shape of the policy network. Read by Hydra, so this module imports nothing heavy.

Defaults describe the 1.9 M-parameter model of the quickstart; `validate` says what the formats and kernels require.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

MXFP4_BLOCK = 32
"""Values that share one MXFP4 scale; expert matrices are cut into such blocks along their input dimension."""

MAX_EXPERTS = 256
"""Recorded routes are uint8."""


class ConfigError(ValueError):
    """A model configuration that cannot be built; one line for each problem."""


class ComputeDtype(StrEnum):
    """The dtype of the matrix products. Norms, router, softmaxes and logits are fp32 in either case."""

    fp32 = "fp32"
    bf16 = "bf16"


@dataclass(slots=True, kw_only=True)
class ModelConfig:
    """A decoder-only Mixture-of-Experts transformer.

    `vocab_size` 0 means: take it from the tokenizer before the model is built. `expert_hidden_size` is the width F of
    one expert; `shared_expert_hidden_size` the width of an expert that every token passes, 0 for none.
    `max_positions` bounds the position ids (and so the context length in tokens).
    """

    vocab_size: int = 0
    hidden_size: int = 128
    num_layers: int = 4
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 32
    expert_hidden_size: int = 128
    num_experts: int = 8
    num_experts_per_tok: int = 2
    shared_expert_hidden_size: int = 0
    router_bias: bool = False
    rope_theta: float = 10000.0
    rms_norm_eps: float = 1e-6
    tie_embeddings: bool = True
    max_positions: int = 512
    compute_dtype: ComputeDtype = ComputeDtype.fp32

    def validate(self) -> None:
        """Check everything that can be checked without the tokenizer.

        Raises:
            ConfigError: One line a problem, all problems at once.
        """
        problems = list(self._problems())
        if problems:
            raise ConfigError("\n".join(problems))

    def _problems(self) -> Iterator[str]:
        positive = {
            "hidden_size": self.hidden_size,
            "num_layers": self.num_layers,
            "num_heads": self.num_heads,
            "num_kv_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "expert_hidden_size": self.expert_hidden_size,
            "num_experts": self.num_experts,
            "num_experts_per_tok": self.num_experts_per_tok,
            "max_positions": self.max_positions,
        }
        for name, value in positive.items():
            if value < 1:
                yield f"model.{name}: must be at least 1, got {value}; give a positive number"
        for name, value in {
            "vocab_size": self.vocab_size,
            "shared_expert_hidden_size": self.shared_expert_hidden_size,
        }.items():
            if value < 0:
                yield f"model.{name}: must not be negative, got {value}; 0 has a meaning of its own, see ModelConfig"
        for name, value in {"hidden_size": self.hidden_size, "expert_hidden_size": self.expert_hidden_size}.items():
            if value > 0 and value % MXFP4_BLOCK:
                remedy = f"use {-(-value // MXFP4_BLOCK) * MXFP4_BLOCK}"
                yield f"model.{name}: must be a multiple of {MXFP4_BLOCK} (the MXFP4 block), got {value}; {remedy}"
        if self.head_dim % 2:
            yield f"model.head_dim: must be even (rotary pairs), got {self.head_dim}; use {self.head_dim + 1}"
        if self.num_kv_heads > 0 and self.num_heads % self.num_kv_heads:
            yield (
                f"model.num_heads: must be a multiple of num_kv_heads={self.num_kv_heads}, got {self.num_heads}; "
                "every key-value head serves the same number of query heads"
            )
        if self.num_experts_per_tok > self.num_experts:
            yield (
                f"model.num_experts_per_tok: must not exceed num_experts={self.num_experts}, "
                f"got {self.num_experts_per_tok}; a token visits an expert at most once"
            )
        if self.num_experts > MAX_EXPERTS:
            yield f"model.num_experts: must be at most {MAX_EXPERTS}, got {self.num_experts}; routes are uint8"
        if not self.rope_theta > 1.0:
            yield f"model.rope_theta: must be above 1, got {self.rope_theta}; 10000 is the usual base"
        if not self.rms_norm_eps > 0.0:
            yield f"model.rms_norm_eps: must be positive, got {self.rms_norm_eps}; 1e-6 is usual"

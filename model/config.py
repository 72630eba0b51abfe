"""The shape of the policy network. Read by Hydra, so this module imports nothing heavy.

Defaults describe the 1.9 M-parameter model of the quickstart; `validate` says what the formats and kernels require.
The families of published checkpoints (`model/families/`) differ only in these values and in the names of their tensors.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, cast, get_type_hints

MXFP4_BLOCK = 32
"""Values that share one MXFP4 scale; expert matrices are cut into such blocks along their input dimension."""

MAX_EXPERTS = 1 << 15
"""Recorded routes are uint8 up to 256 experts and int16 beyond."""

MAX_LAYERS = 4096
"""More than any network has: a damaged file must not keep a program busy."""


_COUNTS = (
    "hidden_size",
    "num_layers",
    "num_heads",
    "num_kv_heads",
    "head_dim",
    "expert_hidden_size",
    "num_experts",
    "num_experts_per_tok",
    "num_expert_groups",
    "num_groups_per_tok",
    "max_positions",
)
_ZERO_MEANS_NONE = (
    "vocab_size",
    "sliding_window",
    "q_lora_rank",
    "kv_lora_rank",
    "qk_rope_head_dim",
    "v_head_dim",
    "shared_expert_hidden_size",
    "dense_hidden_size",
)


class ConfigError(ValueError):
    """A model configuration that cannot be built; one line for each problem."""


class ComputeDtype(StrEnum):
    """The dtype of the matrix products. Norms, router, softmaxes and logits are fp32 in either case."""

    fp32 = "fp32"
    bf16 = "bf16"


class LoraTargets(StrEnum):
    """What adapters are added to: the projections of attention (of latent attention all but `kv_b_proj`, which its
    cache folds into query and output), the fused matrices of the routed experts, or both.
    """  # noqa: D205

    all = "all"
    attention = "attention"
    experts = "experts"


@dataclass(slots=True, kw_only=True)
class LoraConfig:
    """Low-rank adapters on a frozen model (`model/lora.py`); rank 0: none, the model itself is trained.

    What an adapter adds is multiplied by `alpha` / `rank`.
    """

    rank: int = 0
    alpha: float = 16.0
    targets: LoraTargets = LoraTargets.all


class KernelChoice(StrEnum):
    """What computes: `auto` is the best that this machine has, every other name is that or an error.

    `torch` needs no compiler and is the slowest; its results depend on the batch.
    """

    auto = "auto"
    amx = "amx"
    avx512 = "avx512"
    avx2 = "avx2"
    torch = "torch"


class Family(StrEnum):
    """Whose names and configuration keys a checkpoint of the model has; see `model/families/`."""

    mixtral = "mixtral"
    olmoe = "olmoe"
    qwen3_moe = "qwen3_moe"
    gpt_oss = "gpt_oss"
    deepseek_v3 = "deepseek_v3"


class QkNorm(StrEnum):
    """RMSNorm of queries and keys before the rotation: over each head, or over all heads together."""

    none = "none"
    head = "head"
    projection = "projection"


class RouterScores(StrEnum):
    """What makes an expert's weight of its logit: a softmax over all experts, or a sigmoid for each."""

    softmax = "softmax"
    sigmoid = "sigmoid"


class Activation(StrEnum):
    """The gated unit of an expert: silu(gate) * up, or gpt-oss's clamped form (`swiglu_limit`, `swiglu_alpha`)."""

    swiglu = "swiglu"
    clamped_swiglu = "clamped_swiglu"


class RopeScaling(StrEnum):
    """How rotary frequencies are stretched to a longer context."""

    none = "none"
    linear = "linear"
    llama3 = "llama3"
    yarn = "yarn"


@dataclass(slots=True, kw_only=True)
class RopeConfig:
    """Rotary position embedding; see `model/rope.py` for the formulas.

    `factor` and `original_positions` belong to `scaling`, betas and `truncate` (the correction range in whole
    dimensions) to YaRN, the frequency factors to llama3. `attention_factor` multiplies cosine and sine; `None` derives
    it from `factor` (and `mscale`, `mscale_all_dim`, 0 for unset). `adjacent_pairs`: the checkpoint's rotary pairs are
    neighbours, not half a head apart.
    """

    theta: float = 10000.0
    scaling: RopeScaling = RopeScaling.none
    factor: float = 1.0
    original_positions: int = 0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    attention_factor: float | None = None
    mscale: float = 0.0
    mscale_all_dim: float = 0.0
    adjacent_pairs: bool = False

    def problems(self) -> Iterator[str]:
        """One line for each value that no rotation can be made of."""
        if not 1.0 < self.theta < math.inf:
            yield f"model.rope.theta: must be above 1, got {self.theta}; 10000 is the usual base"
        if self.scaling is not RopeScaling.none and not 1.0 <= self.factor < math.inf:
            yield f"model.rope.factor: must be at least 1, got {self.factor}; give the stretch of the context"
        if self.scaling in (RopeScaling.llama3, RopeScaling.yarn) and self.original_positions < 1:
            yield (
                f"model.rope.original_positions: {self.scaling} needs the context length before stretching, "
                f"got {self.original_positions}; give a positive number"
            )
        if self.scaling is RopeScaling.llama3 and not 0.0 < self.low_freq_factor < self.high_freq_factor:
            yield (
                f"model.rope.low_freq_factor: must lie between 0 and high_freq_factor={self.high_freq_factor}, "
                f"got {self.low_freq_factor}; 1 and 4 are usual"
            )
        if self.scaling is RopeScaling.yarn and not 0.0 < self.beta_slow <= self.beta_fast < math.inf:
            yield (
                f"model.rope.beta_slow: must lie between 0 and beta_fast={self.beta_fast}, got {self.beta_slow}; "
                "1 and 32 are usual"
            )
        if self.attention_factor is not None and not 0.0 < self.attention_factor < math.inf:
            yield (
                f"model.rope.attention_factor: must be positive, got {self.attention_factor}; leave it out to derive "
                "it from factor"
            )


@dataclass(slots=True, kw_only=True)
class ModelConfig:
    """A decoder-only Mixture-of-Experts transformer.

    `vocab_size` 0 means: take it from the tokenizer before the model is built. `max_positions` bounds the position ids
    (and so the context length in tokens).

    Attention: the layers of `window_layers` see `sliding_window` tokens, their own included. `attention_sinks` adds one
    learned logit a head to each softmax. With `kv_lora_rank` above 0 it is multi-head latent attention: `head_dim` is
    then that of a query or key, its last `qk_rope_head_dim` values are rotated, values have `v_head_dim`, and
    `q_lora_rank` 0 means that queries are projected in one step.

    Experts: `expert_hidden_size` is the width F of one routed expert, `shared_expert_hidden_size` that of the expert
    which every token passes (0: none), `dense_hidden_size` that of the plain layers `dense_layers`. The router's scores
    become weights after `normalize_topk` (divide by the sum of the chosen) and `routed_scaling`; with
    `router_selection_bias` a bias takes part in the choice only; the choice is made within the `num_groups_per_tok`
    best of `num_expert_groups` groups of experts.
    """

    family: Family = Family.mixtral
    vocab_size: int = 0
    hidden_size: int = 128
    num_layers: int = 4
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 32
    attention_bias: bool = False
    attention_sinks: bool = False
    qk_norm: QkNorm = QkNorm.none
    sliding_window: int = 0
    window_layers: list[int] = field(default_factory=list[int])
    q_lora_rank: int = 0
    kv_lora_rank: int = 0
    qk_rope_head_dim: int = 0
    v_head_dim: int = 0
    rope: RopeConfig = field(default_factory=RopeConfig)
    expert_hidden_size: int = 128
    num_experts: int = 8
    num_experts_per_tok: int = 2
    expert_bias: bool = False
    expert_activation: Activation = Activation.swiglu
    swiglu_limit: float = 7.0
    swiglu_alpha: float = 1.702
    shared_expert_hidden_size: int = 0
    dense_layers: list[int] = field(default_factory=list[int])
    dense_hidden_size: int = 0
    router_bias: bool = False
    router_scores: RouterScores = RouterScores.softmax
    router_selection_bias: bool = False
    num_expert_groups: int = 1
    num_groups_per_tok: int = 1
    normalize_topk: bool = True
    routed_scaling: float = 1.0
    rms_norm_eps: float = 1e-6
    tie_embeddings: bool = True
    max_positions: int = 512
    compute_dtype: ComputeDtype = ComputeDtype.fp32

    @property
    def is_latent(self) -> bool:
        """Whether attention is multi-head latent attention."""
        return self.kv_lora_rank > 0

    @property
    def value_head_dim(self) -> int:
        """Size of a head's value."""
        return self.v_head_dim if self.is_latent else self.head_dim

    @property
    def rotary_dim(self) -> int:
        """Values of a head that are rotated."""
        return self.qk_rope_head_dim if self.is_latent else self.head_dim

    @property
    def moe_layers(self) -> list[int]:
        """The layers with routed experts, in order."""
        return [index for index in range(self.num_layers) if index not in self.dense_layers]

    def window(self, layer_index: int) -> int:
        """Tokens that a query of this layer sees, its own included; 0 for all of them."""
        return self.sliding_window if layer_index in self.window_layers else 0

    def to_dict(self) -> dict[str, Any]:
        """Plain values, as `from_dict` reads them."""
        return dataclasses.asdict(self)

    @staticmethod
    def is_own(values: Mapping[str, Any]) -> bool:
        """Whether a config.json holds what `to_dict` gives: a published one names no family."""
        return "family" in values

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> ModelConfig:
        """The configuration that `to_dict` wrote.

        Raises:
            ConfigError: A key is missing or unknown, or a value is not one of its enumeration.
        """
        return _from_dict(cls, values, "model")

    def validate(self) -> None:
        """Check everything that can be checked without the tokenizer.

        Raises:
            ConfigError: One line a problem, all problems at once.
        """
        problems = [
            *self._size_problems(),
            *self.rope.problems(),
            *self._attention_problems(),
            *self._expert_problems(),
        ]
        if problems:
            raise ConfigError("\n".join(problems))

    def _size_problems(self) -> Iterator[str]:
        for name in _COUNTS:
            if (value := getattr(self, name)) < 1:
                yield f"model.{name}: must be at least 1, got {value}; give a positive number"
        for name in _ZERO_MEANS_NONE:
            if (value := getattr(self, name)) < 0:
                yield f"model.{name}: must not be negative, got {value}; 0 has a meaning of its own, see ModelConfig"
        for name in ("hidden_size", "expert_hidden_size"):
            if (value := getattr(self, name)) > 0 and value % MXFP4_BLOCK:
                remedy = f"use {-(-value // MXFP4_BLOCK) * MXFP4_BLOCK}"
                yield f"model.{name}: must be a multiple of {MXFP4_BLOCK} (the MXFP4 block), got {value}; {remedy}"
        for name in ("rms_norm_eps", "routed_scaling", "swiglu_limit"):
            if not (0.0 < (value := getattr(self, name)) < math.inf):
                yield f"model.{name}: must be positive, got {value}; see ModelConfig for the usual value"
        if self.num_layers > MAX_LAYERS:
            yield f"model.num_layers: must be at most {MAX_LAYERS}, got {self.num_layers}; check the file"
        for name in ("window_layers", "dense_layers"):
            outside = [index for index in getattr(self, name) if index not in range(self.num_layers)]
            if outside:
                yield (
                    f"model.{name}: must be indices below num_layers={self.num_layers}, got {outside[0]}; "
                    "layers count from 0"
                )

    def _attention_problems(self) -> Iterator[str]:
        if self.num_kv_heads > 0 and self.num_heads % self.num_kv_heads:
            yield (
                f"model.num_heads: must be a multiple of num_kv_heads={self.num_kv_heads}, got {self.num_heads}; "
                "every key-value head serves the same number of query heads"
            )
        if self.window_layers and not self.sliding_window:
            yield f"model.sliding_window: window_layers need it, got {self.sliding_window}; give the window in tokens"
        if self.is_latent:
            if self.num_kv_heads != self.num_heads:
                yield (
                    f"model.num_kv_heads: latent attention has as many as num_heads={self.num_heads}, "
                    f"got {self.num_kv_heads}; set it to that"
                )
            if not 0 < self.qk_rope_head_dim < self.head_dim:
                yield (
                    f"model.qk_rope_head_dim: must lie between 0 and head_dim={self.head_dim}, "
                    f"got {self.qk_rope_head_dim}; it is the rotated part of a head"
                )
            if self.v_head_dim < 1:
                yield f"model.v_head_dim: latent attention needs it, got {self.v_head_dim}; give a positive number"
            if self.qk_norm is not QkNorm.none or self.attention_sinks:
                yield (
                    f"model.kv_lora_rank: latent attention has neither qk_norm nor sinks, got qk_norm={self.qk_norm} "
                    f"and attention_sinks={self.attention_sinks}; leave them out"
                )
        if self.rotary_dim % 2:
            name = "qk_rope_head_dim" if self.is_latent else "head_dim"
            yield f"model.{name}: must be even (rotary pairs), got {self.rotary_dim}; use {self.rotary_dim + 1}"

    def _expert_problems(self) -> Iterator[str]:
        groups = max(1, self.num_expert_groups)
        if self.num_experts_per_tok > self.num_experts:
            yield (
                f"model.num_experts_per_tok: must not exceed num_experts={self.num_experts}, "
                f"got {self.num_experts_per_tok}; a token visits an expert at most once"
            )
        if self.num_experts > MAX_EXPERTS:
            yield f"model.num_experts: must be at most {MAX_EXPERTS}, got {self.num_experts}; routes are 15-bit numbers"
        if self.dense_layers and not self.dense_hidden_size:
            yield f"model.dense_hidden_size: dense_layers need it, got {self.dense_hidden_size}; give their width"
        if self.num_layers > 0 and not self.moe_layers:
            yield f"model.dense_layers: one layer must have experts, got all {self.num_layers}; leave one out"
        if groups > 1 and (self.num_experts % groups or self.num_experts // groups < 2):
            yield (
                f"model.num_expert_groups: must divide num_experts={self.num_experts} into groups of two or more, "
                f"got {groups}; use 1 for none"
            )
        elif groups > 1 and (
            self.num_groups_per_tok > groups
            or self.num_experts_per_tok > self.num_groups_per_tok * (self.num_experts // groups)
        ):
            yield (
                f"model.num_groups_per_tok: must hold num_experts_per_tok={self.num_experts_per_tok} experts and be at "
                f"most num_expert_groups={groups}, got {self.num_groups_per_tok}; choose more groups"
            )


def _from_dict(cls: type[Any], found: object, where: str) -> Any:
    """A dataclass of plain values, enumerations and dataclasses from its `asdict`."""
    if not isinstance(found, Mapping):
        raise ConfigError(f"{where}: must be a mapping, got {found}; restore the file")
    values, kinds = cast("Mapping[str, object]", found), get_type_hints(cls)
    missing, extra = sorted(kinds.keys() - values.keys()), sorted(values.keys() - kinds.keys())
    if missing or extra:
        raise ConfigError(
            f"{where}: keys must be exactly those of {cls.__name__}, got missing {missing} and extra {extra}; "
            "restore the file, or convert it with its own release"
        )
    return cls(**{name: _value(kinds[name], value, f"{where}.{name}") for name, value in values.items()})


_PLAIN_TYPES: dict[Any, tuple[str, tuple[type, ...]]] = {
    bool: ("true or false", (bool,)),
    int: ("a whole number", (int,)),
    float: ("a number", (float, int)),
    float | None: ("a number or null", (float, int, type(None))),
    list[int]: ("a list", (list,)),
}
"""For each declared type its name and the types of JSON's values; a bool is no number here."""


def _value(kind: Any, value: object, where: str) -> Any:
    if dataclasses.is_dataclass(kind):
        return _from_dict(cast("type[Any]", kind), value, where)
    if isinstance(kind, type) and issubclass(kind, StrEnum):
        if value not in tuple(kind):
            raise ConfigError(f"{where}: must be one of {[*map(str, kind)]}, got {value}; correct the file")
        return kind(cast("str", value))
    name, types = _PLAIN_TYPES[kind]
    if type(value) not in types:
        raise ConfigError(f"{where}: must be {name}, got {value!r}; correct the file")
    return cast("list[Any]", value)[:] if isinstance(value, list) else value

"""Reading and writing config.json: every key is understood, known to be harmless, or an error.

Invariant: a key that could change the mathematics is never passed over; all problems of a file are reported at once.
Both styles of rotary keys are read, `rope_parameters` (transformers 5) and `rope_theta` with `rope_scaling` (before).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, TypeVar

from model.config import ConfigError, ModelConfig, RopeConfig, RopeScaling

T = TypeVar("T", int, float, bool, str, list)

HARMLESS = frozenset(
    {
        # identity and bookkeeping
        *("model_type", "architectures", "transformers_version", "_name_or_path", "auto_map", "dtype", "torch_dtype"),
        # how the weights are stored: `model/hf/encodings.py` reads it
        *("quantization_config", "expert_dtype"),
        # initialisation, regularisation and losses of training
        *("initializer_range", "attention_dropout", "output_router_logits", "router_aux_loss_coef"),
        *("router_jitter_noise", "aux_loss_alpha", "seq_aux"),
        # running and generating
        *("use_cache", "bos_token_id", "eos_token_id", "pad_token_id", "pretraining_tp", "ep_size"),
        *("output_attentions", "output_hidden_states", "return_dict", "return_dict_in_generate"),
    }
)
"""Keys without influence on the function that the network computes."""

_ROPE_NAMES = {"default": RopeScaling.none, **{str(kind): kind for kind in RopeScaling if kind is not RopeScaling.none}}
_ROPE_KEYS = {
    RopeScaling.none: frozenset[str](),
    RopeScaling.linear: frozenset({"factor"}),
    RopeScaling.llama3: frozenset({"factor", "original_positions", "low_freq_factor", "high_freq_factor"}),
    RopeScaling.yarn: frozenset(
        {"factor", "original_positions", "beta_fast", "beta_slow", "truncate", "attention_factor"}
    ),
}
_LATENT_ROPE_KEYS = frozenset({"mscale", "mscale_all_dim"})
_ROPE_AS_IS = frozenset({"original_max_position_embeddings", "truncate"})
_ROPE_FILE_NAMES = {"original_positions": "original_max_position_embeddings"}


class Keys:
    """The keys of one config.json, ticked off as they are understood; `finish` reports what is left."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self._values = values
        self._known = set(HARMLESS)
        self._problems: list[str] = []

    def get(self, key: str, kind: type[T], default: T | None = None) -> T:
        """The value of a key, or `default` where it is absent or null; without a default it must be there."""
        self._known.add(key)
        value = self._values.get(key)
        if value is None and default is not None:
            return default
        if kind is float and isinstance(value, int) and not isinstance(value, bool):
            value = float(value)
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            self.problem(key, f"must be of type {kind.__name__}", value, "correct the file")
            return kind()
        return value

    def either(self, *names: str) -> str:
        """The one of several names for the same value that the file uses; where it has more, they must agree."""
        self._known.update(names)
        used = [name for name in names if self._values.get(name) is not None]
        if len({str(self._values[name]) for name in used}) > 1:
            self.problem(used[0], f"must agree with {used[1]}", [self._values[name] for name in used], "keep one")
        return used[0] if used else names[0]

    def expect(self, key: str, *supported: Any) -> None:
        """Nothing but these values (or the key's absence) is supported."""
        self._known.add(key)
        value = self._values.get(key)
        if value is not None and value not in supported:
            listed = " or ".join(map(str, supported)) or "null"
            self.problem(key, f"only {listed} is supported", value, "this network has no other")

    def ignore(self, *keys: str) -> None:
        """Keys that this family has and that do not change the function."""
        self._known.update(keys)

    def problem(self, key: str, what: str, got: Any, remedy: str) -> None:
        """Note a problem for `finish`."""
        self._problems.append(f"config.json: {key}: {what}, got {got}; {remedy}")

    def rope(self, *, theta: float, max_positions: int, latent: bool = False) -> RopeConfig:
        """The rotary embedding; `theta` is the family's default, `latent` allows DeepSeek's mscale keys."""
        self._known.update(("rope_parameters", "rope_scaling", "rope_theta"))
        where = "rope_parameters" if self._values.get("rope_parameters") else "rope_scaling"
        found = self._values.get(where) or {}
        if not isinstance(found, Mapping):
            self.problem(where, "must be a mapping", found, "correct the file")
            return RopeConfig()
        values = {key: value for key, value in found.items() if value is not None}
        base = values.pop("rope_theta", self._values.get("rope_theta") or theta)
        old_name, name = values.pop("type", None), values.pop("rope_type", None)
        kind = name or old_name or "default"
        scaling = _ROPE_NAMES.get(kind) if isinstance(kind, str) else None
        if scaling is None:
            self.problem(f"{where}.rope_type", f"only {sorted(_ROPE_NAMES)} are supported", kind, "see model/rope.py")
            return RopeConfig()
        if (share := values.pop("partial_rotary_factor", 1.0)) != 1.0:
            self.problem(f"{where}.partial_rotary_factor", "only 1 is supported", share, "all of a head is rotated")
        fields = {_ROPE_FILE_NAMES.get(field, field): field for field in _rope_fields(scaling, latent)}
        for key in sorted(values.keys() - fields.keys()):
            self.problem(f"{where}.{key}", f"has no meaning for {kind} rotation", values.pop(key), "remove it")
        wrong = {key: value for key, value in {"rope_theta": base, **values}.items() if not _fits_rope(key, value)}
        for key, value in wrong.items():
            self.problem(f"{where}.{key}", f"must be {_rope_kind(key)}", value, "correct the file")
        if wrong:
            return RopeConfig()
        if "original_max_position_embeddings" in fields:
            values.setdefault("original_max_position_embeddings", max_positions)
            values.setdefault("factor", max_positions / max(1, values["original_max_position_embeddings"]))
        if scaling is not RopeScaling.none and "factor" not in values:
            self.problem(f"{where}.factor", f"{kind} rotation needs it", None, "give the stretch of the context")
        stretch: dict[str, Any] = {
            fields[key]: value if key in _ROPE_AS_IS else float(value) for key, value in values.items()
        }
        return RopeConfig(theta=float(base), scaling=scaling, **stretch)

    def common(self, *, rms_norm_eps: float) -> dict[str, Any]:
        """The fields of `ModelConfig` that every family has keys for; `common_keys` writes them."""
        self.expect("hidden_act", "silu")
        hidden_size, num_heads = self.get("hidden_size", int), self.get("num_attention_heads", int)
        return {
            "vocab_size": self.get("vocab_size", int),
            "hidden_size": hidden_size,
            "num_layers": self.get("num_hidden_layers", int),
            "num_heads": num_heads,
            "num_kv_heads": self.get("num_key_value_heads", int, num_heads),
            "head_dim": self.get("head_dim", int, hidden_size // max(1, num_heads)),
            "num_experts_per_tok": self.get("num_experts_per_tok", int),
            "max_positions": self.get("max_position_embeddings", int),
            "rms_norm_eps": self.get("rms_norm_eps", float, rms_norm_eps),
            "tie_embeddings": self.get("tie_word_embeddings", bool, False),
        }

    def finish(self, **fields: Any) -> ModelConfig:
        """The configuration of these fields, when every key was understood.

        Raises:
            ConfigError: One line for each problem.
        """
        for key in sorted(self._values.keys() - self._known):
            what = "an unknown key may change what the network computes"
            self.problem(key, what, self._values[key], "remove it if it does not")
        if self._problems:
            raise ConfigError("\n".join(self._problems))
        config = ModelConfig(**fields)
        config.validate()
        return config


def rope_parameters(rope: RopeConfig, *, latent: bool = False) -> dict[str, Any]:
    """The `rope_parameters` of transformers 5; unset fields are left out."""
    names = {kind: name for name, kind in _ROPE_NAMES.items()}
    written = {
        _ROPE_FILE_NAMES.get(field, field): getattr(rope, field)
        for field in sorted(_rope_fields(rope.scaling, latent))
        if getattr(rope, field) is not None and not (field in _LATENT_ROPE_KEYS and getattr(rope, field) == 0.0)
    }
    return {"rope_type": names[rope.scaling], "rope_theta": rope.theta, **written}


def common_keys(config: ModelConfig, *, architecture: str, model_type: str) -> dict[str, Any]:
    """The keys that every family has."""
    return {
        "architectures": [architecture],
        "model_type": model_type,
        "dtype": "bfloat16",
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "hidden_act": "silu",
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "num_experts_per_tok": config.num_experts_per_tok,
        "max_position_embeddings": config.max_positions,
        "rms_norm_eps": config.rms_norm_eps,
        "tie_word_embeddings": config.tie_embeddings,
    }


def check_held(config: ModelConfig, read_back: ModelConfig) -> None:
    """Check that a family's file holds the whole configuration, by comparing it with what reading the file gives.

    Raises:
        ConfigError: One line for each field that the family has no key for.
    """
    wanted, held = dataclasses.asdict(config), dataclasses.asdict(read_back)
    lost = [
        f"model.{field}: a checkpoint of family {config.family} cannot hold it, got {value}; there it is {held[field]}"
        for field, value in wanted.items()
        if field != "compute_dtype" and value != held[field]
    ]
    if lost:
        raise ConfigError("\n".join(lost))


def _rope_kind(key: str) -> str:
    return "true or false" if key == "truncate" else "a number"


def _fits_rope(key: str, value: Any) -> bool:
    """Whether a rotary key's value is of its type; JSON's true is no number, and "1e4" none either."""
    return type(value) in ((bool,) if key == "truncate" else (int, float))


def _rope_fields(scaling: RopeScaling, latent: bool) -> frozenset[str]:
    return _ROPE_KEYS[scaling] | (_LATENT_ROPE_KEYS if latent and scaling is RopeScaling.yarn else frozenset())

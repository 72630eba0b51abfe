"""Which knob is read when, so that one that would be ignored is refused by name (`rl.config_check`).

Imports nothing heavy: a configuration is checked before torch is loaded. A custom algorithm reads its own `params`, and
what the round does for any algorithm.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Final, NamedTuple

from rl.algorithms.config import Aggregation, AlgorithmConfig, Importance

_CLIP: Final = frozenset({"clip_low", "clip_high"})
_GROUP: Final = frozenset({"max_resample_rounds"})
_CRITIC: Final = frozenset(
    {"gamma", "gae_lambda", "credit", "whiten_advantages", "value_coef", "value_clip", "value_lr"}
)
_LENGTH: Final = frozenset({"length_unit"})

READS: Final[Mapping[str, frozenset[str]]] = {
    "cispo": _CLIP | _GROUP,
    "custom": _GROUP,
    "dapo": _CLIP | _GROUP | {"normalize_advantage"},
    "dr_grpo": _CLIP | _GROUP | _LENGTH,
    "grpo": _CLIP | _GROUP | {"normalize_advantage"},
    "gspo": _CLIP | _GROUP,
    "ppo": _CLIP | _CRITIC,
    "reinforce_pp": _CLIP,
    "reinforce_pp_baseline": _CLIP | _GROUP,
    "rloo": _GROUP | _LENGTH,
}
"""The knobs that only some algorithms read, by algorithm; every other knob is read by all."""

_SOME: Final = frozenset[str]().union(*READS.values())


class Unread(NamedTuple):
    """A knob that differs from its default and changes nothing: `why`, and `remedy`, in words."""

    knob: str
    why: str
    remedy: str


def unread(config: AlgorithmConfig) -> Iterator[Unread]:
    """Every knob that was set for nothing."""
    default = AlgorithmConfig()
    changed = [
        field.name
        for field in dataclasses.fields(config)
        if getattr(config, field.name) != getattr(default, field.name)
    ]
    reads = READS.get(config.name, _SOME)
    if config.aggregation is Aggregation.episode_sum:
        reads = reads | _LENGTH
    elif config.aggregation is not Aggregation.own:
        reads = reads - _LENGTH
    waits = _waiting(config)
    for knob in changed:
        if knob in waits:
            condition, remedy = waits[knob]
            yield Unread(knob, f"not read while {condition}", f"{remedy}, or drop it")
        elif knob in _SOME - reads:
            yield Unread(knob, f"not read by algorithm={config.name}", f"drop it, or choose {_readers(knob)}")


def _readers(knob: str) -> str:
    if knob in _LENGTH:
        return "algorithm.aggregation=episode_sum"
    names = [name for name, knobs in READS.items() if knob in knobs and name != "custom"]
    return f"algorithm={' or '.join(names) if len(names) <= 2 else names[0] + ' or another that does'}"


def _waiting(config: AlgorithmConfig) -> dict[str, tuple[str, str]]:
    """Knobs that another one switches off, with the condition and what to do."""
    found: dict[str, tuple[str, str]] = {}
    if config.kl_coef == 0:
        off = "algorithm.kl_coef is 0", "set algorithm.kl_coef"
        found |= dict.fromkeys(("kl_estimator", "kl_in"), off)
    if config.importance is Importance.none:
        off = "algorithm.importance is none", "set algorithm.importance"
        found |= dict.fromkeys(("importance_level", "importance_cap"), off)
    if config.overlong_buffer_frac == 0:
        found["overlong_coef"] = "algorithm.overlong_buffer_frac is 0", "set algorithm.overlong_buffer_frac"
    return found

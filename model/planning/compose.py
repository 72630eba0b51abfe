"""From `model=<preset> key=value ...` to a `PlanRun`; every mistake is one line.

The presets are the options of conf/model, the keys those of `ModelConfig` and `PlanConfig`, and later values win, as
on the command line of a run (`rl/overrides.py`, which a program below `rl` cannot import).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from difflib import get_close_matches
from enum import Enum
from pathlib import Path
from typing import Any, get_args, get_type_hints

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, OmegaConfBaseException
from yaml import YAMLError

from model.planning.config import PlanError, PlanRun

PRESETS = Path(__file__).resolve().parents[2] / "conf" / "model"

_GROUP = "model"


def presets() -> list[str]:
    """The options of `model=`."""
    return sorted(file.stem for file in PRESETS.glob("*.yaml"))


def keys() -> dict[str, Any]:
    """Every full key and its default."""
    return dict(_leaves(PlanRun(), ""))


def _leaves(node: Any, prefix: str) -> Iterator[tuple[str, Any]]:
    for each in dataclasses.fields(node):
        value = getattr(node, each.name)
        if dataclasses.is_dataclass(value):
            yield from _leaves(value, f"{prefix}{each.name}.")
        else:
            yield f"{prefix}{each.name}", value


def compose(arguments: Sequence[str]) -> PlanRun:
    """The configuration that the arguments describe.

    Raises:
        PlanError: One line about the first argument that is not understood.
    """
    chosen = [argument for argument in arguments if argument.startswith(f"{_GROUP}=")]
    if len(chosen) != 1:
        raise PlanError(
            f"model: one preset must be chosen, got {' '.join(chosen) or 'none'}; write model=<preset>, one of: "
            f"{', '.join(presets())}"
        )
    composed = OmegaConf.merge(OmegaConf.structured(PlanRun), {_GROUP: _preset(chosen[0].partition("=")[2])})
    preset = dict(_leaves(OmegaConf.to_object(composed), ""))
    for argument in arguments:
        if argument not in chosen:
            composed = _override(composed, argument, preset)
    try:
        run = OmegaConf.to_object(composed)
    except OmegaConfBaseException as error:  # an interpolation that leads nowhere
        raise PlanError(
            f"{error.full_key}: cannot be resolved, got {_first_line(error)}; give the value itself"
        ) from error
    if not isinstance(run, PlanRun):
        raise TypeError(f"OmegaConf made {type(run).__name__} of PlanRun")
    return run


def _preset(name: str) -> Any:
    if name not in presets():
        remedy = _did_you_mean(name, presets()) or f"choose one of: {', '.join(presets())}"
        raise PlanError(f"model: no such preset, got {name}; {remedy}")
    values: Any = OmegaConf.to_container(OmegaConf.load(PRESETS / f"{name}.yaml"))
    return values.get(_GROUP, values)  # a preset with more than a shape sets its other sections beside `model`


def _override(composed: Any, argument: str, preset: dict[str, Any]) -> DictConfig:
    """One argument more; `preset` are the values without any."""
    key, equals, value = argument.partition("=")
    if not equals or not key:
        raise PlanError(f"command line: values are written key=value, got '{argument}'; see --help")
    known = keys()
    try:
        return OmegaConf.merge(composed, OmegaConf.from_dotlist([argument]))  # pyright: ignore[reportReturnType]
    except (ConfigKeyError, ConfigAttributeError) as error:
        name = error.full_key or key
        remedy = _did_you_mean(name, [*known]) or "see --help"
        raise PlanError(f"{name}: no such key, got {value or 'no value'}; {remedy}") from error
    except (OmegaConfBaseException, YAMLError) as error:
        if key not in known:
            first = next((name for name in known if name.startswith(f"{key}.")), "model.hidden_size")
            problem = f"is a section, got {value or 'no value'}; set one of its keys, such as {first}=<value>"
        else:
            default = preset[key].name if isinstance(preset[key], Enum) else preset[key]
            problem = f"must be {_kind(key)}, got {value or 'no value'}; the default is {default}"
        raise PlanError(f"{key}: {problem}") from error


def _kind(key: str) -> str:
    """The declared type of a full key, in words."""
    kind: Any = PlanRun
    for name in key.split("."):
        kind = get_type_hints(kind)[name]
    if isinstance(kind, type) and issubclass(kind, Enum):
        return "one of " + ", ".join(kind.__members__)
    words = {bool: "true or false", int: "a whole number", float: "a number"}
    return words.get(kind) or ("a number or null" if float in get_args(kind) else "a list such as [0,2]")


def _did_you_mean(name: str, known: Sequence[str]) -> str:
    close = get_close_matches(name, known, n=1)
    return f"did you mean '{close[0]}'?" if close else ""


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]

"""Command-line overrides, checked against the dataclasses and the config groups before Hydra composes anything.

Hydra 1.3 lets a mistyped `+rollout.max_turn=3` pass, and reports other mistakes as a traceback without saying what
was meant. Here every key is known or refused, with the nearest name of any section; what Hydra still finds while it
composes (types, broken YAML) is turned into the same kind of line by `explain`.

    argv -> reject_unknown -> compose -> to_run_config -> rl.config_check
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from difflib import SequenceMatcher
from enum import Enum
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Final, Union, get_args, get_origin, get_type_hints

import yaml
from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Glob, Override, QuotedString
from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import (
    ConfigAttributeError,
    ConfigKeyError,
    InterpolationResolutionError,
    OmegaConfBaseException,
)

from rl.config import RunConfig
from rl.config_check import ConfigError, dataclass_default, flatten

CONF_FOLDER: Final = Path(__file__).resolve().parent.parent / "conf"
CONFIG_NAME: Final = "config"
EXPERIMENT: Final = "experiment"
GROUPS_WITH_NAME: Final = ("env", "reward", "algorithm")
_CLOSE_ENOUGH: Final = 0.75
COMPOSITION_ERRORS: Final = (HydraException, OmegaConfBaseException, yaml.YAMLError)
"""What Hydra raises for a mistake of the user; anything else is a bug and keeps its traceback."""

# Below `schema/`, so that the dataclasses do not appear among the options of a group.
ConfigStore.instance().store(group="schema", name="run", node=RunConfig)


@functools.cache
def leaves() -> Mapping[str, Any]:
    """Full key of every value of `RunConfig` and its declared type."""
    return dict(_leaves(RunConfig, ""))


def _leaves(cls: type, prefix: str) -> Iterator[tuple[str, Any]]:
    for name, kind in get_type_hints(cls).items():
        if dataclasses.is_dataclass(kind) and isinstance(kind, type):
            yield from _leaves(kind, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", kind


@functools.cache
def sections() -> Mapping[str, tuple[str, ...]]:
    """Every section and the full keys in it, in their declared order."""
    found: dict[str, list[str]] = {}
    for key in leaves():
        found.setdefault(key.rpartition(".")[0], []).append(key)
    return {section: tuple(keys) for section, keys in found.items()}


def open_mapping_of(key: str) -> str | None:
    """The `params` mapping that `key` lies in (its keys belong to a target), or `None`."""
    for name, kind in leaves().items():
        if get_origin(kind) is dict and key.startswith(f"{name}."):
            return name
    return None


def group_options(folders: Sequence[Path] = (CONF_FOLDER,)) -> dict[str, tuple[str, ...]]:
    """The config groups and the options of each, over all folders."""
    found: dict[str, set[str]] = {}
    for folder in folders:
        for file in folder.glob("*/*.yaml"):
            found.setdefault(file.parent.name, set()).add(file.stem)
    return {group: tuple(sorted(options)) for group, options in sorted(found.items())}


def nearest_keys(key: str) -> list[str]:
    """Full keys that `key` may have meant, the best first; keys of other sections count as well."""
    section, _, leaf = key.rpartition(".")
    scored: list[tuple[float, str]] = []
    for candidate in leaves():
        its_section, _, its_leaf = candidate.rpartition(".")
        likeness = SequenceMatcher(None, leaf, its_leaf).ratio()
        if likeness >= _CLOSE_ENOUGH:
            # The section only breaks ties: `rollout.max_turn` means `env.max_turns`, not `rollout.max_retries`.
            scored.append((likeness + 0.1 * SequenceMatcher(None, section, its_section).ratio(), candidate))
    scored.sort(key=lambda pair: (-pair[0], pair[1]))
    if not scored:
        return []
    margin = 0.1 if not section else 0.05
    return [candidate for score, candidate in scored if score >= scored[0][0] - margin][:3]


def _remedy(key: str) -> str:
    """What to write instead of an unknown key."""
    if nearest := nearest_keys(key):
        return "did you mean " + " or ".join(f"'{name}'" for name in nearest) + "?"
    section = key.rpartition(".")[0] or key
    if section in leaves():
        return f"{section} is {describe_type(leaves()[section])} and has no keys"
    if section in sections():
        return f"the keys of {section} are " + ", ".join(name.rpartition(".")[2] for name in sections()[section])
    return "the sections are " + ", ".join(sections())


def unknown_key(key: str, found: str) -> ConfigError:
    """The line for a key that no dataclass has; `found` is its value, or where it stands."""
    return ConfigError(f"{key}: no such key, got {found or 'no value'}; {_remedy(key)}")


def reject_unknown(
    overrides: Sequence[str], *, multirun: bool = False, folders: Sequence[Path] = (CONF_FOLDER,)
) -> list[str]:
    """Check every override, and give it back the way Hydra wants it.

    A known key loses its `+` (it exists), a key below `params` gains `++` (struct mode refuses it otherwise), and the
    experiment gains its `+`. Keys of `hydra` are left to Hydra.

    Raises:
        ConfigError: one line about the first override that is not understood.
    """
    groups = group_options(folders)
    return [_check_override(text, groups, multirun) for text in overrides]


def _check_override(text: str, groups: Mapping[str, tuple[str, ...]], multirun: bool) -> str:
    override = parse(text)
    key = override.key_or_group
    assignment = text.lstrip("+~")
    value = assignment.partition("=")[2]
    if override.is_hydra_override() or key == "hydra":
        return text
    if override.package is not None:
        raise ConfigError(f"{key}: a package cannot be chosen, got '{text}'; write {key}={value or '<option>'}")
    if override.is_delete():
        raise ConfigError(f"{key}: nothing can be removed from the configuration, got '{text}'; set a value instead")
    if override.is_sweep_override():
        _check_sweep(override, value, multirun)
    values = _values(override)
    if key in groups and not any(isinstance(each, dict) for each in values):
        for each in values:
            _check_option(key, each, groups[key])
        return f"+{assignment}" if key == EXPERIMENT else assignment
    for each in values:
        _check_key(key, each, value)
    return f"++{assignment}" if open_mapping_of(key) else assignment


def parse(text: str) -> Override:
    """One override in Hydra's grammar."""
    try:
        return OverridesParser.create().parse_overrides([text])[0]
    except OverrideParseException:
        key, equals, value = text.partition("=")
        remedy = f"quote the value: '{key}=\"{value}\"'" if equals else f"write {key.lstrip('+~') or 'key'}=<value>"
        raise ConfigError(f"{key or text}: cannot be read as key=value, got '{text}'; {remedy}") from None


def _check_sweep(override: Override, value: str, multirun: bool) -> None:
    key = override.key_or_group
    if not multirun:
        kind = leaves().get(key)
        remedy = f"write {key}=[{value}] for a list" if get_origin(kind) is list else "add -m to run one job for each"
        raise ConfigError(f"{key}: takes one value in a single run, got {value}; {remedy}")
    if not override.is_discrete_sweep():
        raise ConfigError(f"{key}: a sweep needs values that can be listed, got {value}; write {key}=a,b or range(0,3)")
    if key in ("run.name", "run.root"):
        raise ConfigError(f"{key}: cannot be swept, got {value}; every job of a sweep has a folder of its own")


def _values(override: Override) -> list[Any]:
    """The values that an override stands for, one for each job of a sweep."""
    if not override.is_sweep_override():
        return [override.value()]
    if isinstance(override.value(), Glob):
        return []
    return [each.text if isinstance(each, QuotedString) else each for each in override.sweep_iterator()]


def _check_option(group: str, chosen: Any, options: tuple[str, ...]) -> None:
    for option in chosen if isinstance(chosen, list) else [chosen]:
        if option not in options:
            likely = max(options, key=lambda known: SequenceMatcher(None, str(option), known).ratio())
            close = SequenceMatcher(None, str(option), likely).ratio() >= _CLOSE_ENOUGH
            hint = f"did you mean '{likely}'? " if close else ""
            shown = "null" if option is None else option
            raise ConfigError(f"{group}: no such option, got {shown}; {hint}choose one of: {', '.join(options)}")


def _check_key(key: str, value: Any, text: str) -> None:
    if key in leaves() or open_mapping_of(key):
        return
    if not any(section == key or section.startswith(f"{key}.") for section in sections()):
        raise unknown_key(key, text)
    if not isinstance(value, dict):
        first = next(name for name in leaves() if name.startswith(f"{key}."))
        raise ConfigError(
            f"{key}: is a section, got {text or 'no value'}; set one of its keys, such as {first}=<value>"
        )
    for name, inner in value.items():
        _check_key(f"{key}.{name}", inner, str(inner))


def expand(overrides: Sequence[str]) -> list[list[str]]:
    """The overrides of each job of a sweep, in the order in which Hydra's basic sweeper runs them."""
    choices: dict[str, list[str]] = {}
    for text in overrides:
        override = parse(text)
        key = override.get_key_element()
        if override.is_sweep_override():
            choices[key] = [f"{key}={value}" for value in override.sweep_string_iterator()]
        else:
            choices[key] = [text]
    return [list(job) for job in itertools.product(*choices.values())]


def compose_run(overrides: Sequence[str], *, folders: Sequence[Path] = (CONF_FOLDER,)) -> RunConfig:
    """Compose the configuration of one job from overrides that `reject_unknown` returned.

    Raises:
        ConfigError: one line about whatever Hydra or OmegaConf found.
    """
    try:
        config, choices = _compose(overrides, folders)
    except COMPOSITION_ERRORS as error:
        raise explain(error, overrides, folders=folders) from error
    _check_names(config, choices)
    return config


def _compose(overrides: Sequence[str], folders: Sequence[Path]) -> tuple[RunConfig, dict[str, str]]:
    """The configuration, and the option of each group; whatever Hydra or OmegaConf finds is raised as it is."""
    search = [f"file://{folder.resolve()}" for folder in folders if folder != CONF_FOLDER]
    extra = [f"hydra.searchpath={search}"] if search else []
    with initialize_config_dir(str(CONF_FOLDER), version_base="1.3"):
        composed = compose(CONFIG_NAME, [*overrides, *extra], return_hydra_config=True)
        choices = dict(composed.hydra.runtime.choices)
        with open_dict(composed):
            del composed["hydra"]
        return to_run_config(composed), choices


def default_of(
    key: str, overrides: Sequence[str] = (), *, folders: Sequence[Path] = (CONF_FOLDER,), instead_of: Any = None
) -> str:
    """What a full key would be had the user not set it, as it is written on the command line.

    That is what the files compose with all of `overrides` but those of the key. Where `instead_of`, the value that is
    refused, comes from one of these files, it is what the shipped ones compose without it.
    """
    others = [text for text in overrides if not _sets(text, key)]
    options = [text for text in others if parse(text).key_or_group in group_options(folders)]
    shipped = [text for text in options if parse(text).key_or_group != EXPERIMENT]
    for kept in (others, options, shipped, ()):
        with contextlib.suppress(*COMPOSITION_ERRORS):  # a mistake in another key, or in a file
            value = flatten(_compose(kept, folders)[0])[key]
            if value != instead_of:
                return shown(value)
    return shown(dataclass_default(key))


def _sets(text: str, key: str) -> bool:
    """Whether an override sets this key, itself or within a section."""
    override = parse(text)
    rest, value = key.removeprefix(override.key_or_group), override.value()
    if rest and not rest.startswith("."):
        return False
    for name in rest.split(".")[1:]:
        if not isinstance(value, dict) or name not in value:
            return False
        value = value[name]
    return True


def _check_names(config: RunConfig, choices: Mapping[str, str]) -> None:
    """A shipped option brings the values that belong to its part: another part's name alone would leave them behind.

    Raises:
        ConfigError: a section's name is not that of its option.
    """
    for group in GROUPS_WITH_NAME:
        options, chosen, name = group_options()[group], choices.get(group), getattr(config, group).name
        if chosen in options and name in options and name != chosen:
            raise ConfigError(
                f"{group}.name: belongs to the option {group}={chosen}, got {name}; write {group}={name}, which brings "
                "its own values"
            )


def to_run_config(composed: DictConfig) -> RunConfig:
    """The dataclasses of a composed configuration, interpolations resolved."""
    config = OmegaConf.to_object(composed)
    if not isinstance(config, RunConfig):
        raise ConfigError(
            f"conf/{CONFIG_NAME}.yaml: must compose into RunConfig, got {type(config).__name__}; restore it"
        )
    return config


def explain(
    error: Exception, overrides: Sequence[str] = (), *, folders: Sequence[Path] = (CONF_FOLDER,)
) -> ConfigError:
    """One line that says what Hydra, OmegaConf or the YAML parser found, with the remedy."""
    if isinstance(error, MissingConfigException) and error.missing_cfg_file:
        group, _, option = error.missing_cfg_file.rpartition("/")
        options = ", ".join(error.options or ()) or "nothing"
        return ConfigError(f"{group or 'config'}: no such option, got {option}; choose one of: {options}")
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
        mark = error.problem_mark
        return ConfigError(
            f"{Path(mark.name or 'YAML').name}: cannot be read as YAML, got {error.problem} at line {mark.line + 1}; "
            "correct that line"
        )
    root = _omegaconf_error(error)
    if root is None or root.full_key is None:
        text = " ".join(str(error).partition("\nSee https")[0].split())
        return ConfigError(f"configuration: cannot be composed, got {text}; see python -m rl.train --help")
    key = root.full_key
    file = re.search(r"In '([^']+)'", str(error))
    where = f" in {file.group(1)}.yaml" if file else ""
    value = _value_given(key, root, overrides)
    if isinstance(root, ConfigKeyError | ConfigAttributeError):
        return unknown_key(key, value or f"it{where}")
    if isinstance(root, InterpolationResolutionError):
        problem = str(root).partition("\n")[0]
        return ConfigError(f"{key}: cannot be resolved, got {problem}; name an existing key or give the value itself")
    if key not in leaves():
        return ConfigError(f"{key}: is a section{where}, got {value or 'no value'}; set one of its keys")
    wanted, default = describe_type(leaves()[key]), default_of(key, overrides, folders=folders)
    return ConfigError(f"{key}: must be {wanted}{where}, got {value or 'no value'}; the default is {default}")


def shown(value: Any) -> str:
    """A value as it is written in YAML and on the command line."""
    if isinstance(value, bool):
        return str(value).lower()
    return "null" if value is None else str(value.name if isinstance(value, Enum) else value)


def _omegaconf_error(error: BaseException | None) -> OmegaConfBaseException | None:
    while error is not None and not isinstance(error, OmegaConfBaseException):
        error = error.__cause__ or error.__context__
    return error


def _value_given(key: str, error: OmegaConfBaseException, overrides: Sequence[str]) -> str:
    for text in reversed(overrides):
        name, _, value = text.lstrip("+").partition("=")
        if name == key:
            return value
    found = re.search(r"[Vv]alue '([^']*)'|value: (.*)", str(error))
    if found:
        return found.group(1) or found.group(2)
    return "null" if "not Optional" in str(error) else ""


def describe_type(kind: Any) -> str:
    """A declared type in words."""
    origin = get_origin(kind)
    if origin in (Union, UnionType):
        inner = [each for each in get_args(kind) if each is not NoneType]
        return f"{describe_type(inner[0])} or null"
    if isinstance(kind, type) and issubclass(kind, Enum):
        return "one of " + ", ".join(kind.__members__)
    if origin is list:
        return "a list such as [a,b]"
    if origin is dict:
        return "a mapping such as {x: 3}"
    return {bool: "true or false", int: "a whole number", float: "a number", str: "a text"}.get(kind, str(kind))

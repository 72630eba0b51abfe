"""Where a data set lies: a file, a folder, a glob, a saved data set, or an id of the Hugging Face hub.

Nothing heavy is imported: the configuration is checked with it.
"""

from __future__ import annotations

import difflib
import glob
import hashlib
import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, cast

from envs.base import EnvError
from envs.config import DatasetConfig, EnvConfig

HUB_PREFIX = "hf://"
LINE_SUFFIXES = (".jsonl", ".json", ".ndjson")
SUFFIXES = (*LINE_SUFFIXES, ".parquet")
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
_BLOCK_BYTES = 1 << 20


def hub_id(path: str) -> str | None:
    """The id `org/name` that the path names, or `None` where it names something of this machine."""
    if path.startswith(HUB_PREFIX):
        rest = path.removeprefix(HUB_PREFIX)  # hf://datasets/org/name/file is the address of a file
        return rest if _HUB_ID.fullmatch(rest) else None
    is_id = _HUB_ID.fullmatch(path) is not None and not path.endswith(SUFFIXES)
    return path if is_id and not Path(path).exists() and not Path(path).parent.exists() else None


def is_saved(path: str) -> bool:
    """Whether the path is a folder that `save_to_disk` wrote."""
    return any((Path(path) / name).is_file() for name in ("state.json", "dataset_dict.json"))


def local_files(path: str) -> list[str]:
    """The files of a file, a folder (its JSON-lines and Parquet files) or a glob, by name; empty when there is none."""
    if Path(path).is_file():
        return [path]
    if Path(path).is_dir():
        return sorted(str(file) for file in Path(path).iterdir() if file.is_file() and file.suffix in SUFFIXES)
    return sorted(file for file in glob.glob(path, recursive=True) if Path(file).is_file())


def is_missing(path: str) -> bool:
    """Whether the path names nothing that could be read."""
    return hub_id(path) is None and "://" not in path and not is_saved(path) and not local_files(path)


def sources(config: EnvConfig) -> Mapping[str, DatasetConfig]:
    """The data sets of the configuration by the key that names them; empty without any. Raises `EnvError`."""
    if config.dataset is not None:
        single = DatasetConfig(
            path=config.dataset,
            format=config.dataset_format,
            split=config.dataset_split,
            columns=dict(config.dataset_columns),
        )
        return {"env.dataset": single}
    return {f"env.datasets.{name}": _source(f"env.datasets.{name}", keys) for name, keys in config.datasets.items()}


def _source(key: str, settings: object) -> DatasetConfig:
    """The settings of one source of a mixture. Raises `EnvError` for a key or a type that is not `DatasetConfig`'s."""
    if isinstance(settings, DatasetConfig):
        return settings
    if not isinstance(settings, Mapping):
        raise EnvError(f"{key}: must have keys, got {settings!r}; set {key}.path")
    defaults = asdict(DatasetConfig())
    chosen = cast(Mapping[str, Any], settings)
    for name, value in chosen.items():
        if name not in defaults:
            close = difflib.get_close_matches(name, defaults, n=1)
            hint = f"did you mean '{key}.{close[0]}'?" if close else f"the keys are {', '.join(defaults)}"
            raise EnvError(f"{key}.{name}: no such key, got {value}; {hint}")
        default: object = defaults[name]
        wanted = next(kind for kind in (str, int, float, Mapping) if isinstance(default, kind))
        if isinstance(value, bool) or not isinstance(value, (int, float) if wanted is float else wanted):
            raise EnvError(
                f"{key}.{name}: must be a {wanted.__name__}, got {value!r}; the default is {defaults[name]!r}"
            )
    if not chosen.get("path"):
        raise EnvError(f"{key}.path: missing, got the keys {list(chosen)}; say where the data set lies")
    return DatasetConfig(**chosen)


def problems(config: EnvConfig) -> Iterator[str]:
    """What is wrong with the data sets of the configuration, as far as it shows without reading them."""
    try:
        found = sources(config)
    except EnvError as error:
        yield str(error)
        return
    for key, source in found.items():
        if is_missing(source.path):
            yield f"{key}: no such file, got {source.path}; name a JSON-lines file of tasks"


def content_digest(config: EnvConfig) -> str | None:
    """A hash of the settings and the content of the data (of a hub's, its id), or `None` without data."""
    found = sources(config)
    if not found:
        return None
    total = hashlib.blake2b(repr((config.curriculum_column, config.curriculum_tasks)).encode())
    for key, source in sorted(found.items()):
        settings = asdict(source)
        path = str(settings.pop("path"))
        total.update(repr((key, sorted(settings.items()))).encode())
        files = [str(file) for file in sorted(Path(path).rglob("*")) if file.is_file()] if is_saved(path) else None
        files = local_files(path) if files is None else files
        if not files:
            total.update(path.encode())
        for file in files:
            with Path(file).open("rb") as stream:
                while block := stream.read(_BLOCK_BYTES):
                    total.update(block)
    return total.hexdigest()

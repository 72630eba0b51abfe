"""Rows of a data set by position, on Arrow files that are mapped and not loaded.

`datasets` writes every source once as Arrow into its cache and maps it into memory: any row is read in constant time,
and the rows take no memory of the process. Its `IterableDataset` would take none either, but it has no random access:
its order hangs on a shuffle buffer, and the cursor of a run would no longer be one integer (`envs.base.TaskSource`).

JSON lines are read as lines of text, because the JSON reader of `datasets` casts a column to one type, which turns 1
into 1.0 and a date-like text into a date.
"""

from __future__ import annotations

import bisect
import itertools
import json
import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, cast

from envs.config import DatasetConfig
from envs.data.errors import DatasetError, RowError
from envs.data.locate import LINE_SUFFIXES, SUFFIXES, hub_id, is_saved, local_files

_MB = 2**20
_CHUNK_BYTES = _MB
"""What the text reader holds at once; it splits it in a `StringIO`, at 4 bytes a character (10 MB are its default)."""


@dataclass(frozen=True, slots=True)
class _Part:
    name: str
    table: Any
    is_text: bool


class Rows:
    """The rows of all files of a source, in the order of the files' names. `key` names the source in messages."""

    def __init__(self, source: DatasetConfig, *, key: str, max_row_mb: float) -> None:
        self.key = key
        self.path = source.path
        self._columns = dict(source.columns)
        self._max_row_mb = max_row_mb
        self._parts = _open(source, key)
        roots = [os.path.dirname(part.name) for part in self._parts]
        self._root = os.path.commonpath(roots) if len(roots) > 1 else "".join(roots)
        self._ends = list(itertools.accumulate(len(part.table) for part in self._parts))

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def where(self, position: int) -> tuple[str, int]:
        """The file (or id) of a row, and its number there, counted from 1 (the line of a JSON-lines file)."""
        part = bisect.bisect_right(self._ends, position)
        return self._parts[part].name, position - (self._ends[part - 1] if part else 0) + 1

    def label(self, position: int) -> str:
        """An id for a row without one: its file, below the folder that holds all of them, and its number."""
        name, number = self.where(position)
        return f"{name[len(self._root) :].lstrip('/')}:{number}"

    def read(self, position: int) -> dict[str, Any] | None:
        """A row with renamed columns, or `None` for an empty line. Raises `RowError`."""
        part = self._parts[bisect.bisect_right(self._ends, position)]
        row = cast(dict[str, Any], part.table[self.where(position)[1] - 1])
        if part.is_text:
            line = cast(str, row["text"])
            if not line.strip():
                return None
            self._check_size(len(line.encode()))
            row = _parsed(line)
        else:
            self._check_size(len(json.dumps(row, default=str)))
        for old, new in self._columns.items():
            if old not in row:
                raise RowError(
                    f"{self._setting('columns')}: the row has no column {old!r}",
                    f"the columns {list(row)}",
                    "rename a column that is there",
                )
            if new in row:
                raise RowError(
                    f"{self._setting('columns')}: {old!r} would replace the column {new!r}",
                    f"the columns {list(row)}",
                    "rename that one too, or drop it",
                )
            row[new] = row.pop(old)
        return row

    def error(self, position: int, problem: RowError, keys: Sequence[str] = ()) -> DatasetError:
        """The message for a row, with its file, number and columns."""
        name, number = self.where(position)
        return DatasetError(
            f"{self.key}: row {number} of {name!r}: {problem.problem}, got {problem.got} in a row with the keys "
            f"{list(keys)}; {problem.remedy}"
        )

    def _setting(self, name: str) -> str:
        return f"{self.key}_{name}" if self.key == "env.dataset" else f"{self.key}.{name}"

    def _check_size(self, num_bytes: int) -> None:
        if num_bytes > self._max_row_mb * _MB:
            raise RowError(
                "longer than env.dataset_max_row_mb",
                f"{num_bytes / _MB:.1f} MB of {self._max_row_mb:g}",
                "drop the row or raise env.dataset_max_row_mb",
            )


def _open(source: DatasetConfig, key: str) -> list[_Part]:
    hub = hub_id(source.path)
    if hub is not None:
        return [_Part(source.path, _load(key, source.path, hub, split=source.split), is_text=False)]
    if is_saved(source.path):
        return [_Part(source.path, _load_saved(source, key), is_text=False)]
    if "://" in source.path:
        return [_open_file(source.path, source.path, key)]
    files = local_files(source.path)
    if not files:
        raise DatasetError(f"{key}: no such file, got {source.path!r}; give the path of a JSON-lines file")
    return [_open_file(file, source.path, key) for file in files if Path(file).stat().st_size]


def _open_file(file: str, path: str, key: str) -> _Part:
    if file.endswith(".parquet"):
        return _Part(file, _load(key, file, "parquet", data_files={"train": file}, split="train"), is_text=False)
    if Path(file).suffix not in LINE_SUFFIXES and file != path:
        raise DatasetError(f"{key}: cannot tell the kind of a file, got {file!r}; end its name with one of {SUFFIXES}")
    files = {"train": file}
    return _Part(file, _load(key, file, "text", data_files=files, split="train", chunksize=_CHUNK_BYTES), is_text=True)


def _library() -> Any:
    import datasets  # pyright: ignore[reportMissingTypeStubs] (here: it takes a second, and most runs have no file)

    library = cast(Any, datasets)
    library.disable_progress_bars()
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)  # its retries would bury the one line of the error
    return library


def _load(key: str, name: str, kind: str, **settings: Any) -> Any:
    library = _library()
    try:
        return library.load_dataset(kind, **settings)
    except (OSError, ValueError, library.exceptions.DatasetsError) as problem:
        is_hub = kind not in ("text", "parquet")
        if kind == "text" and "://" not in name:
            _name_bad_line(key, name)
        remedy = (
            "copy it here, or reach the hub" if is_hub else "give a JSON-lines file in UTF-8, or a whole Parquet file"
        )
        cause: BaseException = problem.__cause__ or problem
        text = " ".join(str(cause).split())[:200]
        raise DatasetError(
            f"{key}: could not be read ({type(cause).__name__}: {text}), got {name!r}; {remedy}"
        ) from problem


def _load_saved(source: DatasetConfig, key: str) -> Any:
    library = _library()
    try:
        table = library.load_from_disk(source.path)
    except (OSError, ValueError, library.exceptions.DatasetsError) as problem:
        text = " ".join(str(problem).split())[:200]
        raise DatasetError(
            f"{key}: could not be read ({type(problem).__name__}: {text}), got {source.path!r}; save it again"
        ) from problem
    if not isinstance(table, Mapping):
        return table
    splits = cast(Mapping[str, Any], table)
    if source.split not in splits:
        raise DatasetError(f"{key}: no such split, got {source.split!r} of {source.path!r}; it has {sorted(splits)}")
    return splits[source.split]


def _name_bad_line(key: str, file: str) -> None:
    """Raise for the first line that is not UTF-8; the reader's own message does not say which it is."""
    with Path(file).open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            try:
                line.decode()
            except UnicodeDecodeError as problem:
                raise DatasetError(
                    f"{key}: could not be read (row {number} is not UTF-8: {problem.reason}), got "
                    f"{file!r}; give a JSON-lines file in UTF-8"
                ) from problem


def _parsed(line: str) -> dict[str, Any]:
    try:
        row: object = json.loads(line, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as problem:
        raise RowError(f"not JSON ({problem})", line, "") from problem
    if not isinstance(row, dict):
        raise RowError("not a JSON object", line, "")
    if "\\u" in line:
        try:
            json.dumps(row, ensure_ascii=False).encode()
        except UnicodeEncodeError as problem:
            half = f"\\u{ord(problem.object[problem.start]):04x}"
            raise RowError("half of a surrogate pair, which is no character", half, "drop it") from problem
    return cast(dict[str, Any], row)


def _refuse_constant(text: str) -> NoReturn:
    raise ValueError(f"{text} is not JSON")

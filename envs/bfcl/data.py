"""The rows of BFCL's multi-turn categories, and its API documents (package `bfcl-eval`, read, not imported).

The known answers are written as Python calls; they are parsed, never evaluated.
"""

from __future__ import annotations

import ast
import functools
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, cast

from envs.base import EnvError
from envs.bfcl.worker import MODULES
from envs.data_packages import data_file

PACKAGE = "bfcl-eval"
CATEGORIES = ("base", "miss_func", "miss_param", "long_context")


@dataclass(frozen=True, slots=True)
class KnownCall:
    """A call of a known answer: positional arguments come first, as it was written."""

    name: str
    positional: tuple[Any, ...]
    named: Mapping[str, Any]

    @classmethod
    def parse(cls, text: str) -> KnownCall:
        """Of a Python call with literal arguments. Raises `EnvError` for anything else."""
        try:
            node = ast.parse(text, mode="eval").body
            if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Name)):
                raise ValueError("no call of a name")
            named = {str(keyword.arg): ast.literal_eval(keyword.value) for keyword in node.keywords}
            return cls(node.func.id, tuple(map(ast.literal_eval, node.args)), named)
        except (ValueError, SyntaxError) as problem:
            raise EnvError(f"bfcl: a known answer must be calls of literals, got {text!r} ({problem})") from None

    def arguments(self) -> dict[str, Any]:
        """All arguments by name, in the order of the tool's document."""
        return {**dict(zip(parameters_of(self.name), self.positional, strict=False)), **self.named}


@functools.cache
def documents(api: str) -> tuple[Mapping[str, Any], ...]:
    """The documents of an API's functions: name, description, parameters (a schema with types of their own)."""
    path = data_file(PACKAGE, f"bfcl_eval/data/multi_turn_func_doc/{MODULES[api]}.json")
    return tuple(_rows(path.read_text()))


@functools.cache
def _by_name() -> Mapping[str, Mapping[str, Any]]:
    return {document["name"]: document for api in MODULES for document in documents(api)}


def parameters_of(name: str) -> tuple[str, ...]:
    """The parameters of a function, in their order."""
    return tuple(_by_name()[name]["parameters"]["properties"])


@functools.cache
def rows(category: str) -> tuple[Mapping[str, Any], ...]:
    """The rows of a category, each with `ground_truth`: for each turn of the user, the calls as text."""
    name = f"BFCL_v4_multi_turn_{category}.json"
    asked = _rows(data_file(PACKAGE, f"bfcl_eval/data/{name}").read_text())
    known = {
        row["id"]: row["ground_truth"]
        for row in _rows(data_file(PACKAGE, f"bfcl_eval/data/possible_answer/{name}").read_text())
    }
    return tuple({**row, "ground_truth": known[row["id"]]} for row in asked)


def _rows(text: str) -> Iterator[Mapping[str, Any]]:
    return (cast("Mapping[str, Any]", json.loads(line)) for line in text.splitlines() if line.strip())

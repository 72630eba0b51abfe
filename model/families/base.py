"""What a family of published checkpoints is: configuration keys, and the stored tensors that each parameter is made of.

A parameter of this project (`model/snapshot.py` lists the names) consists of pieces, each a part of one stored tensor:

    parameter[piece.target] = stored[piece.source]        on loading
    stored[piece.source] = parameter[piece.target]        on saving

One table therefore serves both directions. Indices never touch the last axis of a matrix, along which MXFP4 blocks lie,
so they move packed rows byte for byte: they apply to values [..., out, in], blocks [..., out, in/32, 16] and scales
[..., out, in/32] alike.

Invariant: the pieces of a parameter cover it exactly once, and those of a stored tensor cover that exactly once.

Shapes: E experts, F expert hidden dim, D model dim.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from model.config import Family, ModelConfig

Index = tuple[int | slice, ...]
_LAYER = re.compile(r"^(model\.layers\.)([0-9]+)(\..+)$")


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """A part of a stored tensor, and where it lies in a parameter.

    `shape` is that of the whole stored tensor as [..., out, in], after transposition. `transposed`: the file has it as
    [..., in, out] when its values are not packed.
    """

    name: str
    shape: tuple[int, ...]
    source: Index = ()
    target: Index = ()
    transposed: bool = False


Rule = Callable[[ModelConfig, str, tuple[int, ...]], tuple[Piece, ...]]
"""The pieces of a parameter of the given layer number and shape."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """The names of one style of checkpoint; a parameter without a rule is stored whole under its own name.

    `rules` are keyed by the parameter's name with `N` for the layer's number.
    """

    rules: Mapping[str, Rule] = field(default_factory=dict[str, Rule])

    def pieces(self, config: ModelConfig, name: str, shape: tuple[int, ...]) -> tuple[Piece, ...]:
        """What a parameter of this name and shape is made of."""
        match = _LAYER.match(name)
        key, layer = (f"{match[1]}N{match[3]}", match[2]) if match else (name, "")
        rule = self.rules.get(key)
        return rule(config, layer, shape) if rule else (Piece(name=name, shape=shape),)


@dataclass(frozen=True, slots=True, kw_only=True)
class FamilyFormat:
    """How the checkpoints of a family are read and written.

    `layouts` are tried in order; the first is the one that is written. `read_config` takes the keys of config.json and
    raises `ConfigError` naming everything unsupported at once; `write_config` is its inverse, for `transformers`.
    `skipped` names the prefixes of stored tensors that are no part of the policy, by the same keys.
    """

    family: Family
    model_types: tuple[str, ...]
    read_config: Callable[[Mapping[str, Any]], ModelConfig]
    write_config: Callable[[ModelConfig], dict[str, Any]]
    layouts: tuple[Layout, ...]
    recognises: Callable[[Mapping[str, Any]], bool] = lambda _: False
    skipped: Callable[[Mapping[str, Any]], tuple[str, ...]] = lambda _: ()


def whole(pattern: str, *, transposed: bool = False) -> Rule:
    """The parameter is one stored tensor of another name (`N`: the layer), or of other axes."""
    return lambda _, layer, shape: (Piece(name=_numbered(pattern, layer), shape=shape, transposed=transposed),)


def rows(pattern: str, part: Callable[[ModelConfig], tuple[int, int]]) -> Rule:
    """The parameter is a run of rows of a stored tensor; `part` tells the first row and the rows of the whole."""

    def rule(config: ModelConfig, layer: str, shape: tuple[int, ...]) -> tuple[Piece, ...]:
        first, total = part(config)
        source = (slice(first, first + shape[0]),)
        return (Piece(name=_numbered(pattern, layer), shape=(total, *shape[1:]), source=source),)

    return rule


def interleaved(pattern: str, *, transposed: bool = False) -> Rule:
    """Gate and up rows alternate in the file: row 2i is gate row i, row 2i + 1 is up row i. Also for their biases."""

    def rule(config: ModelConfig, layer: str, shape: tuple[int, ...]) -> tuple[Piece, ...]:
        name, half, every = _numbered(pattern, layer), shape[1] // 2, slice(None)
        return tuple(
            Piece(
                name=name,
                shape=shape,
                source=(every, slice(parity, None, 2)),
                target=(every, slice(parity * half, (parity + 1) * half)),
                transposed=transposed,
            )
            for parity in (0, 1)
        )

    return rule


def per_expert(*patterns: str) -> Rule:
    """Each expert has one stored tensor for each pattern (`J`: the expert); their rows follow one another."""

    def rule(config: ModelConfig, layer: str, shape: tuple[int, ...]) -> tuple[Piece, ...]:
        num_rows = shape[1] // len(patterns)
        return tuple(
            Piece(
                name=_numbered(pattern, layer).replace(".J.", f".{expert}."),
                shape=(num_rows, shape[2]),
                target=(expert, slice(index * num_rows, (index + 1) * num_rows)),
            )
            for expert in range(shape[0])
            for index, pattern in enumerate(patterns)
        )

    return rule


def _numbered(pattern: str, layer: str) -> str:
    return pattern.replace(".N.", f".{layer}.")

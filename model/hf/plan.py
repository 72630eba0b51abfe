"""Which stored tensors make which parameter, decided and checked on the headers of a checkpoint alone.

Invariant: after `make_plan`, every stored tensor belongs to exactly one place or was named in a note, and names, shapes
and dtypes are what the reader expects; it need not check again.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from model.config import ModelConfig
from model.families.base import FamilyFormat, Layout, Piece
from model.hf.encodings import Encoding, Entry, Kind, detect, expected_shapes
from model.hf.files import Folder
from model.loaded import CheckpointError
from model.snapshot import Format, tensor_format
from model.transformer import EMBEDDING, LM_HEAD, parameter_shapes

_DERIVED = ".rotary_emb.inv_freq"
"""A table that old checkpoints store and every reader computes."""

_MAX_LISTED = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """A piece of a parameter and the entries that hold it."""

    piece: Piece
    encoding: Encoding
    names: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameter:
    """A parameter (or the stored copy of a tied one) and all its sources."""

    name: str
    shape: tuple[int, ...]
    sources: tuple[Source, ...]


def read_headers(folder: Folder) -> tuple[dict[str, Entry], dict[str, str]]:
    """All entries of a checkpoint, and the metadata of its first file.

    Raises:
        CheckpointError: A file is missing or damaged, or a tensor is stored twice.
    """
    entries: dict[str, Entry] = {}
    metadata: dict[str, str] | None = None
    for file in folder.weight_files():
        found, found_metadata = folder.header(file)
        if twice := entries.keys() & found.keys():
            first = entries[min(twice)].file
            raise CheckpointError(
                f"{folder.source}: {file}: a tensor must be stored once, got {_listed(twice)} in {first} too; "
                "remove the files of the other checkpoint"
            )
        entries |= found
        metadata = found_metadata if metadata is None else metadata
    return entries, metadata or {}


def make_plan(
    where: str,
    family: FamilyFormat,
    config: ModelConfig,
    entries: Mapping[str, Entry],
    *,
    tile: tuple[int, int],
    skipped: tuple[str, ...],
) -> tuple[tuple[Parameter, ...], tuple[str, ...]]:
    """All parameters (and a stored copy of a tied embedding) with their sources, and notes for the user.

    Args:
        where: The checkpoint's name in errors.
        family: Names its tensors.
        config: Decides which parameters there are.
        entries: What is stored.
        tile: Rows and columns that share an FP8 scale.
        skipped: Prefixes of tensors that are no part of the policy.

    Raises:
        CheckpointError: Lists the names of tensors that are missing, extra, or of another shape or dtype.
    """
    notes = list[str]()
    left_out = {name for name in entries if name.startswith(skipped) or name.endswith(_DERIVED)}
    if left_out:
        notes.append(f"{len(left_out)} tensors are no part of the policy and were skipped: {_listed(left_out)}")
    entries = {name: entry for name, entry in entries.items() if name not in left_out}
    shapes = parameter_shapes(config)
    layout = _layout(family, config, shapes, entries)
    if config.tie_embeddings:
        (copy,) = layout.pieces(config, LM_HEAD, shapes[EMBEDDING])
        if copy.name in entries:
            shapes[LM_HEAD] = shapes[EMBEDDING]
            notes.append(f"{copy.name} is stored although it is tied; it must equal the embedding")
    parameters = tuple(_parameter(config, layout, name, shape, entries) for name, shape in shapes.items())
    _check_entries(where, parameters, entries, tile)
    return parameters, (*notes, *_rounding_notes(parameters, entries))


def _layout(
    family: FamilyFormat, config: ModelConfig, shapes: Mapping[str, tuple[int, ...]], entries: Mapping[str, Entry]
) -> Layout:
    """The family's layout whose embedding is stored; the first when none is."""
    for layout in family.layouts:
        (embedding,) = layout.pieces(config, EMBEDDING, shapes[EMBEDDING])
        if embedding.name in entries:
            return layout
    return family.layouts[0]


def _parameter(
    config: ModelConfig, layout: Layout, name: str, shape: tuple[int, ...], entries: Mapping[str, Entry]
) -> Parameter:
    sources = list[Source]()
    for piece in layout.pieces(config, name, shape):
        encoding = detect(piece.name, entries)
        sources.append(Source(piece=piece, encoding=encoding, names=encoding.names(piece.name, entries)))
    return Parameter(name=name, shape=shape, sources=tuple(sources))


def _check_entries(
    where: str, parameters: Iterable[Parameter], entries: Mapping[str, Entry], tile: tuple[int, int]
) -> None:
    """Check names, shapes and dtypes of everything stored.

    Raises:
        CheckpointError: Lists the names at fault.
    """
    expected: dict[str, tuple[tuple[int, ...], tuple[str, ...]]] = {}
    for parameter in parameters:
        for source in parameter.sources:
            piece, encoding = source.piece, source.encoding
            shape = piece.shape
            if piece.transposed and encoding.kind is Kind.PLAIN:
                shape = (*shape[:-2], shape[-1], shape[-2])
            dtypes = (encoding.dtypes, encoding.scale_dtypes)
            expected |= {
                name: (shape, dtypes[index])
                for index, (name, shape) in enumerate(
                    zip(source.names, expected_shapes(encoding, shape, tile), strict=True)
                )
            }
    missing, extra = expected.keys() - entries.keys(), entries.keys() - expected.keys()
    if missing or extra:
        raise CheckpointError(
            f"{where}: tensors must be exactly those of config.json, got {len(missing)} missing {_listed(missing)} and "
            f"{len(extra)} extra {_listed(extra)}; check that the files belong to this configuration"
        )
    wrong = [
        f"{name} {entries[name].dtype} {entries[name].shape} instead of {'/'.join(dtypes)} {shape}"
        for name, (shape, dtypes) in expected.items()
        if entries[name].shape != shape or entries[name].dtype not in dtypes
    ]
    if wrong:
        raise CheckpointError(
            f"{where}: shapes and dtypes must be those of config.json, got {_listed(wrong)}; "
            "check that the files belong to this configuration"
        )


def _rounding_notes(parameters: Iterable[Parameter], entries: Mapping[str, Entry]) -> Iterator[str]:
    """What the published view will round, as far as dtypes tell; `LoadedModel.rounded` counts values."""
    rounded: dict[tuple[str, Format], list[str]] = {}
    for parameter in parameters:
        format = tensor_format(parameter.name)
        for source in parameter.sources:
            stored = entries[source.names[0]].dtype
            exact = source.encoding.kind is Kind.MXFP4 or format is Format.FP32 or (stored, format) == ("BF16", "bf16")
            if not exact and parameter.name not in rounded.setdefault((stored, format), []):
                rounded[stored, format].append(parameter.name)
    for (stored, format), names in rounded.items():
        where = f"stored as {stored} and rounded where they are published as {format}"
        yield f"{len(names)} parameters are {where}: {_listed(names)}"


def _listed(names: Iterable[str]) -> str:
    ordered = sorted(names)
    more = f" and {len(ordered) - _MAX_LISTED} more" if len(ordered) > _MAX_LISTED else ""
    return f"{ordered[:_MAX_LISTED]}{more}"

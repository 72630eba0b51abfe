"""Calibration tokens: sequences cut from texts or token ids, or drawn at random when there is no text.

A file that ends in `.jsonl` has a document a line: a JSON string, an object with `text`, or a list of token ids. Any
other file is one document of UTF-8 text. A document is cut into pieces of `length` tokens (its last piece may be
shorter), no sequence crosses into another document, and the choice among the pieces follows from the seed.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from tokenizers import Tokenizer

from model.hf.files import Folder

TOKENIZER_FILE = "tokenizer.json"

_MIN_LENGTH = 2
"""One token to predict from and one to predict."""


class CalibrationError(ValueError):
    """Calibration data, or a request, that nothing can be measured with."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrationTokens:
    """Sequences of int64 token ids, each of two or more, and where they are from; `is_random` is worth a warning."""

    sequences: tuple[torch.Tensor, ...]
    origin: str
    is_random: bool

    @property
    def num_tokens(self) -> int:
        """Of all sequences together."""
        return sum(map(len, self.sequences))


def check_length(length: int, max_positions: int) -> None:
    """Check the number of tokens that a sequence may have.

    Raises:
        CalibrationError: It is below two, or more than the model has positions for.
    """
    if not _MIN_LENGTH <= length <= max_positions:
        raise CalibrationError(
            f"--length: must be {_MIN_LENGTH} to {max_positions} (the model's max_positions), got {length}; "
            "choose another length"
        )


def random_tokens(vocab_size: int, *, num_sequences: int, length: int, seed: int) -> CalibrationTokens:
    """Uniform token ids: they reach every part of a model, but no text looks like them."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(vocab_size, (num_sequences, length), generator=generator)
    return CalibrationTokens(sequences=tuple(ids), origin="random token ids", is_random=True)


def read_tokens(
    path: Path, encode: Callable[[str], list[int]], vocab_size: int, *, num_sequences: int, length: int, seed: int
) -> CalibrationTokens:
    """At most `num_sequences` sequences of at most `length` tokens, in the order of the file.

    Args:
        path: The file, as the module's docstring says.
        encode: Token ids of a text; called for texts only, so that ids need no tokenizer.
        vocab_size: Ids must lie below.
        num_sequences: How many of the pieces to choose.
        length: Tokens of a piece.
        seed: Of the choice.

    Raises:
        CalibrationError: The file cannot be read, a line is of another kind, an id is not one of the model's, or no
            document has two tokens.
    """
    pieces: list[torch.Tensor] = []
    for where, document in _documents(path):
        ids = encode(document) if isinstance(document, str) else document
        outside = [token for token in (min(ids, default=0), max(ids, default=0)) if not 0 <= token < vocab_size]
        if outside:
            raise CalibrationError(
                f"{where}: token ids must be below the model's vocab_size={vocab_size}, got {outside[0]}; "
                "use the tokenizer of this checkpoint"
            )
        split = torch.tensor(ids, dtype=torch.int64).split(length)
        pieces += [piece for piece in split if len(piece) >= _MIN_LENGTH]
    if not pieces:
        raise CalibrationError(
            f"{path}: must hold a document of {_MIN_LENGTH} tokens or more, got none; give a longer text"
        )
    order = torch.randperm(len(pieces), generator=torch.Generator().manual_seed(seed))
    chosen = sorted(order[:num_sequences].tolist())
    return CalibrationTokens(sequences=tuple(pieces[index] for index in chosen), origin=str(path), is_random=False)


def checkpoint_encoder(folder: Folder) -> Callable[[str], list[int]]:
    """Token ids of a text by the checkpoint's own tokenizer.json, which is read when the first text comes.

    The function raises `CalibrationError` when the checkpoint has no such file, or it is not a tokenizer.
    """
    loaded: list[Tokenizer] = []

    def encode(text: str) -> list[int]:
        if not loaded:
            loaded.append(_load_tokenizer(folder))
        return loaded[0].encode(text).ids

    return encode


def _load_tokenizer(folder: Folder) -> Tokenizer:
    if TOKENIZER_FILE not in folder.names():
        raise CalibrationError(
            f"{folder.source}: texts need the checkpoint's {TOKENIZER_FILE}, got {folder.names()}; add the file, or "
            "give lists of token ids in a .jsonl file"
        )
    with folder.local_copy(TOKENIZER_FILE) as path:
        try:
            return Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises nothing narrower
            raise CalibrationError(f"{path}: must be a tokenizer, got {error}; restore the file") from error


def _documents(path: Path) -> Iterator[tuple[str, str | list[int]]]:
    """Each document, and what to call it in an error."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise CalibrationError(f"{path}: must be a readable UTF-8 file, got {error}; correct --data") from error
    if path.suffix != ".jsonl":
        yield str(path), text
        return
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            where = f"{path}: line {number}"
            yield where, _document(where, line)


def _document(where: str, line: str) -> str | list[int]:
    try:
        value = json.loads(line)
        json.dumps(value, ensure_ascii=False).encode()  # half a surrogate pair is no text
    except (ValueError, RecursionError):
        value = None
    if isinstance(value, dict):
        value = cast("dict[str, Any]", value).get("text")
    if isinstance(value, str):
        return value
    if isinstance(value, list) and all(type(token) is int for token in cast("list[Any]", value)):
        return cast("list[int]", value)
    raise CalibrationError(
        f'{where}: must be a JSON string, an object with "text" or a list of token ids, got {line[:60]!r}; correct it'
    )

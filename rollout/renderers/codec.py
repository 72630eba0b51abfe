"""Text to ids and back for one chat format: a control token is written by the framework or not at all.

A rendering is a list of parts. `Scaffold` is text of the format, in which every marker (`<|im_end|>`) becomes its one
id; a plain `str` is somebody's words and never becomes one, whatever it spells. Neighbouring texts are encoded in one
piece, so that the ids are those that a chat template and the tokenizer give for the same text.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import TypeAlias

from tokenizers import AddedToken, Tokenizer


class Scaffold(str):
    """Text that the format puts between messages; markers in it are control tokens."""

    __slots__ = ()


Part: TypeAlias = Scaffold | str


class RendererError(ValueError):
    """A tokenizer that does not have a format's control tokens, or messages that the format cannot spell."""


class Codec:
    """A tokenizer with the markers of one format.

    `required` markers must be added tokens of the tokenizer; `optional` ones (`<tool_call>` of Qwen, which Hermes's
    older vocabularies lack) are written as plain text where they are not. The tokenizer itself is not changed.

    Raises:
        RendererError: a required marker is missing, or plain text can become one.
    """

    def __init__(self, tokenizer: Tokenizer, what: str, required: Sequence[str], optional: Sequence[str] = ()):
        added = {token.content: index for index, token in tokenizer.get_added_tokens_decoder().items()}
        missing = [marker for marker in required if marker not in added]
        if missing:
            raise RendererError(
                f"tokenizer: must hold each control token of the chat format {what} as one id, got none for "
                f"{', '.join(missing)}; use the checkpoint's own tokenizer.json, or set rollout.chat_format to its"
            )
        self.ids = {marker: added[marker] for marker in (*required, *optional) if marker in added}
        """The id of each marker that the tokenizer has."""
        self._markers = {index: Scaffold(marker) for marker, index in self.ids.items()}
        longest_first = sorted(self.ids, key=len, reverse=True)
        self._split = re.compile("(" + "|".join(map(re.escape, longest_first)) + ")")
        self._tokenizer = Tokenizer.from_str(tokenizer.to_str())
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        # Only special tokens can be barred from plain text, and some checkpoints do not mark theirs as special.
        self._tokenizer.add_special_tokens([AddedToken(marker, special=True, normalized=False) for marker in self.ids])
        self._tokenizer.encode_special_tokens = True
        self._check_plain(what)

    def encode(self, parts: Iterable[Part]) -> tuple[int, ...]:
        """The ids of a rendering."""
        ids: list[int] = []
        text = ""
        for part in parts:
            if isinstance(part, Scaffold):
                # An odd number of pieces: text, marker, text, ..., text.
                between, *rest = self._split.split(part)
                text += between
                for marker, following in zip(rest[::2], rest[1::2], strict=True):
                    ids += (*self._plain(text), self.ids[marker])
                    text = following
            else:
                text += part
        return (*ids, *self._plain(text))

    def pieces(self, ids: Sequence[int]) -> list[Part]:
        """What ids spell: each marker as a `Scaffold`, the text between markers as `str`.

        Special tokens that are no markers of the format are dropped from the text.
        """
        pieces: list[Part] = []
        run: list[int] = []
        for index in ids:
            if index in self._markers:
                if run:
                    pieces.append(self._tokenizer.decode(run))
                    run = []
                pieces.append(self._markers[index])
            else:
                run.append(index)
        if run:
            pieces.append(self._tokenizer.decode(run))
        return pieces

    def words(self, ids: Sequence[int]) -> str:
        """The text of ids without any control token."""
        return self._tokenizer.decode([index for index in ids if index not in self._markers])

    def spelled(self, ids: Sequence[int]) -> str:
        """The text of ids with every control token spelled out."""
        return self._tokenizer.decode(list(ids), skip_special_tokens=False)

    def _plain(self, text: str) -> list[int]:
        # A lone surrogate (half of a UTF-16 pair, which JSON can spell) has no bytes: it is read as a question mark. A
        # tool that repeats one must not end the episode as a failure, which no reward would judge.
        return self._tokenizer.encode(text.encode(errors="replace").decode(), add_special_tokens=False).ids

    def _check_plain(self, what: str) -> None:
        for marker, index in self.ids.items():
            if index in self._plain(marker):
                raise RendererError(
                    f"tokenizer: plain text must not become a control token of the chat format {what}, got id {index} "
                    f"for the text {marker}; use a tokenizer whose merges do not spell it"
                )

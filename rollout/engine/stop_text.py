"""Stop strings: text that ends an answer, found while its tokens come, wherever the borders of the tokens are.

A token may end inside a character, so text is taken over only up to the last whole one: the ids since then are decoded
together, in front of them the ones before (a decoder may treat the first token of a text in its own way).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

Decode = Callable[[Sequence[int]], str]
"""Text of token ids."""

_UNFINISHED = "\ufffd"
"""What decoders write for bytes that are no whole character."""


class StopText:
    """The text of one answer as far as a stop string may still lie in it."""

    def __init__(self, strings: Sequence[str], decode: Decode):
        self._strings = tuple(strings)
        self._decode = decode
        self._reach = max(map(len, strings)) - 1
        self._ids: list[int] = []
        self._before = 0
        self._read = 0
        self._tail = ""

    def ends_with(self, token: int) -> bool:
        """Take one more token; whether a stop string is complete."""
        self._ids.append(token)
        whole = self._decode(self._ids[self._before :])
        known = self._decode(self._ids[self._before : self._read])
        text = self._tail + whole[len(known) :]
        if any(string in text for string in self._strings):
            return True
        if not whole.endswith(_UNFINISHED):
            self._before, self._read = self._read, len(self._ids)
            self._tail = text[-self._reach :] if self._reach else ""
        return False


def cut_at_stop(text: str, strings: Sequence[str]) -> str:
    """`text` up to the first stop string in it."""
    ends = [index for string in strings if (index := text.find(string)) >= 0]
    return text[: min(ends)] if ends else text

"""What the environment says to a failed try: one short line, from visible examples only.

    f([1, 2]) gave [2], want [3]
    error NameError: name 'y' is not defined
    no code block

Short, because every token of it is context of the next turn, and flat: text of the policy's own program (a value, an
exception message) can neither add lines nor grow without bound.
"""

from __future__ import annotations

MAX_CHARS = 60
MAX_VALUE_CHARS = 24


def shorten(text: str, max_chars: int = MAX_CHARS) -> str:
    """The text on one line, cut at `max_chars`."""
    return " ".join(text[: 4 * max_chars].split())[:max_chars]


def show(value: object) -> str:
    """A value as Python writes it."""
    try:
        return repr(value)
    except (ValueError, RecursionError):  # an int of more digits than Python converts, or a deep nest
        return "?"


def wrong_value(entry_point: str, args: tuple[object, ...], *, got: object, want: object) -> str:
    """The call, what it gave and what it should have given."""
    call = f"{entry_point}({', '.join(show(arg) for arg in args)})"
    return shorten(f"{call} gave {show(got)[:MAX_VALUE_CHARS]}, want {show(want)}")


def error(message: str) -> str:
    """An exception, a timeout, or a program that died."""
    return shorten(f"error {message}")

"""The form of an answer: a fenced code block that defines the entry point.

    ```python
    def f(xs):
        return sum([x * 2 for x in xs if x > 0])
    ```

The last block counts. A malformed answer is a record with a note, never an exception. This is about form only, and no
part of the defence against cheating code: the sandbox and the grader are. The text is not parsed as Python here,
because a parser fed with a policy's text can exhaust this process; the sandbox compiles it.
"""

from __future__ import annotations

from dataclasses import dataclass

LANGUAGES = ("", "python", "python3", "py")
"""Info strings of the fences that hold an answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What one message of the policy says: a program (`well_formed`), or why there is none (`note`)."""

    source: str
    well_formed: bool
    note: str = ""


def format_answer(source: str) -> str:
    """The message that a well-formed answer with this program looks like."""
    return f"```python\n{source.rstrip()}\n```"


def _malformed(note: str) -> Answer:
    return Answer(source="", well_formed=False, note=note)


def _fence(line: str) -> tuple[int, str] | None:
    """Length and info string of a fence line, or `None` for any other line."""
    stripped = line.strip()
    num_ticks = len(stripped) - len(stripped.lstrip("`"))
    if num_ticks < 3 or "`" in stripped[num_ticks:]:
        return None
    return num_ticks, stripped[num_ticks:].strip().lower()


def _last_block(text: str) -> str | None:
    """The last code block in one of `LANGUAGES`; `None` when it is not closed. Raises `LookupError` without any."""
    block: list[str] | None = None
    opened: tuple[int, str] | None = None
    lines: list[str] = []
    for line in text.replace("\r\n", "\n").split("\n"):
        fence = _fence(line)
        if opened is None:
            if fence is not None:
                opened, lines = fence, []
        elif fence is not None and fence[0] >= opened[0] and not fence[1]:
            if opened[1] in LANGUAGES:
                block = lines
            opened = None
        else:
            lines.append(line)
    if opened is not None and opened[1] in LANGUAGES:
        return None
    if block is None:
        raise LookupError
    return "\n".join(block) + "\n"


def extract(text: str, entry_point: str) -> Answer:
    """The program in `text`. Notes: no code block, unclosed code block, no function, two functions, not text."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return _malformed("not text")
    try:
        source = _last_block(text)
    except LookupError:
        return _malformed("no code block")
    if source is None:
        return _malformed("unclosed code block")
    num_definitions = sum(_defines(line, entry_point) for line in source.split("\n"))
    if num_definitions == 0:
        return _malformed(f"no function {entry_point}")
    if num_definitions > 1:
        return _malformed(f"two functions {entry_point}")
    return Answer(source=source, well_formed=True)


def _defines(line: str, entry_point: str) -> bool:
    """Whether a line at the left margin begins the definition of `entry_point`."""
    word, _, rest = line.partition(" ")
    return (
        word == "def"
        and rest.lstrip().startswith(entry_point)
        and rest.lstrip()[len(entry_point) :].lstrip()[:1] == "("
    )

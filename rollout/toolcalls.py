"""Parsers of tool calls: what the policy wrote becomes `ToolCall`s or, where it cannot be read, `MalformedToolCall`s.

No input raises: a policy under training writes anything, and a malformed call is an answer that the environment replies
to and a reward can count. What counts as well formed is strict (RFC 8259 JSON, no NaN, no duplicate keys), because what
one parser forgives the next one rejects. The formats in `rollout/renderers/` find the calls; here they are read.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from rollout.renderers.codec import Part, Scaffold
from rollout.types import Json, MalformedToolCall, ToolCall

Call: TypeAlias = ToolCall | MalformedToolCall

MAX_JSON_CHARACTERS = 1_000_000
MAX_JSON_DEPTH = 64
"""Deeper values break what handles them later (the recursion limit), where it would count as our failure."""

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.\-]{0,127}")
_BLANK = re.compile(r"[ \t\r\n]*")
_OPEN, _CLOSE = "<tool_call>", "</tool_call>"


class _JsonError(ValueError):
    """Text that is not JSON as we read it; its message is the problem."""


def _refuse_constant(text: str) -> None:
    raise _JsonError(f"{text} is not JSON")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise _JsonError(f"the number {text[:20]} is out of range")
    return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    keys = dict(pairs)
    if len(keys) < len(pairs):
        raise _JsonError("an object has the same key twice")
    return keys


_DECODER = json.JSONDecoder(parse_constant=_refuse_constant, parse_float=_finite, object_pairs_hook=_unique)


def _decode(text: str, start: int = 0) -> tuple[Any, int]:
    """The JSON value that begins at `start`, and where it ends. Raises _JsonError."""
    try:
        value, end = _DECODER.raw_decode(text, start)
        json.dumps(value, ensure_ascii=False).encode()
    except _JsonError:
        raise
    except json.JSONDecodeError as error:
        raise _JsonError(f"invalid JSON: {error.msg} at character {error.pos - start}") from None
    except UnicodeEncodeError:
        raise _JsonError("a string holds half of a surrogate pair") from None
    except ValueError:  # Python refuses to convert integers of thousands of digits
        raise _JsonError("a number is too long") from None
    except RecursionError:
        raise _JsonError(f"the JSON is nested deeper than {MAX_JSON_DEPTH} levels") from None
    if _depth(value) > MAX_JSON_DEPTH:
        raise _JsonError(f"the JSON is nested deeper than {MAX_JSON_DEPTH} levels")
    return value, end


def _depth(value: Any) -> int:
    depth, level = 0, [value]
    while level:
        depth += 1
        inner = [item.values() if isinstance(item, dict) else item for item in level if isinstance(item, dict | list)]
        level = [item for items in inner for item in items]
    return depth


def _decode_all(text: str) -> Any:
    """The JSON value that `text` holds and nothing else. Raises _JsonError."""
    if len(text) > MAX_JSON_CHARACTERS:
        raise _JsonError(f"the JSON is longer than {MAX_JSON_CHARACTERS} characters")
    value, end = _decode(text, _skip_blank(text, 0))
    if _skip_blank(text, end) < len(text):
        raise _JsonError(f"more text follows the JSON at character {end}")
    return value


def _skip_blank(text: str, start: int) -> int:
    found = _BLANK.match(text, start)
    return found.end() if found else start


def read_call(call_id: str, name: Any, arguments: Any, raw: str) -> Call:
    """The call of `name` with already decoded `arguments`; a string that holds a JSON object is read as the object."""
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        return MalformedToolCall(id=call_id, raw=raw, problem="the name of the tool is missing or is no identifier")
    if isinstance(arguments, str):
        try:
            arguments = _decode_all(arguments)
        except _JsonError as error:
            return MalformedToolCall(id=call_id, raw=raw, problem=f"arguments: {error}")
    if not isinstance(arguments, dict):
        return MalformedToolCall(id=call_id, raw=raw, problem="arguments must be a JSON object")
    checked: Mapping[str, Json] = arguments
    return ToolCall(id=call_id, name=name, arguments=checked)


def tagged_calls(text: str) -> tuple[str, tuple[Call, ...]]:
    r"""The content and the calls of `text`, each call `<tool_call>\n{"name": ..., "arguments": {...}}\n</tool_call>`.

    A tag inside a JSON string does not end a call. Without calls the content is `text` as it is, else what stands
    around them, stripped.
    """
    outside: list[str] = []
    calls: list[Call] = []
    end = 0
    while (start := text.find(_OPEN, end)) >= 0:
        outside.append(text[end:start])
        call, end = _tagged_call(text, start + len(_OPEN), f"call_{len(calls)}")
        calls.append(call)
    if not calls:
        return text, ()
    outside.append(text[end:])
    return "".join(outside).strip(), tuple(calls)


def _tagged_call(text: str, start: int, call_id: str) -> tuple[Call, int]:
    """The call whose tag ends at `start`, and where the text goes on after it."""
    try:
        limit = start + MAX_JSON_CHARACTERS
        value, end = _decode(text[:limit], _skip_blank(text, start))
        closing = _skip_blank(text, end)
        if not text.startswith(_CLOSE, closing):
            raise _JsonError(f"the JSON must be followed by {_CLOSE}")
        raw, end = text[start:closing], closing + len(_CLOSE)
        if not isinstance(value, dict):
            raise _JsonError("a call must be a JSON object")
        if "name" not in value or "arguments" not in value:
            raise _JsonError("a call must have name and arguments")
        return read_call(call_id, value["name"], value["arguments"], raw), end
    except _JsonError as error:
        # What cannot be read ends at the next tag of either kind.
        ends = [found for tag in (_OPEN, _CLOSE) if (found := text.find(tag, start)) >= 0]
        stop = min(ends, default=len(text))
        after = stop + len(_CLOSE) if text.startswith(_CLOSE, stop) else stop
        problem = str(error) if text.startswith(_CLOSE, stop) else f"{_OPEN} is not closed, and {error}"
        return MalformedToolCall(id=call_id, raw=text[start:stop], problem=problem), after


@dataclass(frozen=True, slots=True, kw_only=True)
class CallMarks:
    """The control tokens of a format whose calls stand in a section: section(call(head, separator, body), ...)."""

    section_begin: str
    section_end: str
    begin: str
    separator: str
    end: str


def sectioned_calls(
    pieces: Sequence[Part], marks: CallMarks, read: Callable[[int, str, str], Call]
) -> tuple[str, tuple[Call, ...]]:
    """The content and the calls of decoded `pieces`; `read(index, head, body)` reads one call.

    Control tokens that are not among `marks` are dropped; a call that is not closed, or text between calls, is
    malformed.
    """
    content: list[str] = []
    calls: list[Call] = []
    inside = False  # in the section
    parts: list[str] | None = None  # texts of the open call: head, then body once its separator has come

    def give_up(problem: str, text: str) -> None:
        calls.append(MalformedToolCall(id=f"call_{len(calls)}", raw=text, problem=problem))

    for piece in pieces:
        if not isinstance(piece, Scaffold):
            if parts is not None:
                parts[-1] += piece
            elif not inside:
                content.append(piece)
            elif piece.strip():
                give_up("text stands between tool calls", piece)
            continue
        if piece in (marks.begin, marks.section_begin, marks.section_end) and parts is not None:
            give_up("a tool call is not closed", "".join(parts))
            parts = None
        if piece == marks.begin:
            inside, parts = True, [""]
        elif piece in (marks.section_begin, marks.section_end):
            inside = piece == marks.section_begin
        elif piece == marks.separator and parts is not None:
            parts.append("")
        elif piece == marks.end and parts is not None:
            if len(parts) == 2:
                calls.append(read(len(calls), parts[0], parts[1]))
            else:
                give_up(f"a tool call must have one {marks.separator}", "".join(parts))
            parts = None
    if parts is not None:
        give_up("a tool call is not closed", "".join(parts))
    return "".join(content), tuple(calls)


def split_reasoning(pieces: Sequence[Part]) -> tuple[str, list[Part]]:
    """The reasoning and the rest of an answer that thinks between `<think>` and `</think>`, tokens or text.

    What stands in the reasoning is thought, not done: calls in it are none. The opening tag may be missing (some
    templates write it into the header); reasoning that is not closed goes on to the end.
    """
    for index, piece in enumerate(pieces):
        before, closing, after = piece.partition("</think>")
        if closing:
            rest = [piece for piece in (after, *pieces[index + 1 :]) if piece]
            if rest and not isinstance(rest[0], Scaffold):
                rest[0] = rest[0].lstrip("\n")
            return _thought("".join([*pieces[:index], before])), rest
    text = "".join(pieces)
    return (_thought(text), []) if text.lstrip().startswith("<think>") else ("", list(pieces))


def _thought(text: str) -> str:
    return text.lstrip().removeprefix("<think>").strip("\n")

"""What both sides of a sandbox's wall agree on: the codec of values and the format of frames.

Standard library alone, like `agent`: these two files are all that runs in a box. A value crosses only as an exact
builtin type, so nothing the policy wrote can act in the process that judges it: no pickle, no subclass, no `__eq__`.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Mapping
from typing import Any, Final, NoReturn, cast

MAX_VALUE_BYTES: Final = 256 * 1024
MAX_VALUE_DEPTH: Final = 32
MAX_VALUE_NODES: Final = 50_000
# Keys chosen to collide make building a set quadratic on the host: the bound keeps that below a tenth of a second.
MAX_HASHED_ITEMS: Final = 1024
_MAX_PLAIN_INT: Final = 2**63


class BadValueError(ValueError):
    """A value that may not cross: not an exact builtin type, too deep, too large, or bytes that encode none."""


class _Budget:
    """Counts the nodes of one value, so that encoding and decoding end soon whatever they are given."""

    __slots__ = ("left",)

    def __init__(self) -> None:
        self.left = MAX_VALUE_NODES

    def enter(self, depth: int) -> None:
        self.left -= 1
        if self.left < 0:
            raise BadValueError(f"value: too many parts, got more than {MAX_VALUE_NODES}; return less")
        if depth > MAX_VALUE_DEPTH:
            raise BadValueError(f"value: nested too deep, got more than {MAX_VALUE_DEPTH} levels; flatten it")


def encode_value(value: object) -> bytes:
    """ASCII JSON of `value`, which holds exact builtin types only (a subclass may redefine `==`).

    JSON has no tuples, sets, non-string keys, NaN or exact floats, so those travel as one-key objects.
    """
    data = json.dumps(_pack(value, 0, _Budget()), separators=(",", ":"), allow_nan=False).encode("ascii")
    if len(data) > MAX_VALUE_BYTES:
        raise BadValueError(f"value: too large, got {len(data)} bytes of {MAX_VALUE_BYTES}; return less")
    return data


def _pack(value: object, depth: int, budget: _Budget) -> object:
    budget.enter(depth)
    kind = type(value)
    if value is None or kind is bool or kind is str:
        return value
    if kind is int:
        number = cast(int, value)
        return number if -_MAX_PLAIN_INT < number < _MAX_PLAIN_INT else {"int": hex(number)}
    if kind is float:
        return {"float": cast(float, value).hex()}
    if kind is complex:
        number = cast(complex, value)
        return {"complex": [number.real.hex(), number.imag.hex()]}
    if kind in (dict, set, frozenset):
        _check_hashed(len(cast(set[object], value)))
    if kind is dict:
        pairs = cast(dict[object, object], value).items()
        return {"dict": [[_pack(key, depth + 1, budget), _pack(item, depth + 1, budget)] for key, item in pairs]}
    if kind in (list, tuple, set, frozenset):
        packed = [_pack(item, depth + 1, budget) for item in cast(list[object], value)]
        return packed if kind is list else {kind.__name__: packed}
    raise BadValueError(f"value: only exact builtin types cross, got {kind.__name__[:80]}; convert it first")


def _check_hashed(count: int) -> None:
    if count > MAX_HASHED_ITEMS:
        raise BadValueError(f"value: too many items to hash, got {count} of {MAX_HASHED_ITEMS}; return a list")


def decode_value(data: bytes) -> object:
    """The value that `data` encodes. Raises `BadValueError`, and nothing else, for every other byte string."""
    if len(data) > MAX_VALUE_BYTES:
        raise BadValueError(f"value: too large, got {len(data)} bytes of {MAX_VALUE_BYTES}; return less")
    try:
        tree = json.loads(data.decode("ascii"), parse_float=_refuse_number, parse_constant=_refuse_number)
        return _unpack(tree, 0, _Budget())
    except BadValueError:
        raise
    except (ValueError, TypeError, OverflowError, RecursionError) as error:
        raise BadValueError(
            f"value: bytes that encode no value, got {type(error).__name__}; see encode_value"
        ) from None


def _refuse_number(text: str) -> NoReturn:
    raise BadValueError(f"value: floats travel in hexadecimal, got {text[:40]}; see encode_value")


def _unpack(tree: object, depth: int, budget: _Budget) -> object:
    budget.enter(depth)
    if isinstance(tree, list):
        return _unpack_all(cast(list[object], tree), depth, budget)
    if not isinstance(tree, dict):
        return tree
    tagged = cast(dict[str, object], tree)
    if len(tagged) != 1:
        raise BadValueError(f"value: an object has one tag, got {len(tagged)}; see encode_value")
    tag, body = next(iter(tagged.items()))
    unpack = _TAGS.get(tag)
    if unpack is None:
        raise BadValueError(f"value: unknown tag, got {tag[:40]!r}; see encode_value")
    return unpack(body, depth, budget)


def _items(body: object) -> list[object]:
    if not isinstance(body, list):
        raise BadValueError(f"value: a list was due, got {type(body).__name__}; see encode_value")
    return cast(list[object], body)


def _unpack_all(body: object, depth: int, budget: _Budget) -> list[object]:
    return [_unpack(item, depth + 1, budget) for item in _items(body)]


def _unpack_hashed(body: object, depth: int, budget: _Budget) -> list[object]:
    _check_hashed(len(_items(body)))
    return _unpack_all(body, depth, budget)


def _unpack_dict(body: object, depth: int, budget: _Budget) -> dict[object, object]:
    _check_hashed(len(_items(body)))
    pairs = (_two(pair) for pair in _items(body))
    return {_unpack(key, depth + 1, budget): _unpack(item, depth + 1, budget) for key, item in pairs}


def _two(body: object) -> tuple[object, object]:
    items = _items(body)
    if len(items) != 2:
        raise BadValueError(f"value: a pair was due, got {len(items)} items; see encode_value")
    return items[0], items[1]


def _text(body: object) -> str:
    if not isinstance(body, str):
        raise BadValueError(f"value: hexadecimal text was due, got {type(body).__name__}; see encode_value")
    return body


def _unpack_complex(body: object) -> complex:
    real, imaginary = _two(body)
    return complex(float.fromhex(_text(real)), float.fromhex(_text(imaginary)))


_TAGS: Final[Mapping[str, Callable[[object, int, _Budget], object]]] = {
    "int": lambda body, depth, budget: int(_text(body), 16),
    "float": lambda body, depth, budget: float.fromhex(_text(body)),
    "complex": lambda body, depth, budget: _unpack_complex(body),
    "tuple": lambda body, depth, budget: tuple(_unpack_all(body, depth, budget)),
    "set": lambda body, depth, budget: set(_unpack_hashed(body, depth, budget)),
    "frozenset": lambda body, depth, budget: frozenset(_unpack_hashed(body, depth, budget)),
    "dict": _unpack_dict,
}

FRAME: Final = struct.Struct("!II")
"""Lengths of a frame's header and payload."""

MAX_HEADER_BYTES: Final = 16 * 1024
MAX_PAYLOAD_BYTES: Final = 64 * 1024 * 1024


class FrameError(ValueError):
    """Bytes that are no frame."""


def pack_frame(header: Mapping[str, object], payload: bytes = b"") -> bytes:
    """One frame: two lengths (u32, big endian), a JSON object, the payload."""
    return pack_head(header, len(payload)) + payload


def pack_head(header: Mapping[str, object], payload_bytes: int) -> bytes:
    """A frame without its payload."""
    text = json.dumps(header).encode()
    return FRAME.pack(len(text), payload_bytes) + text


class FrameReader:
    """Cuts a byte stream into frames; every length is checked before anything is kept for it."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> None:
        """Add bytes as they arrive."""
        self._buffer += data

    def take(self) -> tuple[dict[str, Any], bytes] | None:
        """The next whole frame, or `None` when more bytes are due. Raises `FrameError`."""
        if len(self._buffer) < FRAME.size:
            return None
        header_bytes, payload_bytes = FRAME.unpack_from(self._buffer)
        if header_bytes > MAX_HEADER_BYTES or payload_bytes > MAX_PAYLOAD_BYTES:
            raise FrameError(f"frame: lengths out of bounds, got {header_bytes} and {payload_bytes}; close the box")
        body = FRAME.size + header_bytes
        if len(self._buffer) < body + payload_bytes:
            return None
        text, payload = bytes(self._buffer[FRAME.size : body]), bytes(self._buffer[body : body + payload_bytes])
        del self._buffer[: body + payload_bytes]
        try:
            header = json.loads(text)
        except (ValueError, RecursionError):
            raise FrameError(f"frame: the header is not JSON, got {text[:40]!r}; close the box") from None
        if not isinstance(header, dict):
            raise FrameError(f"frame: the header is no object, got {text[:40]!r}; close the box")
        return cast(dict[str, Any], header), payload

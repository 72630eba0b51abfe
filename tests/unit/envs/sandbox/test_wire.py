import json
import math
import struct
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from envs.sandbox import wire
from envs.sandbox.grader import same_value
from envs.sandbox.wire import BadValueError, FrameError, FrameReader, decode_value, encode_value, pack_frame

SCALARS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(min_value=2**60, max_value=2**200)
    | st.floats()
    | st.complex_numbers()
    | st.text(st.characters())
)
KEYS = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=3).map(tuple) | st.frozensets(inner, max_size=3), max_leaves=5
)
VALUES = st.recursive(
    KEYS,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(KEYS, inner, max_size=4)
        | st.sets(KEYS, max_size=4)
    ),
    max_leaves=20,
)


@given(VALUES)
def test_what_is_encoded_decodes_to_the_same_value(value):
    assert same_value(decode_value(encode_value(value)), value)


@given(st.text())
def test_lone_surrogates_and_all_other_text_cross(text):
    assert decode_value(encode_value(text + "\ud800")) == text + "\ud800"


class _List(list):
    def __eq__(self, other):
        return True

    __hash__ = None


class _Int(int):
    pass


class _Str(str):
    __slots__ = ()


@pytest.mark.parametrize(
    "value",
    [_List([1]), _Int(1), _Str("a"), [(_Int(1),)], {_Str("a"): 1}, object(), b"bytes", range(3), int, print, ...],
    ids=lambda value: type(value).__name__,
)
def test_only_exact_builtin_types_are_encoded(value):
    with pytest.raises(BadValueError):
        encode_value(value)


def _nested(levels):
    value = 0
    for _ in range(levels):
        value = [value]
    return value


def test_bounds_of_size_depth_and_count():
    encode_value(_nested(wire.MAX_VALUE_DEPTH))
    cyclic = []
    cyclic.append(cyclic)
    for value in (
        _nested(wire.MAX_VALUE_DEPTH + 1),
        cyclic,
        "x" * wire.MAX_VALUE_BYTES,
        [0] * (wire.MAX_VALUE_NODES + 1),
        set(range(wire.MAX_HASHED_ITEMS + 1)),
        1 << (8 * wire.MAX_VALUE_BYTES),
    ):
        with pytest.raises(BadValueError):
            encode_value(value)
    # Both sides agree on what is too large, or an honest answer would look forged.
    largest = {number: (number,) for number in range(wire.MAX_HASHED_ITEMS)}
    assert decode_value(encode_value(largest)) == largest


@given(st.binary(max_size=200))
def test_hostile_bytes_decode_or_are_refused(data):
    with suppress(BadValueError):
        decode_value(data)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["int", "float", "complex", "tuple", "set", "frozenset", "dict", "other"]),
            inner,
            max_size=2,
        )
    ),
    max_leaves=10,
)


@given(JSON)
def test_hostile_json_decodes_to_exact_builtins_or_is_refused(tree):
    try:
        value = decode_value(json.dumps(tree).encode())
    except BadValueError:
        return
    encode_value(value)


@pytest.mark.parametrize(
    "text",
    [
        b"1.5",
        b"NaN",
        b"Infinity",
        b"[" * 100_000,
        b'{"set":[[1]]}',
        b'{"dict":[[1]]}',
        b'{"dict":[[{"tuple":[[]]},1]]}',
        b'{"int":7}',
        b'{"int":"zz"}',
        b'{"float":"1e400x"}',
        b'{"complex":["0x1p0"]}',
        b'{"tuple":1}',
        b'{"a":1,"b":2}',
        b"{}",
        b"9" * 10_000,
        b"\xff",
        b"",
    ],
    ids=lambda text: repr(text[:20]),
)
def test_bytes_that_encode_nothing(text):
    with pytest.raises(BadValueError):
        decode_value(text)


def test_floats_cross_exactly():
    for number in (0.1, -0.0, 5e-324, 1.7976931348623157e308, math.inf, -math.inf):
        assert struct.pack("d", decode_value(encode_value(number))) == struct.pack("d", number)
    assert math.isnan(decode_value(encode_value(math.nan)))


# ---- frames


@given(st.lists(st.tuples(st.dictionaries(st.text(), st.integers()), st.binary()), max_size=4), st.integers(1, 7))
def test_frames_survive_any_cutting(frames, step):
    stream = b"".join(pack_frame(header, payload) for header, payload in frames)
    reader, received = FrameReader(), []
    for start in range(0, len(stream), step):
        reader.feed(stream[start : start + step])
        while (frame := reader.take()) is not None:
            received.append(frame)
    assert received == frames


@given(st.binary(max_size=100))
def test_hostile_bytes_are_a_frame_or_an_error_or_incomplete(data):
    reader = FrameReader()
    reader.feed(data)
    try:
        frame = reader.take()
    except FrameError:
        return
    assert frame is None or isinstance(frame[0], dict)


@pytest.mark.parametrize(
    "data",
    [
        struct.pack("!II", wire.MAX_HEADER_BYTES + 1, 0),
        struct.pack("!II", 2, wire.MAX_PAYLOAD_BYTES + 1),
        struct.pack("!II", 2, 0) + b"[]",
        struct.pack("!II", 2, 0) + b"{{",
        struct.pack("!II", 9000, 0) + b"[" * 9000,
    ],
    ids=["long header", "long payload", "no object", "no json", "deep json"],
)
def test_bad_frames(data):
    reader = FrameReader()
    reader.feed(data)
    with pytest.raises(FrameError):
        reader.take()

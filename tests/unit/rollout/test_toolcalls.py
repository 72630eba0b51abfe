import json
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout.renderers.codec import Scaffold
from rollout.toolcalls import (
    MAX_JSON_CHARACTERS,
    MAX_JSON_DEPTH,
    CallMarks,
    read_call,
    sectioned_calls,
    split_reasoning,
    tagged_calls,
)
from rollout.types import MalformedToolCall, ToolCall


def tagged(body):
    return f"<tool_call>\n{body}\n</tool_call>"


def only(text):
    _, calls = tagged_calls(text)
    (call,) = calls
    return call


def test_a_call_is_read_and_its_content_kept():
    content, calls = tagged_calls('I look.\n<tool_call>\n{"name": "f", "arguments": {"x": [1, "é"]}}\n</tool_call>')
    assert content == "I look."
    assert calls == (ToolCall(id="call_0", name="f", arguments={"x": [1, "é"]}),)


def test_text_without_calls_is_left_as_it_is():
    assert tagged_calls("  a </tool_call> b\n") == ("  a </tool_call> b\n", ())


def test_calls_that_can_be_read_stand_beside_one_that_cannot():
    text = tagged('{"name": "f", "arguments": {}}') + tagged("{") + "x" + tagged('{"name": "g", "arguments": {}}')
    content, calls = tagged_calls(text)
    assert content == "x"
    assert [call.id for call in calls] == ["call_0", "call_1", "call_2"]
    assert isinstance(calls[1], MalformedToolCall)
    assert (calls[0], calls[2]) == (
        ToolCall(id="call_0", name="f", arguments={}),
        ToolCall(id="call_2", name="g", arguments={}),
    )


def test_tags_in_a_string_do_not_end_a_call():
    arguments = {"code": "print('</tool_call><tool_call>')"}
    call = only(tagged(json.dumps({"name": "run", "arguments": arguments})))
    assert call == ToolCall(id="call_0", name="run", arguments=arguments)


def test_arguments_as_a_string_that_holds_an_object_are_read_once():
    assert only(tagged(r'{"name": "f", "arguments": "{\"x\": 1}"}')).arguments == {"x": 1}
    twice = json.dumps({"name": "f", "arguments": json.dumps(json.dumps({"x": 1}))})
    assert only(tagged(twice)).problem == "arguments must be a JSON object"


DEEP = "[" * 100_000
DEEP_CLOSED = "[" * (MAX_JSON_DEPTH + 1) + "]" * (MAX_JSON_DEPTH + 1)


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        ("", "invalid JSON: Expecting value at character"),
        ("{'name': 'f'}", "invalid JSON"),
        ('{"name": "f", "arguments": {"x": 1}', "invalid JSON"),
        ('{"name": "f", "arguments": {"x": "a\nb"}}', "invalid JSON: Invalid control character"),
        ('{"name": "f", "arguments": {}} and more', "the JSON must be followed by </tool_call>"),
        ("[1]", "a call must be a JSON object"),
        ('{"arguments": {}}', "a call must have name and arguments"),
        ('{"name": "f"}', "a call must have name and arguments"),
        ('{"name": "", "arguments": {}}', "the name of the tool is missing or is no identifier"),
        ('{"name": 3, "arguments": {}}', "the name of the tool is missing or is no identifier"),
        ('{"name": "a b\\n", "arguments": {}}', "the name of the tool is missing or is no identifier"),
        ('{"name": "f", "arguments": [1]}', "arguments must be a JSON object"),
        ('{"name": "f", "arguments": null}', "arguments must be a JSON object"),
        ('{"name": "f", "arguments": "x"}', "arguments: invalid JSON"),
        ('{"name": "f", "arguments": "{} x"}', "arguments: more text follows the JSON at character 2"),
        ('{"name": "f", "arguments": {"x": NaN}}', "NaN is not JSON"),
        ('{"name": "f", "arguments": {"x": -Infinity}}', "-Infinity is not JSON"),
        ('{"name": "f", "arguments": {"x": 1e999}}', "the number 1e999 is out of range"),
        ('{"name": "f", "arguments": {"x": ' + "9" * 5000 + "}}", "a number is too long"),
        ('{"name": "f", "arguments": {"x": 1, "x": 2}}', "an object has the same key twice"),
        ('{"name": "f", "arguments": {"x": "\\ud800"}}', "a string holds half of a surrogate pair"),
        ('{"name": "f", "arguments": {"x": ' + DEEP + "}}", "the JSON is nested deeper than 64 levels"),
        ('{"name": "f", "arguments": {"x": ' + DEEP_CLOSED + "}}", "the JSON is nested deeper than 64 levels"),
    ],
    ids=lambda value: value[:40].replace("\n", " "),
)
def test_a_malformed_call_is_a_record_with_its_problem(body, problem):
    call = only(tagged(body))
    assert isinstance(call, MalformedToolCall)
    assert call.problem.startswith(problem)
    assert call.raw.strip() == body.strip()
    assert "\n" not in call.problem


def test_a_nested_or_unclosed_tag_is_malformed_and_the_inner_call_is_read():
    _, calls = tagged_calls('<tool_call>\n<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>')
    assert isinstance(calls[0], MalformedToolCall)
    assert calls[0].problem.startswith("<tool_call> is not closed")
    assert calls[1] == ToolCall(id="call_1", name="f", arguments={})
    cut = only('<tool_call>\n{"name": "f", "arguments": {}}')
    assert isinstance(cut, MalformedToolCall)
    assert cut.problem.startswith("<tool_call> is not closed")


def test_long_arguments_have_a_limit():
    fits = json.dumps({"x": "a" * (MAX_JSON_CHARACTERS - 9)})
    assert len(fits) == MAX_JSON_CHARACTERS
    assert isinstance(read_call("i", "f", fits, ""), ToolCall)
    assert (
        read_call("i", "f", fits + " ", "").problem
        == f"arguments: the JSON is longer than {MAX_JSON_CHARACTERS} characters"
    )


SHREDS = st.lists(
    st.one_of(
        st.sampled_from(
            [
                "<tool_call>",
                "</tool_call>",
                '{"name": "f", "arguments": ',
                "{}",
                "}",
                "[",
                '"',
                "\\",
                "NaN",
                "1e999",
                "\n",
            ]
        ),
        st.sampled_from(["<think>", "</think>", "\ud800", "\x00", "9" * 5000]),
        st.text(max_size=5),
    ),
    max_size=12,
).map("".join)


def assert_sound(calls):
    assert len({call.id for call in calls}) == len(calls)
    for call in calls:
        if isinstance(call, ToolCall):
            again = json.loads(json.dumps(call.arguments, allow_nan=False))
            assert again == call.arguments
            assert isinstance(call.arguments, dict)
            assert call.name.isascii()
        else:
            assert call.problem


@settings(deadline=None, max_examples=120)
@given(SHREDS)
def test_no_text_raises(text):
    content, calls = tagged_calls(text)
    assert_sound(calls)
    assert len(calls) == 0 or "<tool_call>" not in content
    assert bool(calls) == ("<tool_call>" in text)


JSON = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(-(2**70), 2**70), st.floats(allow_nan=False, allow_infinity=False))
    | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
)


@settings(deadline=None, max_examples=50)
@given(st.dictionaries(st.text(max_size=5), JSON, max_size=3))
def test_any_json_arguments_come_back(arguments):
    assert only(tagged(json.dumps({"name": "f", "arguments": arguments}))).arguments == arguments


MARKS = CallMarks(section_begin="<S>", section_end="</S>", begin="<C>", separator="<|>", end="</C>")
PIECES = st.lists(
    st.one_of(
        st.sampled_from(["<S>", "</S>", "<C>", "<|>", "</C>", "<other>"]).map(Scaffold),
        st.sampled_from(["f", "{}", '{"x": 1}', " ", "text"]),
    ),
    max_size=14,
)


def read(index, head, body):
    return read_call(f"call_{index}", head, body, head + body)


def sectioned(*parts):
    marks = {"<S>", "</S>", "<C>", "<|>", "</C>"}
    return sectioned_calls([Scaffold(part) if part in marks else part for part in parts], MARKS, read)


def test_calls_in_a_section():
    content, calls = sectioned(
        "Hi", "<S>", "<C>", "f", "<|>", "{}", "</C>", "<C>", "g", "<|>", '{"x": 1}', "</C>", "</S>"
    )
    assert content == "Hi"
    assert calls == (
        ToolCall(id="call_0", name="f", arguments={}),
        ToolCall(id="call_1", name="g", arguments={"x": 1}),
    )


@pytest.mark.parametrize(
    ("parts", "problem", "raw"),
    [
        (("<S>", "<C>", "f", "<|>", "{}"), "a tool call is not closed", "f{}"),
        (("<S>", "<C>", "f", "<|>", "{}", "</S>"), "a tool call is not closed", "f{}"),
        (("<S>", "<C>", "f", "{}", "</C>", "</S>"), "a tool call must have one <|>", "f{}"),
        (("<S>", "<C>", "f", "<|>", "<|>", "</C>", "</S>"), "a tool call must have one <|>", "f"),
        (("<S>", "f {}", "</S>"), "text stands between tool calls", "f {}"),
    ],
)
def test_an_irregular_section_is_malformed(parts, problem, raw):
    content, (call,) = sectioned(*parts)
    assert (call.problem, call.raw, content) == (problem, raw, "")


@settings(deadline=None, max_examples=120)
@given(PIECES)
def test_no_pieces_raise(pieces):
    _, calls = sectioned_calls(pieces, MARKS, read)
    assert_sound(calls)
    assert len(calls) >= sum(piece == "<C>" for piece in pieces if isinstance(piece, Scaffold))


@pytest.mark.parametrize(
    ("pieces", "reasoning", "rest"),
    [
        (["plain"], "", "plain"),
        (["<think>\na\n</think>\n\nb"], "a", "b"),
        ([Scaffold("<think>"), "\na\n", Scaffold("</think>"), "\n\nb"], "a", "b"),
        (["a</think>b"], "a", "b"),
        (["<think>never closed"], "never closed", ""),
        (["x <think> y"], "", "x <think> y"),
        (["<think>", Scaffold("<C>"), "</think>", Scaffold("<C>")], "<C>", "<C>"),
    ],
)
def test_reasoning_is_split_off(pieces, reasoning, rest):
    thought, left = split_reasoning(pieces)
    assert (thought, "".join(left)) == (reasoning, rest)


def test_numbers_keep_their_kind():
    arguments = only(tagged('{"name": "f", "arguments": {"a": 1, "b": 1.0, "c": true}}')).arguments
    assert [type(value) for value in arguments.values()] == [int, float, bool]
    assert math.isfinite(arguments["b"])

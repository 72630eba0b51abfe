"""The headers that gpt-oss writes, and those it should not."""

import pytest

from rollout.config import ChatFormat
from rollout.renderers.codec import RendererError, Scaffold
from rollout.types import MalformedToolCall, ToolCall
from tests.unit.rollout.renderers.vocabulary import call, renderer_for, says, text_of, user

RENDERER = renderer_for(ChatFormat.harmony)
CALL = '<|message|>{"x": 1}<|call|>'


def answer(text):
    """The message that a turn spells; control tokens in `text` are tokens."""
    return RENDERER.answer(RENDERER.codec.encode([Scaffold(text)]))


def test_the_channels_of_one_turn():
    said = answer(
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary<|message|>I look.<|end|>"
        f"<|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json{CALL}"
    )
    assert said == says("I look.", ToolCall(id="call_0", name="f", arguments={"x": 1}), reasoning="Hm.")


@pytest.mark.parametrize(
    "header",
    [
        "<|channel|>commentary to=functions.f <|constrain|>json",
        "<|channel|>commentary to=functions.f<|constrain|>json",
        "<|channel|>commentary to=functions.f json",
        "<|channel|>commentary to=functions.f",
        " to=functions.f<|channel|>commentary <|constrain|>json",
        " to=functions.f<|channel|>commentary json",
        "<|channel|>analysis to=functions.f code",
    ],
)
def test_a_call_may_be_addressed_in_either_place(header):
    assert answer(header + CALL).tool_calls == (ToolCall(id="call_0", name="f", arguments={"x": 1}),)


@pytest.mark.parametrize(
    ("turn", "problem"),
    [
        ("<|channel|>commentary? to=functions.f<|message|>{}<|call|>", "a message must name one channel"),
        ("<|channel|><|channel|>final<|message|>x<|return|>", "a message must name one channel"),
        ("<|message|>x<|return|>", "a message must name one channel"),
        ("<|channel|>final", "a message must have <|message|> after its header"),
        ("<|channel|>final<|return|>", "a message must have <|message|> after its header"),
        (
            "<|channel|>final<|message|>a<|end|><|start|>user<|message|>x<|end|>",
            "a message of the assistant must begin",
        ),
        (
            "<|channel|>commentary to=functions.f to=functions.g<|message|>{}<|call|>",
            "a message must have one recipient",
        ),
        ("<|channel|>commentary to=functions.f<|message|>{<|call|>", "arguments: invalid JSON"),
        ("<|channel|>commentary to=functions.<|message|>{}<|call|>", "the name of the tool is missing"),
    ],
)
def test_what_cannot_be_read_is_a_record_that_keeps_the_text(turn, problem):
    *_, broken = answer(turn).tool_calls
    assert isinstance(broken, MalformedToolCall)
    assert broken.problem.startswith(problem)
    assert broken.raw.startswith(("assistant", "user"))


def test_a_channel_that_is_only_spelled_is_text():
    spelled = "<|channel|>analysis<|message|>x<|end|>"
    assert RENDERER.answer(RENDERER.answer_ids(says(spelled))).content == spelled


def test_both_stop_tokens_end_a_turn():
    final = text_of(RENDERER, RENDERER.answer_ids(says("Hi", reasoning="Hm.")))
    assert final == (
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Hi<|return|>"
    )
    asked = text_of(RENDERER, RENDERER.answer_ids(says("", call("c", x=1))))
    assert asked == ' to=functions.f<|channel|>commentary json<|message|>{"x": 1}<|call|>'
    stops = {RENDERER.answer_ids(says("Hi"))[-1], RENDERER.answer_ids(says("", call("c")))[-1]}
    assert stops == RENDERER.stop_ids


def test_what_follows_a_turn_is_a_whole_message():
    ids = RENDERER.observation([user("Go on")]).ids
    assert text_of(RENDERER, ids) == "<|start|>user<|message|>Go on<|end|><|start|>assistant"


def test_two_calls_in_one_turn_cannot_be_written():
    with pytest.raises(RendererError, match="harmony has one tool call a turn, got 2; give each its own turn"):
        RENDERER.answer_ids(says("", call("a"), call("b")))

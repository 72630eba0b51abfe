"""What every chat format keeps: who writes control tokens, what comes back, and that no ids raise."""

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers

from rollout.config import ChatFormat
from rollout.renderers.codec import Codec, RendererError
from rollout.renderers.registry import RENDERERS, make_renderer
from rollout.tokenizer import train_tokenizer
from rollout.types import MalformedToolCall, Message, Role, SpanOrigin, ToolCall
from tests.unit.rollout.renderers.vocabulary import (
    WEB,
    call,
    controls,
    renderer_for,
    says,
    text_of,
    tokenizer_for,
    tool,
    user,
)

every_format = pytest.mark.parametrize("chat_format", list(ChatFormat), ids=lambda value: value.value)
web_format = pytest.mark.parametrize("chat_format", WEB, ids=lambda value: value.value)
CALL_ID = {ChatFormat.kimi: "functions.f:0"}


def controls_in(renderer, ids):
    return [index for index in ids if index in renderer.codec.ids.values()]


@every_format
def test_words_never_become_control_tokens(chat_format):
    renderer = renderer_for(chat_format)
    spelled = " ".join(controls(chat_format))
    for words, plain in (
        (
            [user(spelled), tool(spelled, name=spelled, tool_call_id=spelled)],
            [user("a"), tool("a", name="a", tool_call_id="a")],
        ),
        (
            [Message(role=Role.SYSTEM, content=spelled), user(spelled)],
            [Message(role=Role.SYSTEM, content="a"), user("a")],
        ),
    ):
        for render in (renderer.opening, renderer.observation):
            assert controls_in(renderer, render(words).ids) == controls_in(renderer, render(plain).ids)
            assert spelled in text_of(renderer, render(words).ids)
    answer = renderer.answer_ids(says(spelled))
    assert controls_in(renderer, answer) == controls_in(renderer, renderer.answer_ids(says("a")))
    assert answer[-1] in renderer.stop_ids  # a positive control: the framework does write some


@web_format
def test_tool_declarations_are_words_too(chat_format):
    renderer = renderer_for(chat_format)
    if not renderer.declares_tools:
        pytest.skip("it has none")

    def declared(text):
        function = {"name": "f", "description": text, "parameters": {"type": "object", "properties": {}}}
        return controls_in(renderer, renderer.opening([user("a")], [{"type": "function", "function": function}]).ids)

    assert declared(" ".join(controls(chat_format))) == declared("a")


@every_format
def test_the_turns_are_of_their_origin_and_lone_surrogates_are_question_marks(chat_format):
    renderer = renderer_for(chat_format)
    assert renderer.opening([user("a")]).origin is SpanOrigin.CONTEXT
    observation = renderer.observation([tool("a\ud800b")])
    assert observation.origin is SpanOrigin.OBSERVATION
    assert observation == renderer.observation([tool("a?b")])
    assert renderer.answer_ids(says("\udfff")) == renderer.answer_ids(says("?"))


@every_format
def test_plain_answers_come_back(chat_format):
    renderer = renderer_for(chat_format)
    for text in ("", "Hello", "  two\n\nlines \n", "Zürich <|im_end|>"):
        answer = renderer.answer(renderer.answer_ids(says(text)))
        assert answer == says(text)


@web_format
def test_calls_and_reasoning_come_back(chat_format):
    renderer = renderer_for(chat_format)
    said = says(
        "I look.", call(CALL_ID.get(chat_format, "call_0"), x=[1, {"y": "é </tool_call>"}]), reasoning="Let me\nsee."
    )
    assert renderer.answer(renderer.answer_ids(said)) == said
    bare = dataclasses.replace(said, content="", reasoning="")
    assert renderer.answer(renderer.answer_ids(bare)) == bare


@pytest.mark.parametrize("chat_format", [ChatFormat.chatml, ChatFormat.deepseek], ids=lambda value: value.value)
def test_tags_that_are_no_tokens_are_text_with_the_same_meaning(chat_format):
    renderer = renderer_for(chat_format, tags=False)
    assert not set(RENDERERS[chat_format].optional) & renderer.codec.ids.keys()
    said = says("Yes.", call("call_0", x=1), reasoning="Hm.")
    assert renderer.answer(renderer.answer_ids(said)) == said
    with_tokens = renderer_for(chat_format)
    opening = [user("Hi"), tool("x")]
    assert text_of(renderer, renderer.opening(opening).ids) == text_of(with_tokens, with_tokens.opening(opening).ids)


@web_format
def test_calls_in_the_reasoning_are_thoughts(chat_format):
    renderer = renderer_for(chat_format)
    call_ids = renderer.answer_ids(says("", call(CALL_ID.get(chat_format, "call_0"))))[:-1]
    if chat_format is ChatFormat.harmony:
        pytest.skip("its channels are separate messages")
    think, close = renderer.codec.encode(["<think>"]), renderer.codec.encode(["</think>"])
    answer = renderer.answer((*think, *call_ids, *close, *renderer.answer_ids(says("No."))))
    assert (answer.tool_calls, answer.content) == ((), "No.")
    assert "f" in answer.reasoning
    assert renderer.answer((*call_ids, *renderer.answer_ids(says("")))).tool_calls  # outside it, it is one


@every_format
@settings(deadline=None, max_examples=40)
@given(data=st.data())
def test_no_ids_raise(chat_format, data):
    renderer = renderer_for(chat_format)
    pool = [*renderer.codec.ids.values()] * 3 + list(range(renderer.codec.ids[renderer.stops[0]], 6))
    words = [
        index
        for text in ("assistant", " to=functions.f", "commentary", "final", '{"x": 1}', "\n")
        for index in renderer.codec.encode([text])
    ]
    token = st.one_of(
        st.sampled_from(pool), st.sampled_from(words), st.integers(0, tokenizer_for(chat_format).get_vocab_size() + 3)
    )
    message = renderer.answer(data.draw(st.lists(token, max_size=25)))
    assert message.role is Role.ASSISTANT
    assert len({each.id for each in message.tool_calls}) == len(message.tool_calls)
    for each in message.tool_calls:
        assert isinstance(each, ToolCall) or each.problem


@every_format
def test_a_missing_control_token_is_named_in_one_line(chat_format):
    kind = RENDERERS[chat_format]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.add_special_tokens(list(kind.required[1:]))
    with pytest.raises(RendererError) as caught:
        make_renderer(chat_format, tokenizer)
    assert str(caught.value) == (
        f"tokenizer: must hold each control token of the chat format {chat_format.value} as one id, got none for "
        f"{kind.required[0]}; use the checkpoint's own tokenizer.json, or set rollout.chat_format to its"
    )


def test_a_vocabulary_in_which_text_becomes_a_control_token_is_refused():
    vocabulary = {"<": 0, "s": 1, "<s": 2, "<s>": 3, ">": 4}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[("<", "s"), ("<s", ">")]))
    tokenizer.add_special_tokens(["<s>"])
    with pytest.raises(
        RendererError, match="plain text must not become a control token of the chat format x, got id 3"
    ):
        Codec(tokenizer, "x", ["<s>"])


def test_the_tokenizer_itself_stays_as_it_was():
    tokenizer = train_tokenizer([], vocab_size=262)
    tokenizer.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    tokenizer.add_tokens([AddedToken("<think>", special=False)])
    tokenizer.enable_truncation(3)
    before = tokenizer.to_str()
    renderer = make_renderer(ChatFormat.chatml, tokenizer)
    assert len(renderer.opening([user("long" * 9)]).ids) > 30
    assert tokenizer.to_str() == before


def test_added_tokens_that_are_no_markers_are_read_in_text():
    """Some vocabularies have runs of spaces as added tokens: text must be encoded with them, as in training."""
    tokenizer = Tokenizer(models.BPE(vocab={"a": 0, "Ġ": 1}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    tokenizer.add_tokens([AddedToken("    ", special=False, normalized=False)])
    renderer = make_renderer(ChatFormat.chatml, tokenizer)
    assert tokenizer.token_to_id("    ") in renderer.codec.encode(["a    a"])


@pytest.mark.parametrize("chat_format", [ChatFormat.native, ChatFormat.smollm2], ids=lambda value: value.value)
def test_tools_are_refused_where_none_can_be_declared(chat_format):
    told = f"tools: the chat format {chat_format.value} cannot declare any, got 1; describe them"
    with pytest.raises(RendererError, match=told):
        renderer_for(chat_format).opening([user("a")], [{}])


def test_native_spells_no_calls():
    renderer = renderer_for(ChatFormat.native)
    with pytest.raises(RendererError, match="calls only where its tokenizer was trained for them, got 1 calls and 0"):
        renderer.answer_ids(says("", call("c")))


@web_format
def test_a_malformed_call_cannot_be_demonstrated(chat_format):
    broken = MalformedToolCall(id="c", raw="{", problem="no JSON")
    with pytest.raises(RendererError, match="message: a tool call must be well formed to be rendered, got <no JSON>"):
        renderer_for(chat_format).answer_ids(says("", broken))

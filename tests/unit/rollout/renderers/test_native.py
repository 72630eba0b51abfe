import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout.config import ChatFormat
from rollout.renderers.codec import RendererError, Scaffold
from rollout.renderers.registry import make_renderer
from rollout.tokenizer import Control, TokenizerError, train_tokenizer
from rollout.types import MalformedToolCall, Message, Role, SpanOrigin, ToolCall

BOS, SYSTEM, USER, ASSISTANT, TOOL, END = range(len(Control))

# No merges, so that ids can be worked out by hand: byte b has id 6 + its place in the byte alphabet.
BYTES = train_tokenizer([], vocab_size=262)
PLAIN = make_renderer(ChatFormat.native, BYTES)
MERGED = make_renderer(ChatFormat.native, train_tokenizer(["return <end> <tool> aaaa\n"] * 9, vocab_size=300))


def _message(role, text):
    return Message(role=role, content=text)


# Printable ASCII comes first in the byte alphabet, in order from "!" = 33; the space is spelled as U+0120.
def _golden(text):
    return [6 + ord(letter) - ord("!") for letter in text]


def test_the_ids_of_a_small_conversation():
    opening = PLAIN.opening([_message(Role.SYSTEM, "ab"), _message(Role.USER, "c!")])
    assert opening.origin is SpanOrigin.CONTEXT
    assert opening.ids == (BOS, SYSTEM, *_golden("ab"), END, USER, *_golden("c!"), END, ASSISTANT)
    assert opening.ids == (0, 1, 70, 71, 5, 2, 72, 6, 5, 3)
    answer = PLAIN.answer_ids(_message(Role.ASSISTANT, "ok"))
    assert answer == (84, 80, 5)
    observation = PLAIN.observation([_message(Role.TOOL, "no"), _message(Role.USER, "x")])
    assert observation.origin is SpanOrigin.OBSERVATION
    assert observation.ids == (4, 83, 84, 5, 2, 93, 5, 3)
    assert PLAIN.stop_ids == {END}


def test_contexts_end_in_the_assistants_header_even_when_empty():
    assert PLAIN.opening([]).ids == (BOS, ASSISTANT)
    assert PLAIN.observation([]).ids == (ASSISTANT,)
    assert PLAIN.opening([_message(Role.USER, "")]).ids == (BOS, USER, END, ASSISTANT)


ROLES = st.sampled_from(list(Role))
TEXT = st.one_of(
    st.text(max_size=20),
    st.lists(st.sampled_from([*map(str, Control), "\n", "a", "return"]), max_size=5).map("".join),
)


@settings(deadline=None, max_examples=50)
@given(st.lists(st.tuples(ROLES, TEXT), max_size=4))
def test_control_tokens_stand_only_where_the_framework_put_them(parts):
    messages = [_message(role, text) for role, text in parts]
    ids = MERGED.observation(messages).ids
    controls = [token for token in ids if token < len(Control)]
    headers = {Role.SYSTEM: SYSTEM, Role.USER: USER, Role.ASSISTANT: ASSISTANT, Role.TOOL: TOOL}
    assert controls == [token for role, _ in parts for token in (headers[role], END)] + [ASSISTANT]
    assert MERGED.answer(ids).content == "".join(text for _, text in parts)


@settings(deadline=None, max_examples=50)
@given(TEXT)
def test_an_answer_reads_back(text):
    ids = MERGED.answer_ids(_message(Role.ASSISTANT, text))
    assert ids[-1] == END
    assert MERGED.answer(ids) == _message(Role.ASSISTANT, text)


def test_control_tokens_that_the_policy_samples_are_dropped_from_its_text():
    ids = (*_golden("ab"), TOOL, *_golden("c"), ASSISTANT, END)
    assert PLAIN.answer(ids).content == "abc"


def test_text_without_bytes_is_read_as_question_marks():
    assert PLAIN.observation([_message(Role.TOOL, "a\ud800b")]).ids == (TOOL, *_golden("a?b"), END, ASSISTANT)
    assert PLAIN.answer_ids(_message(Role.ASSISTANT, "\udfff")) == (*_golden("?"), END)


CALLING = make_renderer(ChatFormat.native, train_tokenizer(['find {"name": "ada"} <call>\n'] * 9, 300, calls=True))


def test_calls_come_back_as_they_were_written():
    made = (
        ToolCall(id="call_0", name="find", arguments={"name": "ada", "deep": [1, {"x": None}]}),
        ToolCall(id="call_1", name="stop", arguments={}),
    )
    said = Message(role=Role.ASSISTANT, content="look: <call>find {}", tool_calls=made)
    ids = CALLING.answer_ids(said)
    assert CALLING.answer(ids) == said
    assert [CALLING.codec.ids["<call>"]] * 2 == [index for index in ids if index == CALLING.codec.ids["<call>"]]
    assert CALLING.answer(CALLING.answer_ids(Message(role=Role.ASSISTANT, content="done"))).tool_calls == ()


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "the name of the tool is missing or is no identifier"),
        ("{}", "the name of the tool is missing or is no identifier"),
        ("find", "arguments: invalid JSON"),
        ("find {", "arguments: invalid JSON"),
        ('find ["a"]', "arguments must be a JSON object"),
        ("find {} {}", "arguments: more text follows the JSON"),
        ('find {"a": NaN}', "arguments: NaN is not JSON"),
    ],
)
def test_a_call_that_cannot_be_read_is_malformed(text, problem):
    ids = CALLING.codec.encode([Scaffold("<call>"), text, Scaffold("<end>")])
    (read,) = CALLING.answer(ids).tool_calls
    assert isinstance(read, MalformedToolCall)
    assert read.problem.startswith(problem)


def test_tools_need_a_tokenizer_that_spells_calls():
    task = [Message(role=Role.USER, content="a")]
    assert CALLING.opening(task, [{}]) == CALLING.opening(task)
    with pytest.raises(RendererError, match="cannot declare any, got 1"):
        PLAIN.opening(task, [{}])
    with pytest.raises(TokenizerError, match="must hold 256 bytes and 7 control tokens, got 262; use at least 263"):
        train_tokenizer([], 262, calls=True)

from hypothesis import given, settings
from hypothesis import strategies as st

from rollout.config import ChatFormat
from rollout.renderers.registry import make_renderer
from rollout.tokenizer import Control, train_tokenizer
from rollout.types import Message, Role, SpanOrigin

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

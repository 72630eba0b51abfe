"""The renderers write what the published chat templates write (`scripts/golden_renderings.py`)."""

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from rollout.config import ChatFormat
from rollout.types import Message, Role, ToolCall
from tests.unit.rollout.renderers.vocabulary import WEB, renderer_for, text_of, tokenizer_for

FOLDER = Path(__file__).parents[3] / "golden/renderings"
GOLDEN = {chat_format: json.loads((FOLDER / f"{chat_format.value}.json").read_text()) for chat_format in WEB}
CASES = [(chat_format, case) for chat_format in WEB for case in GOLDEN[chat_format]["cases"]]


def message(spelled):
    return Message(
        role=Role(spelled["role"]),
        content=spelled["content"],
        reasoning=spelled.get("reasoning_content", ""),
        name=spelled.get("name", ""),
        tool_call_id=spelled.get("tool_call_id", ""),
        tool_calls=tuple(
            ToolCall(id=each["id"], name=each["function"]["name"], arguments=each["function"]["arguments"])
            for each in spelled.get("tool_calls", ())
        ),
    )


named = pytest.mark.parametrize(("chat_format", "case"), CASES, ids=lambda value: str(getattr(value, "value", ""))[:20])


@named
def test_an_opening_is_the_templates_text_and_its_ids(chat_format, case):
    renderer = renderer_for(chat_format)
    ids = renderer.opening([message(each) for each in case["messages"]], case["tools"]).ids
    assert text_of(renderer, ids) == case["text"]
    reader = Tokenizer.from_str(tokenizer_for(chat_format).to_str())  # its special tokens are read as such
    assert list(ids) == reader.encode(case["text"], add_special_tokens=False).ids


@named
def test_an_episode_appends_up_to_the_templates_text(chat_format, case):
    """Opening, answers and observations, one after the other; thoughts of past turns are where they part."""
    if case["name"] == "thoughts of a past answer":
        pytest.skip("the template takes them out, an episode does not")
    renderer = renderer_for(chat_format)
    messages = [message(each) for each in case["messages"]]
    turns = [index for index, each in enumerate(messages) if each.role is Role.ASSISTANT]
    ends = [*turns, len(messages)]
    ids = renderer.opening(messages[: ends[0]], case["tools"]).ids
    for turn, end in zip(turns, ends[1:], strict=True):
        answer = renderer.answer_ids(messages[turn])
        assert answer[-1] in renderer.stop_ids
        assert not renderer.stop_ids.intersection(answer[:-1])
        ids += answer + renderer.observation(messages[turn + 1 : end]).ids
    text = text_of(renderer, ids)
    if chat_format is ChatFormat.harmony:
        text = text.replace("<|return|>", "<|end|>")  # kept as it was sampled
    assert text == case["text"]


def test_the_goldens_name_their_sources_and_hold_what_they_should():
    for chat_format in WEB:
        assert len(GOLDEN[chat_format]["template_sha256"]) == 64
        assert GOLDEN[chat_format]["source"]
    assert {case["name"] for case in GOLDEN[ChatFormat.chatml]["cases"]} >= {"two calls", "a past call", "a history"}
    assert len(CASES) >= 40

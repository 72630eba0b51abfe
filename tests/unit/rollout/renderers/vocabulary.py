"""Tokenizers with the control tokens of a chat format, and messages for tests of the renderers."""

from functools import cache

from tokenizers import AddedToken

from rollout.config import ChatFormat
from rollout.renderers.registry import RENDERERS, make_renderer
from rollout.tokenizer import Control, train_tokenizer
from rollout.types import Message, Role, ToolCall

WEB = [chat_format for chat_format in ChatFormat if chat_format is not ChatFormat.native]
"""The formats of published models."""

CORPUS = ['user\n\nassistant the weather in Zürich is {"name": "f", "arguments": {}}\n</tool_call>'] * 9


@cache
def tokenizer_for(chat_format, tags=True):
    """Bytes and a few merges; the control tokens of the format are added, its tags (`<think>`) as not special."""
    tokenizer = train_tokenizer(CORPUS, vocab_size=300)
    kind = RENDERERS[chat_format]
    if chat_format is not ChatFormat.native:
        tokenizer.add_special_tokens(list(kind.required))
        tokenizer.add_tokens([AddedToken(tag, special=False, normalized=False) for tag in kind.optional if tags])
    return tokenizer


@cache
def renderer_for(chat_format, tags=True):
    return make_renderer(chat_format, tokenizer_for(chat_format, tags))


def text_of(renderer, ids):
    return renderer.codec.spelled(ids)


def user(text):
    return Message(role=Role.USER, content=text)


def tool(text, **fields):
    return Message(role=Role.TOOL, content=text, **fields)


def says(text, *calls, reasoning=""):
    return Message(role=Role.ASSISTANT, content=text, tool_calls=calls, reasoning=reasoning)


def call(call_id, name="f", **arguments):
    return ToolCall(id=call_id, name=name, arguments=arguments)


def controls(chat_format):
    """All strings that are control tokens of a format."""
    if chat_format is ChatFormat.native:
        return tuple(map(str, Control))
    return RENDERERS[chat_format].required + RENDERERS[chat_format].optional

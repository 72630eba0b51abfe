"""Messages to tokens and back: the one place where chat turns become ids. What every chat format must give.

Append-only: what an episode has seen is never rendered again. Its ids grow by the sampled ids (kept as they were
sampled) and by the rendered observation, so the ids of turn t are a prefix of those of turn t+1. A format's own chat
template may write an old turn differently (drop its reasoning, end it in another token); the sampled ids stay.

    opening: messages + header | sampled ... stop | observation: messages + header | sampled ... stop
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, TypeAlias

from tokenizers import Tokenizer

from rollout.config import ChatFormat
from rollout.renderers.codec import Codec, Part, RendererError, Scaffold
from rollout.toolcalls import CallMarks
from rollout.types import MalformedToolCall, Message, Role, SpanOrigin, TokenSpan, ToolCall

Tools: TypeAlias = Sequence[Mapping[str, Any]]
"""Tool declarations, each `{"type": "function", "function": {"name", "description", "parameters": JSON schema}}`."""

STATED_DATE = "2025-08-05"
"""The current date, where a format states one: fixed, so that a run renders the same ids on every day."""


class Renderer(ABC):
    """One chat format with one tokenizer. A format gives its markers, its three renderings and its parser.

    `stops` are the markers that end a turn of the policy, the first one being what a demonstration ends in.
    """

    stops: ClassVar[tuple[str, ...]]
    required: ClassVar[tuple[str, ...]]
    optional: ClassVar[tuple[str, ...]] = ()
    declares_tools: bool = True

    def __init__(self, name: ChatFormat, tokenizer: Tokenizer):
        self.name = name
        self.codec = Codec(tokenizer, name.value, self.required, self.optional)
        self.stop_ids = frozenset(self.codec.ids[stop] for stop in self.stops)
        """A turn of the policy ends with any of these ids; it belongs to the turn."""

    def opening(self, messages: Sequence[Message], tools: Tools = ()) -> TokenSpan:
        """The whole context before the first turn, ending in the assistant's header.

        Raises:
            RendererError: `tools` in a format that has no way to declare them, or a message that it cannot spell.
        """
        if tools and not self.declares_tools:
            raise RendererError(
                f"tools: the chat format {self.name.value} cannot declare any, got {len(tools)}; describe them in the "
                "system message, or set rollout.chat_format to another format"
            )
        return TokenSpan(origin=SpanOrigin.CONTEXT, ids=self.codec.encode(self._opening(messages, tools)))

    def observation(self, messages: Sequence[Message]) -> TokenSpan:
        """What follows a turn that ended in a stop token: what the environment said, and the assistant's header.

        It also holds what the format puts between the stop token and the next header.
        """
        return TokenSpan(origin=SpanOrigin.OBSERVATION, ids=self.codec.encode(self._observation(messages)))

    def answer_ids(self, message: Message) -> tuple[int, ...]:
        """The ids of a whole turn of the assistant that says `message`, its stop token included (for demonstrations).

        Raises:
            RendererError: the format cannot spell it.
        """
        return self.codec.encode(self._answer(message))

    @abstractmethod
    def answer(self, ids: Sequence[int]) -> Message:
        """The assistant message that sampled ids spell.

        Never raises: calls that cannot be read are `MalformedToolCall`s. Control tokens without a meaning where they
        stand are dropped from the text.
        """

    def template_message(self, message: Message) -> dict[str, Any]:
        """`message` as the format's jinja chat template wants it; what is empty is absent."""
        wanted: dict[str, Any] = {"role": message.role.value, "content": message.content}
        if message.reasoning:
            wanted["reasoning_content"] = message.reasoning
        if message.tool_calls:
            wanted["tool_calls"] = [
                {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
                for call in well_formed_calls(message)
            ]
        if message.name:
            wanted["name"] = message.name
        if message.tool_call_id:
            wanted["tool_call_id"] = message.tool_call_id
        return wanted

    @abstractmethod
    def _opening(self, messages: Sequence[Message], tools: Tools) -> list[Part]: ...

    @abstractmethod
    def _observation(self, messages: Sequence[Message]) -> list[Part]: ...

    @abstractmethod
    def _answer(self, message: Message) -> list[Part]: ...


def well_formed_calls(message: Message) -> tuple[ToolCall, ...]:
    """The calls of a message that is to be rendered. Raises RendererError when one of them is malformed."""
    calls: list[ToolCall] = []
    for call in message.tool_calls:
        if isinstance(call, MalformedToolCall):
            raise RendererError(
                f"message: a tool call must be well formed to be rendered, got <{call.problem}>; leave it out"
            )
        calls.append(call)
    return tuple(calls)


def call_section(marks: CallMarks, message: Message, head: Callable[[ToolCall], str]) -> list[Part]:
    """The calls of a message as `toolcalls.sectioned_calls` reads them; `head` is what stands before the arguments.

    Nothing for a message without calls. Raises RendererError when one of them is malformed.
    """
    parts: list[Part] = []
    for call in well_formed_calls(message):
        parts += [Scaffold(marks.begin), head(call), Scaffold(marks.separator)]
        parts += [to_json(call.arguments), Scaffold(marks.end)]
    return [Scaffold(marks.section_begin), *parts, Scaffold(marks.section_end)] if parts else []


def keeps_reasoning(messages: Sequence[Message], index: int) -> bool:
    """Whether message `index` of an opening belongs to the turn that is still going on: no user has spoken since."""
    return all(message.role is not Role.USER for message in messages[index:])


def to_json(value: object) -> str:
    """JSON as chat templates write it."""
    return json.dumps(value, ensure_ascii=False, default=dict)

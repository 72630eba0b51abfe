"""`harmony`: gpt-oss's format. One turn is a chain of messages on channels, and two tokens can end it.

    <|start|>user<|message|>Hi<|end|><|start|>assistant
        | <|channel|>analysis<|message|>thoughts<|end|><|start|>assistant<|channel|>final<|message|>Hello<|return|>
    ... | <|channel|>commentary to=functions.f <|constrain|>json<|message|>{"x": 1}<|call|>

`analysis` is the reasoning, `final` (and `commentary` to nobody) the content, a message with a recipient is a call: at
most one a turn, since `<|call|>` ends it. The header's fields come in several orders; all that the model is known to
write are read. The system message states the date and the effort; a task's system message is the developer's.

Differs from the template: a turn that ended in `<|return|>`, and the reasoning that led to it, stay as they were
sampled, where the template would write `<|end|>` and take the reasoning out of the history. The output of a tool is
written as it is, as the format's description has it, where the template makes one JSON string of any text.

Source: the chat template of openai/gpt-oss-120b, and the OpenAI cookbook's "harmony response format".
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from rollout.renderers.base import STATED_DATE, Renderer, Tools, to_json, well_formed_calls
from rollout.renderers.codec import Part, RendererError, Scaffold
from rollout.renderers.harmony_tools import namespace
from rollout.toolcalls import Call, read_call
from rollout.types import MalformedToolCall, Message, Role

_START, _CHANNEL, _MESSAGE, _CONSTRAIN = "<|start|>", "<|channel|>", "<|message|>", "<|constrain|>"
_END, _RETURN, _CALL = "<|end|>", "<|return|>", "<|call|>"
_SYSTEM = (
    f"{_START}system{_MESSAGE}You are ChatGPT, a large language model trained by OpenAI.\n"
    f"Knowledge cutoff: 2024-06\nCurrent date: {STATED_DATE}\n\nReasoning: medium\n\n"
    "# Valid channels: analysis, commentary, final. Channel must be included for every message."
)
_SYSTEM_TOOLS = "\nCalls to these tools must go to the commentary channel: 'functions'."
_HEADER = Scaffold(f"{_START}assistant")
_NEXT = Scaffold(f"{_END}{_START}assistant")
_CHANNELS = {"analysis", "commentary", "final"}
_RECIPIENT = re.compile(r"(?:^|\s)to=(\S+)")


class HarmonyRenderer(Renderer):
    """See the module."""

    stops = (_RETURN, _CALL)
    required = (_START, _END, _MESSAGE, _CHANNEL, _CONSTRAIN, _RETURN, _CALL)

    def answer(self, ids: Sequence[int]) -> Message:
        """See `Renderer`."""
        reasoning: list[str] = []
        content: list[str] = []
        calls: list[Call] = []
        for sampled in _messages(self.codec.pieces(ids)):
            call_id = f"call_{len(calls)}"
            if sampled.problem:
                calls.append(MalformedToolCall(id=call_id, raw=sampled.raw, problem=sampled.problem))
            elif sampled.recipient:
                name = sampled.recipient.removeprefix("functions.")
                calls.append(read_call(call_id, name, sampled.body, sampled.raw))
            else:
                (reasoning if sampled.channel == "analysis" else content).append(sampled.body)
        return Message(
            role=Role.ASSISTANT, content="\n".join(content), reasoning="\n".join(reasoning), tool_calls=tuple(calls)
        )

    def template_message(self, message: Message) -> dict[str, Any]:
        """See `Renderer`; output of a tool that is JSON is given as its value, which the template writes as it is."""
        wanted = super().template_message(message)
        if "reasoning_content" in wanted:
            wanted["thinking"] = wanted.pop("reasoning_content")
        if message.role is Role.TOOL:
            with suppress(json.JSONDecodeError):
                wanted["content"] = json.loads(message.content)
        return wanted

    def _opening(self, messages: Sequence[Message], tools: Tools) -> list[Part]:
        parts: list[Part] = [Scaffold(_SYSTEM + (_SYSTEM_TOOLS if tools else "") + _END)]
        given = bool(messages) and messages[0].role is Role.SYSTEM
        if given or tools:
            parts.append(Scaffold(f"{_START}developer{_MESSAGE}"))
            if given:
                parts.append(f"# Instructions\n\n{messages[0].content}\n\n")
            if tools:
                parts.append(f"# Tools\n\n{namespace('functions', tools)}")
            parts.append(Scaffold(_END))
        return [*parts, *self._observation(messages[1:] if given else messages)]

    def _observation(self, messages: Sequence[Message]) -> list[Part]:
        parts: list[Part] = []
        for index, message in enumerate(messages):
            if message.role is Role.ASSISTANT:
                parts += _past(message, answered=_is_answered(messages, index))
            elif message.role is Role.TOOL:
                author = f"functions.{message.name}" if message.name else "tool"
                parts += [Scaffold(_START), f"{author} to=assistant", Scaffold(f"{_CHANNEL}commentary{_MESSAGE}")]
                parts += [message.content, Scaffold(_END)]
            else:
                author = "user" if message.role is Role.USER else "developer"
                parts += [Scaffold(f"{_START}{author}{_MESSAGE}"), message.content, Scaffold(_END)]
        return [*parts, _HEADER]

    def _answer(self, message: Message) -> list[Part]:
        thought: list[Part] = []
        if message.reasoning:
            thought = [Scaffold(f"{_CHANNEL}analysis{_MESSAGE}"), message.reasoning, _NEXT]
        if not message.tool_calls:
            return [*thought, *_final(message), Scaffold(_RETURN)]
        preamble: list[Part] = []
        if message.content:
            preamble = [Scaffold(f"{_CHANNEL}commentary{_MESSAGE}"), message.content, _NEXT]
        return [*thought, *preamble, *_call(message)]


def _is_answered(messages: Sequence[Message], index: int) -> bool:
    """Whether the assistant gives its final answer after message `index`: then what led there is not kept."""
    return any(later.role is Role.ASSISTANT and not later.tool_calls for later in messages[index + 1 :])


def _past(message: Message, *, answered: bool) -> list[Part]:
    """An assistant's message in a given history."""
    if not message.tool_calls:
        return [_HEADER, *_final(message), Scaffold(_END)]
    thought: list[Part] = []
    if message.reasoning and not answered:
        thought = [_HEADER, Scaffold(f"{_CHANNEL}analysis{_MESSAGE}"), message.reasoning, Scaffold(_END)]
    preamble: list[Part] = []
    if message.content:
        preamble = [_HEADER, Scaffold(f"{_CHANNEL}commentary{_MESSAGE}"), message.content, Scaffold(_END)]
    return [*thought, *preamble, _HEADER, *_call(message)]


def _final(message: Message) -> list[Part]:
    return [Scaffold(f"{_CHANNEL}final{_MESSAGE}"), message.content]


def _call(message: Message) -> list[Part]:
    calls = well_formed_calls(message)
    if len(calls) != 1:
        raise RendererError(
            f"message: the chat format harmony has one tool call a turn, got {len(calls)}; give each its own turn"
        )
    call = calls[0]
    header = Scaffold(f"{_CHANNEL}commentary json{_MESSAGE}")
    return [f" to=functions.{call.name}", header, to_json(call.arguments), Scaffold(_CALL)]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sampled:
    """One message of a sampled turn. `problem` says why its header cannot be read, `raw` is all of it as text."""

    channel: str
    recipient: str
    body: str
    raw: str
    problem: str


def _messages(pieces: Sequence[Part]) -> Iterator[_Sampled]:
    """The messages of a turn. The first one's `<|start|>assistant` stood in the prompt."""
    header: list[Part] = ["assistant"]
    body: list[str] = []
    in_body = opened = False
    for piece in pieces:
        if not isinstance(piece, Scaffold):
            (body if in_body else header).append(piece)
        elif piece == _MESSAGE and not in_body:
            in_body = True
        elif piece in (_START, _END, _RETURN, _CALL):
            if in_body or opened:
                yield _read(header, body, in_body)
            # Between the end of a message and the next start there is nothing.
            header, body, in_body, opened = [], [], False, piece == _START
            continue
        elif in_body:
            body.append(piece)
        else:
            header.append(piece)
        opened = True
    if opened:
        yield _read(header, body, in_body)


def _read(header: Sequence[Part], body: Sequence[str], in_body: bool) -> _Sampled:
    text = "".join(body)
    spelled = "".join(header)
    # role ... <|channel|> channel ... <|constrain|> type, where `...` may name the recipient.
    role, has_channel, rest = spelled.partition(_CHANNEL)
    fields = rest.partition(_CONSTRAIN)[0]
    channel = "".join(fields.split()[:1])
    recipients: list[str] = _RECIPIENT.findall(f"{role} {fields}")
    recipient = recipients[0] if len(recipients) == 1 else ""
    if not in_body:
        problem = f"a message must have {_MESSAGE} after its header"
    elif role.split()[:1] != ["assistant"]:
        problem = "a message of the assistant must begin with its role"
    elif header.count(Scaffold(_CHANNEL)) != 1 or not has_channel or channel not in _CHANNELS:
        problem = "a message must name one channel: analysis, commentary or final"
    elif len(recipients) > 1:
        problem = "a message must have one recipient"
    else:
        problem = ""
    return _Sampled(channel=channel, recipient=recipient, body=text, raw=f"{spelled}{_MESSAGE}{text}", problem=problem)

"""`kimi`: Kimi-K2's format; every control token is its own id and calls stand in a section of theirs.

    <|im_user|>user<|im_middle|>Hi<|im_end|><|im_assistant|>assistant<|im_middle|> | sampled ... <|im_end|> | ...

A call carries its id, which is `functions.<name>:<number>` with a number that counts through the conversation; the
tool's answer repeats the id in its first line. Equal to the template of Kimi-K2-Instruct.

Source: the chat template of moonshotai/Kimi-K2-Instruct.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from rollout.renderers.base import Renderer, Tools, call_section, to_json
from rollout.renderers.codec import Part, Scaffold
from rollout.toolcalls import Call, CallMarks, read_call, sectioned_calls, split_reasoning
from rollout.types import MalformedToolCall, Message, Role

_MARKS = CallMarks(
    section_begin="<|tool_calls_section_begin|>",
    section_end="<|tool_calls_section_end|>",
    begin="<|tool_call_begin|>",
    separator="<|tool_call_argument_begin|>",
    end="<|tool_call_end|>",
)
_DEFAULT_SYSTEM = Scaffold(
    "<|im_system|>system<|im_middle|>You are Kimi, an AI assistant created by Moonshot AI.<|im_end|>\n"
)
_ROLE_MARKER = {
    Role.SYSTEM: "<|im_system|>",
    Role.USER: "<|im_user|>",
    Role.ASSISTANT: "<|im_assistant|>",
    Role.TOOL: "<|im_system|>",
}
_HEADER = Scaffold("<|im_assistant|>assistant<|im_middle|>")
_STOP = "<|im_end|>"
_CALL_ID = re.compile(r"functions\.(.+):[0-9]+")


class KimiRenderer(Renderer):
    """See the module."""

    stops = (_STOP,)
    required = (
        "<|im_system|>", "<|im_user|>", "<|im_assistant|>", "<|im_middle|>", _STOP,
        _MARKS.section_begin, _MARKS.section_end, _MARKS.begin, _MARKS.separator, _MARKS.end,
    )  # fmt: skip

    def answer(self, ids: Sequence[int]) -> Message:
        """See `Renderer`."""
        reasoning, said = split_reasoning(self.codec.pieces(ids))
        content, calls = sectioned_calls(said, _MARKS, _read)
        return Message(role=Role.ASSISTANT, content=content, reasoning=reasoning, tool_calls=calls)

    def _opening(self, messages: Sequence[Message], tools: Tools) -> list[Part]:
        parts: list[Part] = []
        if tools:
            declared = to_json(tools)
            parts += [Scaffold("<|im_system|>tool_declare<|im_middle|>"), declared, Scaffold("<|im_end|>")]
        if messages and messages[0].role is not Role.SYSTEM:
            parts.append(_DEFAULT_SYSTEM)
        return [*parts, *self._observation(messages)]

    def _observation(self, messages: Sequence[Message]) -> list[Part]:
        parts: list[Part] = []
        for message in messages:
            parts += [
                Scaffold(_ROLE_MARKER[message.role]),
                message.name or message.role.value,
                Scaffold("<|im_middle|>"),
            ]
            if message.tool_call_id:
                parts.append(f"## Return of {message.tool_call_id}\n")
            parts += [*_said(message), Scaffold(_STOP)]
        return [*parts, _HEADER]

    def _answer(self, message: Message) -> list[Part]:
        thought: list[Part] = [f"<think>{message.reasoning}</think>"] if message.reasoning else []
        return [*thought, *_said(message), Scaffold(_STOP)]


def _said(message: Message) -> list[Part]:
    return [message.content, *call_section(_MARKS, message, lambda call: call.id)]


def _read(index: int, head: str, body: str) -> Call:
    found = _CALL_ID.fullmatch(head.strip())
    if found is None:
        problem = "the id of a call must be functions.<name>:<number>"
        return MalformedToolCall(id=f"call_{index}", raw=head + body, problem=problem)
    return read_call(head.strip(), found[1], body, head + body)

"""`deepseek`: DeepSeek-V3.1's format without thinking; the parser also reads the calls of V3 and its thinking.

    <｜begin▁of▁sentence｜>system<｜User｜>Hi<｜Assistant｜></think> | sampled ... <｜end▁of▁sentence｜> | <｜User｜>...

There are no role names: the system message is bare text at the start, and after the output of a tool the assistant goes
on without a header. Equal to V3.1's template, except that a system message which comes later in an episode, which the
template moves to the start, is written as the user's.

Source: the chat template and the model card of deepseek-ai/DeepSeek-V3.1.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from rollout.renderers.base import Renderer, Tools, call_section, to_json
from rollout.renderers.codec import Part, Scaffold
from rollout.toolcalls import Call, CallMarks, read_call, sectioned_calls, split_reasoning
from rollout.types import Message, Role

_MARKS = CallMarks(
    section_begin="<｜tool▁calls▁begin｜>",
    section_end="<｜tool▁calls▁end｜>",
    begin="<｜tool▁call▁begin｜>",
    separator="<｜tool▁sep｜>",
    end="<｜tool▁call▁end｜>",
)
_BOS, _STOP = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"
_USER, _ASSISTANT = "<｜User｜>", "<｜Assistant｜>"
_OUTPUT_BEGIN, _OUTPUT_END = "<｜tool▁output▁begin｜>", "<｜tool▁output▁end｜>"
_HEADER = Scaffold(f"{_ASSISTANT}</think>")
_TOOLS_BEFORE = Scaffold("\n\n## Tools\nYou have access to the following tools:\n")
_TOOLS_AFTER = Scaffold(
    "\nIMPORTANT: ALWAYS adhere to this exact format for tool use:\n"
    "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>tool_call_name<｜tool▁sep｜>tool_call_arguments<｜tool▁call▁end｜>"
    "{{additional_tool_calls}}<｜tool▁calls▁end｜>\n\nWhere:\n\n"
    "- `tool_call_name` must be an exact match to one of the available tools\n"
    "- `tool_call_arguments` must be valid JSON that strictly follows the tool's Parameters Schema\n"
    "- For multiple tool calls, chain them directly without separators or spaces\n"
)
_V3_BODY = re.compile(r"([^\n]*)\n```json\n(.*)\n```", re.DOTALL)


class DeepseekRenderer(Renderer):
    """See the module."""

    stops = (_STOP,)
    required = (
        _BOS, _STOP, _USER, _ASSISTANT, _OUTPUT_BEGIN, _OUTPUT_END,
        _MARKS.section_begin, _MARKS.section_end, _MARKS.begin, _MARKS.separator, _MARKS.end,
    )  # fmt: skip
    optional = ("<think>", "</think>")

    def answer(self, ids: Sequence[int]) -> Message:
        """See `Renderer`."""
        reasoning, said = split_reasoning(self.codec.pieces(ids))
        content, calls = sectioned_calls(said, _MARKS, _read)
        return Message(role=Role.ASSISTANT, content=content, reasoning=reasoning, tool_calls=calls)

    def template_message(self, message: Message) -> dict[str, Any]:
        """See `Renderer`; the template has no field for reasoning."""
        wanted = super().template_message(message)
        wanted.pop("reasoning_content", None)
        return wanted

    def _opening(self, messages: Sequence[Message], tools: Tools) -> list[Part]:
        system = "\n\n".join(message.content for message in messages if message.role is Role.SYSTEM)
        parts: list[Part] = [Scaffold(_BOS), system]
        if tools:
            parts += [_TOOLS_BEFORE, *(_declared(tool["function"]) for tool in tools), _TOOLS_AFTER]
        return [*parts, *self._observation([message for message in messages if message.role is not Role.SYSTEM])]

    def _observation(self, messages: Sequence[Message]) -> list[Part]:
        parts: list[Part] = []
        headed = False  # the assistant's turn is open: after a tool's output, and after its own message
        for message in messages:
            if message.role is Role.TOOL:
                parts += [Scaffold(_OUTPUT_BEGIN), message.content, Scaffold(_OUTPUT_END)]
                headed = True
            elif message.role is Role.ASSISTANT:
                parts += [*([] if headed else [_HEADER]), *self._answer_without_reasoning(message)]
                headed = True
            else:
                parts += [Scaffold(_USER), message.content]
                headed = False
        return parts if headed else [*parts, _HEADER]

    def _answer(self, message: Message) -> list[Part]:
        thought: list[Part] = []
        if message.reasoning:
            thought = [Scaffold("<think>"), message.reasoning, Scaffold("</think>")]
        return [*thought, *self._answer_without_reasoning(message)]

    def _answer_without_reasoning(self, message: Message) -> list[Part]:
        calls = call_section(_MARKS, message, lambda call: call.name)
        return [message.content, *calls, Scaffold(_STOP)]


def _declared(function: Any) -> str:
    parameters = to_json(function["parameters"])
    return f"\n### {function['name']}\nDescription: {function['description']}\n\nParameters: {parameters}\n"


def _read(index: int, head: str, body: str) -> Call:
    call_id = f"call_{index}"
    v3 = _V3_BODY.fullmatch(body.strip()) if head.strip() == "function" else None
    if v3 is not None:
        return read_call(call_id, v3[1].strip(), v3[2], head + body)
    return read_call(call_id, head.strip(), body, head + body)

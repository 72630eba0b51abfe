r"""`chatml`: `<|im_start|>role`, a line break, text, `<|im_end|>`, a line break; calls as tagged JSON in the text.

    <|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n | sampled ... <|im_end|> | \n<|im_start|>user\n...

Written by Qwen2.5, Qwen3, the Hermes models and, without tools, by SmolLM2; they differ in the system message that a
conversation without one gets. Tools are declared at the end of the system message, a call is
`<tool_call>\n{"name": ..., "arguments": {...}}\n</tool_call>`, results are a user's message of `<tool_response>`s, and
reasoning stands in `<think>` before the content. Equal to the templates of Qwen2.5, Qwen3 and SmolLM2, except that
reasoning of turns that the policy sampled is never taken out again.

Source: the chat templates of Qwen/Qwen2.5-7B-Instruct, Qwen/Qwen3-0.6B and HuggingFaceTB/SmolLM2-135M-Instruct.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from tokenizers import Tokenizer

from rollout.config import ChatFormat
from rollout.renderers.base import Renderer, Tools, keeps_reasoning, to_json, well_formed_calls
from rollout.renderers.codec import Part, Scaffold
from rollout.toolcalls import split_reasoning, tagged_calls
from rollout.types import Message, Role

_DEFAULT_SYSTEM = {
    ChatFormat.qwen2_5: "You are Qwen, created by Alibaba Cloud. You are a helpful assistant.",
    ChatFormat.smollm2: "You are a helpful AI assistant named SmolLM, trained by Hugging Face",
}

_TOOLS_BEFORE = Scaffold(
    "# Tools\n\nYou may call one or more functions to assist with the user query.\n\n"
    "You are provided with function signatures within <tools></tools> XML tags:\n<tools>"
)
_TOOLS_AFTER = Scaffold(
    "\n</tools>\n\nFor each function call, return a json object with function name and arguments within "
    '<tool_call></tool_call> XML tags:\n<tool_call>\n{"name": <function-name>, "arguments": <args-json-object>}\n'
    "</tool_call>"
)
_HEADER = Scaffold("<|im_start|>assistant\n")
_STOP = "<|im_end|>"


class ChatmlRenderer(Renderer):
    """See the module."""

    stops = (_STOP,)
    required = ("<|im_start|>", _STOP)
    optional = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>")

    def __init__(self, name: ChatFormat, tokenizer: Tokenizer):
        super().__init__(name, tokenizer)
        self._default_system = _DEFAULT_SYSTEM.get(name, "")
        self.declares_tools = name is not ChatFormat.smollm2

    def answer(self, ids: Sequence[int]) -> Message:
        """See `Renderer`."""
        # Tags count wherever they are spelled: not every vocabulary has them as tokens.
        pieces = [piece for piece in self.codec.pieces(ids) if not _is_control(piece)]
        reasoning, said = split_reasoning(pieces)
        content, calls = tagged_calls("".join(said))
        return Message(role=Role.ASSISTANT, content=content, reasoning=reasoning, tool_calls=calls)

    def _opening(self, messages: Sequence[Message], tools: Tools) -> list[Part]:
        given = bool(messages) and messages[0].role is Role.SYSTEM
        system = messages[0].content if given else self._default_system
        parts: list[Part] = []
        if given or system or tools:
            parts += [Scaffold("<|im_start|>system\n"), system]
            if tools:
                parts += ["\n\n" if given or system else "", *_declared(tools)]
            parts.append(Scaffold("<|im_end|>\n"))
        rest = messages[1:] if given else messages
        return [*parts, *_turns(rest), _HEADER]

    def _observation(self, messages: Sequence[Message]) -> list[Part]:
        return [Scaffold("\n"), *_turns(messages), _HEADER]

    def _answer(self, message: Message) -> list[Part]:
        return [*_said(message, with_reasoning=True), Scaffold(_STOP)]


def _is_control(piece: Part) -> bool:
    """Whether it is a control token, and not a tag or text that spells one."""
    return isinstance(piece, Scaffold) and piece in ChatmlRenderer.required


def _declared(tools: Tools) -> list[Part]:
    return [_TOOLS_BEFORE, *(f"\n{to_json(tool)}" for tool in tools), _TOOLS_AFTER]


def _turns(messages: Sequence[Message]) -> list[Part]:
    """Whole messages; neighbouring messages of tools share one turn of the user."""
    parts: list[Part] = []
    for from_tools, group in groupby(range(len(messages)), key=lambda index: messages[index].role is Role.TOOL):
        if from_tools:
            parts.append(Scaffold("<|im_start|>user"))
            for index in group:
                parts += [Scaffold("\n<tool_response>\n"), messages[index].content, Scaffold("\n</tool_response>")]
            parts.append(Scaffold("<|im_end|>\n"))
            continue
        for index in group:
            message = messages[index]
            said = _said(message, with_reasoning=keeps_reasoning(messages, index))
            parts += [Scaffold(f"<|im_start|>{message.role.value}\n"), *said, Scaffold("<|im_end|>\n")]
    return parts


def _said(message: Message, *, with_reasoning: bool) -> list[Part]:
    parts: list[Part] = []
    if message.reasoning and with_reasoning:
        parts += [Scaffold("<think>\n"), message.reasoning, Scaffold("\n</think>\n\n")]
    parts.append(message.content)
    for number, call in enumerate(well_formed_calls(message)):
        if number or message.content:
            parts.append("\n")
        spelled = f'{{"name": {to_json(call.name)}, "arguments": {to_json(call.arguments)}}}'
        parts += [Scaffold("<tool_call>\n"), spelled, Scaffold("\n</tool_call>")]
    return parts

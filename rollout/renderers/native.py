"""`native`: the format of the tokenizer that the warm start trains (`rollout.tokenizer`), control tokens and text.

    <bos> <user> text <end> <assistant> | sampled ... <end> | <tool> text <end> <assistant> | sampled ...

Where the tokenizer was trained for tasks with tools, a turn may end in calls, each `<call>name {"argument": value}`.
The declarations of the tools are not written: a policy of this tokenizer knows its tools from the demonstrations, and
they would fill the context of a small model. It has no reasoning.
"""

from __future__ import annotations

from collections.abc import Sequence

from tokenizers import Tokenizer

from rollout.config import ChatFormat
from rollout.renderers.base import Renderer, Tools, to_json, well_formed_calls
from rollout.renderers.codec import Part, RendererError, Scaffold
from rollout.tokenizer import CALL, Control
from rollout.toolcalls import read_call
from rollout.types import MalformedToolCall, Message, Role, ToolCall

_HEADER = {
    Role.SYSTEM: Scaffold(Control.SYSTEM),
    Role.USER: Scaffold(Control.USER),
    Role.ASSISTANT: Scaffold(Control.ASSISTANT),
    Role.TOOL: Scaffold(Control.TOOL),
}
_END = Scaffold(Control.END)


class NativeRenderer(Renderer):
    """See the module."""

    stops = (Control.END.value,)
    required = tuple(control.value for control in Control)
    optional = (CALL,)

    def __init__(self, name: ChatFormat, tokenizer: Tokenizer):
        super().__init__(name, tokenizer)
        self.declares_tools = CALL in self.codec.ids

    def answer(self, ids: Sequence[int]) -> Message:
        """See `Renderer`."""
        words, *written = _split(self.codec.pieces(ids))
        return Message(
            role=Role.ASSISTANT,
            content=words,
            tool_calls=tuple(_read(f"call_{index}", text) for index, text in enumerate(written)),
        )

    def _opening(self, messages: Sequence[Message], tools: Tools) -> list[Part]:
        return [Scaffold(Control.BOS), *self._observation(messages)]

    def _observation(self, messages: Sequence[Message]) -> list[Part]:
        parts: list[Part] = []
        for message in messages:
            parts += [_HEADER[message.role], *self._answer(message)]
        return [*parts, _HEADER[Role.ASSISTANT]]

    def _answer(self, message: Message) -> list[Part]:
        if message.reasoning or (message.tool_calls and not self.declares_tools):
            raise RendererError(
                "message: the chat format native has no reasoning, and calls only where its tokenizer was trained "
                f"for them, got {len(message.tool_calls)} calls and {len(message.reasoning)} characters of reasoning; "
                "write them in the content"
            )
        parts: list[Part] = [message.content]
        for call in well_formed_calls(message):
            parts += [Scaffold(CALL), f"{call.name} {to_json(call.arguments)}"]
        return [*parts, _END]


def _split(pieces: Sequence[Part]) -> list[str]:
    """The text before the first call, then that of each call; control tokens without a meaning here are dropped."""
    texts = [""]
    for piece in pieces:
        if not isinstance(piece, Scaffold):
            texts[-1] += piece
        elif piece == CALL:
            texts.append("")
    return texts


def _read(call_id: str, text: str) -> ToolCall | MalformedToolCall:
    name, _, arguments = text.strip().partition(" ")
    return read_call(call_id, name, arguments, text)

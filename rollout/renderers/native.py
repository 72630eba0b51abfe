"""`native`: the format of the tokenizer that the warm start trains (`rollout.tokenizer`), six control tokens and text.

    <bos> <user> text <end> <assistant> | sampled ... <end> | <tool> text <end> <assistant> | sampled ...

It has no reasoning, no tool declarations and no tool calls: environments that use it speak in plain text.
"""

from __future__ import annotations

from collections.abc import Sequence

from rollout.renderers.base import Renderer, Tools
from rollout.renderers.codec import Part, RendererError, Scaffold
from rollout.tokenizer import Control
from rollout.types import Message, Role

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
    declares_tools = False

    def answer(self, ids: Sequence[int]) -> Message:
        """See `Renderer`."""
        return Message(role=Role.ASSISTANT, content=self.codec.words(ids))

    def _opening(self, messages: Sequence[Message], tools: Tools) -> list[Part]:
        return [Scaffold(Control.BOS), *self._observation(messages)]

    def _observation(self, messages: Sequence[Message]) -> list[Part]:
        parts: list[Part] = []
        for message in messages:
            parts += [_HEADER[message.role], *self._answer(message)]
        return [*parts, _HEADER[Role.ASSISTANT]]

    def _answer(self, message: Message) -> list[Part]:
        if message.tool_calls or message.reasoning:
            raise RendererError(
                "message: the chat format native has neither tool calls nor reasoning, got "
                f"{len(message.tool_calls)} calls and {len(message.reasoning)} characters of reasoning; write them in "
                "the content"
            )
        return [message.content, _END]

"""Messages to tokens and back: the one place where chat turns become ids.

Append-only: what an episode has seen is never rendered again. Its ids grow by the sampled ids (kept as they were
sampled) and by the rendered observation, so the ids of turn t are a prefix of those of turn t+1.

    <bos> <user> text <end> <assistant> | sampled ... <end> | <tool> text <end> <assistant> | sampled ...
"""

from __future__ import annotations

from collections.abc import Sequence

from tokenizers import Tokenizer

from rollout.tokenizer import CONTROL_IDS, Control
from rollout.types import Message, Role, SpanOrigin, TokenSpan

_HEADER = {
    Role.SYSTEM: CONTROL_IDS[Control.SYSTEM],
    Role.USER: CONTROL_IDS[Control.USER],
    Role.ASSISTANT: CONTROL_IDS[Control.ASSISTANT],
    Role.TOOL: CONTROL_IDS[Control.TOOL],
}
_BOS = CONTROL_IDS[Control.BOS]
_END = CONTROL_IDS[Control.END]


class ChatRenderer:
    """Renders messages for one tokenizer. `stop_id` ends a turn of the policy."""

    stop_id = _END

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer

    def opening(self, messages: Sequence[Message]) -> TokenSpan:
        """The whole context before the first turn, ending in the assistant's header."""
        ids = [_BOS]
        for message in messages:
            ids += self._render(message)
        return TokenSpan(origin=SpanOrigin.CONTEXT, ids=(*ids, _HEADER[Role.ASSISTANT]))

    def observation(self, messages: Sequence[Message]) -> TokenSpan:
        """What the environment said, ending in the assistant's header; appended after a turn that ended in `<end>`."""
        ids: list[int] = []
        for message in messages:
            ids += self._render(message)
        return TokenSpan(origin=SpanOrigin.OBSERVATION, ids=(*ids, _HEADER[Role.ASSISTANT]))

    def answer_ids(self, text: str) -> tuple[int, ...]:
        """The ids of a whole assistant turn that says `text` (for demonstrations)."""
        return (*self._encode(text), _END)

    def answer(self, ids: Sequence[int]) -> Message:
        """The assistant message that sampled ids spell; control tokens in it are dropped from the text."""
        text = self._tokenizer.decode([i for i in ids if i >= len(CONTROL_IDS)])
        return Message(role=Role.ASSISTANT, content=text)

    def _render(self, message: Message) -> list[int]:
        return [_HEADER[message.role], *self._encode(message.content), _END]

    def _encode(self, text: str) -> list[int]:
        # A lone surrogate (half of a UTF-16 pair, which JSON can spell) has no bytes: it is read as a question mark. A
        # tool that repeats one must not end the episode as a failure, which no reward would judge.
        return self._tokenizer.encode(text.encode(errors="replace").decode()).ids

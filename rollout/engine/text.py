"""The engine for use alone: prompts as text, chat messages or token ids, answers as text and tool calls."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, cast

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

from rollout.engine.stop_text import cut_at_stop
from rollout.renderers.base import Renderer, Tools
from rollout.types import FinishReason, Generation, MalformedToolCall, Message, Role, SamplingParams, ToolCall

Chat: TypeAlias = "Sequence[Message | Mapping[str, Any]]"
"""Messages, or mappings with their `role` and `content`."""

Prompt: TypeAlias = "str | Sequence[int] | Chat"
"""Text to go on with, token ids, or a conversation to answer."""


class PromptError(ValueError):
    """A prompt that cannot be made into token ids."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """One answer. `text` ends before a stop string; `reasoning` and `tool_calls` are what a chat format finds in it."""

    prompt_ids: tuple[int, ...]
    ids: tuple[int, ...]
    text: str
    reasoning: str
    tool_calls: tuple[ToolCall | MalformedToolCall, ...]
    logprobs_T: npt.NDArray[np.float32]
    model_logprobs_T: npt.NDArray[np.float32] | None
    finish: FinishReason


class TextSide:
    """A checkpoint's tokenizer and, when its chat format is known, the renderer."""

    def __init__(self, tokenizer: Tokenizer, renderer: Renderer | None):
        self._tokenizer = tokenizer
        self._renderer = renderer

    @property
    def stop_ids(self) -> frozenset[int]:
        """Ids that end a turn of the chat format."""
        return frozenset() if self._renderer is None else self._renderer.stop_ids

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids, without control tokens."""
        return self._tokenizer.decode(list(ids))

    def encode(self, prompt: Prompt, tools: Tools) -> tuple[int, ...]:
        """The ids of a prompt.

        Raises:
            PromptError: Tools without a conversation, or a conversation without a chat format.
            RendererError: The chat format cannot spell it.
        """
        if not is_chat(prompt):
            if tools:
                raise PromptError("tools: belong to a conversation, got a prompt without messages; give messages")
            if isinstance(prompt, str):
                return tuple(self._tokenizer.encode(prompt).ids)
            return tuple(cast(Sequence[int], prompt))
        if self._renderer is None:
            raise PromptError(
                "prompt: messages need a chat format, got a tokenizer with the tokens of none; name chat_format, or "
                "give text"
            )
        return self._renderer.opening([_message(each) for each in cast(Chat, prompt)], tools).ids

    def completion(self, prompt: Prompt, ids: tuple[int, ...], said: Generation, params: SamplingParams) -> Completion:
        """What a generation says."""
        message = Message(role=Role.ASSISTANT, content=self.decode(said.ids))
        if is_chat(prompt) and self._renderer is not None:
            message = self._renderer.answer(said.ids)
        return Completion(
            prompt_ids=ids,
            ids=said.ids,
            text=cut_at_stop(message.content, params.stop),
            reasoning=message.reasoning,
            tool_calls=message.tool_calls,
            logprobs_T=said.logprobs_T,
            model_logprobs_T=said.model_logprobs_T,
            finish=said.finish,
        )


def is_chat(prompt: Prompt) -> bool:
    """Whether a prompt is a conversation."""
    return not isinstance(prompt, str) and len(prompt) > 0 and isinstance(prompt[0], Message | Mapping)


def check_prompt(index: int, prompt: object) -> None:
    """Raises PromptError when prompt number `index` is none of text, token ids and a conversation."""
    if isinstance(prompt, str):
        return
    if not isinstance(prompt, Sequence | np.ndarray):
        raise PromptError(
            f"prompts[{index}]: must be text, token ids or messages, got {prompt!r}; give generate a list of prompts"
        )
    wanted = (Message, Mapping) if len(prompt) and isinstance(prompt[0], Message | Mapping) else (int, np.integer)
    for each in prompt:
        if not isinstance(each, wanted) or isinstance(each, bool):
            what = "messages" if wanted[0] is Message else "token ids (whole numbers)"
            raise PromptError(f"prompts[{index}]: must hold {what} only, got {each!r}; give it all of one kind")


def check_tools(tools: object) -> None:
    """Raises PromptError when these are no declarations of functions that a chat format can write."""
    if not isinstance(tools, Sequence) or isinstance(tools, str):
        raise PromptError(
            f"tools: must be a list of tools, got {tools!r}; put a single one into a list, or leave it out"
        )
    for index, tool in enumerate(tools):
        function = tool.get("function") if isinstance(tool, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise PromptError(
                f"tools[{index}]: must declare a function by its name, got {tool!r}; write "
                '{"type": "function", "function": {"name": ..., "description": ..., "parameters": ...}}'
            )
        try:
            json.dumps(tool)
        except (TypeError, ValueError) as error:
            raise PromptError(
                f"tools[{index}]: must be what JSON can hold, got {error}; use lists, texts and numbers"
            ) from error


def plain_completion(ids: tuple[int, ...], said: Generation) -> Completion:
    """A generation of an engine without a tokenizer: ids only."""
    return Completion(
        prompt_ids=ids,
        ids=said.ids,
        text="",
        reasoning="",
        tool_calls=(),
        logprobs_T=said.logprobs_T,
        model_logprobs_T=said.model_logprobs_T,
        finish=said.finish,
    )


def _message(given: Message | Mapping[str, Any]) -> Message:
    if isinstance(given, Message):
        return given
    unknown = given.keys() - {"role", "content", "name", "tool_call_id"}
    if unknown or not {"role", "content"} <= given.keys() or given["role"] not in set(Role):
        raise PromptError(
            f"prompt: a message has a role of {', '.join(Role)} and a content, got keys {sorted(given)} and role "
            f"{given.get('role')}; use rollout.types.Message for more"
        )
    return Message(
        role=Role(given["role"]),
        content=given["content"],
        name=given.get("name", ""),
        tool_call_id=given.get("tool_call_id", ""),
    )

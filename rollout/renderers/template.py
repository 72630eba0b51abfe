"""A checkpoint's own chat template as a reference: does our renderer write what it writes?

Runs jinja templates as `transformers` does (sandboxed, block trimming, its `tojson`), for whole conversations that a
probe makes up. Never used to render an episode: a template renders all of history again, and some change it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import date
from pathlib import Path
from typing import Any, NoReturn

from jinja2 import TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

from rollout.renderers.base import STATED_DATE, Renderer, Tools
from rollout.types import Message, Role, ToolCall

_SHOWN = 30
"""Characters shown on either side of a difference."""

PROBE = (
    Message(role=Role.SYSTEM, content="Be brief."),
    Message(role=Role.USER, content="Is it warm in Zürich?"),
    Message(role=Role.ASSISTANT, content="Yes."),
    Message(role=Role.USER, content="\nHow warm?"),
)
_CALL_ID = "functions.temperature:0"
PROBE_WITH_TOOLS = (
    *PROBE[1:],
    Message(
        role=Role.ASSISTANT,
        content="",
        tool_calls=(ToolCall(id=_CALL_ID, name="temperature", arguments={"place": "Zürich", "days": 1}),),
    ),
    Message(role=Role.TOOL, content='{"celsius": 21}', name="temperature", tool_call_id=_CALL_ID),
)
PROBE_TOOLS: Tools = (
    {
        "type": "function",
        "function": {
            "name": "temperature",
            "description": "The temperature of a place.",
            "parameters": {
                "type": "object",
                "properties": {
                    "place": {"type": "string", "description": "The name of the place."},
                    "days": {"type": "integer", "description": "How many days ahead.", "default": 0},
                },
                "required": ["place"],
            },
        },
    },
)


class ChatTemplate:
    """A compiled jinja chat template. `variables` are the special tokens it may name (`bos_token`).

    Raises:
        ChatTemplateError: it is not a template.
    """

    def __init__(self, source: str, variables: Mapping[str, str]):
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise
        environment.globals["strftime_now"] = date.fromisoformat(STATED_DATE).strftime
        try:
            self._template = environment.from_string(source)
        except TemplateError as error:
            raise ChatTemplateError(
                f"chat template: must be jinja, got <{_one_line(error)}>; see the checkpoint"
            ) from None
        self._variables = variables

    def render(self, messages: Sequence[Mapping[str, Any]], tools: Tools = ()) -> str:
        """The whole conversation, ending in the assistant's header. Raises ChatTemplateError when the template does."""
        try:
            return self._template.render(
                messages=messages, tools=list(tools) or None, add_generation_prompt=True, **self._variables
            )
        except Exception as error:  # noqa: BLE001 (a template is a program, and may fail in any way)
            raise ChatTemplateError(
                f"chat template: must render, got <{_one_line(error)}>; see the checkpoint"
            ) from None


class ChatTemplateError(ValueError):
    """A chat template that cannot be read, or that refuses a conversation."""


def find_template(folder: Path) -> ChatTemplate | None:
    """The chat template of a checkpoint folder (`chat_template.jinja`, or within `tokenizer_config.json`), or `None`.

    Raises:
        ChatTemplateError: What is there cannot be read.
    """
    config_file, template_file = folder / "tokenizer_config.json", folder / "chat_template.jinja"
    try:
        config = dict(json.loads(config_file.read_text())) if config_file.is_file() else {}
    except (TypeError, ValueError) as error:
        raise ChatTemplateError(f"{config_file}: must be JSON, got <{_one_line(error)}>; restore the file") from None
    source = template_file.read_text() if template_file.is_file() else config.get("chat_template")
    if not isinstance(source, str):
        return None
    tokens = {key: value for key, value in config.items() if key.endswith("_token") and value is not None}
    spelled = {key: value["content"] if isinstance(value, dict) else str(value) for key, value in tokens.items()}
    return ChatTemplate(source, spelled)


def compare_with_folder(renderer: Renderer, tokenizer: Tokenizer, folder: Path) -> str:
    """One line for the user: whether the chat format writes what the checkpoint's own template does."""
    try:
        template = find_template(folder)
        difference = None if template is None else check_against_template(renderer, template, tokenizer)
    except ChatTemplateError as error:
        return f"chat format {renderer.name.value}: not compared with the checkpoint's template: {error}"
    if template is None:
        return f"chat format {renderer.name.value}: the checkpoint has no chat template to compare it with"
    return difference or f"chat format {renderer.name.value}: writes what the checkpoint's chat template does"


def check_against_template(renderer: Renderer, template: ChatTemplate, tokenizer: Tokenizer) -> str | None:
    """The first difference between `renderer` and `template` on the probes, in one line; `None` if there is none.

    Token ids are compared, the template's text being read by `tokenizer` with its special tokens. A tool is declared
    only to formats that can.
    """
    probes: list[tuple[Sequence[Message], Tools]] = [(PROBE, ())]
    if renderer.declares_tools:
        probes.append((PROBE_WITH_TOOLS, PROBE_TOOLS))
    reader = Tokenizer.from_str(tokenizer.to_str())
    for messages, tools in probes:
        text = template.render([renderer.template_message(message) for message in messages], tools)
        theirs = reader.encode(text, add_special_tokens=False).ids
        ours = renderer.opening(messages, tools).ids
        if list(ours) != theirs:
            return f"chat format {renderer.name.value}: {first_difference(renderer.codec.spelled(ours), text)}"
    return None


def first_difference(ours: str, theirs: str) -> str:
    """One line that shows where two texts part."""
    at = next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), min(len(ours), len(theirs)))
    if at == len(ours) == len(theirs):
        return "the texts are equal, but not their token ids"
    shown = slice(max(0, at - _SHOWN), at + _SHOWN)
    return f"differs from the template at character {at}: {ours[shown]!r}, the template has {theirs[shown]!r}"


def _tojson(value: object, ensure_ascii: bool = False, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, default=dict)


def _raise(message: str) -> NoReturn:
    raise TemplateError(message)


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())

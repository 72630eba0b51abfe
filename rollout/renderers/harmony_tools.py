"""Tool declarations in harmony: JSON schemas as TypeScript-like types in one namespace.

Written line for line as the template does, its irregular spaces included: the model has seen these and no others.

Source: the chat template of openai/gpt-oss-120b.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rollout.renderers.base import Tools, to_json

_ARRAYS_OF = {"string": "string[]", "number": "number[]", "integer": "number[]", "boolean": "boolean[]"}
_SIMPLE = {"number": "number", "integer": "number", "boolean": "boolean"}
_LONGEST_ELEMENT = 50
"""Characters of an element's type; arrays of longer ones are `any[]`."""


def namespace(name: str, tools: Tools) -> str:
    """The declarations of `tools` as the namespace `name`."""
    declared = "".join(_function(tool["function"]) for tool in tools)
    return f"## {name}\n\nnamespace {name} {{\n\n{declared}}} // namespace {name}"


def _function(function: Mapping[str, Any]) -> str:
    head = f"// {function['description']}\ntype {function['name']} = "
    schema: Mapping[str, Any] = function.get("parameters") or {}
    properties: Mapping[str, Any] = schema.get("properties") or {}
    if not properties:
        return f"{head}() => any;\n\n"
    required = schema.get("required") or []
    lines = "".join(_parameter(name, spec, name in required) for name, spec in properties.items())
    return f"{head}(_: {{\n{lines}}}) => any;\n\n"


def _parameter(name: str, spec: Mapping[str, Any], required: bool) -> str:
    comment = f"// {spec['description']}\n" if spec.get("description") else ""
    return f"{comment}{name}{'' if required else '?'}: {_type(spec)}{_default(spec)},\n"


def _default(spec: Mapping[str, Any]) -> str:
    if "default" not in spec:
        return ""
    if spec.get("enum"):
        return f", // default: {spec['default']}"
    if spec.get("oneOf"):
        return f"// default: {spec['default']}"
    return f", // default: {to_json(spec['default'])}"


def _type(spec: Mapping[str, Any]) -> str:
    kind = spec.get("type")
    nullable = " | null" if spec.get("nullable") else ""
    if kind == "array":
        return _array(spec) + nullable
    if isinstance(kind, list) and kind:
        return " | ".join(kind)
    if spec.get("oneOf"):
        return _union(spec["oneOf"])
    if kind == "string":
        options = spec.get("enum")
        return '"' + '" | "'.join(map(str, options)) + '"' if options else f"string{nullable}"
    if kind == "object":
        return _object(spec)
    return _SIMPLE.get(kind, "any") if isinstance(kind, str) else "any"


def _array(spec: Mapping[str, Any]) -> str:
    items = spec.get("items")
    if not items:
        return "any[]"
    simple = _ARRAYS_OF.get(items["type"]) if isinstance(items.get("type"), str) else None
    if simple is not None:
        return simple
    element = _type(items)
    return "any[]" if element == "object | object" or len(element) > _LONGEST_ELEMENT else f"{element}[]"


def _union(variants: list[Mapping[str, Any]]) -> str:
    if len(variants) > 1 and any(variant.get("type") == "object" for variant in variants):
        return "any"
    spelled: list[str] = []
    for variant in variants:
        comment = f"// {variant['description']}" if variant.get("description") else ""
        default = f"{' ' * 20}// default: {to_json(variant['default'])}" if "default" in variant else ""
        spelled.append(_type(variant) + comment + default)
    return " | \n".join(spelled)


def _object(spec: Mapping[str, Any]) -> str:
    properties: Mapping[str, Any] = spec.get("properties") or {}
    if not properties:
        return "object"
    required = spec.get("required") or []
    gap = "\n" + " " * 16
    fields = [f"{name}{'' if name in required else '?'}: {gap}{_type(inner)}" for name, inner in properties.items()]
    return "{\n" + ", ".join(fields) + "}"

"""Tools: typed Python functions that the policy calls, and the boundary around each call.

`@tool` marks a method (`envs/tool_env.py` shows one). Its signature and its docstring become the declaration that chat
formats show (OpenAI's function schema), and the same schema checks each call before the function runs. A mistake of the
policy never raises: a call that cannot be read, an unknown tool, arguments that break the schema and an exception
inside the function each become a tool message, and are counted apart. Only `SandboxLost` passes through: infrastructure
is not the policy's mistake.
"""

from __future__ import annotations

import asyncio
import difflib
import inspect
import json
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar, cast, get_type_hints, overload

from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model
from pydantic.errors import PydanticUserError

from envs.base import EnvError, SandboxLost
from rollout.types import Checks, Json, MalformedToolCall, Message, Role, ToolCall, TurnEvidence

MAX_OUTPUT_CHARACTERS = 8_192
"""What a tool says beyond this is cut in the middle, and the cut is named: the end often holds the error."""

MAX_CALLS_PER_TURN = 32
"""Later calls of the same turn are answered with an error and do not run."""

_MARK = "__tool__"
_F = TypeVar("_F", bound=Callable[..., Any])


class ToolError(Exception):
    """What a tool raises to tell the policy why it cannot do what was asked; the message is all that it sees."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCounts:
    """Calls of an episode: all, and those that could not be read, named no tool, broke the schema, or failed."""

    calls: int = 0
    malformed: int = 0
    unknown: int = 0
    invalid: int = 0
    failed: int = 0

    @property
    def errors(self) -> int:
        """Calls that did nothing, or broke off."""
        return self.malformed + self.unknown + self.invalid + self.failed


def turn_of_calls(
    message: Message, before: ToolCounts, after: ToolCounts, *, milestones: Checks, violations: tuple[str, ...] = ()
) -> TurnEvidence:
    """What the counts before and after a turn say of it. A turn of calls shows no checks."""
    readable = after.malformed == before.malformed
    return TurnEvidence(
        well_formed=readable and bool(message.tool_calls or message.content.strip()),
        visible=Checks(passed=0, declared=0),
        num_calls=after.calls - before.calls,
        num_call_errors=after.errors - before.errors,
        milestones=milestones,
        violations=violations,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Options:
    parallel: bool


@overload
def tool(function: _F, /) -> _F: ...
@overload
def tool(*, parallel: bool = False) -> Callable[[_F], _F]: ...
def tool(function: Callable[..., Any] | None = None, *, parallel: bool = False) -> Any:
    """Mark a method (or a function) as a tool.

    Args:
        function: The function, when the decorator is used without parentheses.
        parallel: Calls of such tools that stand side by side in one turn may overlap; others run one after the other,
            in the order of the turn. Only an `async` function gains by it.
    """

    def mark(marked: _F) -> _F:
        setattr(marked, _MARK, _Options(parallel=parallel))
        return marked

    return mark if function is None else mark(function)


@dataclass(frozen=True, slots=True, kw_only=True)
class Tool:
    """A function and what its calls must look like."""

    name: str
    description: str
    run: Callable[..., Any]
    arguments: type[BaseModel]
    parallel: bool

    @property
    def declaration(self) -> Mapping[str, Any]:
        """`{"type": "function", "function": {"name", "description", "parameters"}}`, as chat templates want it."""
        schema = cast("dict[str, Any]", _without_titles(self.arguments.model_json_schema()))
        schema.setdefault("properties", {})
        return {
            "type": "function",
            "function": {"name": self.name, "description": self.description, "parameters": schema},
        }


def _without_titles(schema: object) -> object:
    """`schema` without the titles that pydantic derives from names: they repeat the names, token by token."""
    if isinstance(schema, list):
        return [_without_titles(item) for item in cast("list[object]", schema)]
    if not isinstance(schema, dict):
        return schema
    items = cast("dict[str, object]", schema)
    kept = {key: value for key, value in items.items() if not (key == "title" and isinstance(value, str))}
    return {
        key: {name: _without_titles(inner) for name, inner in cast("dict[str, object]", value).items()}
        if key in ("properties", "$defs")
        else _without_titles(value)
        for key, value in kept.items()
    }


def as_tool(function: Callable[..., Any]) -> Tool:
    """The tool that `function` is: a bound method, or a plain function.

    Raises:
        EnvError: It has no docstring, or a parameter without a type, without a description or of a type that JSON
            cannot carry.
    """
    name: str = getattr(function, "__name__", repr(function))
    parts = _docstring(function, name)
    try:
        hints = get_type_hints(function)
    except NameError as problem:
        raise EnvError(f"tool {name}: a type hint names what does not exist, got {problem}; import it") from None
    fields: dict[str, Any] = {}
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD, parameter.POSITIONAL_ONLY):
            raise EnvError(f"tool {name}: every parameter needs a name, got {parameter}; write it out")
        if parameter.name not in hints:
            raise EnvError(f"tool {name}: the parameter has no type, got {parameter.name!r}; add a type hint")
        if parameter.name not in parts.arguments:
            raise EnvError(
                f"tool {name}: the parameter has no description, got {parameter.name!r}; add it under Args: in the "
                "docstring"
            )
        fields[parameter.name] = (hints[parameter.name], _field(parameter, parts.arguments[parameter.name]))
    unknown = sorted(parts.arguments.keys() - fields.keys())
    if unknown:
        raise EnvError(f"tool {name}: Args: describes no parameter, got {unknown[0]!r}; use the parameter's name")
    try:
        arguments = create_model(name, __config__=ConfigDict(extra="forbid", strict=True), **fields)
        arguments.model_json_schema()
    except (PydanticUserError, NameError) as problem:
        reason = " ".join(str(problem).split())[:200]
        raise EnvError(f"tool {name}: a parameter's type has no JSON form, got <{reason}>; use JSON types") from None
    options: _Options = getattr(function, _MARK, _Options(parallel=False))
    return Tool(name=name, description=parts.description, run=function, arguments=arguments, parallel=options.parallel)


def _field(parameter: inspect.Parameter, description: str) -> Any:
    default: Any = ... if parameter.default is parameter.empty else parameter.default
    return Field(default=default, description=description)


@dataclass(frozen=True, slots=True)
class _Docstring:
    description: str
    arguments: Mapping[str, str]


_SECTION = re.compile(r"^(Args|Arguments|Returns|Raises|Yields|Example|Examples|Note|Notes):\s*$", re.MULTILINE)
_ARGUMENT = re.compile(r"^(\w+)\s*(?:\([^)]*\))?:\s*(.*)$")


def _docstring(function: Callable[..., Any], name: str) -> _Docstring:
    """What a Google-style docstring says of the function and of each argument."""
    text = inspect.getdoc(function) or ""
    pieces = _SECTION.split(text)
    description = " ".join(pieces[0].split())
    if not description:
        raise EnvError(f"tool {name}: has no docstring, got {text[:40]!r}; say what the tool does: the policy reads it")
    sections = dict(zip(pieces[1::2], pieces[2::2], strict=True))
    body = inspect.cleandoc("\n" + sections.get("Args", sections.get("Arguments", "")))
    arguments: dict[str, str] = {}
    current = ""
    for line in body.splitlines():
        found = None if line.startswith(" ") else _ARGUMENT.match(line)
        if found:
            current = found.group(1)
            arguments[current] = found.group(2)
        elif current:
            arguments[current] = f"{arguments[current]} {line.strip()}".strip()
    return _Docstring(description, {key: value for key, value in arguments.items() if value})


class ToolBox:
    """The tools of one episode: runs the calls of a turn, answers each, counts what went wrong.

    Tools that are `unlisted` can be called, but neither are declared nor occur in a hint.
    """

    def __init__(self, tools: Sequence[Tool], *, unlisted: Collection[str] = ()) -> None:
        self._tools = {tool.name: tool for tool in tools}
        if len(self._tools) < len(tools):
            names = [tool.name for tool in tools]
            twice = next(name for name in names if names.count(name) > 1)
            raise EnvError(f"tools: each needs a name of its own, got {twice!r} twice; rename one")
        self._listed = [name for name in self._tools if name not in unlisted]
        self.counts = ToolCounts()

    @classmethod
    def of(cls, owner: object) -> ToolBox:
        """The tools of an object: its methods under `@tool`, in the order of their names in the class body."""
        names = dict.fromkeys(name for base in reversed(type(owner).__mro__) for name in vars(base))
        methods = [getattr(owner, name) for name in names if hasattr(getattr(type(owner), name, None), _MARK)]
        return cls([as_tool(method) for method in methods])

    @property
    def declarations(self) -> tuple[Mapping[str, Any], ...]:
        """What chat formats show to the policy (`Task.tools`)."""
        return tuple(self._tools[name].declaration for name in self._listed)

    async def run(self, calls: Sequence[ToolCall | MalformedToolCall]) -> tuple[Message, ...]:
        """One tool message for each call, in their order. Raises nothing but `SandboxLost`."""
        messages: list[Message] = []
        at_once: list[ToolCall] = []
        for call in calls[:MAX_CALLS_PER_TURN]:
            if isinstance(call, ToolCall) and call.name in self._tools and self._tools[call.name].parallel:
                at_once.append(call)
                continue
            messages += await asyncio.gather(*map(self._answer, at_once))
            at_once = []
            messages.append(await self._answer(call))
        messages += await asyncio.gather(*map(self._answer, at_once))
        for call in calls[MAX_CALLS_PER_TURN:]:
            problem = f"Error: too many calls in one turn; only the first {MAX_CALLS_PER_TURN} ran"
            messages.append(_said(call, self._count(problem, "invalid")))
        return tuple(messages)

    async def _answer(self, call: ToolCall | MalformedToolCall) -> Message:
        return _said(call, await self._outcome(call))

    async def _outcome(self, call: ToolCall | MalformedToolCall) -> str:
        if isinstance(call, MalformedToolCall):
            return self._count(f"Error: {call.problem}", "malformed")
        known = self._tools.get(call.name)
        if known is None:
            near = difflib.get_close_matches(call.name, self._listed, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"the tools are {', '.join(self._listed)}"
            return self._count(f"Error: no tool named {call.name!r}; {hint}", "unknown")
        try:
            checked = known.arguments.model_validate_json(json.dumps(call.arguments, default=dict))
        except ValidationError as problem:
            return self._count(f"Error: {_first_problem(problem)}", "invalid")
        # What was not given is left to the function: its default may be another than its declaration says.
        arguments = {name: getattr(checked, name) for name in checked.model_fields_set}
        try:
            result = known.run(**arguments)
            if inspect.isawaitable(result):
                result = await result
            said = _capped(_as_text(result))
        except SandboxLost:
            raise
        except ToolError as problem:
            return self._count(_capped(f"Error: {problem}"), "failed")
        except Exception as problem:  # noqa: BLE001 (the policy's arguments may break a tool: that is its answer)
            return self._count(_capped(f"Error: {type(problem).__name__}: {problem}"), "failed")
        return self._count(said)

    def _count(self, said: str, mistake: str | None = None) -> str:
        """Count a call, and its kind of `mistake` (a field of `ToolCounts`) where it has one."""
        for name in filter(None, ("calls", mistake)):
            self.counts = replace(self.counts, **{name: getattr(self.counts, name) + 1})
        return said


def _said(call: ToolCall | MalformedToolCall, content: str) -> Message:
    name = call.name if isinstance(call, ToolCall) else ""
    return Message(role=Role.TOOL, content=content, name=name, tool_call_id=call.id)


def _first_problem(problem: ValidationError) -> str:
    """`amount: Input should be a valid integer, got '5'`, the first of the problems."""
    first = problem.errors(include_url=False)[0]
    where = ".".join(map(str, first["loc"])) or "arguments"
    if first["type"] == "missing":
        return f"{where}: missing argument"
    return f"{where}: {first['msg']}, got {first['input']!r}"[:300]


def _as_text(result: Json | object) -> str:
    return result if isinstance(result, str) else json.dumps(result, ensure_ascii=False)


def _capped(text: str) -> str:
    # Half of a surrogate pair is no text: it could not be encoded, which would look like a failure of ours.
    text = text.encode(errors="replace").decode()
    left_out = len(text) - MAX_OUTPUT_CHARACTERS
    if left_out <= 0:
        return text
    half = MAX_OUTPUT_CHARACTERS // 2
    return f"{text[:half]}\n[... {left_out} characters left out ...]\n{text[-half:]}"

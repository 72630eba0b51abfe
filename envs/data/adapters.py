"""How rows of the usual conventions become tasks: one table, from the columns that tell a convention to its reader.

| format | told by the columns | messages | what the grading reads (`payload`) |
|---|---|---|---|
| own | entry_point, visible | prompt | the examples (`envs.data.own`) |
| verl | prompt, reward_model | prompt | answer (reward_model.ground_truth), reward_model, extra_info, the rest |
| skyrl | prompt, env_class | prompt | answer (reward_spec.ground_truth), env_class, reward_spec, max_turns, the rest |
| nemo_gym | responses_create_params | its input | every other column |
| verifiers | prompt with info or task | prompt | answer, task, the keys of info, the rest |
| trl | prompt | prompt | every other column |
| chat | messages | messages | every other column |

A prompt is a text, which is one message of the user, or a list of messages. `id` and `split` are read where they are
columns (of verl: in extra_info); otherwise the number of the row is the id.
"""

from __future__ import annotations

import difflib
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

from envs.data.digest import text_digest
from envs.data.errors import RowError
from envs.data.own import own_item
from rollout.types import Answer, Message, Role, Split, Task

AUTO = "auto"
_SPLITS = {
    "train": Split.TRAIN,
    "held_out": Split.HELD_OUT,
    "test": Split.HELD_OUT,
    "validation": Split.HELD_OUT,
    "val": Split.HELD_OUT,
}


class Item(NamedTuple):
    """A task, and the answers of its demonstration where the data give one."""

    task: Task
    solution: tuple[Answer, ...] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Adapter:
    """A convention. A row has all columns `needs` and, of `any_of`, one; `but` belong to another convention."""

    needs: tuple[str, ...]
    read: Callable[[dict[str, Any], str], Item]
    any_of: tuple[str, ...] = ()
    but: tuple[str, ...] = ()

    def fits(self, columns: Sequence[str]) -> bool:
        """Whether the columns are of this convention."""
        found = set(columns)
        return (
            found.issuperset(self.needs)
            and (not self.any_of or not found.isdisjoint(self.any_of))
            and found.isdisjoint(self.but)
        )


def recognise(columns: Sequence[str]) -> str:
    """The convention of a row with these columns. Raises `RowError` when it is none, or more than one."""
    fitting = [name for name, adapter in ADAPTERS.items() if adapter.fits(columns)]
    if len(fitting) == 1:
        return fitting[0]
    if fitting:
        raise RowError(f"the columns fit {' and '.join(fitting)}", list(columns), f"set the format to one of {fitting}")
    near = _near(columns)
    hint = f"did you mean {near[1]!r} by {near[0]!r}? rename it, or " if near else ""
    raise RowError("the columns fit no convention", list(columns), f"{hint}use those of {', '.join(ADAPTERS)}")


def refuse_foreign(columns: Sequence[str], name: str) -> None:
    """Raise `RowError` for a row whose columns mark another convention than `name`, that of the rows before it."""
    foreign = [column for column in columns if column in ADAPTERS[name].but]
    if foreign:
        raise RowError(
            f"the rows before are of {name}, and {foreign[0]!r} is a column of another convention",
            list(columns),
            f"give each convention a file of its own in env.datasets, or set the format to {name}",
        )


def check_format(name: str, key: str) -> str | None:
    """What is wrong with the name of a format, or `None`."""
    if name == AUTO or name in ADAPTERS:
        return None
    close = difflib.get_close_matches(name, ADAPTERS, n=1)
    hint = f"did you mean {close[0]!r}?" if close else f"choose {AUTO} or one of {', '.join(ADAPTERS)}"
    return f"{key}: no such format, got {name!r}; {hint}"


def read_row(row: dict[str, Any], *, name: str, default_id: str) -> Item:
    """A row as a task. Raises `RowError` for whatever a policy or a grader could not use."""
    adapter = ADAPTERS[name]
    for column in adapter.needs:
        if column not in row:
            close = difflib.get_close_matches(column, list(row), n=1)
            hint = f"did you mean {close[0]!r}? rename it" if close else f"a row of {name} has {adapter.needs}"
            raise RowError(f"the column {column!r} is missing", "none", hint)
    item = adapter.read(row, default_id)
    _check_json(item.task.payload, "")
    return item


def _near(columns: Sequence[str]) -> tuple[str, str] | None:
    wanted = sorted({column for adapter in ADAPTERS.values() for column in adapter.needs})
    for column in columns:
        close = difflib.get_close_matches(column, wanted, n=1)
        if close and close[0] != column:
            return column, close[0]
    return None


def _messages(value: object, column: str) -> tuple[Message, ...]:
    if isinstance(value, str):
        if not value.strip():
            raise RowError(f"{column}: empty", repr(value), "give a text or messages")
        return (Message(role=Role.USER, content=value),)
    row_value: object = value
    parts = cast(Sequence[object], value) if isinstance(value, Sequence) else ()
    if not parts:
        raise RowError(f"{column}: must be a text or a list of messages", repr(row_value), "give at least one message")
    messages = tuple(_message(each, f"{column}[{n}]") for n, each in enumerate(parts))
    if messages[-1].role == Role.ASSISTANT:
        raise RowError(
            f"{column}[{len(messages) - 1}]: ends with the assistant, which leaves nothing to answer",
            repr(messages[-1].content),
            "end with a message of the user",
        )
    if not messages[-1].content.strip():
        raise RowError(f"{column}[{len(messages) - 1}]: empty", "''", "give the message a text")
    return messages


def _message(value: object, where: str) -> Message:
    if not isinstance(value, Mapping):
        raise RowError(f"{where}: a message must be an object with role and content", repr(value), "write it so")
    fields = {key: each for key, each in cast(Mapping[str, object], value).items() if each is not None}
    role, content = fields.pop("role", None), fields.pop("content", None)
    if role not in tuple(Role):
        raise RowError(f"{where}.role: unknown role", repr(role), f"use one of {', '.join(Role)}")
    if not isinstance(content, str):
        raise RowError(f"{where}.content: must be a text", repr(content), "give the content as one text")
    extra = {key: fields.pop(key, "") for key in ("name", "tool_call_id")}
    fields.pop("type", None)
    if fields:
        raise RowError(f"{where}: unknown key {next(iter(fields))!r}", repr(next(iter(fields.values()))), "drop it")
    return Message(
        role=Role(str(role)), content=content, name=str(extra["name"]), tool_call_id=str(extra["tool_call_id"])
    )


def _item(
    row: Mapping[str, Any], messages: tuple[Message, ...], payload: Mapping[str, Any], default_id: str, **more: Any
) -> Item:
    """The task of a row whose prompt is read; `id` and `split` are the row's own unless `more` has them."""
    task_id = more.pop("id", row.get("id"))
    if task_id is None:
        task_id = default_id
    if isinstance(task_id, bool) or not isinstance(task_id, str | int) or task_id == "":
        raise RowError("id: must be a text or a whole number", repr(task_id), "give every row its own")
    split = more.pop("split", row.get("split"))
    if split is not None and (not isinstance(split, str) or split not in _SPLITS):
        raise RowError("split: unknown", repr(split), f"use one of {', '.join(_SPLITS)}")
    task = Task(
        id=str(task_id),
        messages=messages,
        payload=dict(payload),
        split=_SPLITS[split] if split is not None else Split.TRAIN,
        seed=text_digest(str(task_id), num_bits=32),
        **more,
    )
    return Item(task, None)


def _rest(row: Mapping[str, Any], *used: str) -> dict[str, Any]:
    return {key: value for key, value in row.items() if key not in (*used, "id", "split")}


def _object(row: Mapping[str, Any], column: str) -> Mapping[str, Any]:
    """A column that holds an object, or its JSON text; absent or null is an empty one."""
    value: object = row.get(column)
    if isinstance(value, str):
        try:
            value = cast(object, json.loads(value)) if value else None
        except ValueError as problem:
            raise RowError(
                f"{column}: not JSON ({problem})", repr(value), "give an object or its JSON text"
            ) from problem
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise RowError(f"{column}: must be an object", repr(value), "give an object or its JSON text")
    return cast(Mapping[str, Any], value)


def _own(row: dict[str, Any], default_id: str) -> Item:
    return Item(*own_item(row))


def _verl(row: dict[str, Any], default_id: str) -> Item:
    extra, reward = _object(row, "extra_info"), _object(row, "reward_model")
    if "ground_truth" not in reward:
        raise RowError("reward_model.ground_truth: missing", list(reward), "give the right answer there")
    more: dict[str, Any] = {}
    if extra.get("split") is not None:
        more["split"] = extra["split"]
    if "id" not in row and extra.get("index") is not None:  # Parquet gives every row every key, null where it has none
        more["id"] = f"{row.get('data_source', 'verl')}/{extra.get('split') or 'train'}/{extra['index']}"
    payload = _rest(row, "prompt") | {"answer": reward["ground_truth"], "reward_model": reward, "extra_info": extra}
    return _item(row, _messages(row["prompt"], "prompt"), payload, default_id, **more)


def _skyrl(row: dict[str, Any], default_id: str) -> Item:
    spec = _object(row, "reward_spec") or _object(row, "reward_model")
    payload = _rest(row, "prompt") | {"answer": spec.get("ground_truth")}
    return _item(row, _messages(row["prompt"], "prompt"), payload, default_id)


def _nemo_gym(row: dict[str, Any], default_id: str) -> Item:
    asked = _object(row, "responses_create_params")
    column = "responses_create_params.input"
    given: object = asked.get("tools") or ()
    tools = cast(Sequence[Any], given) if isinstance(given, list | tuple) else (None,)
    if not all(isinstance(tool, Mapping) for tool in tools):
        raise RowError("responses_create_params.tools: must be a list of objects", str(asked), "give their schemas")
    messages = _messages(asked.get("input"), column)
    return _item(row, messages, _rest(row, "responses_create_params"), default_id, tools=tuple(tools))


def _verifiers(row: dict[str, Any], default_id: str) -> Item:
    payload = dict(_object(row, "info")) | _rest(row, "prompt", "info")  # a column of its own says more than `info`
    return _item(row, _messages(row["prompt"], "prompt"), payload, default_id)


def _trl(row: dict[str, Any], default_id: str) -> Item:
    return _item(row, _messages(row["prompt"], "prompt"), _rest(row, "prompt"), default_id)


def _chat(row: dict[str, Any], default_id: str) -> Item:
    return _item(row, _messages(row["messages"], "messages"), _rest(row, "messages"), default_id)


def _check_json(value: object, where: str) -> None:
    """Refuse what JSON does not hold, with the path of the value in the payload."""
    if isinstance(value, Mapping):
        for key, each in cast(Mapping[object, object], value).items():
            _check_json(each, f"{where}.{key}" if where else str(key))
    elif isinstance(value, list | tuple):
        for number, each in enumerate(cast(Sequence[object], value)):
            _check_json(each, f"{where}[{number}]")
    elif isinstance(value, float) and not math.isfinite(value):
        raise RowError(f"{where}: not a finite number", value, "drop the row or the value")
    elif value is not None and not isinstance(value, bool | int | float | str):
        raise RowError(f"{where}: JSON does not hold a {type(value).__name__}", repr(value), "write it as a text")


_MARKS = ("reward_model", "env_class", "entry_point", "info", "task")

ADAPTERS: Mapping[str, Adapter] = {
    "own": Adapter(needs=(), any_of=("entry_point", "visible"), read=_own),
    "verl": Adapter(needs=("prompt", "reward_model"), but=("env_class",), read=_verl),
    "skyrl": Adapter(needs=("prompt", "env_class"), read=_skyrl),
    "nemo_gym": Adapter(needs=("responses_create_params",), read=_nemo_gym),
    "verifiers": Adapter(needs=("prompt",), any_of=("info", "task"), read=_verifiers),
    "trl": Adapter(needs=("prompt",), but=_MARKS, read=_trl),
    "chat": Adapter(needs=("messages",), read=_chat),
}
"""Conventions by the name that `env.dataset_format` gives them."""

"""Declarations come from signatures and docstrings; no call of a policy raises, and each kind of mistake is counted."""

import asyncio
import enum
from typing import Literal

import pytest

from envs.base import EnvError, SandboxLost
from envs.tools import MAX_CALLS_PER_TURN, MAX_OUTPUT_CHARACTERS, ToolBox, ToolCounts, ToolError, as_tool, tool
from rollout.types import MalformedToolCall, ToolCall


class Colour(enum.Enum):
    RED = "red"
    BLUE = "blue"


class Desk:
    def __init__(self):
        self.log = []

    @tool
    def add(self, first: int, second: int = 1) -> int:
        """Add two numbers.

        Args:
            first: The one.
            second: The other,
                over two lines.

        Returns:
            The sum.
        """
        self.log.append((first, second))
        return first + second

    @tool
    def paint(self, colour: Colour, size: Literal["s", "l"], names: list[str] | None = None) -> str:
        """Paint.

        Args:
            colour: Which colour.
            size: How large.
            names: Of what.
        """
        return f"{colour.name} {size} {names}"

    @tool
    def fail(self, how: str) -> str:
        """Fail.

        Args:
            how: In which way.
        """
        if how == "said":
            raise ToolError("not today")
        if how == "lost":
            raise SandboxLost("gone")
        return {"key": {1: 2}[int(how)]}

    @tool
    def speak(self, count: int) -> str:
        """Say much.

        Args:
            count: Letters.
        """
        return "a" * count + "\ud800"

    @tool(parallel=True)
    async def wait(self, name: str) -> str:
        """Wait.

        Args:
            name: Who.
        """
        self.log.append(f"{name} begins")
        await asyncio.sleep(0)
        self.log.append(f"{name} ends")
        return name

    def hidden(self):
        """No tool."""


def _run(box, *calls):
    made = [
        call if isinstance(call, MalformedToolCall) else ToolCall(id=f"c{index}", name=call[0], arguments=call[1])
        for index, call in enumerate(calls)
    ]
    return asyncio.run(box.run(made))


def test_the_declaration_is_the_signature_and_the_docstring():
    add, paint, *rest = ToolBox.of(Desk()).declarations
    assert [item["function"]["name"] for item in rest] == ["fail", "speak", "wait"]
    assert add == {
        "type": "function",
        "function": {
            "name": "add",
            "description": "Add two numbers.",
            "parameters": {
                "type": "object",
                "properties": {
                    "first": {"type": "integer", "description": "The one."},
                    "second": {"type": "integer", "default": 1, "description": "The other, over two lines."},
                },
                "required": ["first"],
                "additionalProperties": False,
            },
        },
    }
    parameters = paint["function"]["parameters"]
    assert parameters["properties"]["size"]["enum"] == ["s", "l"]
    assert parameters["$defs"]["Colour"]["enum"] == ["red", "blue"]


def test_a_parameter_named_title_keeps_its_place():
    def book(title: str) -> str:
        """Look up.

        Args:
            title: Of the book.
        """
        return title

    properties = as_tool(book).declaration["function"]["parameters"]["properties"]
    assert properties == {"title": {"type": "string", "description": "Of the book."}}


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (("add", {"first": 2}), "3"),
        (("add", {"first": 2, "second": 5}), "7"),
        (("paint", {"colour": "red", "size": "l", "names": ["x"]}), "RED l ['x']"),
    ],
)
def test_a_right_call_runs(call, said):
    box = ToolBox.of(Desk())
    (message,) = _run(box, call)
    assert (message.content, message.name, message.tool_call_id) == (said, call[0], "c0")
    assert box.counts == ToolCounts(calls=1)


@pytest.mark.parametrize(
    ("call", "kind", "said"),
    [
        (("ad", {"first": 1}), "unknown", "Error: no tool named 'ad'; did you mean 'add'?"),
        (("zzz", {}), "unknown", "Error: no tool named 'zzz'; the tools are add, paint, fail, speak, wait"),
        (("hidden", {}), "unknown", "Error: no tool named 'hidden'; the tools are add, paint, fail, speak, wait"),
        (("add", {}), "invalid", "Error: first: missing argument"),
        (("add", {"first": "2"}), "invalid", "Error: first: Input should be a valid integer, got '2'"),
        (("add", {"first": True}), "invalid", "Error: first: Input should be a valid integer, got True"),
        (("add", {"first": 1, "third": 1}), "invalid", "Error: third: Extra inputs are not permitted, got 1"),
        (("paint", {"colour": "x", "size": "l"}), "invalid", "Error: colour: Input should be 'red' or 'blue', got 'x'"),
        (("fail", {"how": "said"}), "failed", "Error: not today"),
        (("fail", {"how": "7"}), "failed", "Error: KeyError: 7"),
        (("fail", {"how": "x"}), "failed", "Error: ValueError: invalid literal for int() with base 10: 'x'"),
    ],
)  # fmt: skip
def test_a_mistake_is_told_and_counted(call, kind, said):
    box = ToolBox.of(Desk())
    (message,) = _run(box, call)
    assert message.content == said
    assert box.counts == ToolCounts(calls=1, **{kind: 1})
    assert box.counts.errors == 1


def test_a_call_that_cannot_be_read_is_answered():
    box = ToolBox.of(Desk())
    (message,) = _run(box, MalformedToolCall(id="m", raw="{", problem="invalid JSON"))
    assert (message.content, message.tool_call_id) == ("Error: invalid JSON", "m")
    assert box.counts == ToolCounts(calls=1, malformed=1)


def test_infrastructure_passes_through():
    with pytest.raises(SandboxLost):
        _run(ToolBox.of(Desk()), ("fail", {"how": "lost"}))


def test_calls_of_a_turn_run_in_their_order_unless_all_are_parallel():
    desk = Desk()
    said = _run(ToolBox.of(desk), ("wait", {"name": "a"}), ("wait", {"name": "b"}), ("add", {"first": 1}))
    assert [message.content for message in said] == ["a", "b", "2"]
    assert desk.log == ["a begins", "b begins", "a ends", "b ends", (1, 1)]


def test_what_is_too_much_is_cut_and_named():
    box = ToolBox.of(Desk())
    (message,) = _run(box, ("speak", {"count": MAX_OUTPUT_CHARACTERS + 9}))
    assert "[... 10 characters left out ...]" in message.content
    assert len(message.content) < MAX_OUTPUT_CHARACTERS + 50
    assert message.content.endswith("a?")


def test_too_many_calls_of_a_turn_do_not_run():
    desk = Desk()
    box = ToolBox.of(desk)
    said = _run(box, *[("add", {"first": n}) for n in range(MAX_CALLS_PER_TURN + 2)])
    assert len(desk.log) == MAX_CALLS_PER_TURN
    assert said[-1].content.startswith("Error: too many calls")
    assert box.counts == ToolCounts(calls=MAX_CALLS_PER_TURN + 2, invalid=2)


def _undocumented(x: int):
    return x


def _untyped(x):
    """Do.

    Args:
        x: It.
    """


def _undescribed(x: int):
    """Do."""


def _misdescribed(x: int):
    """Do.

    Args:
        x: It.
        y: Nothing.
    """


def _starred(*x: int):
    """Do."""


def _without_json(x: asyncio.Lock):
    """Do.

    Args:
        x: It.
    """


@pytest.mark.parametrize(
    ("function", "problem"),
    [
        (_undocumented, "tool _undocumented: has no docstring"),
        (_untyped, "tool _untyped: the parameter has no type, got 'x'"),
        (_undescribed, "tool _undescribed: the parameter has no description, got 'x'"),
        (_misdescribed, "tool _misdescribed: Args: describes no parameter, got 'y'"),
        (_starred, "tool _starred: every parameter needs a name"),
        (_without_json, "tool _without_json: a parameter's type has no JSON form"),
    ],
)
def test_a_function_that_is_no_tool_is_refused(function, problem):
    with pytest.raises(EnvError, match=problem):
        as_tool(function)


def test_two_tools_of_one_name_are_refused():
    with pytest.raises(EnvError, match="each needs a name of its own, got 'add' twice"):
        ToolBox([as_tool(Desk().add), as_tool(Desk().add)])

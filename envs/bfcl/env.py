"""One episode of BFCL multi-turn: several requests of a user, each served by calls until the policy answers in words.

After each of the user's turns the state is compared with the known answer's, and the results that the user asked for
must have been seen (`envs.bfcl.worker`, as BFCL's own checker). The episode is solved when every turn was; hidden
checks are the turns that ask for calls, passed up to the first one that failed.

As in BFCL, an argument of another type than declared reaches the function, and so does a call of a function that was
not declared (known answers do both). Functions that appear later (`miss_func`) are described in the user's message, as
an episode's tools are declared once.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, WithJsonSchema, create_model

from envs.base import Env, EnvError, EnvFactory, SandboxLost, StepResult
from envs.bfcl.client import CallTimeoutError, Session, Worker
from envs.bfcl.data import documents
from envs.config import EnvConfig
from envs.tools import Tool, ToolBox, ToolError, turn_of_calls
from rollout.types import Checks, Evidence, Message, Role, Task, Verdict

MORE_FUNCTIONS = "I have updated some more functions you can choose from. What about now?"
_TYPES = {"float": "number", "tuple": "array", "dict": "object"}
"""BFCL's names of types that JSON schema calls otherwise."""


def tools_of(api: str, session: Session | None = None) -> list[Tool]:
    """The functions of an API as tools; without a session they can be declared, not run."""

    async def run(name: str, /, **arguments: Any) -> str:
        if session is None:
            raise EnvError(f"bfcl: no episode is open, got a call of {name}; call reset first")
        reply = await session.ask({"call": name, "arguments": arguments})
        if "error" in reply:
            raise ToolError(reply["error"].removeprefix("Error "))
        return reply["result"]

    return [
        Tool(
            name=document["name"],
            description=document["description"],
            run=functools.partial(run, document["name"]),
            arguments=_arguments(api, document["name"]),
            parallel=False,
        )
        for document in documents(api)
    ]


@functools.cache
def declarations_of(api: str) -> Mapping[str, Mapping[str, Any]]:
    """What the policy is shown of an API, by the function's name."""
    return {tool.name: tool.declaration for tool in tools_of(api)}


@functools.cache
def _arguments(api: str, name: str) -> type[BaseModel]:
    (document,) = (document for document in documents(api) if document["name"] == name)
    schema = document["parameters"]
    fields: dict[str, Any] = {}
    for parameter, declared in schema["properties"].items():
        kind = Annotated[Any, WithJsonSchema(_schema(declared))]
        fields[parameter] = (kind, ... if parameter in schema.get("required", ()) else None)
    return create_model(name, __config__=ConfigDict(extra="forbid"), **fields)


def _schema(declared: Mapping[str, Any]) -> dict[str, Any]:
    """A parameter's schema in the terms of JSON schema."""
    known = {**declared, "type": _TYPES.get(declared["type"], declared["type"])}
    if "items" in declared:
        known["items"] = _schema(declared["items"])
    if "properties" in declared:
        known["properties"] = {name: _schema(inner) for name, inner in declared["properties"].items()}
    return known


class BfclEnv(Env):
    """See the module."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._session: Session | None = None
        self._task: Task | None = None

    async def reset(self, task: Task) -> tuple[Message, ...]:
        """Make the objects and open with the first request."""
        payload = task.payload
        self._task, self._turns = task, ()
        self._position, self._num_served, self._problem, self._failed = 0, 0, "", False
        self._session = await self._worker.session()
        await self._session.open(
            {"open": payload["objects"], "long_context": payload["long_context"], "known": payload["known"]}
        )
        tools = [tool for api in payload["objects"] for tool in tools_of(api, self._session)]
        later = {name for names in payload["later"].values() for name in names}
        self._box = ToolBox(tools, unlisted=later | set(payload["excluded"]))
        return task.messages

    async def step(self, message: Message) -> StepResult:
        """Run the calls, or end the user's turn and hear the next request."""
        task, session = self._current()
        before = self._box.counts
        if message.tool_calls:
            observations, over = await self._box.run(message.tool_calls), session.hung
            self._failed = session.hung
        else:
            observations, over = await self._next_request(task, session)
        turn = turn_of_calls(message, before, self._box.counts, milestones=self._checks(task))
        self._turns = (*self._turns, turn)
        return StepResult(observations=observations, terminated=over)

    async def evidence(self) -> Evidence:
        """The turns that were served. An episode without a turn has passed nothing."""
        task, _ = self._current()
        failed = "a call did not return" if self._failed else "" if self._turns else "no answer"
        return Evidence(
            verdict=Verdict.POLICY_FAILED if failed else Verdict.VALID,
            turns=self._turns,
            hidden=self._checks(task),
            reason=failed or self._problem,
        )

    async def close(self) -> None:
        """End the episode's process."""
        if self._session is not None:
            self._session.close()

    async def _next_request(self, task: Task, session: Session) -> tuple[tuple[Message, ...], bool]:
        asked = bool(task.payload["known"][self._position])
        try:
            problem = (await session.ask({"end_turn": True}))["problem"]
        except CallTimeoutError as late:
            raise SandboxLost(f"bfcl worker: the known answer did not return ({late})") from late
        if problem and not self._problem:
            self._problem = f"turn {self._position}: {problem}"
        self._num_served += asked and not self._problem
        self._position += 1
        requests = task.payload["requests"]
        if self._position == len(requests):
            return (), True
        return self._said(task, requests[self._position]), False

    def _said(self, task: Task, request: str) -> tuple[Message, ...]:
        """The next request, with the functions that it brings."""
        new = task.payload["later"].get(str(self._position), [])
        if not new:
            return (Message(role=Role.USER, content=request),)
        known = {name: tool for api in task.payload["objects"] for name, tool in declarations_of(api).items()}
        declared = "\n".join(json.dumps(known[name]["function"]) for name in new)
        return (Message(role=Role.USER, content=f"{request or MORE_FUNCTIONS}\n{declared}"),)

    def _checks(self, task: Task) -> Checks:
        return Checks(passed=self._num_served, declared=sum(bool(known) for known in task.payload["known"]))

    def _current(self) -> tuple[Task, Session]:
        if self._task is None or self._session is None:
            raise EnvError("bfcl episode: no task is open, got a call before reset; call reset first")
        return self._task, self._session


class BfclFactory(EnvFactory):
    """The episodes of one rollout worker share the process that forks theirs."""

    def __init__(self, config: EnvConfig) -> None:
        self._worker = Worker(timeout_s=config.call_timeout_s)

    def make(self, *, fresh_grading: bool = False) -> BfclEnv:
        """A new episode; every one has a process of its own."""
        return BfclEnv(self._worker)

    def close(self) -> None:
        """End the processes. Idempotent."""
        self._worker.close()

"""A box as the host sees it, whoever built its walls: the contract of `base` spoken to the agent inside.

A `BoxServer` starts boxes (the fork server of `local`, the engine of `docker`) and a `BoxHandle` is one of them, with
the stream to its agent. `AgentSandbox` is everything on this side of the walls, the same for all kinds.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final, Protocol

from envs.base import SandboxLost
from envs.config import SandboxKind
from envs.sandbox.base import BoxFileError, CallOutcome, CallStatus, CodeResult, ExecStatus, SandboxSpec
from envs.sandbox.client import AgentClient, DeadlineError
from envs.sandbox.enforcement import measure
from envs.sandbox.wire import BadValueError, decode_value, encode_value

_MANAGE_S: Final = 20.0
_INTERRUPT_GRACE_S: Final = 1.0
# The agent keeps the deadline of a request itself; past this margin the whole box is ended from outside.
_MARGIN_S: Final = 10.0


class BoxHandle(Protocol):
    """One running box."""

    @property
    def client(self) -> AgentClient:
        """The stream to its agent."""
        ...

    def alive(self) -> bool:
        """Whether the box still runs."""
        ...

    def end(self) -> None:
        """End every process of the box."""
        ...


class BoxServer(Protocol):
    """Starts boxes of one kind. Thread-safe."""

    @property
    def kind(self) -> SandboxKind:
        """The kind of its boxes."""
        ...

    @property
    def python(self) -> str:
        """The interpreter that runs in the boxes."""
        ...

    def open(self, spec: SandboxSpec) -> BoxHandle:
        """A new box whose agent answers. Raises `SandboxLost`."""
        ...

    def enforced(self, spec: SandboxSpec) -> frozenset[str]:
        """The walls that hold. Raises `SandboxLost` when no box can be made."""
        ...

    def close(self) -> None:
        """End every box. Idempotent."""
        ...


class Measurements:
    """The walls that a server's boxes were measured to have: each spec is tried once, in a scratch box."""

    def __init__(self) -> None:
        self._found: dict[SandboxSpec, frozenset[str]] = {}

    def of(self, server: BoxServer, spec: SandboxSpec) -> frozenset[str]:
        """The walls by name (`envs.sandbox.enforcement.ALL`)."""
        if spec not in self._found:
            box = AgentSandbox(server, spec)
            try:
                self._found[spec] = measure(box, spec)
            finally:
                box.close()
        return self._found[spec]


class AgentSandbox:
    """One box of a server (`envs.sandbox.base.Sandbox`).

    A box that its code made unusable is replaced on the next use. `SandboxLost` is for the rest: the box or its
    server ended, and nothing that the code may do explains it.
    """

    def __init__(self, server: BoxServer, spec: SandboxSpec) -> None:
        self._server = server
        self._spec = spec
        self._closed = False
        self._worn = False
        self._box: BoxHandle | None = server.open(spec)

    # ---- the contract

    @property
    def enforced(self) -> frozenset[str]:
        """The walls that were measured to hold."""
        return self._server.enforced(self._spec)

    @property
    def worn(self) -> bool:
        """Whether its code died or ran out of memory, or the box was lost, since it was made."""
        return self._worn

    def run_code(self, source: str, timeout_s: float) -> CodeResult:
        """Run a cell in the persistent interpreter."""
        fields = {"timeout_s": timeout_s, "grace_s": _INTERRUPT_GRACE_S}
        data = source.encode("utf-8", "surrogatepass")
        try:
            header, stdout = self._request("run", fields, data, timeout_s + _INTERRUPT_GRACE_S + _MARGIN_S)
        except DeadlineError:
            self._end()
            return CodeResult(
                status=ExecStatus.TIMEOUT,
                stdout=b"",
                stdout_total_bytes=0,
                truncated=False,
                seconds=timeout_s,
                state_lost=True,
            )
        status = _EXEC_STATUS[header["status"]]
        self._note(status in (ExecStatus.OOM, ExecStatus.DIED))
        return CodeResult(
            status=status,
            stdout=stdout,
            stdout_total_bytes=header["total"],
            truncated=header["total"] > self._spec.max_output_bytes,
            seconds=header["seconds"],
            state_lost=header["state_lost"],
        )

    def load(self, source: str, entry_point: str, timeout_s: float) -> CallOutcome:
        """Run `source` in a fresh worker process and keep its function `entry_point`."""
        payload = json.dumps({"source": source, "entry_point": entry_point}).encode()
        return self._ask_function("load", payload, timeout_s)

    def call(self, args: tuple[object, ...], timeout_s: float) -> CallOutcome:
        """Call the loaded function. Raises `BadValueError` when an argument cannot cross."""
        return self._ask_function("call", encode_value(args), timeout_s)

    def settle(self, timeout_s: float) -> CallOutcome:
        """Make sure that the worker has nothing more to say."""
        return self._ask_function("settle", b"", timeout_s)

    def put(self, path: str, data: bytes) -> None:
        """Write a file below the working folder."""
        self._manage("put", {"path": path}, data)

    def get(self, path: str, max_bytes: int = 1 << 20) -> bytes:
        """Read a plain file below the working folder."""
        return self._manage("get", {"path": path, "max_bytes": max_bytes})[1]

    def num_processes(self) -> int:
        """Processes in the box besides its agent."""
        return self._manage("count", {})[0]["count"]

    def reset(self) -> None:
        """Kill everything in the box, empty its folders, start a fresh interpreter; or replace the box."""
        try:
            clean = self._box is not None and self._request("reset", {}, b"", _MANAGE_S)[0].get("clean") is True
        except (DeadlineError, SandboxLost):
            clean = False
        if not clean:
            self._end()
            self._box = self._server.open(self._spec)

    def close(self) -> None:
        """End every process of the box. Idempotent."""
        self._closed = True
        self._end()

    def alive(self) -> bool:
        """Whether the box still runs."""
        return self._box is not None and self._box.alive()

    # ---- the box

    def _end(self) -> None:
        if self._box is not None:
            self._box.end()
            self._box = None

    def _request(
        self, op: str, fields: Mapping[str, object], payload: bytes, wall_s: float
    ) -> tuple[dict[str, Any], bytes]:
        if self._closed:
            raise SandboxLost(f"sandbox: the box is closed, got a request to {op}; take another one")
        if self._box is None:
            self._box = self._server.open(self._spec)
        try:
            return self._box.client.request(op, fields, payload, wall_s=wall_s)
        except (DeadlineError, SandboxLost):
            self._worn = True
            self._end()
            raise

    def _manage(self, op: str, fields: Mapping[str, object], payload: bytes = b"") -> tuple[dict[str, Any], bytes]:
        try:
            header, body = self._request(op, fields, payload, _MANAGE_S)
        except DeadlineError as error:
            raise SandboxLost(str(error)) from None
        if "error" in header:
            raise BoxFileError(f"box file: cannot {op}, got {header['error']}; name a plain file below the folder")
        return header, body

    def _ask_function(self, op: str, payload: bytes, timeout_s: float) -> CallOutcome:
        try:
            header, body = self._request(op, {"timeout_s": timeout_s}, payload, timeout_s + _MARGIN_S)
        except DeadlineError:
            return CallOutcome(status=CallStatus.TIMEOUT, error="the box stopped answering")
        status = CallStatus(header["status"])
        self._note(status in (CallStatus.OOM, CallStatus.DIED))
        if status is not CallStatus.RETURNED:
            return CallOutcome(status=status, error=body.decode(errors="replace"))
        if op != "call":
            return CallOutcome(status=status)
        try:
            return CallOutcome(status=status, value=decode_value(body))
        except BadValueError as error:
            # The codec in the worker cannot have written this: the policy's code did.
            return CallOutcome(status=CallStatus.PROTOCOL, error=str(error))

    def _note(self, harmed: bool) -> None:
        self._worn = self._worn or harmed


_EXEC_STATUS: Final = {
    "returned": ExecStatus.OK,
    "raised": ExecStatus.ERROR,
    "timeout": ExecStatus.TIMEOUT,
    "oom": ExecStatus.OOM,
    "died": ExecStatus.DIED,
    # Code that forges replies of its own interpreter: that interpreter was ended.
    "protocol": ExecStatus.DIED,
}

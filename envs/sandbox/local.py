"""Boxes on this machine, forked from a fork server: 10 ms to a new one, 2 ms to a clean one.

`Zygote` owns the fork server's process; `LocalSandbox` is one box. The kind decides which walls the fork server builds
(`namespaces` or `degraded`); everything on this side of them is the same.
"""

from __future__ import annotations

import array
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from envs.base import SandboxLost
from envs.config import SandboxKind
from envs.sandbox.base import (
    BoxFileError,
    CallOutcome,
    CallStatus,
    CodeResult,
    ExecStatus,
    SandboxSpec,
    SandboxUnavailable,
)
from envs.sandbox.client import AgentClient, DeadlineError
from envs.sandbox.enforcement import measure
from envs.sandbox.wire import BadValueError, decode_value, encode_value

_CHECKOUT: Final = str(Path(__file__).parents[2])
_BOOT: Final = "import sys; sys.path.insert(0, sys.argv.pop()); from envs.sandbox.zygote import main; main()"
# Hashes must not differ from run to run, or the order of a set makes rewards differ. The arenas of threads would count
# against the limit on address space.
_ENVIRONMENT: Final = {"PATH": "/usr/bin:/bin", "LANG": "C.UTF-8", "PYTHONHASHSEED": "0", "MALLOC_ARENA_MAX": "1"}
_OTHER_PYTHONS: Final = ("/usr/local/bin/python3", "/usr/bin/python3")
_NOBODY: Final = 65534
_SPAWN_S: Final = 20.0
_MANAGE_S: Final = 20.0
_INTERRUPT_GRACE_S: Final = 1.0
# The agent keeps the deadline of a request itself; past this margin the whole box is ended from outside.
_MARGIN_S: Final = 10.0


def python_for_anybody() -> str:
    """An interpreter that a user without rights can start: this one, unless it lies in a folder private to root."""
    tried = (sys.executable, *_OTHER_PYTHONS)
    for python in tried:
        command = [python, "-I", "-c", "import subprocess, sys; sys.exit(sys.version_info < (3, 11))"]
        with suppress(OSError):
            done = subprocess.run(
                command, user=_NOBODY, group=_NOBODY, extra_groups=[], capture_output=True, check=False, cwd="/"
            )
            if done.returncode == 0:
                return python
    raise SandboxUnavailable(
        f"env.sandbox: degraded boxes run as a user of no rights, got no Python 3.11 that such a user can start "
        f"({', '.join(tried)}); install one outside private folders, or use env.sandbox=local"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Box:
    client: AgentClient
    pidfd: int


class Zygote:
    """A running fork server. It and all its boxes end with the process that made it.

    `python` is the interpreter of the boxes: by default this process's, except for degraded boxes made by root, which
    must be able to read it without rights (`python_for_anybody`). `user` is the user id to run the fork server as.
    """

    def __init__(
        self, kind: SandboxKind = SandboxKind.local, *, python: str | None = None, user: int | None = None
    ) -> None:
        self.kind = kind
        if python is None:
            degraded_by_root = kind is SandboxKind.degraded and os.geteuid() == 0
            python = python_for_anybody() if degraded_by_root else sys.executable
        self.python = python
        self._user = user
        self._lock = threading.Lock()
        self._closed = False
        self._measured: dict[SandboxSpec, frozenset[str]] = {}
        self._process, self._control = self._start()

    @property
    def pid(self) -> int:
        """Process id of the fork server."""
        return self._process.pid

    def _start(self) -> tuple[subprocess.Popen[bytes], socket.socket]:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            process = subprocess.Popen(
                # As -I, but with the environment read: it is ours, and it fixes the hash seed.
                [self.python, "-P", "-s", "-S", "-c", _BOOT, str(os.getpid()), _CHECKOUT],
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                env=_ENVIRONMENT,
                cwd="/",
                user=self._user,
                group=self._user,
                extra_groups=None if self._user is None else [],
            )
        ours.settimeout(_SPAWN_S)
        return process, ours

    def spawn(self, spec: SandboxSpec) -> tuple[socket.socket, int]:
        """A new box: the socket to its agent and a pidfd of its first process. Raises `SandboxLost`."""
        request = json.dumps({"kind": self.kind.value, **asdict(spec)}).encode()
        with self._lock:
            if self._closed:
                raise SandboxLost("sandbox: the fork server is closed, got a request for a box; make a new pool")
            if self._process.poll() is not None:
                self._control.close()
                self._process, self._control = self._start()
            return self._ask(request)

    def _ask(self, request: bytes) -> tuple[socket.socket, int]:
        ours, theirs = socket.socketpair()
        try:
            with theirs:
                rights = array.array("i", [theirs.fileno()])
                self._control.sendmsg([request], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)])
            text, ancillary, _, _ = self._control.recvmsg(4096, socket.CMSG_SPACE(4))
            if not text:
                raise ConnectionResetError("end of file")
            answer = json.loads(text)
            if "error" in answer:
                raise SandboxLost(f"sandbox: no new box, got {answer['error']}; probe this machine")
            return ours, array.array("i", ancillary[0][2])[0]
        except OSError as error:
            ours.close()
            self._process.kill()
            self._process.wait()
            raise SandboxLost(f"sandbox: the fork server failed, got {error!r}; it is started anew") from None
        except SandboxLost:
            ours.close()
            raise

    def enforced(self, spec: SandboxSpec) -> frozenset[str]:
        """The walls that hold, measured once in a scratch box."""
        if spec not in self._measured:
            box = LocalSandbox(self, spec)
            try:
                self._measured[spec] = measure(box, spec)
            finally:
                box.close()
        return self._measured[spec]

    def close(self) -> None:
        """End the fork server, and with it every box. Idempotent."""
        with self._lock:
            self._closed = True
            self._control.close()
            try:
                self._process.wait(5.0)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()


class LocalSandbox:
    """One box of a fork server (`envs.sandbox.base.Sandbox`).

    A box that its code made unusable is replaced on the next use. `SandboxLost` is for the rest: the box or the fork
    server ended, and nothing that the code may do explains it.
    """

    def __init__(self, zygote: Zygote, spec: SandboxSpec) -> None:
        self._zygote = zygote
        self._spec = spec
        self._closed = False
        self._worn = False
        self._box: _Box | None = self._open()

    # ---- the contract

    @property
    def enforced(self) -> frozenset[str]:
        """The walls that were measured to hold."""
        return self._zygote.enforced(self._spec)

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
            self._box = self._open()

    def close(self) -> None:
        """End every process of the box. Idempotent."""
        self._closed = True
        self._end()

    def alive(self) -> bool:
        """Whether the box still runs."""
        return self._box is not None and not _ended(self._box.pidfd, within_s=0.0)

    # ---- the box

    def _open(self) -> _Box:
        connection, pidfd = self._zygote.spawn(self._spec)
        box = _Box(client=AgentClient(connection), pidfd=pidfd)
        try:
            box.client.request("ping", {}, wall_s=_SPAWN_S)
        except (DeadlineError, SandboxLost) as error:
            _end_box(box, patience_s=0.0)
            raise SandboxLost(str(error)) from None
        return box

    def _end(self) -> None:
        if self._box is not None:
            # The first process of a pid namespace takes all others with it. Elsewhere the agent has to do that.
            _end_box(self._box, patience_s=0.0 if self._zygote.kind is SandboxKind.local else 2.0)
            self._box = None

    def _request(
        self, op: str, fields: Mapping[str, object], payload: bytes, wall_s: float
    ) -> tuple[dict[str, Any], bytes]:
        if self._closed:
            raise SandboxLost(f"sandbox: the box is closed, got a request to {op}; take another one")
        if self._box is None:
            self._box = self._open()
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


def _end_box(box: _Box, *, patience_s: float) -> None:
    box.client.close()
    if not (patience_s and _ended(box.pidfd, within_s=patience_s)):
        with suppress(ProcessLookupError, PermissionError):
            signal.pidfd_send_signal(box.pidfd, signal.SIGKILL)
        _ended(box.pidfd, within_s=2.0)
    os.close(box.pidfd)


def _ended(pidfd: int, *, within_s: float) -> bool:
    """Whether the process ends in time. Not select(2), which fails in a process with many open files."""
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(within_s * 1000))

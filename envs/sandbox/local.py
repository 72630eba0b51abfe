"""Boxes on this machine, forked from a fork server: 10 ms to a new one, 2 ms to a clean one.

`Zygote` owns the fork server's process; `LocalBox` is one box. The kind decides which walls the fork server builds
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
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Final

from envs.base import SandboxLost
from envs.config import SandboxKind
from envs.sandbox.agentbox import Measurements
from envs.sandbox.base import SandboxSpec, SandboxUnavailable
from envs.sandbox.client import AgentClient, DeadlineError

_CHECKOUT: Final = str(Path(__file__).parents[2])
_BOOT: Final = "import sys; sys.path.insert(0, sys.argv.pop()); from envs.sandbox.zygote import main; main()"
# Hashes must not differ from run to run, or the order of a set makes rewards differ. The arenas of threads would count
# against the limit on address space.
_ENVIRONMENT: Final = {"PATH": "/usr/bin:/bin", "LANG": "C.UTF-8", "PYTHONHASHSEED": "0", "MALLOC_ARENA_MAX": "1"}
_OTHER_PYTHONS: Final = ("/usr/local/bin/python3", "/usr/bin/python3")
_NOBODY: Final = 65534
_SPAWN_S: Final = 20.0


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
class LocalBox:
    """A box of a fork server (`envs.sandbox.agentbox.BoxHandle`). `patience_s`: how long it may take to end itself."""

    client: AgentClient
    pidfd: int
    patience_s: float

    def alive(self) -> bool:
        """Whether the box's first process runs."""
        return not _ended(self.pidfd, within_s=0.0)

    def end(self) -> None:
        """End every process of the box."""
        self.client.close()
        if not (self.patience_s and _ended(self.pidfd, within_s=self.patience_s)):
            with suppress(ProcessLookupError, PermissionError):
                signal.pidfd_send_signal(self.pidfd, signal.SIGKILL)
            _ended(self.pidfd, within_s=2.0)
        os.close(self.pidfd)


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
        self._measurements = Measurements()
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

    def open(self, spec: SandboxSpec) -> LocalBox:
        """A new box whose agent answers. Raises `SandboxLost`."""
        connection, pidfd = self.spawn(spec)
        # The first process of a pid namespace takes all others with it. Elsewhere the agent has to do that.
        patience_s = 0.0 if self.kind is SandboxKind.local else 2.0
        box = LocalBox(client=AgentClient(connection), pidfd=pidfd, patience_s=patience_s)
        try:
            box.client.request("ping", {}, wall_s=_SPAWN_S)
        except (DeadlineError, SandboxLost) as error:
            replace(box, patience_s=0.0).end()
            raise SandboxLost(str(error)) from None
        return box

    def enforced(self, spec: SandboxSpec) -> frozenset[str]:
        """The walls that hold, measured once in a scratch box."""
        return self._measurements.of(self, spec)

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


def _ended(pidfd: int, *, within_s: float) -> bool:
    """Whether the process ends in time. Not select(2), which fails in a process with many open files."""
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(within_s * 1000))

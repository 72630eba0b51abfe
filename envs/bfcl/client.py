"""Our side of `envs.bfcl.worker`: one process that forks, and a session for each episode."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from envs.base import SandboxLost

_PROGRAM = Path(__file__).with_name("worker.py")
_START_TIMEOUT_S = 60.0
_LINE_BYTES = 1 << 24
"""A file of the long contexts is a line of megabytes."""


class CallTimeoutError(Exception):
    """A function did not return; its process was ended, and with it the episode's objects."""


class Session:
    """The objects of one episode."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, timeout_s: float) -> None:
        self._reader = reader
        self._writer = writer
        self._timeout_s = timeout_s
        self._pid: int | None = None
        self.hung = False
        """Whether a request did not return in time; the objects are gone then."""

    async def open(self, request: Mapping[str, Any]) -> None:
        """Make the objects. Raises `SandboxLost`."""
        try:
            self._pid = int((await self.ask(request))["pid"])
        except CallTimeoutError as problem:
            raise SandboxLost(f"bfcl worker: no objects within {self._timeout_s:g} s") from problem

    async def ask(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """The reply to a request. Raises `CallTimeoutError`, or `SandboxLost` when the process has died."""
        if self.hung:
            raise CallTimeoutError("an earlier call did not return")
        try:
            self._writer.write(json.dumps(request).encode() + b"\n")
            await self._writer.drain()
            line = await asyncio.wait_for(self._reader.readline(), self._timeout_s)
        except TimeoutError:
            self.hung = True
            self.kill()
            raise CallTimeoutError(f"no result within {self._timeout_s:g} s") from None
        except (OSError, ValueError) as problem:
            raise SandboxLost(f"bfcl worker: the connection broke ({problem})") from problem
        if not line:
            raise SandboxLost("bfcl worker: the episode's process died")
        return cast("dict[str, Any]", json.loads(line))

    def kill(self) -> None:
        """End the process, whatever it is doing."""
        if self._pid is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._pid, signal.SIGKILL)
            self._pid = None

    def close(self) -> None:
        """End the episode. Idempotent."""
        self._writer.close()


class Worker:
    """The process that forks an episode's, made anew when it has died."""

    def __init__(self, *, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._folder = Path(tempfile.mkdtemp(prefix="rl-bfcl-"))
        self._process: subprocess.Popen[str] | None = None

    async def session(self) -> Session:
        """A connection whose process has no objects yet. Raises `SandboxLost`."""
        await asyncio.to_thread(self._ensure)
        try:
            reader, writer = await asyncio.open_unix_connection(str(self._socket), limit=_LINE_BYTES)
        except OSError as problem:
            raise SandboxLost(f"bfcl worker: cannot be reached ({problem})") from problem
        return Session(reader, writer, self._timeout_s)

    def close(self) -> None:
        """End it; episodes that are open are lost. Idempotent."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()
            for stream in (process.stdin, process.stdout):
                if stream is not None:
                    stream.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    @property
    def _socket(self) -> Path:
        return self._folder / "socket"

    def _ensure(self) -> None:
        if self._process is not None and self._process.poll() is None:
            return
        self._folder.mkdir(exist_ok=True)
        self._socket.unlink(missing_ok=True)
        self._process = subprocess.Popen(
            [sys.executable, "-I", str(_PROGRAM), str(self._socket)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=self._folder, env={},
        )  # fmt: skip
        if self._process.stdout is None or self._process.stdout.readline() != "ready\n":
            raise SandboxLost(f"bfcl worker: did not start, got exit code {self._process.wait(_START_TIMEOUT_S)}")

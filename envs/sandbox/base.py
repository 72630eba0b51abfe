"""The contract of a sandbox: a place where the policy's code runs and reaches nothing but itself.

What the code does to its own box (ends its worker, eats its memory, never returns, floods its output) is a status;
`SandboxLost` is raised only where infrastructure failed. Everything here blocks, always with a deadline: environments
call it through `asyncio.to_thread`.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from envs.base import EnvError


class SandboxUnavailable(EnvError):  # noqa: N818 (a state of this machine)
    """This machine cannot give the kind of sandbox that was asked for."""


class BoxFileError(OSError):
    """A file of a box that cannot be read or written, for a reason that lies in the box."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxSpec:
    """Limits of one box.

    `memory_mb` bounds each process's address space and the sum of the memory that all hold. `tmpfs_mb` and
    `num_inodes` bound each of the three folders that code may write to; what lies there is memory as well.
    """

    memory_mb: int = 512
    num_processes: int = 32
    tmpfs_mb: int = 64
    num_inodes: int = 16384
    file_mb: int = 64
    max_output_bytes: int = 65536

    def __post_init__(self) -> None:
        if self.memory_mb < 64:
            raise EnvError(f"env.sandbox_memory_mb: an interpreter needs 64 MiB, got {self.memory_mb}; raise it")
        for name in ("num_processes", "tmpfs_mb", "num_inodes", "file_mb", "max_output_bytes"):
            if getattr(self, name) < 4:
                raise EnvError(f"sandbox.{name}: must be at least 4, got {getattr(self, name)}; raise it")


class ExecStatus(StrEnum):
    """How a run of code in the persistent interpreter ended; an exit, even with code 0, is an error."""

    OK = "ok"
    ERROR = "error"
    TIMEOUT = "timeout"
    OOM = "oom"
    DIED = "died"


class CallStatus(StrEnum):
    """How loading or calling a function ended.

    `BAD_VALUE`: it returned something that may not cross. `PROTOCOL`: its process sent something that no request
    asked for.
    """

    RETURNED = "returned"
    RAISED = "raised"
    TIMEOUT = "timeout"
    OOM = "oom"
    DIED = "died"
    BAD_VALUE = "bad_value"
    PROTOCOL = "protocol"

    @property
    def worker_lost(self) -> bool:
        """Whether the process that held the function is gone or of no use."""
        return self in (CallStatus.TIMEOUT, CallStatus.DIED, CallStatus.PROTOCOL)


@dataclass(frozen=True, slots=True, kw_only=True)
class CodeResult:
    """A run of code. `stdout` holds both output streams: all of it, or when `truncated` its head and tail.

    `state_lost`: what earlier runs defined is gone, because the interpreter ended in or before this run.
    """

    status: ExecStatus
    stdout: bytes
    stdout_total_bytes: int
    truncated: bool
    seconds: float
    state_lost: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class CallOutcome:
    """A load or call. `value` is set when it returned (a load returns `None`), `error` is a line of text otherwise."""

    status: CallStatus
    value: object = None
    error: str = ""


class Sandbox(Protocol):
    """One box. Not for use by two threads at once."""

    @property
    def enforced(self) -> frozenset[str]:
        """The walls that were measured to hold on this machine (`envs.sandbox.enforcement.ALL`)."""
        ...

    @property
    def worn(self) -> bool:
        """Whether something happened to the box after which it should be replaced, not reset."""
        ...

    def run_code(self, source: str, timeout_s: float) -> CodeResult:
        """Run a cell in the persistent interpreter."""
        ...

    def load(self, source: str, entry_point: str, timeout_s: float) -> CallOutcome:
        """Run `source` in a fresh worker process (which ends the interpreter's) and keep its function `entry_point`."""
        ...

    def call(self, args: tuple[object, ...], timeout_s: float) -> CallOutcome:
        """Call the loaded function. Arguments and result are exact builtin types (`envs.sandbox.wire`)."""
        ...

    def settle(self, timeout_s: float) -> CallOutcome:
        """Make sure that the worker has nothing more to say; `PROTOCOL` when it has."""
        ...

    def put(self, path: str, data: bytes) -> None:
        """Write a file below the working folder. Raises `BoxFileError`."""
        ...

    def get(self, path: str, max_bytes: int = 1 << 20) -> bytes:
        """Read a plain file below the working folder. Raises `BoxFileError`."""
        ...

    def num_processes(self) -> int:
        """Processes in the box besides its agent; 1, the interpreter, after a reset."""
        ...

    def reset(self) -> None:
        """Kill everything in the box, empty its folders, start a fresh interpreter."""
        ...

    def close(self) -> None:
        """End every process of the box. Idempotent."""
        ...

    def alive(self) -> bool:
        """Whether the box still runs."""
        ...

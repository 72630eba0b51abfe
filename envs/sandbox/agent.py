"""The supervisor inside a sandbox: PID 1 of the box where there are namespaces, else the leader of its processes.

Standard library, `wire`, `worker`, `scratch` and `boxfiles` alone: those five files are all that runs in a box.

    host  <- frames over a socket ->  Agent  <- records over a socketpair ->  worker (runs the policy's code)

Invariants: the policy's code never holds the host's socket; a worker's reply counts only when it carries the random
id of the request in flight, and any other byte from the worker is a protocol violation; the agent never parses what a
worker sent, it only bounds it; what passes through it (sources, values, output, files) stays in memory that no later
worker inherits; no wait in here is without a deadline but the one for the host's next frame.
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import select
import signal
import socket
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final

from envs.sandbox import boxfiles
from envs.sandbox.scratch import Connection, Output, Scratch, View, send_all, send_some
from envs.sandbox.wire import FRAME, MAX_HEADER_BYTES, MAX_PAYLOAD_BYTES, MAX_VALUE_BYTES, pack_head
from envs.sandbox.worker import RECORD, Kind, Reply, serve_worker

_POLL_S: Final = 0.05
_PR_SET_PDEATHSIG: Final = 1
_PR_SET_DUMPABLE: Final = 4
_REPLY_STATUS: Final = {Reply.OK: "returned", Reply.RAISED: "raised", Reply.BAD_VALUE: "bad_value", Reply.OOM: "oom"}

_libc = ctypes.CDLL(None)


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentConfig:
    """What the agent needs to know of its box.

    `folders` are wiped by a reset; the first is the working folder. `owns_all`: `kill(-1)` reaches every process of
    the box and no other. `confine_worker` runs in each worker before any of the policy's code.
    """

    folders: tuple[str, ...]
    memory_bytes: int
    max_output_bytes: int
    owns_all: bool
    confine_worker: Callable[[], None] = lambda: None


@dataclass(slots=True, kw_only=True)
class _Worker:
    """A forked worker as the agent sees it. `used`: it has run code of the policy."""

    pid: int
    pidfd: int
    channel: socket.socket
    output: int
    used: bool = False

    def close(self) -> None:
        os.close(self.pidfd)
        os.close(self.output)
        self.channel.close()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Outcome:
    """How an exchange with the worker ended. `lost`: the worker is of no further use."""

    status: str
    payload: View = b""
    lost: bool = False


class Agent:
    """Serves one host over one socket until that socket closes."""

    def __init__(self, connection: socket.socket | Connection, config: AgentConfig) -> None:
        self._connection = connection
        self._config = config
        self._worker: _Worker | None = None
        self._state_at_risk = False
        self._request = Scratch(FRAME.size + MAX_HEADER_BYTES + MAX_PAYLOAD_BYTES)
        # One byte more than the longest reply, so that what follows it shows.
        self._reply = Scratch(RECORD.size + MAX_VALUE_BYTES + 1)
        self._output = Output(config.max_output_bytes)

    def serve(self) -> None:
        """Answer frames one at a time; return when the host is gone, with nothing else left in the box."""
        _open_streams()
        self._start_worker()
        while (frame := self._read_frame()) is not None:
            header, payload = frame
            answer, body = self._answer(header, payload)
            head = pack_head({**answer, "id": header["id"]}, sum(map(len, body)))
            send_all(self._connection, [head, *body])
        self._kill_others()

    def _read_frame(self) -> tuple[dict[str, Any], memoryview] | None:
        """The host's next frame, its payload as a view; `None` when the host is gone."""
        buffer, filled, due = self._request.view, 0, FRAME.size
        while filled < due:
            count = self._connection.recv_into(buffer[filled:due])
            if not count:
                return None
            filled += count
            if filled == due == FRAME.size:
                due += sum(FRAME.unpack_from(buffer))
        header_end = FRAME.size + FRAME.unpack_from(buffer)[0]
        return json.loads(bytes(buffer[FRAME.size : header_end])), buffer[header_end:due]

    def _answer(self, header: dict[str, Any], payload: memoryview) -> tuple[dict[str, object], list[View]]:
        _reap()
        op = header["op"]
        if op == "run":
            return self._run(header, payload)
        if op in ("load", "call", "settle"):
            return self._ask_function(op, header, payload)
        try:
            return self._manage(op, header, payload)
        except (OSError, ValueError) as error:
            return {"error": f"{type(error).__name__}: {error}"}, []

    def _manage(self, op: str, header: dict[str, Any], payload: memoryview) -> tuple[dict[str, object], list[View]]:
        folder = self._config.folders[0]
        if op == "put":
            boxfiles.put_file(folder, header["path"], payload)
        elif op == "get":
            buffer = self._request.view[: header["max_bytes"] + 1]
            return {}, [buffer[: boxfiles.get_file(folder, header["path"], buffer)]]
        elif op == "reset":
            return {"clean": self._reset()}, []
        elif op == "count":
            return {"count": len(descendants())}, []
        elif op != "ping":
            raise ValueError(f"agent: unknown operation, got {op!r}; update both sides")
        return {}, []

    # ---- running the policy's code

    def _run(self, header: dict[str, Any], source: memoryview) -> tuple[dict[str, object], list[View]]:
        fresh = self._worker is None
        worker = self._worker or self._start_worker()
        self._output.start(keep=True)
        start = time.monotonic()
        outcome = self._exchange(worker, header, Kind.RUN, source, grace_s=header["grace_s"])
        answer: dict[str, object] = {
            "status": outcome.status,
            "seconds": time.monotonic() - start,
            "total": self._output.total,
            "state_lost": outcome.lost or (fresh and self._state_at_risk),
        }
        self._state_at_risk = not outcome.lost
        return answer, self._output.parts()

    def _ask_function(
        self, op: str, header: dict[str, Any], payload: memoryview
    ) -> tuple[dict[str, object], list[View]]:
        if op == "load" and self._worker is not None and self._worker.used:
            self._discard_worker()
        worker = self._worker
        if worker is None:
            if op != "load":
                return {"status": "died"}, [b"no worker: it ended in an earlier request"]
            worker = self._start_worker()
        self._output.start(keep=False)
        outcome = self._exchange(worker, header, Kind[op.upper()], payload, grace_s=0.0)
        return {"status": outcome.status}, [outcome.payload]

    def _exchange(
        self, worker: _Worker, header: dict[str, Any], kind: Kind, payload: memoryview, *, grace_s: float
    ) -> _Outcome:
        request_id = bytes.fromhex(header["id"])
        record: list[View] = [RECORD.pack(request_id, kind, len(payload))]
        if payload:
            record.append(payload)
        exchange = _Exchange(worker, request_id, record, self._reply.view, self._output, self._memory_exceeded)
        outcome = exchange.finish(timeout_s=header["timeout_s"], interrupt_grace_s=grace_s)
        if outcome.lost:
            self._discard_worker()
        return outcome

    # ---- processes

    def _start_worker(self) -> _Worker:
        ours, theirs = socket.socketpair()
        output_read, output_write = os.pipe()
        pid = os.fork()
        if pid == 0:
            try:
                _become_worker(theirs, output_write, self._config)
            finally:
                os._exit(70)
        theirs.close()
        os.close(output_write)
        os.set_blocking(output_read, False)
        ours.setblocking(False)
        self._worker = _Worker(pid=pid, pidfd=os.pidfd_open(pid), channel=ours, output=output_read)
        return self._worker

    def _discard_worker(self) -> None:
        self._kill_others()
        if self._worker is not None:
            self._worker.close()
            self._worker = None

    def _reset(self) -> bool:
        self._discard_worker()
        clean = boxfiles.wipe(self._config.folders)
        self._state_at_risk = False
        # Forked now, it is ready by the time that the next request arrives.
        self._start_worker()
        return clean

    def _kill_others(self) -> None:
        """Kill and reap every other process of the box, daemons included."""
        if self._config.owns_all:
            with suppress(ProcessLookupError):
                os.kill(-1, signal.SIGKILL)
            with suppress(ChildProcessError):
                while True:
                    os.waitpid(-1, 0)
            return
        end_descendants(2.0)

    def _memory_exceeded(self) -> bool:
        """Whether the box holds more than it may. Shared pages count once: slow, so only when the quick sum is high."""
        limit = self._config.memory_bytes
        others = descendants()
        if sum(_resident_bytes(pid) for pid in others) <= limit:
            return False
        return sum(_proportional_bytes(pid) for pid in others) > limit


class _Exchange:
    """One request to the worker and the wait for its reply, with output drained all the while."""

    def __init__(
        self,
        worker: _Worker,
        request_id: bytes,
        record: list[View],
        reply: memoryview,
        output: Output,
        memory_exceeded: Callable[[], bool],
    ) -> None:
        self._worker = worker
        self._id = request_id
        self._outbox = record
        self._reply = reply
        self._filled = 0
        self._output = output
        self._output_open = True
        self._memory_exceeded = memory_exceeded

    def finish(self, *, timeout_s: float, interrupt_grace_s: float) -> _Outcome:
        """Send, wait, judge. With a grace, a timeout first interrupts the worker and may keep it."""
        if self._readable(self._worker.channel):
            return self._unasked()
        self._worker.used = True
        outcome = self._wait(timeout_s)
        if outcome is None and interrupt_grace_s:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._worker.pidfd, signal.SIGINT)
            outcome = self._wait(interrupt_grace_s)
            if outcome is not None and not outcome.lost:
                outcome = _Outcome(status="timeout")
        self._drain_output()
        return outcome or _Outcome(status="timeout", lost=True)

    def _wait(self, seconds: float) -> _Outcome | None:
        """Serve the worker until its reply or its end; `None` when the time is over."""
        now = time.monotonic()
        deadline, next_check = now + seconds, now + _POLL_S
        while now < deadline:
            ready = self._select(min(deadline, next_check) - now)
            if self._worker.output in ready:
                self._drain_output()
            if self._worker.channel in ready:
                outcome = self._receive()
                if outcome is not None:
                    return outcome
            elif self._worker.pidfd in ready:
                return _Outcome(status="died", payload=b"the worker process ended", lost=True)
            now = time.monotonic()
            if now >= next_check:
                next_check = now + _POLL_S
                if self._memory_exceeded():
                    return _Outcome(status="oom", payload=b"memory limit of the box", lost=True)
        return None

    def _select(self, seconds: float) -> list[Any]:
        worker = self._worker
        reads: list[Any] = [worker.channel, worker.pidfd]
        if self._output_open:
            reads.append(worker.output)
        ready, writable, _ = select.select(reads, [worker.channel] if self._outbox else [], [], max(seconds, 0.0))
        if writable:
            # A worker that is gone shows on the read side.
            with suppress(BlockingIOError, BrokenPipeError, ConnectionResetError):
                send_some(worker.channel, self._outbox)
        return ready

    def _receive(self) -> _Outcome | None:
        """Take in what the worker sent; an outcome once it is a whole reply, or can no longer become one."""
        try:
            count = self._worker.channel.recv_into(self._reply[self._filled :])
        except BlockingIOError:
            return None
        except ConnectionResetError:
            count = 0
        if not count:
            return _Outcome(status="died", payload=b"the worker process ended", lost=True)
        self._filled += count
        if self._filled < RECORD.size:
            return None
        request_id, reply, size = RECORD.unpack_from(self._reply)
        if request_id != self._id or reply not in _REPLY_STATUS or size > MAX_VALUE_BYTES or self._outbox:
            return _Outcome(status="protocol", payload=b"a reply that nothing asked for", lost=True)
        payload = self._reply[RECORD.size : self._filled]
        if len(payload) < size:
            return None
        if len(payload) > size:
            return _Outcome(status="protocol", payload=b"more than one reply to one request", lost=True)
        return _Outcome(status=_REPLY_STATUS[Reply(reply)], payload=payload)

    def _unasked(self) -> _Outcome:
        with suppress(OSError):
            if self._worker.channel.recv(1):
                return _Outcome(status="protocol", payload=b"a reply that nothing asked for", lost=True)
        return _Outcome(status="died", payload=b"the worker process ended before this request", lost=True)

    def _drain_output(self) -> None:
        """Read what is there. A writer faster than this loop is left to the next turn, so that deadlines hold."""
        for _ in range(64):
            try:
                count = self._output.read(self._worker.output)
            except BlockingIOError:
                return
            if not count:
                self._output_open = False
                return

    @staticmethod
    def _readable(channel: socket.socket) -> bool:
        return bool(select.select([channel], [], [], 0)[0])


def _become_worker(channel: socket.socket, output: int, config: AgentConfig) -> None:
    """In the forked child: let go of everything of the agent, take on the limits, serve."""
    os.setsid()
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    null = os.open("/dev/null", os.O_RDONLY)
    os.dup2(null, 0)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.dup2(channel.detach(), 3)
    os.closerange(4, 1 << 16)
    # The agent is not dumpable, so that nobody in the box can trace it; the worker's own /proc files need the reverse.
    set_dumpable(True)
    offer_to_oom_killer()
    resource.setrlimit(resource.RLIMIT_AS, (config.memory_bytes, config.memory_bytes))
    config.confine_worker()
    serve_worker(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM, 0, fileno=3))


def _open_streams() -> None:
    """Make the workers' standard streams: they name descriptors, so one making serves every fork."""
    sys.stdin = open(0, closefd=False)  # noqa: SIM115 (open for the life of the process)
    sys.stdout = open(1, "w", buffering=1, closefd=False, errors="backslashreplace")  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, closefd=False, errors="backslashreplace")  # noqa: SIM115


def offer_to_oom_killer() -> None:
    """When the machine runs out of memory, this process and what it starts go first."""
    with suppress(OSError):
        descriptor = os.open("/proc/self/oom_score_adj", os.O_WRONLY | os.O_CLOEXEC)
        os.write(descriptor, b"1000")
        os.close(descriptor)


def set_dumpable(dumpable: bool) -> None:
    """Whether processes of the same user may trace this one and read its memory (prctl(2))."""
    _libc.prctl(_PR_SET_DUMPABLE, int(dumpable), 0, 0, 0)


def _reap() -> None:
    """Collect ended children; orphans of the box become children of the agent."""
    with suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def descendants() -> list[int]:
    """All processes below this one. With orphans coming back to it (PID 1, subreaper), that is all it ever started."""
    found: list[int] = []
    waiting = [os.getpid()]
    while waiting:
        children = _children(waiting.pop())
        found += children
        waiting += children
    return found


def end_descendants(seconds: float) -> None:
    """Kill and collect everything below this process, within the time given.

    A process may fork while the list is read: stop all first, and look again until none is left.
    """
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and (found := descendants()):
        for number in (signal.SIGSTOP, signal.SIGKILL):
            for pid in found:
                with suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, number)
        _reap()


def _children(pid: int) -> list[int]:
    """Children of all threads of a process; none when it is gone or may not be looked at."""
    found: list[int] = []
    with suppress(OSError):
        for thread in os.listdir(f"/proc/{pid}/task"):
            with open(f"/proc/{pid}/task/{thread}/children") as file:
                found += [int(child) for child in file.read().split()]
    return found


def _resident_bytes(pid: int) -> int:
    try:
        with open(f"/proc/{pid}/statm") as file:
            return int(file.read().split()[1]) * resource.getpagesize()
    except (OSError, IndexError):
        return 0


def _proportional_bytes(pid: int) -> int:
    """The process's share of its pages; what it hides by being undumpable counts in full."""
    try:
        with open(f"/proc/{pid}/smaps_rollup") as file:
            for line in file:
                if line.startswith("Pss:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        pass
    return _resident_bytes(pid)

"""The worker: the process in a box that runs the policy's code. Nothing it says is trusted.

Standard library and `wire` alone. It serves four kinds of request over one socket, one at a time: run a cell of the
persistent interpreter, load a function, call that function, and settle (an empty request; its answer proves that no
earlier reply is still on its way).
"""

from __future__ import annotations

import ast
import json
import linecache
import os
import signal
import socket
import struct
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from enum import IntEnum
from types import ModuleType, TracebackType
from typing import Any, Final, cast

from envs.sandbox.wire import BadValueError, decode_value, encode_value

RECORD: Final = struct.Struct("!16sBI")
"""Head of a record between agent and worker: request id, kind of request or reply, length of what follows."""

MAX_ERROR_CHARS: Final = 400


class Kind(IntEnum):
    """What the agent asks of the worker."""

    RUN = 1
    LOAD = 2
    CALL = 3
    SETTLE = 4


class Reply(IntEnum):
    """How the worker answers."""

    OK = 1
    RAISED = 2
    BAD_VALUE = 3
    OOM = 4


def serve_worker(channel: socket.socket) -> None:
    """Answer requests until the agent goes away."""
    interpreter = _Interpreter()
    while True:
        head = _read(channel, RECORD.size)
        request_id, kind, size = RECORD.unpack(head)
        payload = _read(channel, size)
        reply, body = interpreter.answer(Kind(kind), payload)
        channel.sendall(RECORD.pack(request_id, reply, len(body)) + body)


def _read(channel: socket.socket, size: int) -> bytes:
    data = bytearray()
    while len(data) < size:
        chunk = channel.recv(size - len(data))
        if not chunk:
            os._exit(0)
        data += chunk
    return bytes(data)


class _Interpreter:
    """What the policy's code defines: the REPL's namespace, or one loaded function."""

    def __init__(self) -> None:
        self._main = ModuleType("__main__")
        self._function: Callable[..., object] | None = None
        self._num_cells = 0
        self._stderr = sys.stderr
        sys.modules["__main__"] = self._main

    def answer(self, kind: Kind, payload: bytes) -> tuple[Reply, bytes]:
        """Do one request. Whatever the policy's code raises, exits included, becomes a reply."""
        if kind is Kind.RUN:
            return self._run(payload.decode("utf-8", "surrogatepass"))
        try:
            if kind is Kind.LOAD:
                self._load(**json.loads(payload))
            elif kind is Kind.CALL:
                return Reply.OK, self._call(payload)
        except BadValueError as error:
            return Reply.BAD_VALUE, _message(error)
        except MemoryError:
            return Reply.OOM, b"MemoryError"
        except BaseException as error:  # noqa: BLE001 (the sandbox boundary: SystemExit is an answer as well)
            return Reply.RAISED, _message(error)
        return Reply.OK, b""

    def _load(self, source: str, entry_point: str) -> None:
        module = ModuleType("solution")
        sys.modules["solution"] = module
        exec(compile(source, "<solution>", "exec"), module.__dict__)
        function = module.__dict__.get(entry_point)
        if not callable(function):
            raise NameError(f"no function named {entry_point!r}")
        self._function = function

    def _call(self, payload: bytes) -> bytes:
        if self._function is None:
            raise NameError("no function is loaded")
        arguments = cast(tuple[Any, ...], decode_value(payload))
        return encode_value(self._function(*arguments))

    def _run(self, source: str) -> tuple[Reply, bytes]:
        """Run one cell; a SIGINT from the agent ends it with the namespace kept."""
        reply = Reply.OK
        try:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            self._run_cell(source)
        except MemoryError:
            reply = Reply.OOM
            self._print("MemoryError")
        except BaseException as error:  # noqa: BLE001 (the sandbox boundary: SystemExit is an answer as well)
            reply = Reply.RAISED
            self._print_traceback(error)
        # From here a late SIGINT must not cut a record in half.
        with suppress(KeyboardInterrupt, ValueError):
            signal.signal(signal.SIGINT, signal.SIG_IGN)
        for stream in (sys.stdout, sys.stderr):
            with suppress(BaseException):
                stream.flush()
        return reply, b""

    def _run_cell(self, source: str) -> None:
        """Execute statements; print the value of a last expression, as an interactive interpreter does."""
        self._num_cells += 1
        name = f"<cell {self._num_cells}>"
        linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
        body = ast.parse(source, name).body
        last = body.pop() if body and isinstance(body[-1], ast.Expr) else None
        namespace = self._main.__dict__
        exec(compile(ast.Module(body=body, type_ignores=[]), name, "exec"), namespace)
        if isinstance(last, ast.Expr):
            value = eval(compile(ast.Expression(last.value), name, "eval"), namespace)
            if value is not None:
                namespace["_"] = value
                sys.stdout.write(f"{value!r}\n")

    def _print_traceback(self, error: BaseException) -> None:
        with suppress(BaseException):
            own = error.__traceback__
            while own is not None and own.tb_frame.f_code.co_filename == __file__:
                own = own.tb_next
            traceback.print_exception(type(error), error, own, file=self._stderr)
            self._stderr.flush()

    def _print(self, text: str) -> None:
        with suppress(BaseException):
            self._stderr.write(f"{text}\n")


def _message(error: BaseException) -> bytes:
    """One line about an exception, whose class the policy may have written."""
    try:
        text = f"{type(error).__name__}: {error}"[:MAX_ERROR_CHARS]
        line = _solution_line(error.__traceback__)
        return (text if line is None else f"{text} (line {line})").encode("utf-8", "backslashreplace")
    except BaseException:  # noqa: BLE001 (the sandbox boundary: the policy's own __str__ may raise anything)
        return b"an exception that cannot be printed"


def _solution_line(tb: TracebackType | None) -> int | None:
    line = None
    while tb is not None:
        if tb.tb_frame.f_code.co_filename == "<solution>":
            line = tb.tb_lineno
        tb = tb.tb_next
    return line

"""The test's process: runs a task's own check code, whose candidate is answered by the host, one call at a time.

Standard library alone: the host sends this file's source into a box that no policy code enters. The check runs in a
thread that waits inside its candidate; `advance` hands it the answer to its last call and returns what it wants next.

    advance("start", preamble, check, entry_point)   the first message
    advance("returned", value)                       the candidate's answer
    advance("failed", error)                         it gave none
    -> ("call", args) | ("ended", checks passed, "" or why the check failed)
"""

from __future__ import annotations

import ast
import threading
from collections import Counter
from queue import SimpleQueue
from types import ModuleType
from typing import Any

MAX_ERROR_CHARS = 200


class CandidateError(Exception):
    """The candidate gave no value: it raised, or what it returned may not cross."""


def num_checks(check: str) -> int:
    """The checks that a text declares: its assert statements, but for those of a constant."""
    return sum(_is_check(node) for node in ast.walk(ast.parse(check)))


def _is_check(node: ast.AST) -> bool:
    return isinstance(node, ast.Assert) and not isinstance(node.test, ast.Constant)


class _CountPassed(ast.NodeTransformer):
    """Puts a note that it began before every check, and one that it passed after it."""

    def __init__(self) -> None:
        self._number = 0

    def visit_Assert(self, node: ast.Assert) -> list[ast.stmt]:
        if not _is_check(node):
            return [node]
        self._number += 1
        before, after = (ast.parse(f"{name}({self._number})").body for name in ("__began__", "__passed__"))
        return [ast.copy_location(statement, node) for statement in (*before, node, *after)]


class _Test:
    """One run of one check."""

    def __init__(self, preamble: str, check: str, entry_point: str) -> None:
        self._to_host: SimpleQueue[tuple[Any, ...]] = SimpleQueue()
        self._to_test: SimpleQueue[tuple[str, Any]] = SimpleQueue()
        self._began: list[int] = []
        self._passed: list[int] = []
        threading.Thread(target=self._run, args=(preamble, check, entry_point), daemon=True).start()

    def wanted(self) -> tuple[Any, ...]:
        return self._to_host.get()

    def answer(self, kind: str, value: Any) -> None:
        self._to_test.put((kind, value))

    def _candidate(self, *args: Any) -> Any:
        self._to_host.put(("call", args))
        kind, value = self._to_test.get()
        if kind != "returned":
            raise CandidateError(value)
        return value

    def _run(self, preamble: str, check: str, entry_point: str) -> None:
        failure = ""
        try:
            module = ModuleType("test")
            namespace = module.__dict__
            exec(compile(preamble, "<preamble>", "exec"), namespace)
            notes = {"__began__": self._began.append, "__passed__": self._passed.append}
            namespace |= {entry_point: self._candidate, **notes}
            tree = ast.fix_missing_locations(_CountPassed().visit(ast.parse(check)))
            exec(compile(tree, "<check>", "exec"), namespace)
            namespace["check"](self._candidate)
        except BaseException as error:  # noqa: BLE001 (whatever ends the check is its result)
            failure = f"{type(error).__name__}: {error}"[:MAX_ERROR_CHARS]
        # A check in a loop passes when it did so every time: a test may catch the failure of one round and go on.
        passed = Counter(self._passed)
        num_passed = sum(passed[number] == times for number, times in Counter(self._began).items())
        self._to_host.put(("ended", num_passed, failure))


_test: list[_Test] = []


def advance(kind: str, *values: Any) -> tuple[Any, ...]:
    """Start the check or answer its call; what it wants next."""
    if kind == "start":
        _test[:] = [_Test(*values)]
    else:
        _test[0].answer(kind, values[0])
    return _test[0].wanted()

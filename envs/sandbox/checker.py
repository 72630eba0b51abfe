"""The proxy grader for check code: a task's own `check(candidate)` judges a function that runs in another box.

    candidate's box  <- arguments, values ->  this process  <- the same ->  test's box (`envs.sandbox.tester`)

The policy's code and the test never share a process or a box, and only exact builtin types cross, so the test's `==`
is Python's own. Helpers of the task that the test calls (a `preamble`) are defined in the test's box from the data: the
policy's copies of them judge nothing. Every call has its own id on both wires. The number of checks is the number of
assert statements declared by the text, so ending early only loses.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Final, cast

from envs.base import EnvError
from envs.sandbox import tester as tester_program
from envs.sandbox.base import CallOutcome, CallStatus, Sandbox
from envs.sandbox.tester import num_checks
from envs.sandbox.wire import BadValueError
from rollout.types import Checks

_TESTER_SOURCE: Final = inspect.getsource(tester_program)


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckCode:
    """Check code of a task: `source` defines `check(candidate)`; it may use what `preamble` defines."""

    preamble: str
    source: str
    declared: int

    @classmethod
    def parse(cls, preamble: str, source: str) -> CheckCode:
        """Check code with its assert statements counted. Raises `EnvError` when it is no Python or has none."""
        try:
            declared = num_checks(source)
        except SyntaxError as problem:
            raise EnvError(f"task check: not Python, got {problem}; fix the task") from None
        if declared == 0:
            raise EnvError("task check: must assert something, got no assert statement; fix the task")
        return cls(preamble=preamble, source=source, declared=declared)

    def payload(self) -> dict[str, Any]:
        """The JSON form that a `Task` carries."""
        return asdict(self)

    @classmethod
    def of(cls, payload: Mapping[str, Any]) -> CheckCode:
        """The reverse of `payload`."""
        return cls(**payload)


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckReport:
    """The verdict of check code. `passed` counts up to the first failed check; `failure` says what it was.

    `load_error`: why there was no function. `ended_process`: the program ended its process.
    """

    checks: Checks
    failure: str = ""
    load_error: str = ""
    tampered: bool = False
    ended_process: bool = False


def run_check(
    candidate: Sandbox,
    tester: Sandbox,
    program: str,
    entry_point: str,
    check: CheckCode,
    *,
    call_timeout_s: float,
    total_timeout_s: float,
) -> CheckReport:
    """Judge `program` by `check`; the two boxes are clean ones.

    All of it together ends by `total_timeout_s`, whoever is slow. Once the test has seen a value of the policy's,
    whatever stops the test is charged to the policy. Raises `SandboxLost`, and `EnvError` for check code that stops
    before that.
    """
    deadline = time.monotonic() + total_timeout_s
    loaded = candidate.load(program, entry_point, min(call_timeout_s, total_timeout_s))
    if loaded.status is not CallStatus.RETURNED:
        return _failed(check, loaded, load_error=loaded.error or loaded.status.value)
    message: tuple[object, ...] = ("start", check.preamble, check.source, entry_point)
    wanted = tester.load(_TESTER_SOURCE, "advance", total_timeout_s)
    num_answers = 0
    while wanted.status is CallStatus.RETURNED:
        left = deadline - time.monotonic()
        if left <= 0:
            return _failed(check, CallOutcome(status=CallStatus.TIMEOUT), "the time for all calls together is over")
        try:
            wanted = tester.call(message, left)
        except BadValueError as problem:
            return _failed(check, CallOutcome(status=CallStatus.BAD_VALUE), str(problem))
        if wanted.status is not CallStatus.RETURNED:
            break
        kind, *rest = cast(tuple[Any, ...], wanted.value)
        if kind == "ended":
            if num_answers == 0:
                raise _uncalled(entry_point, rest[1] or "no call")
            return _ended(candidate, check, rest[0], rest[1], call_timeout_s)
        answer = _call(candidate, rest[0], min(call_timeout_s, deadline - time.monotonic()))
        if answer.status.worker_lost:
            return _failed(check, answer, answer.error or answer.status.value)
        num_answers += 1
        returned = answer.status is CallStatus.RETURNED
        message = ("returned", answer.value) if returned else ("failed", answer.error or answer.status.value)
    if num_answers == 0:
        raise _uncalled(entry_point, f"{wanted.status.value} {wanted.error}")
    return _failed(check, CallOutcome(status=wanted.status), f"the test stopped ({wanted.status.value})", test=True)


def _uncalled(entry_point: str, got: str) -> EnvError:
    return EnvError(f"task check: stopped before it called {entry_point!r}, got {got}; fix the task")


def _call(candidate: Sandbox, args: tuple[object, ...], timeout_s: float) -> CallOutcome:
    if timeout_s <= 0:
        return CallOutcome(status=CallStatus.TIMEOUT, error="the time for all calls together is over")
    return candidate.call(args, timeout_s)


def _ended(candidate: Sandbox, check: CheckCode, passed: int, failure: str, timeout_s: float) -> CheckReport:
    """The test came to its end: make sure that the candidate has nothing more to say, then count."""
    settled = candidate.settle(timeout_s)
    if settled.status.worker_lost:
        return _failed(check, settled, settled.error or settled.status.value)
    if failure:
        passed = min(passed, check.declared - 1)
    return CheckReport(checks=Checks(passed=passed, declared=check.declared), failure=failure)


def _failed(
    check: CheckCode, outcome: CallOutcome, failure: str = "", *, load_error: str = "", test: bool = False
) -> CheckReport:
    """No check passes. `test`: the outcome is the test's, not the candidate's."""
    return CheckReport(
        checks=Checks(passed=0, declared=check.declared),
        failure=failure or load_error,
        load_error=load_error,
        tampered=not test and outcome.status is CallStatus.PROTOCOL,
        ended_process=not test and outcome.status in (CallStatus.DIED, CallStatus.PROTOCOL),
    )

"""The proxy grader: the policy's function answers from its box, one call at a time, and is judged out here.

Expected values never enter the box, so there is nothing in it to find. Only exact builtin types come out, so there is
no `__eq__` to override and nothing to unpickle. A reply counts only for the request whose random id it carries; any
other reply is tampering. What the code prints is never read. The number of checks is the number declared, so ending
early only loses.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence, Sized
from dataclasses import dataclass
from typing import Final, cast

from envs.base import EnvError
from envs.sandbox.base import CallOutcome, CallStatus, Sandbox
from envs.sandbox.wire import BadValueError
from rollout.types import Checks

DEFAULT_TOTAL_CALLS: Final = 4.0
"""Without a total of its own, all calls of a function together may take this many times the limit of one call."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FunctionReport:
    """What a function answered, one outcome an input whatever happened. `load_error`: why there was no function."""

    outcomes: tuple[CallOutcome, ...]
    tampered: bool = False
    load_error: str = ""


def call_function(
    box: Sandbox,
    source: str,
    entry_point: str,
    inputs: Sequence[tuple[object, ...]],
    call_timeout_s: float,
    total_timeout_s: float | None = None,
) -> FunctionReport:
    """Load `source` in a fresh process of `box` and call its function on every input.

    A raised exception costs its own call only. After a timeout or a death the rest is not run: each remaining input
    gets the same status. Raises `SandboxLost`, and `EnvError` for an input that cannot cross.
    """
    total = DEFAULT_TOTAL_CALLS * call_timeout_s if total_timeout_s is None else total_timeout_s
    deadline = time.monotonic() + total
    loaded = box.load(source, entry_point, min(call_timeout_s, total))
    if loaded.status is not CallStatus.RETURNED:
        unrun = CallOutcome(status=loaded.status, error=f"not loaded: {loaded.error or loaded.status.value}")
        return FunctionReport(
            outcomes=(unrun,) * len(inputs),
            tampered=loaded.status is CallStatus.PROTOCOL,
            load_error=loaded.error or loaded.status.value,
        )
    outcomes: list[CallOutcome] = []
    for args in inputs:
        outcomes.append(_call(box, args, min(call_timeout_s, deadline - time.monotonic())))
        if outcomes[-1].status.worker_lost:
            break
    last = outcomes[-1].status if outcomes else CallStatus.RETURNED
    if not last.worker_lost:
        # A second reply to the last call has no next call to collide with: ask once more.
        last = box.settle(call_timeout_s).status
    unrun = CallOutcome(status=last, error="not run: the function's process was lost in an earlier call")
    outcomes += [unrun] * (len(inputs) - len(outcomes))
    return FunctionReport(outcomes=tuple(outcomes), tampered=last is CallStatus.PROTOCOL)


def _call(box: Sandbox, args: tuple[object, ...], timeout_s: float) -> CallOutcome:
    if timeout_s <= 0:
        return CallOutcome(status=CallStatus.TIMEOUT, error="the time for all calls together is over")
    try:
        return box.call(args, timeout_s)
    except BadValueError as error:
        raise EnvError(f"task input: cannot enter a box, got {args!r:.200} ({error}); use builtin types") from None


def checks(report: FunctionReport, expected: Sequence[object], rel_tolerance: float = 0.0) -> Checks:
    """Checks passed of those declared, one an expected value; none passes when the function tampered."""
    if len(report.outcomes) != len(expected):
        raise EnvError(
            f"task checks: one expected value an input, got {len(expected)} for {len(report.outcomes)}; fix the task"
        )
    passed = sum(
        outcome.status is CallStatus.RETURNED and same_value(outcome.value, due, rel_tolerance)
        for outcome, due in zip(report.outcomes, expected, strict=True)
    )
    return Checks(passed=0 if report.tampered else passed, declared=len(expected))


def same_value(actual: object, expected: object, rel_tolerance: float = 0.0) -> bool:
    """Equal, and of exactly the same builtin types all the way down: 1, 1.0 and True are three values.

    With a `rel_tolerance`, floats in lists, tuples and values of dicts may differ by that share of the larger one
    (and by as much of 1, since sums that cancel have no scale of their own).

    NaN is the same as NaN, since a task that expects it has no other way to say so; 0.0 is the same as -0.0. The order
    of dict items does not count. Raises `EnvError` when `expected` holds anything but exact builtin types.
    """
    try:
        due = _fingerprint(expected)
    except TypeError as error:
        raise EnvError(f"task check: an expected value that no answer can match, got {error}; fix the task") from None
    if type(actual) is not type(expected):
        return False
    if isinstance(actual, Sized) and len(actual) != len(cast(Sized, expected)):
        return False  # before anything is hashed: an answer may hold keys that collide on purpose
    if rel_tolerance:
        return _close(actual, expected, rel_tolerance)
    try:
        return _fingerprint(actual) == due
    except TypeError:
        return False


def _close(actual: object, expected: object, rel_tolerance: float) -> bool:
    """`same_value` where floats need not be equal to the last bit. What `expected` holds is known to be builtin."""
    kind = type(expected)
    if type(actual) is not kind:
        return False
    if kind is float:
        one, other = cast(float, actual), cast(float, expected)
        return math.isclose(one, other, rel_tol=rel_tolerance, abs_tol=rel_tolerance) or (one != one and other != other)
    if kind in (list, tuple):
        ones, others = cast(list[object], actual), cast(list[object], expected)
        return len(ones) == len(others) and all(
            _close(one, other, rel_tolerance) for one, other in zip(ones, others, strict=True)
        )
    if kind is dict:
        table, due = cast(dict[object, object], actual), cast(dict[object, object], expected)
        return same_value(set(table), set(due)) and all(_close(table[key], due[key], rel_tolerance) for key in due)
    return same_value(actual, expected)


def _fingerprint(value: object) -> tuple[object, ...]:
    """A hashable stand-in that is equal exactly when two values are the same."""
    kind = type(value)
    if value is None or kind in (bool, int, str):
        return (kind, value)
    if kind is float:
        number = cast(float, value)
        return (float, number if number == number else "nan")
    if kind is complex:
        number = cast(complex, value)
        return (complex, _fingerprint(number.real), _fingerprint(number.imag))
    if kind in (list, tuple):
        return (kind, *(_fingerprint(item) for item in cast(list[object], value)))
    if kind in (set, frozenset):
        return (kind, frozenset(_fingerprint(item) for item in cast(set[object], value)))
    if kind is dict:
        pairs = cast(dict[object, object], value).items()
        return (dict, frozenset((_fingerprint(key), _fingerprint(item)) for key, item in pairs))
    raise TypeError(f"{kind.__name__}")

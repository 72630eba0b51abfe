import math
from collections import OrderedDict

import pytest

from envs.base import EnvError
from envs.sandbox.base import CallOutcome, CallStatus
from envs.sandbox.grader import FunctionReport, call_function, checks, same_value
from envs.sandbox.wire import BadValueError


@pytest.mark.parametrize(
    ("actual", "expected"),
    [
        (1, 1),
        (math.nan, math.nan),
        ([math.nan], [math.nan]),
        ({math.nan}, {math.nan}),
        (complex(math.nan, 1), complex(math.nan, 1)),
        (0.0, -0.0),
        ({"a": [1], "b": (2,)}, {"b": (2,), "a": [1]}),
        ({frozenset({1}), (1, 2)}, {(1, 2), frozenset({1})}),
        (None, None),
    ],
)
def test_same(actual, expected):
    assert same_value(actual, expected)


@pytest.mark.parametrize(
    ("actual", "expected"),
    [
        (True, 1),
        (1.0, 1),
        (1, 1 + 0j),
        ([1], (1,)),
        ({1}, frozenset({1})),
        ({1}, {True}),
        ({1: 0}, {1.0: 0}),
        ({"a": 1}, {"a": True}),
        ([1, [2, [True]]], [1, [2, [1]]]),
        (0.9999, 1),
        (math.nan, 0.0),
        ("nan", math.nan),
        (math.nan, "nan"),
        ("1", 1),
        (None, 0),
        ([], None),
        (OrderedDict(a=1), {"a": 1}),
    ],
)
def test_not_same(actual, expected):
    assert not same_value(actual, expected)


def test_an_expected_value_that_nothing_can_match_is_an_error_of_the_task():
    with pytest.raises(EnvError, match="task check"):
        same_value(1, object())


class _ScriptedBox:
    """Answers calls with outcomes given in advance."""

    def __init__(self, *outcomes, load=CallStatus.RETURNED, settle=CallStatus.RETURNED):
        self._outcomes = list(outcomes)
        self._load, self._settle = load, settle
        self.timeouts = []

    def load(self, source, entry_point, timeout_s):
        return CallOutcome(status=self._load, error="" if self._load is CallStatus.RETURNED else "why")

    def call(self, args, timeout_s):
        self.timeouts.append(timeout_s)
        outcome = self._outcomes.pop(0)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    def settle(self, timeout_s):
        return CallOutcome(status=self._settle)


def _returned(value):
    return CallOutcome(status=CallStatus.RETURNED, value=value)


INPUTS = [(0,), (1,), (2,)]


def test_every_check_counts():
    box = _ScriptedBox(_returned(0), CallOutcome(status=CallStatus.RAISED, error="x"), _returned(2))
    report = call_function(box, "", "f", INPUTS, 1.0)
    assert not report.tampered
    assert checks(report, [0, 1, 2]).passed == 2
    assert checks(report, [0, 1, 2]).declared == 3


@pytest.mark.parametrize("status", [CallStatus.TIMEOUT, CallStatus.DIED, CallStatus.PROTOCOL])
def test_a_lost_worker_ends_the_calls_but_not_the_count(status):
    box = _ScriptedBox(_returned(0), CallOutcome(status=status))
    report = call_function(box, "", "f", INPUTS, 1.0)
    assert [outcome.status for outcome in report.outcomes] == [CallStatus.RETURNED, status, status]
    assert report.tampered is (status is CallStatus.PROTOCOL)
    assert checks(report, [0, 1, 2]).declared == 3
    assert checks(report, [0, 1, 2]).passed == (0 if report.tampered else 1)


def test_a_reply_after_the_last_call_is_tampering():
    report = call_function(_ScriptedBox(*map(_returned, range(3)), settle=CallStatus.PROTOCOL), "", "f", INPUTS, 1.0)
    assert report.tampered
    assert checks(report, [0, 1, 2]).passed == 0


@pytest.mark.parametrize("status", [status for status in CallStatus if status is not CallStatus.RETURNED])
def test_a_function_that_does_not_load_fails_every_check(status):
    report = call_function(_ScriptedBox(load=status), "", "f", INPUTS, 1.0)
    assert report.load_error == "why"
    assert checks(report, [0, 1, 2]).passed == 0
    assert checks(report, [0, 1, 2]).declared == 3
    assert report.tampered is (status is CallStatus.PROTOCOL)


def test_the_calls_of_one_function_share_a_limit():
    box = _ScriptedBox(*map(_returned, range(3)))
    report = call_function(box, "", "f", INPUTS, 1.0, total_timeout_s=0.0)
    assert {outcome.status for outcome in report.outcomes} == {CallStatus.TIMEOUT}
    box = _ScriptedBox(*map(_returned, range(3)))
    call_function(box, "", "f", INPUTS, 1.0, total_timeout_s=0.5)
    assert max(box.timeouts) <= 0.5


def test_an_input_that_cannot_enter_is_an_error_of_the_task():
    with pytest.raises(EnvError, match="task input"):
        call_function(_ScriptedBox(BadValueError("no")), "", "f", INPUTS, 1.0)


def test_expected_values_and_inputs_go_together():
    with pytest.raises(EnvError, match="task checks"):
        checks(FunctionReport(outcomes=(_returned(1),)), [1, 2])


def test_an_answer_of_another_size_is_refused_before_its_colliding_keys_are_hashed():
    hashed = []

    class Item(int):
        def __hash__(self):
            hashed.append(self)
            return 0

    assert not same_value({1: Item(1), 2: Item(2)}, {1: 1})
    assert not same_value([Item(1)], {1})
    assert not hashed


@pytest.mark.parametrize(
    ("actual", "expected", "same"),
    [
        (0.1 + 0.2, 0.3, True),
        (1 + 2e-9, 1.0, False),
        (1e-10, 0.0, True),
        (1e20 + 2**35, 1e20, True),
        (1e20 * (1 + 1e-8), 1e20, False),
        (math.nan, math.nan, True),
        (math.nan, 1.0, False),
        (math.inf, math.inf, True),
        (math.inf, 1e308, False),
        (1, 1.0, False),
        (True, 1, False),
        (2, 3, False),
        ([0.1 + 0.2, "a"], [0.3, "a"], True),
        ([0.3], (0.3,), False),
        ([0.3], [0.3, 0.3], False),
        ({"a": [0.1 + 0.2]}, {"a": [0.3]}, True),
        ({"a": 0.3}, {"b": 0.3}, False),
        ({1: 0.3}, {True: 0.3}, False),
        ({0.1 + 0.2}, {0.3}, False),
        ({"b": 1, "a": 2}, {"a": 2, "b": 1}, True),
    ],
)
def test_floats_may_be_close_where_a_tolerance_says_so(actual, expected, same):
    assert same_value(actual, expected, 1e-9) is same
    if not same:
        assert not same_value(actual, expected)

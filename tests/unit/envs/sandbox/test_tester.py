"""The test's side of check code, driven here by hand as the host drives it in a box."""

import pytest

from envs.sandbox.tester import advance, num_checks

CHECK = """
def check(candidate):
    assert candidate(1) == 2
    assert True
    for x in (3, 4):
        assert candidate(x, base=0) if x < 0 else candidate(x) == double(x)
"""
DOUBLE = "def double(x):\n    return 2 * x\n"


def _run(check, answer, preamble=DOUBLE):
    calls, wanted = [], advance("start", preamble, check, "f")
    while wanted[0] == "call":
        calls.append(wanted[1])
        wanted = advance(*answer(*wanted[1]))
    return calls, wanted


def test_checks_are_the_assert_statements_of_something():
    assert num_checks(CHECK) == 2


def test_a_right_candidate_passes_every_check():
    calls, ended = _run(CHECK, lambda x: ("returned", 2 * x))
    assert (calls, ended) == ([(1,), (3,), (4,)], ("ended", 2, ""))


def test_a_wrong_value_ends_the_check():
    calls, ended = _run(CHECK, lambda x: ("returned", 2))
    assert (calls, ended) == ([(1,), (3,)], ("ended", 1, "AssertionError: "))


def test_a_candidate_that_gave_nothing_raises_in_the_test():
    assert _run(CHECK, lambda x: ("failed", "ValueError: x"))[1] == ("ended", 0, "CandidateError: ValueError: x")
    catching = (
        "def check(candidate):\n    try:\n        candidate(0)\n    except Exception:\n        pass\n    assert 1 < 2"
    )
    assert _run(catching, lambda x: ("failed", "why"))[1] == ("ended", 1, "")


def test_the_test_may_call_the_function_by_its_name():
    assert _run("def check(candidate):\n    assert f(5) == 10", lambda x: ("returned", 10))[1] == ("ended", 1, "")


@pytest.mark.parametrize("check", ["def check(candidate):\n    exit(0)\n    assert candidate(1)", "x = 1"])
def test_a_check_that_exits_or_is_missing_is_a_failure(check):
    assert _run(check, lambda x: ("returned", 0))[1][2].split(":")[0] in ("SystemExit", "KeyError", "NameError")


def test_a_check_in_a_loop_passes_when_it_does_so_in_every_round():
    swallowing = (
        "def check(candidate):\n    for x in range(3):\n        try:\n            assert candidate(x) == x\n"
        "        except AssertionError:\n            pass\n"
    )
    assert _run(swallowing, lambda x: ("returned", x))[1] == ("ended", 1, "")
    assert _run(swallowing, lambda x: ("returned", 0))[1] == ("ended", 0, "")

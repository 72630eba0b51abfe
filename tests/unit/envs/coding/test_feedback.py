import pytest

from envs.coding import feedback


def test_a_wrong_value():
    line = feedback.wrong_value("f", ([1, 2],), got=[2], want=[3])
    assert line == "f([1, 2]) gave [2], want [3]"
    assert feedback.wrong_value("g", (1, "a"), got=True, want=None) == "g(1, 'a') gave True, want None"


def test_an_error():
    assert feedback.error("NameError: name 'y' is not defined") == "error NameError: name 'y' is not defined"


@pytest.mark.parametrize("text", ["a\nb\n" * 100, "x" * 10_000, "\r\v\f\u2028" * 50 + "end"])
def test_text_of_the_program_adds_no_lines_and_has_a_bound(text):
    for line in (feedback.error(text), feedback.wrong_value("f", (1,), got=text, want=text)):
        assert len(line.splitlines()) == 1
        assert len(line) <= feedback.MAX_CHARS


def test_a_value_that_python_cannot_write():
    assert feedback.wrong_value("f", (1,), got=10**5000, want=2) == "f(1) gave ?, want 2"

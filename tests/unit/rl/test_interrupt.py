import os
import signal

import pytest

from rl.interrupt import graceful_interrupt

NUMBERS = (signal.SIGINT, signal.SIGTERM)


def handlers() -> list[object]:
    return [signal.getsignal(number) for number in NUMBERS]


def send(number: signal.Signals) -> None:
    os.kill(os.getpid(), number)


@pytest.mark.parametrize("number", NUMBERS)
def test_the_first_signal_is_only_noted(number: signal.Signals):
    noted: list[str] = []
    with graceful_interrupt(lambda: noted.append("stopping")) as requested:
        assert not requested()
        send(number)
        assert requested()
        assert noted == ["stopping"]


@pytest.mark.parametrize(("first", "second"), [(NUMBERS[0], NUMBERS[0]), (NUMBERS[1], NUMBERS[0]), NUMBERS])
def test_the_second_signal_ends_the_run_at_once(first: signal.Signals, second: signal.Signals):
    before = handlers()
    noted: list[str] = []

    def interrupted_twice() -> None:
        with graceful_interrupt(lambda: noted.append("stopping")):
            send(first)
            send(second)

    with pytest.raises(KeyboardInterrupt):
        interrupted_twice()
    assert noted == ["stopping"]
    assert handlers() == before


def test_the_handlers_of_before_are_back_after_the_block_and_after_an_exception():
    before = handlers()
    with graceful_interrupt(lambda: None):
        assert all(now is not then for now, then in zip(handlers(), before, strict=True))
    assert handlers() == before
    with pytest.raises(ValueError, match="round"), graceful_interrupt(lambda: None):
        raise ValueError("round")
    assert handlers() == before


def test_each_block_starts_without_a_request():
    with graceful_interrupt(lambda: None) as first:
        send(signal.SIGINT)
    with graceful_interrupt(lambda: None) as second:
        assert first()
        assert not second()

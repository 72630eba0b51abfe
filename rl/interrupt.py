"""Ctrl-C: the first one lets the round finish and be saved, the second ends the run at once."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def graceful_interrupt(on_request: Callable[[], None]) -> Iterator[Callable[[], bool]]:
    """Within the block, a first SIGINT or SIGTERM is only noted (and `on_request` called); yields the question."""
    requested = False

    def note(number: int, frame: FrameType | None) -> None:
        nonlocal requested
        if requested:
            raise KeyboardInterrupt
        requested = True
        on_request()

    before = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield lambda: requested
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)

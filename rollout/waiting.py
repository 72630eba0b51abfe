"""Waiting for several remote calls at once, with a deadline: a failure is seen when it happens."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any

import ray


class StillWaitingError(TimeoutError):
    """The deadline passed; `pending` are the numbers of the calls without an answer."""

    def __init__(self, pending: Sequence[int]):
        super().__init__(f"no answer of calls {list(pending)}")
        self.pending = tuple(pending)


def as_they_finish(references: Sequence[Any], deadline_s: float) -> Iterator[tuple[int, Any]]:
    """The number and the reference of each call, in the order in which they finish or fail.

    Raises:
        StillWaitingError: `deadline_s` after the first look, some have done neither.
    """
    number_of = {reference: number for number, reference in enumerate(references)}
    waiting, until_s = list(references), time.monotonic() + deadline_s
    while waiting:
        ready, waiting = ray.wait(waiting, num_returns=1, timeout=max(until_s - time.monotonic(), 0.0))
        if not ready:
            raise StillWaitingError([number_of[reference] for reference in waiting])
        yield number_of[ready[0]], ready[0]

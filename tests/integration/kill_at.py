"""rl.train, killing itself (SIGKILL) in a stage: `python -m tests.integration.kill_at STAGE NUMBER -- <overrides>`.

The kill comes from inside the driver, in the middle of the stage: its remote calls were sent and are not done. The
stage `rank` kills a learner rank in the middle of an update instead, and the driver lives on.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable
from typing import Any


def die(*_: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def die_during(owner: Any, method: str, number: int, after_s: float) -> None:
    """Kill this process `after_s` into call `number` (from 1) of the method."""
    original: Callable[..., Any] = getattr(owner, method)
    calls = 0

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == number:
            threading.Timer(after_s, die).start()
        return original(*args, **kwargs)

    setattr(owner, method, wrapped)


def kill_rank(number: int, after_s: float) -> None:
    """Kill the last rank of the learner `after_s` into update `number` (from 1) of the process."""
    from rl.learner.group import LearnerGroup

    original = LearnerGroup.update
    calls = 0

    def wrapped(self: LearnerGroup, *args: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == number:
            threading.Timer(after_s, os.kill, (self.pids[-1], signal.SIGKILL)).start()
        return original(self, *args)

    LearnerGroup.update = wrapped


def die_after(owner: Any, method: str, number: int) -> None:
    """Kill this process right after call `number` of the method."""
    original: Callable[..., Any] = getattr(owner, method)
    calls = 0

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        result = original(*args, **kwargs)
        if calls == number:
            die()
        return result

    setattr(owner, method, wrapped)


def arm(stage: str, number: int) -> None:
    import rl.publish
    import rl.rollouts
    import rl.warm_start
    from rl.learner.group import LearnerGroup
    from rollout.pool import RolloutPool

    if stage == "warm_start":
        die_during(LearnerGroup, "fit", number, after_s=0.02)
    elif stage == "demonstrations":
        die_during(RolloutPool, "demonstrate", number, after_s=0.2)
    elif stage == "rollout":
        die_during(rl.rollouts.Rollouts, "collect", number, after_s=0.1)
    elif stage == "update":
        die_during(LearnerGroup, "update", number, after_s=0.02)
    elif stage == "rank":
        kill_rank(number, after_s=0.02)
    elif stage == "publish":
        die_during(RolloutPool, "publish", number, after_s=0.005)
    elif stage == "checkpoint":
        die_after(LearnerGroup, "save", number)
    else:
        raise SystemExit(f"no such stage: {stage}")


if __name__ == "__main__":
    kill_stage, kill_number = sys.argv[1], int(sys.argv[2])
    sys.argv = ["rl.train", *sys.argv[4:]]
    import rl.train

    arm(kill_stage, kill_number)
    raise SystemExit(rl.train.main())

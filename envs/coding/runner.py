"""Where a policy's program runs: the one place that ties this environment to the sandbox."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Sequence
from typing import Any, Final, Protocol, cast

from envs.base import EnvError, SandboxLost
from envs.coding import reference as reference_program
from envs.coding.examples import Example, Reference
from envs.config import EnvConfig
from envs.sandbox.base import CallStatus, SandboxSpec
from envs.sandbox.checker import CheckCode, CheckReport, run_check
from envs.sandbox.grader import DEFAULT_TOTAL_CALLS, FunctionReport, call_function
from envs.sandbox.pool import SandboxPool
from rollout.types import Json

_REFERENCE_SOURCE: Final = inspect.getsource(reference_program)


class CodeRunner(Protocol):
    """Calls a function of a program that nobody trusts. Blocking, with a deadline for each call."""

    def call(self, source: str, entry_point: str, inputs: Sequence[tuple[Json, ...]], *, fresh: bool) -> FunctionReport:
        """The outcome of each input. `fresh`: in a box where nothing ran before. Raises `SandboxLost`."""
        ...

    def check(self, program: str, entry_point: str, check: CheckCode, *, fresh: bool) -> CheckReport:
        """The verdict of a task's check code, which runs in another box. Raises `SandboxLost`."""
        ...

    def examples(self, reference: Reference, entry_point: str) -> tuple[Example, ...]:
        """The examples that a task's own code makes, the same every time. Raises `SandboxLost` and `EnvError`."""
        ...

    def close(self) -> None:
        """Give the boxes back. Idempotent."""
        ...


class SandboxRunner:
    """Runs programs in a pool of sandboxes."""

    def __init__(self, config: EnvConfig) -> None:
        self._config = config
        self._call_timeout_s = config.call_timeout_s
        self._pool = self._new_pool()
        self._lock = threading.Lock()
        self._testers: SandboxPool | None = None
        self._closed = False

    def call(self, source: str, entry_point: str, inputs: Sequence[tuple[Json, ...]], *, fresh: bool) -> FunctionReport:
        """Take a box for this one program."""
        with self._pool.acquire(fresh=fresh) as box:
            return call_function(box, source, entry_point, inputs, self._call_timeout_s)

    def check(self, program: str, entry_point: str, check: CheckCode, *, fresh: bool) -> CheckReport:
        """Take a box for the program and one for the test."""
        # Always the program's first, and from pools of their own: nobody who holds the one waits for the other in a
        # circle.
        with self._pool.acquire(fresh=fresh) as candidate, self._tester_pool().acquire() as tester:
            return run_check(
                candidate,
                tester,
                program,
                entry_point,
                check,
                call_timeout_s=self._call_timeout_s,
                total_timeout_s=DEFAULT_TOTAL_CALLS * self._call_timeout_s,
            )

    def examples(self, reference: Reference, entry_point: str) -> tuple[Example, ...]:
        """Run the reference in a box that no answer is in."""
        count = reference.num_visible + reference.num_hidden
        found, _ = self.make_examples(reference.source, reference.generator, entry_point, reference.seed, count)
        if len(found) < count:
            raise EnvError(
                f"task reference: gave too few examples, got {len(found)} of {count} with seed {reference.seed}; lower "
                "env.num_hidden_checks, or drop the task"
            )
        return found

    def make_examples(
        self, source: str, generator: str, entry_point: str, seed: int, count: int
    ) -> tuple[tuple[Example, ...], int]:
        """Up to `count` examples of any reference code, and how many inputs it had no usable answer to."""
        timeout_s = DEFAULT_TOTAL_CALLS * self._call_timeout_s
        with self._pool.acquire() as box:
            outcome = box.load(_REFERENCE_SOURCE, reference_program.make_examples.__name__, timeout_s)
            if outcome.status is CallStatus.RETURNED:
                outcome = box.call((source, generator, entry_point, seed, count), timeout_s)
        if outcome.status is not CallStatus.RETURNED:
            raise EnvError(f"task reference: failed, got {outcome.status.value} {outcome.error}; drop the task")
        pairs, num_unusable = cast(tuple[list[tuple[list[Any], Any]], int], outcome.value)
        return tuple(Example(args=tuple(args), expected=value) for args, value in pairs), num_unusable

    def close(self) -> None:
        """End all boxes."""
        with self._lock:
            self._closed = True
            testers, self._testers = self._testers, None
        self._pool.close()
        if testers is not None:
            testers.close()

    def _new_pool(self) -> SandboxPool:
        spec = SandboxSpec(memory_mb=self._config.sandbox_memory_mb)
        return SandboxPool(self._config.sandbox, spec, size=self._config.sandboxes_per_worker)

    def _tester_pool(self) -> SandboxPool:
        """Boxes for check code, started when a task has some."""
        with self._lock:
            if self._testers is None:
                if self._closed:
                    raise SandboxLost("sandbox pool: closed, got a request for a box; make a new pool")
                self._testers = self._new_pool()
            return self._testers

"""Where a policy's program runs: the one place that ties this environment to the sandbox."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from envs.config import EnvConfig
from envs.sandbox.base import SandboxSpec
from envs.sandbox.grader import FunctionReport, call_function
from envs.sandbox.pool import SandboxPool
from rollout.types import Json


class CodeRunner(Protocol):
    """Calls a function of a program that nobody trusts. Blocking, with a deadline for each call."""

    def call(self, source: str, entry_point: str, inputs: Sequence[tuple[Json, ...]], *, fresh: bool) -> FunctionReport:
        """The outcome of each input. `fresh`: in a box where nothing ran before. Raises `SandboxLost`."""
        ...

    def close(self) -> None:
        """Give the boxes back. Idempotent."""
        ...


class SandboxRunner:
    """Runs programs in a pool of sandboxes."""

    def __init__(self, config: EnvConfig) -> None:
        spec = SandboxSpec(memory_mb=config.sandbox_memory_mb)
        self._pool = SandboxPool(config.sandbox, spec, size=config.sandboxes_per_worker)
        self._call_timeout_s = config.call_timeout_s

    def call(self, source: str, entry_point: str, inputs: Sequence[tuple[Json, ...]], *, fresh: bool) -> FunctionReport:
        """Take a box for this one program."""
        with self._pool.acquire(fresh=fresh) as box:
            return call_function(box, source, entry_point, inputs, self._call_timeout_s)

    def close(self) -> None:
        """End all boxes."""
        self._pool.close()

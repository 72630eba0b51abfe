"""A pool of warm boxes over one fork server or engine, for the episodes of one rollout worker.

A box is reset when it comes back, so nothing an answer left runs on, and replaced when its code died or ran out of
memory, when it was lost, or after enough uses. Thread-safe. `acquire` has a deadline and says whom it waited for.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

from envs.base import EnvError, SandboxLost
from envs.config import SandboxKind
from envs.sandbox.agentbox import AgentSandbox, BoxServer
from envs.sandbox.base import Sandbox, SandboxSpec
from envs.sandbox.probe import ProbeReport, check, open_server

DEFAULT_ACQUIRE_S: Final = 120.0
DEFAULT_MAX_USES: Final = 1000


@dataclass(slots=True, kw_only=True)
class _Entry:
    """A box and how often it was given out."""

    box: AgentSandbox
    uses: int = 0


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Holder:
    """Who has a box, and since when (monotonic seconds)."""

    owner: str
    since: float
    fresh: bool


class SandboxPool:
    """Up to `size` boxes in use at once, and as many fresh ones beside them.

    Fresh boxes are counted apart, so that an episode that holds a box may take a fresh one to be graded in while all
    others do the same. The pool owns `server` when one is given.
    """

    def __init__(
        self,
        kind: SandboxKind,
        spec: SandboxSpec,
        size: int,
        *,
        acquire_timeout_s: float = DEFAULT_ACQUIRE_S,
        max_uses: int = DEFAULT_MAX_USES,
        server: BoxServer | None = None,
    ) -> None:
        if size < 1:
            raise EnvError(f"env.sandboxes_per_worker: must be at least 1, got {size}; use 1 or more")
        self._spec = spec
        self._size = size
        self._acquire_timeout_s = acquire_timeout_s
        self._max_uses = max_uses
        self._changed = threading.Condition()
        self._idle: list[_Entry] = []
        self._holders: list[_Holder] = []
        self._closed = False
        self._server = server or open_server(kind)
        try:
            self.report: ProbeReport = check(self._server, spec)
        except BaseException:
            self._server.close()
            raise

    @property
    def enforced(self) -> frozenset[str]:
        """The walls that were measured to hold."""
        return self.report.enforced

    @contextmanager
    def acquire(self, fresh: bool = False, *, owner: str = "") -> Generator[Sandbox]:
        """A clean box for the time of a `with`.

        `fresh`: a box that nothing ran in before, ended afterwards. `owner` names the holder in a stall report. Raises
        `SandboxLost` when none became free in time, or none can be made.
        """
        holder = self._wait_for_place(fresh, owner or threading.current_thread().name)
        entry: _Entry | None = None
        try:
            entry = self._take(fresh)
            yield entry.box
        finally:
            if entry is not None:
                self._give_back(entry, fresh)
            with self._changed:
                self._holders.remove(holder)
                self._changed.notify_all()

    def close(self) -> None:
        """End every box, those in use as well. Idempotent."""
        with self._changed:
            self._closed = True
            idle, self._idle = self._idle, []
            self._changed.notify_all()
        for entry in idle:
            entry.box.close()
        self._server.close()

    def _wait_for_place(self, fresh: bool, owner: str) -> _Holder:
        deadline = time.monotonic() + self._acquire_timeout_s
        with self._changed:
            while not self._closed and self._num_held(fresh) >= self._size:
                if not self._changed.wait(max(deadline - time.monotonic(), 0.0)) and time.monotonic() >= deadline:
                    raise SandboxLost(self._stall_report(fresh))
            if self._closed:
                raise SandboxLost("sandbox pool: closed, got a request for a box; make a new pool")
            holder = _Holder(owner=owner, since=time.monotonic(), fresh=fresh)
            self._holders.append(holder)
            return holder

    def _num_held(self, fresh: bool) -> int:
        return sum(holder.fresh is fresh for holder in self._holders)

    def _stall_report(self, fresh: bool) -> str:
        now = time.monotonic()
        holders = [f"{held.owner} ({now - held.since:.0f} s)" for held in self._holders if held.fresh is fresh]
        return (
            f"sandbox pool: no {'fresh ' if fresh else ''}box in {self._acquire_timeout_s:.0f} s, got all {self._size} "
            f"in use by {', '.join(holders)}; raise env.sandboxes_per_worker or end those episodes"
        )

    def _take(self, fresh: bool) -> _Entry:
        if not fresh:
            with self._changed:
                while self._idle:
                    entry = self._idle.pop()
                    if entry.box.alive():
                        return entry
                    entry.box.close()
        return _Entry(box=AgentSandbox(self._server, self._spec))

    def _give_back(self, entry: _Entry, fresh: bool) -> None:
        entry.uses += 1
        keep = not (fresh or entry.box.worn or entry.uses >= self._max_uses)
        if keep:
            try:
                entry.box.reset()
            except SandboxLost:
                # The holder has its result already; the next one gets a new box or the error.
                keep = False
        with self._changed:
            keep = keep and not self._closed
            if keep:
                self._idle.append(entry)
        if not keep:
            entry.box.close()

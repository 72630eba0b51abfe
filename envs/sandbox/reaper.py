"""Whose boxes are whose on an engine, and the removal of those whose owner is gone.

A box ends with the stream to its owner, so there is little to do: boxes of an engine that was itself killed, or that
were made and never started. Every box carries its owner as a label; a reaper that sees an owner of its own machine and
process namespace gone removes the box whatever its state. Of owners elsewhere it cannot know, so it goes by the label
that says how long the box may live.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol

OWNER_LABEL: Final = "moe-agent-rl.owner"
EXPIRY_LABEL: Final = "moe-agent-rl.expires"
"""Unix time in whole seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Owner:
    """A process. `scope` is its boot and process namespace; ids come again, with another `started` (clock ticks)."""

    scope: str
    pid: int
    started: int

    def __str__(self) -> str:
        return f"{self.scope}:{self.pid}:{self.started}"


def this_scope() -> str:
    """The boot and the process namespace in which this process can tell who lives."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}:{os.stat('/proc/self/ns/pid').st_ino}"


def owner_of(pid: int) -> Owner:
    """The identity of a process that runs here. Raises `OSError` when there is none."""
    return Owner(scope=this_scope(), pid=pid, started=_started(pid))


def _started(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])


def is_stale(labels: Mapping[str, str], now: float) -> bool:
    """Whether a box with these labels belongs to nobody any more. A label that is no owner's is left alone."""
    scope, _, process = labels.get(OWNER_LABEL, "").rpartition(":")
    scope, _, pid = scope.rpartition(":")
    if not (scope and pid.isdigit() and process.isdigit()):
        return False
    expires = labels.get(EXPIRY_LABEL, "")
    if expires.isdigit() and int(expires) < now:
        return True
    if scope != this_scope():
        return False
    with suppress(OSError):
        return _started(int(pid)) != int(process)
    return True


class Removable(Protocol):
    """A container as its engine lists it."""

    @property
    def labels(self) -> Mapping[str, str]:
        """Its labels."""
        ...

    def remove(self, *, force: bool, v: bool) -> None:
        """Remove it, running or not."""
        ...


def reap(containers: Iterable[Removable], ignore: type[Exception]) -> int:
    """Remove stale boxes; how many. An error `ignore` means that another reaper was faster."""
    now, count = time.time(), 0
    for container in containers:
        if is_stale(container.labels, now):
            with suppress(ignore):
                container.remove(force=True, v=True)
                count += 1
    return count

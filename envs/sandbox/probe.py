"""Can this machine give the sandbox that was asked for? Asked before anything slow starts, answered in one line."""

from __future__ import annotations

import errno
import os
import platform
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from envs.base import SandboxLost
from envs.config import SandboxKind
from envs.sandbox import enforcement, landlock, seccomp
from envs.sandbox.agentbox import BoxServer
from envs.sandbox.base import SandboxSpec, SandboxUnavailable
from envs.sandbox.local import Zygote

REQUIRED: Final = {
    SandboxKind.local: enforcement.ALL,
    SandboxKind.docker: enforcement.ALL,
    # What Landlock, the filter and limits give everywhere; the rest depends on who starts them.
    SandboxKind.degraded: frozenset(("net", "fs", "processes", "syscalls", "memory")),
}
_USERNS_SETTINGS: Final = (
    (
        "/proc/sys/kernel/apparmor_restrict_unprivileged_userns",
        "1",
        "sysctl kernel.apparmor_restrict_unprivileged_userns=0",
    ),
    ("/proc/sys/kernel/unprivileged_userns_clone", "0", "sysctl kernel.unprivileged_userns_clone=1"),
    ("/proc/sys/user/max_user_namespaces", "0", "sysctl user.max_user_namespaces=10000"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeReport:
    """The walls that hold, and those that this kind cannot give here; and the interpreter that runs in the boxes."""

    kind: SandboxKind
    python: str
    enforced: frozenset[str]

    @property
    def missing(self) -> frozenset[str]:
        """Walls that do not hold."""
        return enforcement.ALL - self.enforced

    def __str__(self) -> str:
        without = f", without {', '.join(sorted(self.missing))}" if self.missing else ""
        return f"sandbox {self.kind.value}: enforces {', '.join(sorted(self.enforced))}{without}; runs {self.python}"


def probe(kind: SandboxKind, spec: SandboxSpec | None = None) -> ProbeReport:
    """Make a box of this kind and try its walls. Raises `SandboxUnavailable` with what is missing and the remedy."""
    server = open_server(kind)
    try:
        return check(server, spec or SandboxSpec())
    finally:
        server.close()


def open_server(kind: SandboxKind) -> BoxServer:
    """What starts boxes of this kind. Raises `SandboxUnavailable`."""
    if kind is SandboxKind.docker:
        # Here, so that runs with other boxes do not load the client of the engine.
        from envs.sandbox.docker import DockerServer

        return DockerServer()
    return Zygote(kind)


def check(server: BoxServer, spec: SandboxSpec) -> ProbeReport:
    """`probe` with a server that is to be used afterwards."""
    kind = server.kind
    if not seccomp.supported(platform.machine()):
        raise SandboxUnavailable(
            f"env.sandbox: no system-call numbers for this architecture, got {platform.machine()}; "
            "use x86_64 or aarch64"
        )
    if kind is SandboxKind.degraded and landlock.abi() < 1:
        raise SandboxUnavailable(
            "env.sandbox: degraded needs Landlock, got a kernel without it; boot with lsm=landlock,... (Linux 5.13)"
        )
    try:
        enforced = server.enforced(spec)
    except SandboxLost as error:
        raise SandboxUnavailable(_explain(kind, str(error))) from None
    weak = REQUIRED[kind] - enforced
    if weak:
        raise SandboxUnavailable(
            f"env.sandbox: {kind.value} boxes do not hold here, got no wall for {', '.join(sorted(weak))}; "
            f"{_other(kind)}"
        )
    return ProbeReport(kind=kind, python=server.python, enforced=enforced)


def _explain(kind: SandboxKind, problem: str) -> str:
    line = " ".join(problem.split())
    return f"env.sandbox: {kind.value} boxes cannot be made here, got <{line}>; {_remedy(kind, line)}"


def _remedy(kind: SandboxKind, problem: str) -> str:
    steps: list[str] = []
    if kind is SandboxKind.local and os.strerror(errno.EPERM) in problem:
        steps = [remedy for path, bad, remedy in _USERNS_SETTINGS if _holds(path, bad)]
        if not steps and _in_container():
            steps = ["start the container with a seccomp profile that permits unshare and mount"]
    return ", or ".join([*steps, _other(kind)])


def _other(kind: SandboxKind) -> str:
    if kind is SandboxKind.local:
        return "choose the weaker walls by name with env.sandbox=degraded"
    if kind is SandboxKind.docker:
        return "look at the engine's log, or use env.sandbox=local"
    return "use a machine with namespaces and env.sandbox=local"


def _holds(path: str, value: str) -> bool:
    try:
        return Path(path).read_text().strip() == value
    except OSError:
        return False


def _in_container() -> bool:
    return any(Path(path).exists() for path in ("/.dockerenv", "/run/.containerenv"))

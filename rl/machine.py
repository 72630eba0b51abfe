"""What this machine offers (CPUs, memory, disk) and which of its processes are alive.

Reads the kernel's files only and imports nothing heavy: the configuration is checked against these numbers before
anything slow starts, and a run folder's owner is recognised by them after a crash.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import psutil

_CGROUP = Path("/sys/fs/cgroup")
_NO_LIMIT_BYTES = 1 << 60  # cgroup v1 writes "no limit" as a number near 2^63


def _read(path: Path) -> str | None:
    try:
        return path.read_text().strip()
    except (OSError, UnicodeDecodeError):
        return None


def _cgroup_folders(cgroup: Path, controller: str) -> list[Path]:
    """Folders that may hold a limit of this process, the nearest first (v2, then v1)."""
    folders: list[Path] = []
    for line in (_read(Path("/proc/self/cgroup")) or "").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            base = cgroup
        elif controller in controllers.split(","):
            base = cgroup / controller
        else:
            continue
        nearest = base / path.lstrip("/")
        folders += [nearest, *(parent for parent in nearest.parents if parent.is_relative_to(base))]
    return [*folders, cgroup, cgroup / controller]


def cpu_quota(cgroup: Path = _CGROUP) -> float | None:
    """CPUs that the control groups allow this process, the tightest limit; `None` without one."""
    quotas: list[float] = []
    for folder in _cgroup_folders(cgroup, "cpu"):
        v2 = (_read(folder / "cpu.max") or "").split()
        if len(v2) == 2 and v2[0] != "max":
            quotas.append(int(v2[0]) / int(v2[1]))
        quota, period = _read(folder / "cpu.cfs_quota_us"), _read(folder / "cpu.cfs_period_us")
        if quota and period and int(quota) > 0:
            quotas.append(int(quota) / int(period))
    return min(quotas, default=None)


def usable_cpus(cgroup: Path = _CGROUP) -> int:
    """CPUs this process may run on: its affinity, cut by the control groups' quota; at least 1."""
    allowed = len(os.sched_getaffinity(0))
    quota = cpu_quota(cgroup)
    return max(1, allowed if quota is None else min(allowed, int(quota)))


def available_memory_bytes(cgroup: Path = _CGROUP) -> int:
    """Memory that can be had without swapping, within the control groups' limit."""
    available = psutil.virtual_memory().available
    for folder in _cgroup_folders(cgroup, "memory"):
        for limit_name, usage_name in (
            ("memory.max", "memory.current"),
            ("memory.limit_in_bytes", "memory.usage_in_bytes"),
        ):
            limit, usage = _read(folder / limit_name), _read(folder / usage_name)
            if limit is None or usage is None or limit == "max" or int(limit) >= _NO_LIMIT_BYTES:
                continue
            # The page cache counts as usage and is given back on demand.
            reclaimable = 0
            for line in (_read(folder / "memory.stat") or "").splitlines():
                name, _, value = line.partition(" ")
                if name in ("inactive_file", "total_inactive_file"):
                    reclaimable = int(value)
            available = min(available, int(limit) - int(usage) + reclaimable)
    return max(0, available)


def free_disk_bytes(path: Path) -> int:
    """Free bytes where `path` is or will be made."""
    existing = path.absolute()
    while not existing.exists():
        existing = existing.parent
    return psutil.disk_usage(str(existing)).free


def free_shared_memory_bytes() -> int:
    """Free bytes of /dev/shm, where Ray keeps its object store; 0 without one."""
    shm = Path("/dev/shm")
    return psutil.disk_usage(str(shm)).free if shm.is_dir() else 0


def peak_memory_bytes() -> int | None:
    """The most memory that this process ever had resident; `None` where the kernel does not tell.

    Not `ru_maxrss`: that of a child starts at its parent's.
    """
    return _status_bytes("VmHWM")


def peak_growth_bytes(call: Callable[[], object]) -> int:
    """Growth of the peak resident size during `call`; make a small one before, for what a first call loads (Linux).

    Raises:
        OSError: This kernel does not tell them.
    """
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts again: a process inherits its parent's
    before = _status_bytes("VmRSS")
    call()
    peak = peak_memory_bytes()
    if before is None or peak is None:
        raise OSError(
            "/proc/self/status: must tell VmRSS and VmHWM, got one or none of them; measure on another kernel"
        )
    return peak - before


def _status_bytes(field: str) -> int | None:
    for line in (_read(Path("/proc/self/status")) or "").splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessIdentity:
    """A process, told apart from any other that had or will have its number.

    `start_ticks` is the start time since boot in clock ticks; `pid_namespace` says in which container `pid` counts.
    """

    pid: int
    start_ticks: int
    boot_id: str
    pid_namespace: str
    host: str

    def is_comparable(self) -> bool:
        """Whether this process can be looked up from here: same boot of the same machine, same container."""
        here = current_process()
        return (self.boot_id, self.pid_namespace) == (here.boot_id, here.pid_namespace)

    def is_alive(self) -> bool | None:
        """Whether it still runs; `None` when it cannot be known from here (another machine or container)."""
        here = current_process()
        if self.is_comparable():
            return _start_ticks(self.pid) == self.start_ticks
        # The same host name after another boot: every process of the former boot is gone.
        return False if self.host == here.host and self.boot_id != here.boot_id else None


def _start_ticks(pid: int) -> int | None:
    """Field 22 of /proc/<pid>/stat; `None` for a process that is gone or a zombie."""
    stat = _read(Path(f"/proc/{pid}/stat"))
    if stat is None:
        return None
    fields = stat.rpartition(")")[2].split()  # the name before it may hold spaces and brackets
    return None if fields[0] in "ZX" else int(fields[19])


def current_process() -> ProcessIdentity:
    """This process."""
    return ProcessIdentity(
        pid=os.getpid(),
        start_ticks=_start_ticks(os.getpid()) or 0,
        boot_id=_read(Path("/proc/sys/kernel/random/boot_id")) or "unknown",
        pid_namespace=os.readlink("/proc/self/ns/pid"),
        host=socket.gethostname(),
    )

"""What this machine offers to a run, what it lacks, and what to do about each thing: `python scripts/doctor.py`."""

import importlib.metadata
import platform
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from envs.config import SandboxKind
from envs.sandbox.base import SandboxUnavailable
from envs.sandbox.probe import probe
from rl import machine
from rl.config import RunConfig
from rl.config_check import estimate_memory_bytes, resolve_workers
from rl.tracking import resolve_mode

GIB = 1 << 30
MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Finding:
    """One row: what was looked at, what is there, and what to do when that is not enough (else empty)."""

    name: str
    found: str
    remedy: str = ""
    needed: bool = True


def python_and_libraries() -> Finding:
    """The interpreter and the libraries whose versions matter."""
    versions: list[str] = []
    for name in ("torch", "deepspeed", "ray"):
        try:
            versions.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            return Finding("Python", f"{platform.python_version()}, no {name}", "run make setup")
    return Finding("Python", f"{platform.python_version()}, {', '.join(versions)}")


def instruction_sets() -> Finding:
    """The vector instructions that decide which CPU kernels run, and in which dtype."""
    flags: set[str] = set()
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith(("flags", "Features")):
            flags = set(line.partition(":")[2].split())
            break
    known = {
        "amx_bf16": "AMX bf16",
        "avx512_bf16": "AVX-512 bf16",
        "avx512f": "AVX-512",
        "avx2": "AVX2",
        "asimd": "NEON",
    }
    found = [name for flag, name in known.items() if flag in flags]
    if not found:
        return Finding("CPU instructions", "none of AMX, AVX-512, AVX2, NEON", "expect the reference kernels' speed")
    fast_bf16 = "bf16 matmuls in hardware" if flags & {"amx_bf16", "avx512_bf16"} else "compute in fp32"
    return Finding("CPU instructions", f"{', '.join(found)} ({fast_bf16})")


def resources() -> Iterator[Finding]:
    """CPUs, memory, disk and shared memory, against what the quickstart needs."""
    config = RunConfig()
    plan = resolve_workers(config)
    quota = machine.cpu_quota()
    limit = f", quota {quota:g}" if quota is not None else ""
    yield Finding(
        "usable CPUs",
        f"{machine.usable_cpus()}{limit}: {plan.num_workers} rollout workers, {plan.learner_threads} learner threads",
    )
    available, wanted = machine.available_memory_bytes(), sum(estimate_memory_bytes(config, plan).values())
    short = "close other programs, or use rollout.num_workers=1" if available < wanted else ""
    yield Finding("memory", f"{available / GIB:.1f} GiB available, the quickstart needs {wanted / GIB:.1f}", short)
    disk = machine.free_disk_bytes(Path("runs"))
    yield Finding("disk", f"{disk / GIB:.1f} GiB free for runs/", "free some" if disk < GIB else "")
    shared = machine.free_shared_memory_bytes()
    small = shared < config.cluster.object_store_mb * MIB
    remedy = "Ray uses the disk instead, slower; in Docker: --shm-size=1g" if small else ""
    yield Finding("/dev/shm", f"{shared / MIB:.0f} MiB free", remedy, needed=False)


def tool(name: str, commands: tuple[str, ...], remedy: str) -> Finding:
    """A program that some part needs, by any of its names."""
    path = next((path for command in commands if (path := shutil.which(command))), None)
    if path is None:
        return Finding(name, "missing", remedy, needed=False)
    done = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=20, check=False)
    return Finding(name, (done.stdout or done.stderr).partition("\n")[0].strip() or path)


def sandboxes() -> Iterator[Finding]:
    """Whether the policy's code can be kept apart, tried with a real box of each kind."""
    for kind in SandboxKind:
        try:
            report = probe(kind)
        except SandboxUnavailable as error:
            problem, _, remedy = str(error).rpartition("; ")
            yield Finding(f"sandbox {kind.value}", problem, remedy, needed=kind is SandboxKind.local)
        else:
            yield Finding(f"sandbox {kind.value}", str(report).partition(": ")[2])


def gpus() -> Finding:
    """NVIDIA GPUs; everything runs without one."""
    devices = sorted(Path("/dev").glob("nvidia[0-9]*"))
    return Finding("GPU", ", ".join(device.name for device in devices) or "none: everything runs on the CPU")


def tracking() -> Finding:
    """Where W&B metrics would go."""
    choice = resolve_mode("auto")
    online = choice.mode.value == "online"
    remedy = "" if online else "set WANDB_API_KEY to see runs online; offline files can be sent later with wandb sync"
    return Finding("W&B", f"{choice.mode.value} ({choice.reason})", remedy, needed=False)


def ports() -> Finding:
    """Whether local ports can be had: Ray and the learner's process group take free ones."""
    try:
        with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname(), 5):
            pass
    except OSError as error:
        return Finding("local ports", str(error), "allow TCP on 127.0.0.1; Ray's processes talk over it")
    return Finding("local ports", "TCP on 127.0.0.1 works")


def findings() -> Iterator[Finding]:
    """All rows, in the order of the table."""
    yield python_and_libraries()
    yield instruction_sets()
    yield from resources()
    yield gpus()
    yield tool("g++", ("g++",), "apt-get install g++; until then the CPU kernels use a slower backend, by name")
    yield from sandboxes()
    yield tracking()
    yield ports()
    yield tool("chromium", ("chromium", "chromium-browser", "google-chrome"), "only the test of the report needs it")


def main() -> int:
    """Print the table; 1 when something that a run needs is missing."""
    rows = list(findings())
    table = Table(title="this machine", title_justify="left")
    for heading in ("", "found", "what to do"):
        table.add_column(heading, overflow="fold")
    for row in rows:
        style = "" if not row.remedy else "red" if row.needed else "yellow"
        table.add_row(row.name, row.found, row.remedy or "-", style=style)
    Console().print(table)
    return 1 if any(row.remedy and row.needed for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())

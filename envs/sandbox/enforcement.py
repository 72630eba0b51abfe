"""Which walls of a box hold on this machine: tried out, not believed.

A probe runs in a scratch box and tries to get through each wall. Only what it failed at counts as enforced.
"""

from __future__ import annotations

import json
import os
import socket
import tempfile
from typing import Final, cast

from envs.base import SandboxLost
from envs.sandbox.base import ExecStatus, Sandbox, SandboxSpec

ALL: Final = frozenset(
    ("net", "fs", "processes", "syscalls", "pids", "memory", "disk", "inodes", "daemons"),
)
"""Walls by name.

`net`: no host, loopback service or abstract socket outside can be reached. `fs`: no host file but the system's can be
read, none can be written. `processes`: no process outside can be signalled or read, and the box's agent not ended.
`syscalls`: no namespaces, tracing or io_uring. `pids`, `memory`, `disk`, `inodes`: bounded as the spec says.
`daemons`: a reset leaves no process.
"""

_PROBE: Final = """
import ctypes, json, os, socket, subprocess, sys, time

def refused(attempt):
    try:
        attempt()
    except (OSError, MemoryError):
        return True
    return False

def connect(family, address):
    with socket.socket(family, socket.SOCK_STREAM) as client:
        client.settimeout(1)
        client.connect(address)

def write(path):
    with open(path, "w") as file:
        file.write("x")

def count_forks(limit):
    for count in range(limit):
        try:
            if os.fork() == 0:
                time.sleep(60)
                os._exit(0)
        except OSError:
            return count
    return limit

def leave_daemon():
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            time.sleep(60)
        os._exit(0)
    os.wait()

libc = ctypes.CDLL(None, use_errno=True)
space = os.statvfs(".")
found = {
    "net": refused(lambda: connect(socket.AF_INET, ("127.0.0.1", PORT)))
    and refused(lambda: connect(socket.AF_UNIX, ABSTRACT))
    and refused(lambda: socket.socket(40, socket.SOCK_STREAM)),
    "fs": refused(lambda: open(CANARY)) and refused(lambda: write(CANARY + ".new")),
    "processes": refused(lambda: os.kill(OWNER, 0)) and refused(lambda: open(f"/proc/{OWNER}/environ")),
    "syscalls": libc.unshare(0x10000000) < 0 and libc.ptrace(0, 0, 0, 0) < 0 and libc.syscall(425, 1, 0) < 0,
    "memory": refused(lambda: bytearray(MEMORY_BYTES + 1)),
    "disk": space.f_blocks * space.f_frsize <= TMPFS_BYTES,
    "inodes": 0 < space.f_files <= INODES,
}
leave_daemon()
found["pids"] = count_forks(PROCESSES + 8) <= PROCESSES
print(json.dumps(found))
"""


def measure(box: Sandbox, spec: SandboxSpec) -> frozenset[str]:
    """Try every wall of a fresh box. The box is reset, but better not used for anything else."""
    with (
        tempfile.TemporaryDirectory(prefix="sandbox-probe-") as folder,
        _listen_tcp() as tcp,
        _listen_abstract() as unix,
    ):
        # Everybody on this machine may use the canary: only the walls keep the box from it.
        os.chmod(folder, 0o777)
        canary = f"{folder}/canary"
        with open(canary, "w") as file:
            file.write("canary")
        facts = {
            "PORT": tcp.getsockname()[1],
            "ABSTRACT": unix.getsockname(),
            "CANARY": canary,
            "OWNER": os.getpid(),
            "MEMORY_BYTES": spec.memory_mb << 20,
            "TMPFS_BYTES": spec.tmpfs_mb << 20,
            "INODES": spec.num_inodes,
            "PROCESSES": spec.num_processes,
        }
        source = "".join(f"{name} = {value!r}\n" for name, value in facts.items()) + _PROBE
        result = box.run_code(source, timeout_s=20.0)
    if result.status is not ExecStatus.OK:
        raise SandboxLost(
            f"sandbox: the probe did not finish, got {result.status} and {result.stdout[-300:]!r}; "
            "look at the limits of the box"
        )
    found = cast(dict[str, bool], json.loads(result.stdout))
    box.reset()
    # None at all would mean that the agent cannot see processes: then it cannot add up their memory either.
    sees_processes = box.num_processes() == 1
    found["daemons"] = sees_processes
    found["memory"] = found["memory"] and sees_processes
    found["processes"] = found["processes"] and _agent_survives(box)
    return frozenset(name for name, holds in found.items() if holds)


def _agent_survives(box: Sandbox) -> bool:
    """Code that could end its agent would turn its failures into failures of the machine."""
    try:
        box.run_code("import os, signal\nos.kill(os.getppid(), signal.SIGKILL)", timeout_s=5.0)
        return box.run_code("1", timeout_s=5.0).status is ExecStatus.OK
    except SandboxLost:
        return False


def _listen_tcp() -> socket.socket:
    return socket.create_server(("127.0.0.1", 0))


def _listen_abstract() -> socket.socket:
    """A service in Linux's abstract namespace, which no file permission protects."""
    server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    server.bind(f"\0sandbox-probe-{os.urandom(8).hex()}")
    server.listen()
    return server

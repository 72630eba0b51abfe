"""The fork server: a small single-threaded interpreter from which boxes are forked in milliseconds.

Started by `local.Zygote` with a cleaned environment as `python -P -s -S -c ... <checkout>`; fd 0 is a SOCK_SEQPACKET
socket. One request (JSON and the box's end of a socket) makes one box; the answer carries a pidfd of its first
process. It holds no secrets and must stay single-threaded: a threaded process cannot enter a user namespace, and a
fork of it would not be safe.

It ends, and every box with it, when the socket closes or when its owner is gone: the owner is watched by a pidfd,
because a parent-death signal would follow the *thread* that started this process.
"""

from __future__ import annotations

import array
import gc
import importlib
import json
import os
import select
import signal
import socket
import sys
from contextlib import suppress
from typing import Any, Final, NoReturn

from envs.sandbox import agent, degraded, namespaces, seccomp
from envs.sandbox.wire import pack_frame

# What answers commonly import: loaded once here instead of in every worker. Every module makes every fork dearer, so
# not those that bring much along (random and tempfile load OpenSSL).
PREIMPORT: Final = (
    "bisect",
    "collections",
    "copy",
    "dataclasses",
    "functools",
    "heapq",
    "itertools",
    "math",
    "operator",
    "re",
    "string",
    "typing",
)
_BOX_FD: Final = 3
BOX_ENVIRONMENT: Final = {"LANG": "C.UTF-8", "PYTHONDONTWRITEBYTECODE": "1"}


def main() -> None:
    """Serve spawn requests until the owner is gone."""
    owner = os.pidfd_open(int(sys.argv[1]))
    if os.getppid() != int(sys.argv[1]):
        return
    control = socket.socket(fileno=os.dup(0))
    sys.argv[:] = [""]
    for name in PREIMPORT:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()
    namespaces.adopt_orphans()
    child_ended = _watch_children()
    folders: dict[int, str] = {}
    while True:
        ready = select.select([control, owner, child_ended], [], [])[0]
        if child_ended in ready:
            os.read(child_ended, 4096)
            _reap(folders)
        if owner in ready:
            break
        if control in ready:
            message, ancillary, _, _ = control.recvmsg(1 << 16, socket.CMSG_SPACE(4))
            if not message:
                break
            connection = array.array("i", ancillary[0][2])[0]
            _spawn(control, json.loads(message), connection, folders)
    _end_all(folders)


def _watch_children() -> int:
    """A descriptor that becomes readable when a child has ended."""
    read, write = os.pipe()
    os.set_blocking(read, False)
    os.set_blocking(write, False)
    signal.set_wakeup_fd(write, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    return read


def _spawn(control: socket.socket, request: dict[str, Any], connection: int, folders: dict[int, str]) -> None:
    """Fork a box and answer with its first process; a failure after the fork is told over the box's own socket."""
    folder = degraded.make_folder() if request["kind"] == "degraded" else None
    try:
        pid = _fork_box(request, connection, folder)
    except OSError as error:
        control.send(json.dumps({"error": str(error)}).encode())
        if folder is not None:
            degraded.remove_folder(folder)
        return
    finally:
        os.close(connection)
    if folder is not None:
        folders[pid] = folder
    pidfd = os.pidfd_open(pid)
    descriptors = array.array("i", [pidfd])
    control.sendmsg([json.dumps({"pid": pid}).encode()], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, descriptors)])
    os.close(pidfd)


def _fork_box(request: dict[str, Any], connection: int, folder: str | None) -> int:
    """The process id of a new box's first process, already a child of this one."""
    report_read, report_write = os.pipe()
    go_read, go_write = os.pipe()
    middle = os.fork()
    if middle == 0:
        os.close(report_read)
        os.close(go_write)
        _in_child(request, connection, folder, report_write, go_read)
    os.close(report_write)
    os.close(go_read)
    with open(report_read, "rb") as report:
        text = report.read()
    os.waitpid(middle, 0)
    with open(go_write, "wb", buffering=0) as go:
        if not text.isdigit():
            raise OSError(text.decode(errors="replace") or "the box's first process could not be forked")
        # The parent-death signal counts from now: the process between has ended, and this one is the parent.
        go.write(b"g")
    return int(text)


def _in_child(request: dict[str, Any], connection: int, folder: str | None, report: int, go: int) -> NoReturn:
    """Between two forks: enter the namespaces, so that the next fork is their first process."""
    try:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        if request["kind"] == "local":
            _give_up_root_without_rights()
            namespaces.unshare_all()
        pid = os.fork()
        if pid:
            os.write(report, str(pid).encode())
            os._exit(0)
        os.close(report)
        report = -1
        # End of file instead of a byte: the fork server is gone.
        if os.read(go, 1) == b"g":
            _become_box(request, connection, folder)
    except BaseException as error:  # noqa: BLE001 (nothing may return into the fork server's loop)
        text = f"{type(error).__name__}: {error}"
        with suppress(OSError):
            os.write(report, text.encode())
        with suppress(OSError):
            socket.socket(fileno=connection).sendall(pack_frame({"id": "", "setup_error": text}))
    finally:
        os._exit(71)


def _give_up_root_without_rights() -> None:
    """Root that may not make namespaces (a container) takes the way of other users, from a user id of no rights."""
    uid = namespaces.unused_uid()
    if os.geteuid() == 0 and not namespaces.may_administer() and uid is not None:
        with suppress(OSError):
            namespaces.become(uid)
            # The change of user took away this process's own /proc files, which the id maps are written to.
            agent.set_dumpable(True)


def _become_box(request: dict[str, Any], connection: int, folder: str | None) -> None:
    """In the box's first process: build the walls, from the widest right to the narrowest, and serve."""
    os.setsid()
    num_foreign = 0
    if folder is None:
        config = _wall_off(request)
    else:
        config = degraded.wall_off(
            folder, memory_bytes=request["memory_mb"] << 20, max_output_bytes=request["max_output_bytes"]
        )
        # Where the user id is shared, so is the count that the limit on processes goes by.
        num_foreign = 0 if config.owns_all else degraded.count_tasks(os.geteuid())
    namespaces.die_with_parent()
    agent.set_dumpable(False)
    namespaces.limit_resources(
        num_processes=request["num_processes"] + num_foreign, file_bytes=request["file_mb"] << 20
    )
    os.dup2(connection, _BOX_FD)
    null = os.open("/dev/null", os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(null, descriptor)
    os.closerange(_BOX_FD + 1, 1 << 16)
    work, temporary = config.folders[0], config.folders[min(1, len(config.folders) - 1)]
    os.chdir(work)
    os.umask(0o022)
    path = f"{sys.base_prefix}/bin:/usr/local/bin:/usr/bin:/bin"
    os.environ.clear()
    os.environ.update(BOX_ENVIRONMENT, PATH=path, HOME=work, TMPDIR=temporary)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    seccomp.install(seccomp.BOX_FAMILIES if folder is None else (), on_host_files=folder is not None)
    agent.Agent(socket.socket(fileno=_BOX_FD), config).serve()


def _wall_off(request: dict[str, Any]) -> agent.AgentConfig:
    """Inside new namespaces: own network, own root, no rights."""
    namespaces.raise_loopback()
    folders = namespaces.build_root(tmpfs_bytes=request["tmpfs_mb"] << 20, num_inodes=request["num_inodes"])
    namespaces.drop_bounding_set()
    uid = namespaces.unused_uid()
    if os.geteuid() == 0 and uid is not None:
        namespaces.become(uid)
    namespaces.drop_capabilities()
    return agent.AgentConfig(
        folders=folders,
        memory_bytes=request["memory_mb"] << 20,
        max_output_bytes=request["max_output_bytes"],
        owns_all=True,
    )


def _reap(folders: dict[int, str]) -> None:
    """Collect ended boxes, and the folders of those that had one on the host."""
    with suppress(ChildProcessError):
        while pid := os.waitpid(-1, os.WNOHANG)[0]:
            if pid in folders:
                degraded.remove_folder(folders.pop(pid))


def _end_all(folders: dict[int, str]) -> None:
    """End every box and what may be left of ended ones (all come back to this process), then their folders."""
    agent.end_descendants(2.0)
    for folder in folders.values():
        degraded.remove_folder(folder)

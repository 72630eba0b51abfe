"""Linux namespaces for a box, in plain ctypes: own processes, mounts, network, IPC, host name and (non-root) users.

Runs in the fork server and its children. A box sees an empty read-only root with three small tmpfs folders, the
interpreter and system libraries bound read-only, and a /proc of its own processes; nothing of it exists on the host,
so nothing is left behind when its last process ends.

Sources: namespaces(7), pivot_root(2), mount_setattr(2), capabilities(7); the two-step pivot is that of bubblewrap.
"""

from __future__ import annotations

import ctypes
import fcntl
import glob
import os
import platform
import resource
import socket
import struct
import sys
from collections.abc import Iterable
from typing import Final

_NEWNS: Final = 0x00020000
_NEWCGROUP: Final = 0x02000000
_NEWUTS: Final = 0x04000000
_NEWIPC: Final = 0x08000000
_NEWUSER: Final = 0x10000000
_NEWPID: Final = 0x20000000
_NEWNET: Final = 0x40000000
CLONE_NAMESPACES: Final = _NEWNS | _NEWCGROUP | _NEWUTS | _NEWIPC | _NEWUSER | _NEWPID | _NEWNET

_RDONLY, _NOSUID, _NODEV, _NOEXEC, _BIND, _REC, _PRIVATE = 1, 2, 4, 8, 4096, 16384, 1 << 18
_MNT_DETACH: Final = 2
_AT_FDCWD: Final = -100
_AT_RECURSIVE: Final = 0x8000
_NR_PIVOT_ROOT: Final = {"x86_64": 155, "aarch64": 41}
_NR_MOUNT_SETATTR: Final = 442

_PR_SET_PDEATHSIG, _PR_CAPBSET_DROP, _PR_SET_CHILD_SUBREAPER, _PR_SET_NO_NEW_PRIVS, _PR_CAP_AMBIENT = 1, 24, 36, 38, 47
_PR_CAP_AMBIENT_CLEAR_ALL: Final = 4
_CAP_SYS_ADMIN: Final = 21
_CAPABILITY_VERSION_3: Final = 0x20080522
_SIOCSIFFLAGS: Final = 0x8914
_IFF_UP: Final = 1

WORK_FOLDER: Final = "/work"
_NOBODY: Final = 65534
_DEVICES: Final = ("null", "zero", "full", "random", "urandom")
_SMALL_TMPFS: Final = "size=1m,mode=755"

libc = ctypes.CDLL(None, use_errno=True)
libc.mount.argtypes = [ctypes.c_char_p, ctypes.c_char_p, ctypes.c_char_p, ctypes.c_ulong, ctypes.c_char_p]
libc.prctl.argtypes = [ctypes.c_int] + [ctypes.c_ulong] * 4


class _MountAttr(ctypes.Structure):
    _fields_ = (
        ("set", ctypes.c_uint64),
        ("clear", ctypes.c_uint64),
        ("propagation", ctypes.c_uint64),
        ("userns", ctypes.c_uint64),
    )


class _CapHeader(ctypes.Structure):
    _fields_ = (("version", ctypes.c_uint32), ("pid", ctypes.c_int))


def check(result: int, what: str) -> int:
    """`result` of a C call, or the OSError that its -1 stands for."""
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
    return result


def prctl(option: int, *arguments: int) -> int:
    """The system call; its result is left to the caller, as some options fail where they are not needed."""
    return libc.prctl(option, *arguments, *([0] * (4 - len(arguments))))


# ---- entering


def may_administer() -> bool:
    """Whether this process holds CAP_SYS_ADMIN, so that it needs no user namespace to make the others."""
    with open("/proc/self/status") as file:
        effective = next(int(line.split()[1], 16) for line in file if line.startswith("CapEff:"))
    return bool(effective >> _CAP_SYS_ADMIN & 1)


def unshare_all() -> None:
    """New namespaces for this process's children (PID) and itself (the rest)."""
    if may_administer():
        check(libc.unshare(CLONE_NAMESPACES & ~_NEWUSER), "unshare")
        return
    uid, gid = os.geteuid(), os.getegid()
    check(libc.unshare(CLONE_NAMESPACES), "unshare with a user namespace")
    for name, text in (
        ("setgroups", "deny"),
        ("uid_map", f"{_NOBODY} {uid} 1"),
        ("gid_map", f"{_NOBODY} {gid} 1"),
    ):
        with open(f"/proc/self/{name}", "w") as file:
            file.write(text)


def raise_loopback() -> None:
    """The box's own loopback interface: programs may talk to themselves, and to nobody else."""
    libc.sethostname(b"sandbox", 7)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        fcntl.ioctl(probe, _SIOCSIFFLAGS, struct.pack("16sh14x", b"lo", _IFF_UP))


def unused_uid() -> int | None:
    """A user id that no account and, by chance of one in many millions, no other box has.

    The limit on processes is counted for each user id over the whole machine, so boxes must not share one. Where only
    few ids are mapped (a container), the choice is among those; `None` when this process's own is the only one.
    """
    with open("/proc/self/uid_map") as file:
        last = max(int(inside) + int(count) for inside, _, count in (line.split() for line in file)) - 1
    if last < 1000:
        return None
    low = min(300_000, last // 2)
    return low + int.from_bytes(os.urandom(8), "big") % (min(last, 2**31 - 2) - low)


def become(uid: int) -> None:
    """Change to a user id of no rights, for good."""
    os.setgroups([])
    os.setresgid(uid, uid, uid)
    os.setresuid(uid, uid, uid)


def drop_bounding_set() -> None:
    """No program started from here can gain a capability. Needs CAP_SETPCAP, so it comes before `become`."""
    for capability in range(64):
        if prctl(_PR_CAPBSET_DROP, capability) < 0:
            return


def drop_capabilities() -> None:
    """Give up every capability and every way to get one back."""
    prctl(_PR_CAP_AMBIENT, _PR_CAP_AMBIENT_CLEAR_ALL)
    header = _CapHeader(_CAPABILITY_VERSION_3, 0)
    check(libc.capset(ctypes.byref(header), ctypes.byref((ctypes.c_uint32 * 6)())), "capset")
    check(prctl(_PR_SET_NO_NEW_PRIVS, 1), "no_new_privs")


def die_with_parent() -> None:
    """SIGKILL when the (single-threaded) parent ends. A change of user id clears this, so it comes after."""
    check(prctl(_PR_SET_PDEATHSIG, 9), "PR_SET_PDEATHSIG")


def adopt_orphans() -> None:
    """Orphaned descendants become this process's children."""
    check(prctl(_PR_SET_CHILD_SUBREAPER, 1), "PR_SET_CHILD_SUBREAPER")


def limit_resources(*, num_processes: int, file_bytes: int) -> None:
    """Limits that every process of the box inherits; never above what the host allows."""
    limits = {
        resource.RLIMIT_NPROC: num_processes,
        resource.RLIMIT_FSIZE: file_bytes,
        resource.RLIMIT_NOFILE: 256,
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_MEMLOCK: 65536,
        resource.RLIMIT_MSGQUEUE: 0,
        # Bounds runaway recursion in C; the memory limit bounds the rest.
        resource.RLIMIT_STACK: 8 << 20,
    }
    for kind, value in limits.items():
        hard = resource.getrlimit(kind)[1]
        limit = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(kind, (limit, limit))


# ---- the file system of a box


def system_folders() -> tuple[list[str], list[tuple[str, str]]]:
    """What a Python program needs to run: folders to bind, and links as (target, name).

    Not whole prefixes: a checkout with hidden tests may lie below /usr.
    """
    prefixes = {"/usr", "/usr/local", sys.base_prefix}
    folders = {f"{prefix}/{name}" for prefix in prefixes for name in ("bin", "lib", "lib32", "lib64")}
    links: list[tuple[str, str]] = []
    for name in ("/bin", "/lib", "/lib32", "/lib64"):
        if os.path.islink(name):
            links.append((os.readlink(name), name))
        else:
            folders.add(name)
    folders.add("/etc/alternatives")
    files = [path for path in ("/etc/ld.so.cache",) if os.path.isfile(path) and not os.path.islink(path)]
    return sorted(path for path in folders if os.path.isdir(path) and not os.path.islink(path)) + files, links


def installed_packages(folders: Iterable[str]) -> list[str]:
    """Folders of third-party packages below `folders`: covered, since data sets with answers get installed there."""
    names = ("site-packages", "dist-packages")
    return [path for folder in folders for name in names for path in glob.glob(f"{folder}/python3*/{name}")]


def build_root(*, tmpfs_bytes: int, num_inodes: int) -> tuple[str, ...]:
    """Replace this process's view of the file system; the folders that the box may write to, /work first."""
    folders, links = system_folders()
    covered = installed_packages(folders)
    _mount("none", "/", None, _REC | _PRIVATE)
    _mount("tmpfs", "/tmp", "tmpfs", _NOSUID | _NODEV, _SMALL_TMPFS)
    os.mkdir("/tmp/new")
    os.mkdir("/tmp/old")
    _pivot("/tmp", "/tmp/old")
    os.chdir("/")
    _mount("tmpfs", "/new", "tmpfs", _NOSUID | _NODEV, _SMALL_TMPFS)
    for path in folders:
        _bind(path, device=False)
    for path in covered:
        _mount("tmpfs", f"/new{path}", "tmpfs", _RDONLY | _NOSUID | _NODEV, "size=4k,mode=755")
    for target, name in links:
        os.symlink(target, f"/new{name}")
    _fill_dev()
    _fill_etc()
    os.mkdir("/new/proc")
    _mount("proc", "/new/proc", "proc", _NOSUID | _NODEV | _NOEXEC, "subset=pid")
    writable = (WORK_FOLDER, "/tmp", "/dev/shm")
    for path in writable:
        os.makedirs(f"/new{path}")
        options = f"size={tmpfs_bytes},nr_inodes={num_inodes},mode=1777"
        _mount("tmpfs", f"/new{path}", "tmpfs", _NOSUID | _NODEV, options)
    os.chdir("/new")
    _pivot(".", ".")
    check(libc.umount2(b".", _MNT_DETACH), "umount the old root")
    os.chdir("/")
    _set_attributes("/", _RDONLY, recursive=False)
    return writable


def _fill_dev() -> None:
    os.mkdir("/new/dev")
    for name in _DEVICES:
        _bind(f"/dev/{name}", device=True)
    for target, name in (("fd", "fd"), ("fd/0", "stdin"), ("fd/1", "stdout"), ("fd/2", "stderr")):
        os.symlink(f"/proc/self/{target}", f"/new/dev/{name}")


def _fill_etc() -> None:
    os.makedirs("/new/etc", exist_ok=True)
    for name, text in (
        ("passwd", f"root:x:0:0::/:/bin/false\nnobody:x:{_NOBODY}:{_NOBODY}::{WORK_FOLDER}:/bin/sh\n"),
        ("group", f"root:x:0:\nnogroup:x:{_NOBODY}:\n"),
        ("hosts", "127.0.0.1 localhost\n"),
    ):
        with open(f"/new/etc/{name}", "w") as file:
            file.write(text)


def _bind(path: str, *, device: bool) -> None:
    """Show the old root's `path` in the new root, read-only unless it is a device."""
    source, target = f"/old{path}", f"/new{path}"
    if os.path.isdir(source):
        os.makedirs(target, exist_ok=True)
    else:
        os.makedirs(os.path.dirname(target), exist_ok=True)
        with open(target, "w"):
            pass
    _mount(source, target, None, _BIND | _REC)
    _set_attributes(target, _NOSUID if device else _NOSUID | _RDONLY | _NODEV, recursive=True)


def _set_attributes(path: str, attributes: int, *, recursive: bool) -> None:
    """mount_setattr(2), Linux 5.12: the only call that reaches the mounts below as well."""
    value = _MountAttr(attributes, 0, 0, 0)
    flags = _AT_RECURSIVE if recursive else 0
    result = libc.syscall(
        _NR_MOUNT_SETATTR, _AT_FDCWD, path.encode(), flags, ctypes.byref(value), ctypes.c_size_t(ctypes.sizeof(value))
    )
    check(result, f"mount_setattr {path}")


def _mount(source: str, target: str, kind: str | None, flags: int, options: str | None = None) -> None:
    result = libc.mount(
        source.encode(), target.encode(), kind.encode() if kind else None, flags, options.encode() if options else None
    )
    check(result, f"mount {kind or 'bind'} on {target}")


def _pivot(new: str, old: str) -> None:
    number = _NR_PIVOT_ROOT[platform.machine()]
    check(libc.syscall(number, new.encode(), old.encode()), f"pivot_root to {new}")

"""Landlock for the degraded sandbox: file-system rights of a process without any namespace (landlock(7)).

A domain can only be narrowed, is inherited, and needs no privilege. Rights of newer kernels are used where the kernel
has them; `abi()` says which.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterable
from contextlib import suppress
from typing import Final

from envs.sandbox.namespaces import check, libc, prctl

# The three numbers are the same on every architecture.
_NR_CREATE_RULESET, _NR_ADD_RULE, _NR_RESTRICT_SELF = 444, 445, 446
_CREATE_RULESET_VERSION: Final = 1
_RULE_PATH_BENEATH: Final = 1
_PR_SET_NO_NEW_PRIVS: Final = 38

_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_DIR = 1 << 0, 1 << 1, 1 << 2, 1 << 3
_MAKE_CHAR, _MAKE_BLOCK, _TRUNCATE, _IOCTL_DEV = 1 << 6, 1 << 11, 1 << 14, 1 << 15
_FIRST_ABI_RIGHTS: Final = (1 << 13) - 1
_RIGHTS_SINCE: Final = {2: 1 << 13, 3: _TRUNCATE, 5: _IOCTL_DEV}
_NET_TCP: Final = 3
_SCOPE_ABSTRACT_SOCKETS_AND_SIGNALS: Final = 3
_READ_ONLY: Final = _EXECUTE | _READ_FILE | _READ_DIR
_FILE_RIGHTS: Final = _EXECUTE | _WRITE_FILE | _READ_FILE | _TRUNCATE


class _RulesetAttr(ctypes.Structure):
    _fields_ = (("fs", ctypes.c_uint64), ("net", ctypes.c_uint64), ("scoped", ctypes.c_uint64))


class _PathBeneath(ctypes.Structure):
    _pack_ = 1
    _fields_ = (("allowed", ctypes.c_uint64), ("parent", ctypes.c_int32))


def abi() -> int:
    """The kernel's Landlock version; 0 when it has none."""
    return max(libc.syscall(_NR_CREATE_RULESET, None, ctypes.c_size_t(0), _CREATE_RULESET_VERSION), 0)


def restrict(*, read_only: Iterable[str], writable: Iterable[str]) -> None:
    """Leave this process and its descendants the paths given, no TCP, and no signals or sockets to outsiders."""
    version = abi()
    if version < 1:
        raise OSError("landlock: the kernel has none; boot with lsm=landlock,... or use namespaces")
    rights = _FIRST_ABI_RIGHTS
    for since, right in _RIGHTS_SINCE.items():
        rights |= right if version >= since else 0
    attributes = _RulesetAttr(
        rights, _NET_TCP if version >= 4 else 0, _SCOPE_ABSTRACT_SOCKETS_AND_SIGNALS if version >= 6 else 0
    )
    size = 24 if version >= 6 else 16 if version >= 4 else 8
    ruleset = check(
        libc.syscall(_NR_CREATE_RULESET, ctypes.byref(attributes), ctypes.c_size_t(size), 0), "landlock_create_ruleset"
    )
    try:
        for path in read_only:
            _allow(ruleset, path, _READ_ONLY)
        for path in writable:
            _allow(ruleset, path, rights & ~(_MAKE_CHAR | _MAKE_BLOCK | _IOCTL_DEV))
        check(prctl(_PR_SET_NO_NEW_PRIVS, 1), "no_new_privs")
        check(libc.syscall(_NR_RESTRICT_SELF, ruleset, 0), "landlock_restrict_self")
    finally:
        os.close(ruleset)


def _allow(ruleset: int, path: str, rights: int) -> None:
    with suppress(FileNotFoundError):
        parent = os.open(path, os.O_PATH | os.O_CLOEXEC)
        try:
            allowed = rights if os.path.isdir(path) else rights & _FILE_RIGHTS
            rule = _PathBeneath(allowed, parent)
            check(libc.syscall(_NR_ADD_RULE, ruleset, _RULE_PATH_BENEATH, ctypes.byref(rule), 0), f"landlock {path}")
        finally:
            os.close(parent)

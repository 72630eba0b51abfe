"""The system-call filter of a box: a raw BPF program, so that no library is needed (seccomp(2), bpf(4)).

A deny list: what reaches past a box's walls (tracing, mounting, new namespaces, kernel interfaces with a history of
escapes) or holds memory that no limit of the box counts (memfd, System V and POSIX queues and shared memory, which
also outlive processes). Sockets are let through by family; a call made for another architecture kills the process.
"""

from __future__ import annotations

import ctypes
import errno
import platform
import socket
import struct
from typing import Final

from envs.sandbox.namespaces import CLONE_NAMESPACES, check, libc, prctl

# Numbers by architecture, of the kernel's own tables (asm/unistd_64.h; asm-generic/unistd.h for aarch64).
_DENIED: Final[dict[str, tuple[int | None, int | None]]] = {
    # name: (x86_64, aarch64)
    "_sysctl": (156, None),
    "acct": (163, 89),
    "add_key": (248, 217),
    "adjtimex": (159, 171),
    "bpf": (321, 280),
    "chroot": (161, 51),
    "clock_adjtime": (305, 266),
    "clock_settime": (227, 112),
    "delete_module": (176, 106),
    "fanotify_init": (300, 262),
    "finit_module": (313, 273),
    "fsconfig": (431, 431),
    "fsmount": (432, 432),
    "fsopen": (430, 430),
    "fspick": (433, 433),
    "init_module": (175, 105),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    "io_uring_setup": (425, 425),
    "ioperm": (173, None),
    "ioprio_set": (251, 30),
    "iopl": (172, None),
    "kcmp": (312, 272),
    "kexec_file_load": (320, 294),
    "kexec_load": (246, 104),
    "keyctl": (250, 219),
    "memfd_create": (319, 279),
    "memfd_secret": (447, 447),
    "migrate_pages": (256, 238),
    "modify_ldt": (154, None),
    "mount": (165, 40),
    "mount_setattr": (442, 442),
    "move_mount": (429, 429),
    "move_pages": (279, 239),
    "mq_open": (240, 180),
    "msgget": (68, 186),
    "name_to_handle_at": (303, 264),
    "open_by_handle_at": (304, 265),
    "open_tree": (428, 428),
    "perf_event_open": (298, 241),
    "personality": (135, 92),
    "pidfd_getfd": (438, 438),
    "pivot_root": (155, 41),
    "process_madvise": (440, 440),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "ptrace": (101, 117),
    "quotactl": (179, 60),
    "quotactl_fd": (443, 443),
    "reboot": (169, 142),
    "request_key": (249, 218),
    "semget": (64, 190),
    "setdomainname": (171, 162),
    "sethostname": (170, 161),
    "setns": (308, 268),
    "settimeofday": (164, 170),
    "shmget": (29, 194),
    "swapoff": (168, 225),
    "swapon": (167, 224),
    "sysfs": (139, None),
    "syslog": (103, 116),
    "umount2": (166, 39),
    "unshare": (272, 97),
    "uselib": (134, None),
    "userfaultfd": (323, 282),
    "vhangup": (153, 58),
}
# Landlock does not cover these, so a box without a file system of its own does without them.
_DENIED_ON_HOST_FILES: Final[dict[str, tuple[int | None, int | None]]] = {
    "chmod": (90, None),
    "chown": (92, None),
    "fchmod": (91, 52),
    "fchmodat": (268, 53),
    "fchmodat2": (452, 452),
    "fchown": (93, 55),
    "fchownat": (260, 54),
    "fremovexattr": (199, 16),
    "fsetxattr": (190, 7),
    "futimesat": (261, None),
    "lchown": (94, None),
    "lremovexattr": (198, 15),
    "lsetxattr": (189, 6),
    "removexattr": (197, 14),
    "setxattr": (188, 5),
    "utime": (132, None),
    "utimensat": (280, 88),
    "utimes": (235, None),
}
# Limits and scheduling are a process's own affair: from outside they could cripple the box's agent, which shares the
# user id, and make a failure of the policy look like one of the machine. The first argument must be 0, "myself".
_OWN_PROCESS_ONLY: Final[dict[str, tuple[int, int]]] = {
    "prlimit64": (302, 261),
    "sched_setaffinity": (203, 122),
    "sched_setattr": (314, 274),
    "sched_setparam": (142, 118),
    "sched_setscheduler": (144, 119),
}
_SETPRIORITY: Final = (141, 140)
_ARCHITECTURES: Final = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}  # column above, AUDIT_ARCH
_ENGINE_ARCHITECTURES: Final = {"x86_64": "SCMP_ARCH_X86_64", "aarch64": "SCMP_ARCH_AARCH64"}
_CLONE: Final = (56, 220)
_CLONE3: Final = 435
_SOCKET: Final = (41, 198)
_SOCKETPAIR: Final = (53, 199)
_X32_BIT: Final = 0x40000000
_SOCK_TYPE_MASK: Final = 0xF

_LOAD, _AND, _JUMP_EQUAL, _JUMP_GREATER_EQUAL, _JUMP_SET, _RETURN = 0x20, 0x54, 0x15, 0x35, 0x45, 0x06
_OFFSET_NUMBER, _OFFSET_ARCH, _OFFSET_FIRST, _OFFSET_SECOND = 0, 4, 16, 24  # of struct seccomp_data, low halves
_KILL_PROCESS, _ERRNO, _ALLOW = 0x80000000, 0x00050000, 0x7FFF0000
_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, _PR_SET_NO_NEW_PRIVS = 22, 2, 38

BOX_FAMILIES: Final = (socket.AF_UNIX, socket.AF_INET, socket.AF_INET6)


class _FilterProgram(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("instructions", ctypes.c_void_p))


_Instruction = tuple[int, int, int, int]


def supported(machine: str) -> bool:
    """Whether the numbers of this architecture are known."""
    return machine in _ARCHITECTURES


def build_filter(families: tuple[int, ...], machine: str, *, on_host_files: bool = False) -> bytes:
    """The program for one architecture.

    `families` are those that socket(2) may open. With none of them, socketpair(2) still makes connected pairs of the
    stream kind (pipes in both directions), which cannot be pointed at anything else. `on_host_files`: the box sees
    the host's file system, so owners, modes, times and attributes of files cannot be changed either.
    """
    if machine not in _ARCHITECTURES:
        raise OSError(
            errno.ENOSYS,
            f"seccomp: system-call numbers are known for {', '.join(_ARCHITECTURES)}, got {machine}; "
            "run on one of those",
        )
    column, architecture = _ARCHITECTURES[machine]
    program: list[_Instruction] = [
        (_LOAD, 0, 0, _OFFSET_ARCH),
        (_JUMP_EQUAL, 1, 0, architecture),
        (_RETURN, 0, 0, _KILL_PROCESS),
        (_LOAD, 0, 0, _OFFSET_NUMBER),
    ]
    if machine == "x86_64":
        program += [(_JUMP_GREATER_EQUAL, 0, 1, _X32_BIT), _refuse(errno.EPERM)]
    denied = _DENIED | (_DENIED_ON_HOST_FILES if on_host_files else {})
    for numbers in denied.values():
        number = numbers[column]
        if number is not None:
            program += [(_JUMP_EQUAL, 0, 1, number), _refuse(errno.EPERM)]
    # clone3 hides its flags behind a pointer; without it the C library falls back to clone.
    program += [(_JUMP_EQUAL, 0, 1, _CLONE3), _refuse(errno.ENOSYS)]
    for numbers in _OWN_PROCESS_ONLY.values():
        program += _when(numbers[column], [(_LOAD, 0, 0, _OFFSET_FIRST), *_only_zero()])
    # Which kind of target (0: a process), then which one.
    first_zero: list[_Instruction] = [(_LOAD, 0, 0, _OFFSET_FIRST), (_JUMP_EQUAL, 1, 0, 0), _refuse(errno.EPERM)]
    program += _when(_SETPRIORITY[column], [*first_zero, (_LOAD, 0, 0, _OFFSET_SECOND), *_only_zero()])
    program += _when(
        _CLONE[column],
        [(_LOAD, 0, 0, _OFFSET_FIRST), (_JUMP_SET, 0, 1, CLONE_NAMESPACES), _refuse(errno.EPERM), _allow()],
    )
    program += _when(_SOCKET[column], _only(families))
    program += _when(_SOCKETPAIR[column], _only(families) if families else _stream_pairs_only())
    program.append(_allow())
    return b"".join(struct.pack("=HBBI", *instruction) for instruction in program)


def _when(number: int, body: list[_Instruction]) -> list[_Instruction]:
    """`body`, which ends in a return, for one system call; the number is still loaded after it was another."""
    return [(_JUMP_EQUAL, 0, len(body), number), *body]


def _only_zero() -> list[_Instruction]:
    return [(_JUMP_EQUAL, 0, 1, 0), _allow(), _refuse(errno.EPERM)]


def _only(families: tuple[int, ...]) -> list[_Instruction]:
    tests: list[_Instruction] = [
        (_JUMP_EQUAL, len(families) - index, 0, family) for index, family in enumerate(families)
    ]
    return [(_LOAD, 0, 0, _OFFSET_FIRST), *tests, _refuse(errno.EAFNOSUPPORT), _allow()]


def _stream_pairs_only() -> list[_Instruction]:
    return [
        (_LOAD, 0, 0, _OFFSET_FIRST),
        (_JUMP_EQUAL, 0, 4, socket.AF_UNIX),
        (_LOAD, 0, 0, _OFFSET_SECOND),
        (_AND, 0, 0, _SOCK_TYPE_MASK),
        (_JUMP_EQUAL, 0, 1, socket.SOCK_STREAM),
        _allow(),
        _refuse(errno.EAFNOSUPPORT),
    ]


def _refuse(number: int) -> _Instruction:
    return (_RETURN, 0, 0, _ERRNO | number)


def _allow() -> _Instruction:
    return (_RETURN, 0, 0, _ALLOW)


def engine_profile(machine: str) -> dict[str, object]:
    """The filter of a box with a file system of its own as a container engine's profile (runtime-spec, seccomp).

    A call made for another architecture is killed, as here, because no other one is listed. Conditions on one argument
    are alternatives to libseccomp 2.5, so each rule has one.
    """
    if machine not in _ENGINE_ARCHITECTURES:
        raise OSError(
            errno.ENOSYS, f"seccomp: profiles are known for {', '.join(_ENGINE_ARCHITECTURES)}, got {machine}"
        )
    rules: list[dict[str, object]] = [
        _rule(sorted(_DENIED), errno.EPERM),
        _rule(["clone3"], errno.ENOSYS),
        _rule(sorted(_OWN_PROCESS_ONLY), errno.EPERM, index=0, value=0, op="SCMP_CMP_NE"),
        _rule(["setpriority"], errno.EPERM, index=0, value=0, op="SCMP_CMP_NE"),
        _rule(["setpriority"], errno.EPERM, index=1, value=0, op="SCMP_CMP_NE"),
    ]
    for shift in range(CLONE_NAMESPACES.bit_length()):
        flag = CLONE_NAMESPACES & 1 << shift
        if flag:
            rules.append(_rule(["clone"], errno.EPERM, index=0, value=flag, valueTwo=flag, op="SCMP_CMP_MASKED_EQ"))
    sockets = ["socket", "socketpair"]
    rules += [
        _rule(sockets, errno.EAFNOSUPPORT, index=0, value=family, op="SCMP_CMP_EQ")
        for family in range(max(BOX_FAMILIES))
        if family not in BOX_FAMILIES
    ]
    rules.append(_rule(sockets, errno.EAFNOSUPPORT, index=0, value=int(max(BOX_FAMILIES)), op="SCMP_CMP_GT"))
    return {
        "defaultAction": "SCMP_ACT_ALLOW",
        "architectures": [_ENGINE_ARCHITECTURES[machine]],
        "syscalls": rules,
    }


def _rule(names: list[str], number: int, **argument: int | str) -> dict[str, object]:
    rule: dict[str, object] = {"names": names, "action": "SCMP_ACT_ERRNO", "errnoRet": number}
    return {**rule, "args": [argument]} if argument else rule


def install(families: tuple[int, ...], *, on_host_files: bool = False) -> None:
    """Filter this process and all its descendants, for good."""
    program = build_filter(families, platform.machine(), on_host_files=on_host_files)
    buffer = ctypes.create_string_buffer(program, len(program))
    argument = _FilterProgram(len(program) // 8, ctypes.cast(buffer, ctypes.c_void_p))
    check(prctl(_PR_SET_NO_NEW_PRIVS, 1), "no_new_privs")
    check(
        libc.prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, ctypes.addressof(argument), 0, 0),
        "seccomp (the kernel must have CONFIG_SECCOMP_FILTER)",
    )

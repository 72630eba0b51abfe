import errno
import socket
import struct

import pytest

from envs.sandbox import seccomp

MACHINES = ("x86_64", "aarch64")
ALLOW, KILL = 0x7FFF0000, 0x80000000


def _refused(number):
    return 0x00050000 | number


def _decide(program, machine, number, *arguments):
    """Run a filter as the kernel would: an interpreter of the few BPF instructions in use."""
    arguments = [*arguments, *[0] * (6 - len(arguments))]
    data = struct.pack("=IIQ6Q", number, seccomp._ARCHITECTURES[machine][1], 0, *arguments)
    accumulator, at = 0, 0
    while True:
        code, if_true, if_false, value = struct.unpack_from("=HBBI", program, at * 8)
        at += 1
        if code == 0x20:
            (accumulator,) = struct.unpack_from("=I", data, value)
        elif code == 0x54:
            accumulator &= value
        elif code == 0x06:
            return value
        else:
            holds = {0x15: accumulator == value, 0x35: accumulator >= value, 0x45: bool(accumulator & value)}[code]
            at += if_true if holds else if_false


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("on_host_files", [False, True])
def test_every_denied_call_is_refused_and_the_rest_allowed(machine, on_host_files):
    column = seccomp._ARCHITECTURES[machine][0]
    program = seccomp.build_filter(seccomp.BOX_FAMILIES, machine, on_host_files=on_host_files)
    denied = {numbers[column] for numbers in seccomp._DENIED.values()}
    if on_host_files:
        denied |= {numbers[column] for numbers in seccomp._DENIED_ON_HOST_FILES.values()}
    for number in range(600):
        due = _refused(errno.EPERM) if number in denied else ALLOW
        if number == 435:
            due = _refused(errno.ENOSYS)
        # Family and kind of a plain socket, so that the calls with conditions are allowed as well.
        arguments = (socket.AF_UNIX, socket.SOCK_STREAM) if number in (41, 53, 198, 199) else ()
        assert _decide(program, machine, number, *arguments) == due, number


@pytest.mark.parametrize("machine", MACHINES)
def test_calls_with_conditions(machine):
    column = seccomp._ARCHITECTURES[machine][0]
    clone, sock, pair = (seccomp._CLONE[column], seccomp._SOCKET[column], seccomp._SOCKETPAIR[column])
    limits, priority = seccomp._OWN_PROCESS_ONLY["prlimit64"][column], seccomp._SETPRIORITY[column]
    program = seccomp.build_filter(seccomp.BOX_FAMILIES, machine)
    stream = socket.SOCK_STREAM
    for due, number, *arguments in (
        (ALLOW, clone, 17),
        (_refused(errno.EPERM), clone, 0x10000000 | 17),
        (_refused(errno.EPERM), clone, 0x00020000 | 17),
        (ALLOW, sock, socket.AF_INET6, stream),
        (ALLOW, pair, socket.AF_UNIX, stream),
        (_refused(errno.EAFNOSUPPORT), sock, 40, stream),
        (_refused(errno.EAFNOSUPPORT), sock, socket.AF_NETLINK, stream),
        (_refused(errno.EAFNOSUPPORT), sock, socket.AF_PACKET, stream),
        (ALLOW, limits, 0, 9),
        (_refused(errno.EPERM), limits, 1, 9),
        (ALLOW, priority, 0, 0, 19),
        (_refused(errno.EPERM), priority, 0, 1, 19),
        (_refused(errno.EPERM), priority, 2, 0, 19),
    ):
        assert _decide(program, machine, number, *arguments) == due, (number, arguments)


@pytest.mark.parametrize("machine", MACHINES)
def test_without_families_only_stream_pairs_are_left(machine):
    column = seccomp._ARCHITECTURES[machine][0]
    program = seccomp.build_filter((), machine)
    no_family = _refused(errno.EAFNOSUPPORT)
    for family in (socket.AF_UNIX, socket.AF_INET, socket.AF_INET6, 40):
        assert _decide(program, machine, seccomp._SOCKET[column], family, socket.SOCK_STREAM) == no_family
    pair = seccomp._SOCKETPAIR[column]
    assert _decide(program, machine, pair, socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC) == ALLOW
    assert _decide(program, machine, pair, socket.AF_UNIX, socket.SOCK_DGRAM) == no_family
    assert _decide(program, machine, pair, socket.AF_INET, socket.SOCK_STREAM) == no_family


def test_another_architectures_calls_kill():
    program = seccomp.build_filter(seccomp.BOX_FAMILIES, "x86_64")
    assert _decide(program, "aarch64", 0) == KILL
    assert _decide(program, "x86_64", 0x40000000 | 1) == _refused(errno.EPERM)


def test_an_unknown_architecture_is_named():
    assert not seccomp.supported("riscv64")
    with pytest.raises(OSError, match="got riscv64"):
        seccomp.build_filter(seccomp.BOX_FAMILIES, "riscv64")

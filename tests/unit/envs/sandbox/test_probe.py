import errno
import os
import platform
import sys

import pytest

from envs.base import EnvError, SandboxLost
from envs.config import SandboxKind
from envs.sandbox import enforcement, landlock, local, probe
from envs.sandbox.base import SandboxSpec, SandboxUnavailable

SPEC = SandboxSpec()


class _Zygote:
    """A fork server on a machine of a test's choice."""

    def __init__(self, kind, enforced=enforcement.ALL, error=None):
        self.kind, self.python = kind, "python3"
        self._enforced, self._error = frozenset(enforced), error

    def enforced(self, spec):
        if self._error is not None:
            raise SandboxLost(self._error)
        return self._enforced


def _line(error):
    text = str(error.value)
    assert isinstance(error.value, EnvError)
    assert "\n" not in text
    return text


def test_a_report_says_what_holds_and_what_does_not():
    report = probe.check(_Zygote(SandboxKind.local), SPEC)
    assert report.missing == frozenset()
    assert str(report).startswith("sandbox local: enforces daemons, disk")
    assert str(report).endswith("syscalls; runs python3")
    weak = probe.check(_Zygote(SandboxKind.degraded, enforcement.ALL - {"disk", "inodes"}), SPEC)
    assert str(weak).endswith("without disk, inodes; runs python3")


def test_without_namespaces_one_line_says_why_and_what_to_do():
    problem = f"sandbox: no new box, got unshare: {os.strerror(errno.EPERM)};\nprobe this machine"
    with pytest.raises(SandboxUnavailable) as error:
        probe.check(_Zygote(SandboxKind.local, error=problem), SPEC)
    line = _line(error)
    assert line.startswith("env.sandbox: local boxes cannot be made here, got <sandbox: no new box, got unshare")
    assert line.endswith("choose the weaker walls by name with env.sandbox=degraded")


def test_the_setting_that_forbids_namespaces_is_named(monkeypatch):
    monkeypatch.setattr(probe, "_holds", lambda path, value: "apparmor" in path)
    with pytest.raises(SandboxUnavailable) as error:
        probe.check(_Zygote(SandboxKind.local, error=f"unshare: {os.strerror(errno.EPERM)}"), SPEC)
    assert "sysctl kernel.apparmor_restrict_unprivileged_userns=0, or choose" in _line(error)


@pytest.mark.parametrize("kind", SandboxKind)
def test_walls_that_do_not_hold_are_named(kind):
    with pytest.raises(SandboxUnavailable) as error:
        probe.check(_Zygote(kind, enforcement.ALL - {"net", "fs"}), SPEC)
    assert "got no wall for fs, net" in _line(error)


def test_an_unknown_architecture_and_a_kernel_without_landlock_are_named(monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(landlock, "abi", lambda: 0)
        with pytest.raises(SandboxUnavailable, match="degraded needs Landlock"):
            probe.check(_Zygote(SandboxKind.degraded), SPEC)
    monkeypatch.setattr(platform, "machine", lambda: "riscv64")
    with pytest.raises(SandboxUnavailable, match="got riscv64"):
        probe.check(_Zygote(SandboxKind.local), SPEC)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root makes boxes of other users")
def test_degraded_boxes_of_root_get_an_interpreter_that_they_can_read(monkeypatch):
    monkeypatch.setattr(local, "_OTHER_PYTHONS", ())
    monkeypatch.setattr(sys, "executable", "/root/private/python3")
    with pytest.raises(SandboxUnavailable, match=r"that such a user can start \(/root/private/python3\)"):
        local.Zygote(SandboxKind.degraded)

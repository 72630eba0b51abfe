import json
import os
import subprocess
import time

import pytest

from envs.base import EnvError
from envs.config import EnvConfig, SandboxKind
from envs.registry import check_env_config
from envs.sandbox import reaper, seccomp
from envs.sandbox.base import SandboxSpec, SandboxUnavailable
from envs.sandbox.docker import AttachedStream, DockerOptions, DockerServer, container_settings
from envs.sandbox.reaper import EXPIRY_LABEL, OWNER_LABEL, Owner, is_stale, owner_of, this_scope

SPEC = SandboxSpec(memory_mb=256, num_processes=16, tmpfs_mb=16, num_inodes=1000, file_mb=8)


def test_a_container_has_every_wall():
    settings = container_settings(SPEC, DockerOptions(image="image"), {"label": "value"})
    assert settings["network_mode"] == "none"
    assert settings["read_only"] is True
    assert settings["cap_drop"] == ["ALL"]
    assert settings["user"] == "65534:65534"
    assert settings["ipc_mode"] == "private"
    assert settings["pids_limit"] == 17
    assert settings["mem_limit"] == settings["memswap_limit"] == f"{256 + 3 * 16 + 64}m"
    assert settings["nano_cpus"] == 10**9
    assert settings["log_config"]["Type"] == "none"
    assert settings["auto_remove"] is True
    assert settings["labels"] == {"label": "value"}
    assert set(settings["tmpfs"]) == {"/work", "/tmp", "/dev/shm"}
    assert all("size=16m,nr_inodes=1000," in options for options in settings["tmpfs"].values())
    assert {limit["Name"]: limit["Hard"] for limit in settings["ulimits"]}["fsize"] == 8 << 20
    assert "no-new-privileges" in settings["security_opt"]
    assert "runtime" not in settings
    assert container_settings(SPEC, DockerOptions(runtime="runsc"), {})["runtime"] == "runsc"


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_the_engines_profile_denies_what_the_own_filter_denies(machine):
    profile = json.loads(json.dumps(seccomp.engine_profile(machine)))
    always = {name for rule in profile["syscalls"] if "args" not in rule for name in rule["names"]}
    assert {"unshare", "ptrace", "io_uring_setup", "bpf", "memfd_create", "clone3"} <= always
    families = [rule["args"][0] for rule in profile["syscalls"] if "socket" in rule["names"]]
    equal = {test["value"] for test in families if test["op"] == "SCMP_CMP_EQ"}
    assert equal == set(range(10)) - {1, 2}
    # Everything above AF_INET6, vsock (40) among it.
    assert [test["value"] for test in families if test["op"] == "SCMP_CMP_GT"] == [10]
    flags = {rule["args"][0]["value"] for rule in profile["syscalls"] if rule["names"] == ["clone"]}
    assert sum(flags) == seccomp.CLONE_NAMESPACES


def test_a_profile_for_an_unknown_architecture_is_refused():
    with pytest.raises(OSError, match="got riscv64"):
        seccomp.engine_profile("riscv64")


class _Connection:
    """Gives its bytes out in pieces of at most `size`."""

    def __init__(self, data, size):
        self._data, self._size = data, size

    def recv(self, bufsize):
        size = min(bufsize, self._size)
        piece, self._data = self._data[:size], self._data[size:]
        return piece


@pytest.mark.parametrize("size", [1, 3, 100])
def test_an_attached_stream_keeps_standard_output_alone(size):
    pieces = [(1, b"one"), (2, b"an error"), (1, b""), (1, b"two, longer")]
    data = b"".join(bytes([number, 0, 0, 0]) + len(text).to_bytes(4, "big") + text for number, text in pieces)
    stream = AttachedStream(_Connection(data, size))
    received = b""
    while piece := stream.recv(4):
        received += piece
    assert received == b"onetwo, longer"


def test_no_engine_is_one_line_with_the_remedy(monkeypatch):
    monkeypatch.setenv("DOCKER_HOST", "unix:///nonexistent/docker.sock")
    with pytest.raises(SandboxUnavailable) as error:
        DockerServer()
    text = str(error.value)
    assert text.startswith("env.sandbox: docker needs an engine, got none at unix:///nonexistent/docker.sock <")
    assert text.endswith("start one, set DOCKER_HOST, or use env.sandbox=local")
    assert "\n" not in text


@pytest.mark.parametrize(
    ("config", "problem"),
    [
        (EnvConfig(sandbox_runtime="runsc"), "env.sandbox_runtime: belongs to env.sandbox=docker, got 'runsc' with"),
        (EnvConfig(sandbox=SandboxKind.docker, sandbox_image=" "), "env.sandbox_image: must name an image, got ' '"),
    ],
)
def test_settings_that_make_no_sense_are_refused(config, problem):
    with pytest.raises(EnvError, match=problem):
        check_env_config(config)


def test_a_live_owner_keeps_its_boxes_and_a_dead_one_does_not():
    now = time.time()
    mine = owner_of(os.getpid())
    process = subprocess.Popen(["sleep", "60"])
    other = owner_of(process.pid)
    assert not is_stale({OWNER_LABEL: str(mine)}, now)
    assert not is_stale({OWNER_LABEL: str(other)}, now)
    process.kill()
    process.wait()
    assert is_stale({OWNER_LABEL: str(other)}, now)
    # The same process id, come again.
    assert is_stale({OWNER_LABEL: str(Owner(scope=mine.scope, pid=mine.pid, started=mine.started + 1))}, now)


def test_owners_elsewhere_are_judged_by_the_clock_alone():
    now = time.time()
    labels = {OWNER_LABEL: str(Owner(scope="another-boot:1", pid=1, started=1))}
    assert this_scope() != "another-boot:1"
    assert not is_stale(labels, now)
    assert not is_stale({**labels, EXPIRY_LABEL: str(int(now) + 60)}, now)
    assert is_stale({**labels, EXPIRY_LABEL: str(int(now) - 60)}, now)


@pytest.mark.parametrize("label", ["", "text", "a:b", ":1:2", "scope:x:1"])
def test_what_is_no_owner_is_left_alone(label):
    assert not is_stale({OWNER_LABEL: label}, time.time())


def test_a_removal_that_fails_does_not_end_the_reaper():
    class _Gone:
        def __init__(self, fails):
            self.labels = {OWNER_LABEL: str(Owner(scope=this_scope(), pid=2**30, started=1))}
            self.fails, self.removed = fails, False

        def remove(self, *, force, v):
            assert force
            assert v
            if self.fails:
                raise KeyError
            self.removed = True

    containers = [_Gone(True), _Gone(False)]
    assert reaper.reap(containers, KeyError) == 1
    assert containers[1].removed

"""Boxes as containers of a Docker engine (or of one that speaks its API): `env.sandbox=docker`.

One container is one box: its first process is the agent, spoken to over the attached stream (0.5 ms a call, where
`docker exec` costs 80 ms), and reset instead of replaced. A container ends when its stream does, so a killed owner
leaves none; `reaper` removes what an engine that was killed itself leaves.

Walls: no network, read-only root, small tmpfs folders, no capabilities, no new privileges, the same system-call filter
as local boxes, limits on processes, memory and CPUs, a user id of no rights, no log. With `env.sandbox_runtime=runsc`
(gVisor) the box has a kernel of its own in addition.
"""

from __future__ import annotations

import json
import os
import platform
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, cast

import docker
from docker.errors import APIError, DockerException, ImageNotFound
from docker.types import LogConfig, Ulimit
from requests.exceptions import RequestException

from envs.base import SandboxLost
from envs.config import EnvConfig, SandboxKind
from envs.sandbox import dockeragent, seccomp
from envs.sandbox.agentbox import Measurements
from envs.sandbox.base import SandboxSpec, SandboxUnavailable
from envs.sandbox.client import AgentClient, DeadlineError, Stream
from envs.sandbox.namespaces import WORK_FOLDER
from envs.sandbox.reaper import EXPIRY_LABEL, OWNER_LABEL, owner_of, reap
from envs.sandbox.zygote import BOX_ENVIRONMENT, PREIMPORT

LIFETIME_S: Final = 24 * 3600
FOLDERS: Final = (WORK_FOLDER, "/tmp", "/dev/shm")
_NOBODY: Final = 65534
_API_TIMEOUT_S: Final = 60
_START_S: Final = 60.0
_CPUS: Final = 1.0
# Of the agent itself, above what the spec gives to the policy's code.
_AGENT_MB: Final = 64
_STREAM_HEAD_BYTES: Final = 8
_STDOUT: Final = 1
# gVisor's own threads count against the limit.
_RUNSC_PROCESSES: Final = 256
_ENVIRONMENT: Final = {
    **BOX_ENVIRONMENT,
    "PATH": "/usr/local/bin:/usr/bin:/bin",
    "HOME": FOLDERS[0],
    "TMPDIR": FOLDERS[1],
}
_START_ENVIRONMENT: Final = {"PYTHONHASHSEED": "0", "MALLOC_ARENA_MAX": "1", "LANG": "C.UTF-8"}
_ENGINE_ERRORS: Final = (DockerException, RequestException, OSError)


@dataclass(frozen=True, slots=True, kw_only=True)
class DockerOptions:
    """The image (with any Python 3.11 as `python3`) and the runtime of docker boxes; `None` is the engine's default."""

    image: str = field(default_factory=lambda: EnvConfig().sandbox_image)
    runtime: str | None = None


class _Chosen:
    """The options of this process, which `choose` sets."""

    options = DockerOptions()


def choose(options: DockerOptions) -> None:
    """Make these the options of every docker box that this process starts from now on."""
    _Chosen.options = options


def container_settings(spec: SandboxSpec, options: DockerOptions, labels: dict[str, str]) -> dict[str, Any]:
    """The arguments of `containers.create` for a box."""
    tmpfs = f"rw,nosuid,nodev,size={spec.tmpfs_mb}m,nr_inodes={spec.num_inodes},uid={_NOBODY},gid={_NOBODY},mode=700"
    # What lies in the folders is memory too, and may not take from what the processes were promised.
    memory_mb = spec.memory_mb + len(FOLDERS) * spec.tmpfs_mb + _AGENT_MB
    limits = {"nofile": 256, "fsize": spec.file_mb << 20, "core": 0, "memlock": 65536, "msgqueue": 0, "stack": 8 << 20}
    # The agent is a process as well; local boxes do not count it either.
    num_processes = spec.num_processes + 1 + (_RUNSC_PROCESSES if options.runtime == "runsc" else 0)
    profile = json.dumps(seccomp.engine_profile(platform.machine()))
    settings: dict[str, Any] = {
        "image": options.image,
        "entrypoint": ["python3", "-P", "-s", "-S", "-c", dockeragent.BOOT],
        "command": [],
        "environment": _START_ENVIRONMENT,
        "hostname": "sandbox",
        "user": f"{_NOBODY}:{_NOBODY}",
        "working_dir": "/",
        "labels": labels,
        "stdin_open": True,
        "tty": False,
        "auto_remove": True,
        "network_mode": "none",
        "read_only": True,
        "tmpfs": dict.fromkeys(FOLDERS, tmpfs),
        "cap_drop": ["ALL"],
        "security_opt": ["no-new-privileges", f"seccomp={profile}"],
        "pids_limit": num_processes,
        "mem_limit": f"{memory_mb}m",
        "memswap_limit": f"{memory_mb}m",
        "nano_cpus": int(_CPUS * 1e9),
        "ipc_mode": "private",
        "ulimits": [Ulimit(name=name, soft=value, hard=value) for name, value in limits.items()],
        "log_config": LogConfig(type="none"),
    }
    if options.runtime is not None:
        settings["runtime"] = options.runtime
    return settings


def _start_message(spec: SandboxSpec) -> bytes:
    """What the box's first process reads before its first frame: the agent, and its settings."""
    folder = Path(__file__).parent
    names = (*dockeragent.MODULES, dockeragent.__name__)
    message = {
        "modules": [(name, (folder / f"{name.rpartition('.')[2]}.py").read_text()) for name in names],
        "settings": {
            "folders": FOLDERS,
            "environment": _ENVIRONMENT,
            "preimport": PREIMPORT,
            "memory_bytes": spec.memory_mb << 20,
            "max_output_bytes": spec.max_output_bytes,
            "lifetime_s": LIFETIME_S,
        },
    }
    data = json.dumps(message).encode()
    return len(data).to_bytes(4, "big") + data


class AttachedStream:
    """A container's standard input and output over one connection.

    What comes back is cut into pieces with a head of 8 bytes: the stream's number, three zeros, the length (u32, big
    endian) (Docker Engine API, ContainerAttach). Output of other streams than the standard one is dropped.
    """

    def __init__(self, connection: Stream) -> None:
        self._connection = connection
        self._head = bytearray()
        self._left = 0
        self._ours = False

    def settimeout(self, value: float | None, /) -> None:
        """How long a call may wait before it raises `TimeoutError`."""
        self._connection.settimeout(value)

    def sendall(self, data: bytes, /) -> None:
        """Send all. Raises `OSError`."""
        self._connection.sendall(data)

    def recv(self, bufsize: int, /) -> bytes:
        """What has arrived on standard output, nothing at the end. Raises `OSError`."""
        while True:
            if self._left:
                data = self._connection.recv(min(bufsize, self._left))
                self._left -= len(data)
                if self._ours or not data:
                    return data
                continue
            head = self._connection.recv(_STREAM_HEAD_BYTES - len(self._head))
            if not head:
                return b""
            self._head += head
            if len(self._head) == _STREAM_HEAD_BYTES:
                self._ours = self._head[0] == _STDOUT
                self._left = int.from_bytes(self._head[4:], "big")
                self._head.clear()

    def close(self) -> None:
        """Close both directions."""
        self._connection.close()


class DockerBox:
    """A running container (`envs.sandbox.agentbox.BoxHandle`). `forget` removes it from its engine and its server."""

    def __init__(self, container: Any, stream: AttachedStream, forget: Callable[[Any], None]) -> None:
        self._container = container
        self._forget = forget
        self.client = AgentClient(stream)

    def alive(self) -> bool:
        """Whether the engine says that the container runs."""
        try:
            self._container.reload()
        except _ENGINE_ERRORS:
            return False
        return self._container.status == "running"

    def end(self) -> None:
        """End every process of the box and remove the container."""
        self.client.close()
        self._forget(self._container)


class DockerServer:
    """Starts boxes on the engine of DOCKER_HOST (`envs.sandbox.agentbox.BoxServer`), and removes those of dead owners.

    Raises `SandboxUnavailable` without an engine, an image or the runtime.
    """

    kind = SandboxKind.docker

    def __init__(self, options: DockerOptions | None = None) -> None:
        self._options = options or _Chosen.options
        self.python = f"python3 of {self._options.image}"
        self._measurements = Measurements()
        self._lock = threading.Lock()
        self._boxes: list[Any] = []
        self._closed = False
        self._owner = str(owner_of(os.getpid()))
        self._engine = self._connect()
        try:
            self._check()
            self.reap()
        except BaseException:
            self._engine.close()
            raise

    def _connect(self) -> docker.DockerClient:
        where = os.environ.get("DOCKER_HOST", "the default socket")
        try:
            engine = docker.from_env(timeout=_API_TIMEOUT_S)
            cast(Any, engine).ping()
        except _ENGINE_ERRORS as error:
            raise SandboxUnavailable(
                f"env.sandbox: docker needs an engine, got none at {where} <{_line(error)}>; start one, set "
                "DOCKER_HOST, or use env.sandbox=local"
            ) from None
        return engine

    def _check(self) -> None:
        image, runtime = self._options.image, self._options.runtime
        try:
            self._engine.images.get(image)
            known = cast(dict[str, object], cast(Any, self._engine).info().get("Runtimes") or {})
        except ImageNotFound:
            raise SandboxUnavailable(
                f"env.sandbox_image: not on the engine, got {image!r}; run `make sandbox-image`, or name another"
            ) from None
        except _ENGINE_ERRORS as error:
            raise SandboxUnavailable(
                f"env.sandbox: the engine cannot be asked, got <{_line(error)}>; look at its log"
            ) from None
        if runtime is not None and runtime not in known:
            raise SandboxUnavailable(
                f"env.sandbox_runtime: unknown to the engine, got {runtime!r}; choose one of {sorted(known)}, or add "
                "it to the engine's daemon.json"
            )

    def reap(self) -> int:
        """Remove containers of dead owners, in any state; how many."""
        with suppress(*_ENGINE_ERRORS):
            return reap(
                self._engine.containers.list(all=True, filters={"label": OWNER_LABEL}, ignore_removed=True), APIError
            )
        return 0

    def open(self, spec: SandboxSpec) -> DockerBox:
        """A new container whose agent answers. Raises `SandboxLost`."""
        if self._closed:
            raise SandboxLost("sandbox: the engine's client is closed, got a request for a box; make a new pool")
        labels = {OWNER_LABEL: self._owner, EXPIRY_LABEL: str(int(time.time()) + LIFETIME_S + 60)}
        container: Any = None
        try:
            container = self._engine.containers.create(**container_settings(spec, self._options, labels))
            with self._lock:
                self._boxes.append(container)
            # Attached first, or what the agent says at once would be lost.
            attached: Any = container.attach_socket(params={"stdin": 1, "stdout": 1, "stream": 1})
            box = DockerBox(container, AttachedStream(getattr(attached, "_sock", attached)), self._forget)
            container.start()
            box.client.start(_start_message(spec), wall_s=_START_S)
        except (*_ENGINE_ERRORS, DeadlineError, SandboxLost) as error:
            if container is not None:
                self._forget(container)
            raise SandboxLost(f"sandbox: no new box, got <{_line(error)}>; look at the engine's log") from None
        return box

    def _forget(self, container: Any) -> None:
        _remove(container)
        with self._lock, suppress(ValueError):
            self._boxes.remove(container)

    def enforced(self, spec: SandboxSpec) -> frozenset[str]:
        """The walls that hold, measured once in a scratch box."""
        return self._measurements.of(self, spec)

    def close(self) -> None:
        """Remove every container. Idempotent."""
        with self._lock:
            self._closed = True
            boxes, self._boxes = self._boxes, []
        for container in boxes:
            _remove(container)
        self._engine.close()


def _remove(container: Any) -> None:
    """Remove a container in any state. One that is gone, or on its way, is fine."""
    with suppress(*_ENGINE_ERRORS):
        container.remove(force=True, v=True)


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[:300]

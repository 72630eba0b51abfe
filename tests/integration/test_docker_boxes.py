"""Containers and their owners, on a real engine: `DOCKER_HOST`, see scripts/docker_engine.sh."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import docker
import pytest

from envs.config import SandboxKind
from envs.sandbox.agentbox import AgentSandbox
from envs.sandbox.base import SandboxSpec, SandboxUnavailable
from envs.sandbox.docker import DockerOptions, DockerServer
from envs.sandbox.probe import probe
from envs.sandbox.reaper import OWNER_LABEL, owner_of

pytestmark = pytest.mark.docker

CHECKOUT = Path(__file__).parents[2]
OWNER = """
import sys, time
from envs.sandbox.agentbox import AgentSandbox
from envs.sandbox.base import SandboxSpec
from envs.sandbox.docker import DockerServer
server = DockerServer()
boxes = [AgentSandbox(server, SandboxSpec()) for _ in range(2)]
boxes[0].run_code("import subprocess; p = subprocess.Popen(['sleep', '86400'], start_new_session=True)", 20)
print("ready", flush=True)
time.sleep(60)
"""


@pytest.fixture(scope="module")
def server():
    try:
        server = DockerServer()
    except SandboxUnavailable as error:
        if os.environ.get("REQUIRE_DOCKER"):
            raise
        pytest.skip(str(error))
    yield server
    server.close()


@pytest.fixture
def engine(server):
    client = docker.from_env()
    yield client
    client.close()


def _of_owner(engine, owner):
    return engine.containers.list(all=True, filters={"label": f"{OWNER_LABEL}={owner}"}, ignore_removed=True)


def test_every_wall_holds(server):
    assert probe(SandboxKind.docker).missing == frozenset()


def test_a_killed_owner_leaves_no_container(engine):
    process = subprocess.Popen([sys.executable, "-c", OWNER], cwd=CHECKOUT, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout.readline() == "ready\n"
        owner = owner_of(process.pid)
        assert len(_of_owner(engine, owner)) == 2
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
        process.stdout.close()
    deadline = time.monotonic() + 10.0
    while _of_owner(engine, owner) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert _of_owner(engine, owner) == []


def test_the_reaper_removes_containers_of_dead_owners_in_every_state(server, engine):
    process = subprocess.Popen(["sleep", "60"])
    dead = owner_of(process.pid)
    process.kill()
    process.wait()
    image = DockerOptions().image
    settings = {"image": image, "command": ["sleep", "600"], "network_mode": "none"}

    def make(owner):
        containers = {
            state: engine.containers.create(labels={OWNER_LABEL: str(owner)}, **settings)
            for state in ("created", "running", "exited", "paused")
        }
        for state in ("running", "exited", "paused"):
            containers[state].start()
        containers["exited"].kill()
        containers["exited"].wait()
        containers["paused"].pause()
        for state, container in containers.items():
            container.reload()
            assert container.status == state
        return containers

    live = owner_of(os.getppid())
    kept = make(live)
    try:
        make(dead)
        assert server.reap() == 4
        assert _of_owner(engine, dead) == []
        assert len(_of_owner(engine, live)) == 4
    finally:
        for container in kept.values():
            container.remove(force=True)


def test_closing_a_box_and_a_server_leaves_nothing(engine):
    server = DockerServer()
    first, second = (AgentSandbox(server, SandboxSpec()) for _ in range(2))
    owner = owner_of(os.getpid())
    before = len(_of_owner(engine, owner))
    first.close()
    assert len(_of_owner(engine, owner)) == before - 1
    assert second.alive()
    server.close()
    assert len(_of_owner(engine, owner)) == before - 2
    assert not second.alive()


def test_an_image_and_a_runtime_that_are_missing_are_named(server):
    with pytest.raises(
        SandboxUnavailable, match=r"env.sandbox_image: not on the engine, got 'no-such-image'; run `make sandbox-image`"
    ):
        DockerServer(DockerOptions(image="no-such-image"))
    with pytest.raises(SandboxUnavailable, match=r"env.sandbox_runtime: unknown to the engine, got 'nope'; choose one"):
        DockerServer(DockerOptions(runtime="nope"))

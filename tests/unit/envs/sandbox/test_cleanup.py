import glob
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

from envs.config import SandboxKind
from envs.sandbox.base import SandboxUnavailable
from envs.sandbox.probe import probe

CHECKOUT = Path(__file__).parents[4]

OWNER = """
import sys, threading, time
from envs.config import SandboxKind
from envs.sandbox.base import SandboxSpec
from envs.sandbox.agentbox import AgentSandbox
from envs.sandbox.local import Zygote
boxes = []
def start():
    zygote = Zygote(SandboxKind(sys.argv[1]))
    for _ in range(2):
        box = AgentSandbox(zygote, SandboxSpec())
        box.run_code("import subprocess; p = subprocess.Popen(['sleep', sys.argv[2]], start_new_session=True)".replace(
            "sys.argv[2]", repr(sys.argv[2])), 20)
        boxes.append(box)
# From a thread that ends: the fork server must follow the process, not the thread.
thread = threading.Thread(target=start)
thread.start()
thread.join()
time.sleep(0.2)
boxes[0].run_code("1", 20)
print(boxes[0]._server.pid, flush=True)
time.sleep(60)
"""


def _below(pid):
    found = [pid]
    for parent in found:
        for children in glob.glob(f"/proc/{parent}/task/*/children"):
            found += [int(child) for child in Path(children).read_text().split()]
    return found


def _running(pids):
    alive = []
    for pid in pids:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except (FileNotFoundError, ProcessLookupError):
            continue
        if state != "Z":
            alive.append(pid)
    return alive


def _folders_on_the_host(pids):
    folders = set()
    for pid in pids:
        with suppress(OSError):
            folders.add(os.readlink(f"/proc/{pid}/cwd"))
    return {folder for folder in folders if os.path.basename(folder).startswith("sandbox-")}


@pytest.mark.parametrize("kind", [SandboxKind.local, SandboxKind.degraded])
def test_everything_goes_with_a_killed_owner(kind):
    try:
        probe(kind)
    except SandboxUnavailable as error:
        pytest.skip(f"{kind.value} sandbox: {error}")
    seconds = f"86400.{os.getpid()}"
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER, kind.value, seconds], cwd=CHECKOUT, stdout=subprocess.PIPE, text=True
    )
    try:
        zygote = int(owner.stdout.readline())
        pids = _below(zygote)
        folders = _folders_on_the_host(pids)
        assert bool(folders) is (kind is SandboxKind.degraded)
        # The fork server, two agents, two interpreters, two daemons.
        assert len(pids) >= 7
        assert sum(seconds in Path(f"/proc/{pid}/cmdline").read_text() for pid in pids) == 2
    finally:
        owner.send_signal(signal.SIGKILL)
        owner.wait()
        owner.stdout.close()
    deadline = time.monotonic() + 2.0
    while _running(pids) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert _running(pids) == []
    assert not any(os.path.exists(folder) for folder in folders)

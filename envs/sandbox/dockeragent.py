"""The first process of a docker box: takes the agent's files from its standard input and becomes the agent.

Standard library and the files of the agent alone. The image holds only an interpreter, so a change of the agent needs
no new image: `BOOT` is the program text on the command line, and what it runs arrives over the attached stream, as a
length (u32, big endian) and a JSON object of module names and sources. The engine built the walls already.
"""

from __future__ import annotations

import gc
import importlib
import os
import signal
import sys
from collections.abc import Sequence
from typing import Any, Final

from envs.sandbox import agent, boxfiles
from envs.sandbox.scratch import View

BOOT: Final = """
import json, os, sys, types
def read(size):
    data = b""
    while len(data) < size:
        chunk = os.read(0, size - len(data))
        if not chunk: os._exit(0)
        data += chunk
    return data
start = json.loads(read(int.from_bytes(read(4), "big")))
for name in ("envs", "envs.sandbox"):
    sys.modules[name] = package = types.ModuleType(name)
    package.__path__ = []
sys.modules["envs"].sandbox = package
for name, source in start["modules"]:
    sys.modules[name] = module = types.ModuleType(name)
    module.__file__ = f"<{name}>"
    setattr(package, name.rpartition(".")[2], module)
    exec(compile(source, module.__file__, "exec"), module.__dict__)
sys.modules[start["modules"][-1][0]].main(start["settings"])
"""

MODULES: Final = tuple(f"envs.sandbox.{name}" for name in ("wire", "worker", "scratch", "boxfiles", "agent"))
"""What runs in a box before this module, in the order of its imports."""


class _Pipes:
    """The host's two pipes as the agent's connection."""

    def __init__(self, read: int, write: int) -> None:
        self._read = read
        self._write = write

    def recv_into(self, buffer: memoryview, /) -> int:
        """Read what has arrived; 0 at the end."""
        return os.readv(self._read, [buffer])

    def sendmsg(self, buffers: Sequence[View], /) -> int:
        """Write what fits; the number of bytes."""
        return os.writev(self._write, buffers)


def main(settings: dict[str, Any]) -> None:
    """Serve the host until it goes away or the box's time is over."""
    agent.set_dumpable(False)
    # Descriptors that no worker inherits, and nothing under the numbers that code expects its own streams at.
    pipes = _Pipes(os.dup(0), os.dup(1))
    null = os.open("/dev/null", os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(null, descriptor)
    os.close(null)
    # A box whose host is cut off without closing the stream (a remote engine) ends by itself.
    signal.signal(signal.SIGALRM, lambda number, frame: os._exit(0))
    signal.setitimer(signal.ITIMER_REAL, settings["lifetime_s"])
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.umask(0o022)
    os.environ.clear()
    os.environ.update(settings["environment"])
    folders = tuple(settings["folders"])
    os.chdir(folders[0])
    for name in settings["preimport"]:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()
    sys.argv[:] = [""]
    boxfiles.wipe(folders)
    config = agent.AgentConfig(
        folders=folders,
        memory_bytes=settings["memory_bytes"],
        max_output_bytes=settings["max_output_bytes"],
        owns_all=True,
        confine_worker=_forget_lifetime,
    )
    agent.Agent(pipes, config).serve()


def _forget_lifetime() -> None:
    """A worker inherits the handler but not the timer: the policy's own alarms act as usual."""
    signal.signal(signal.SIGALRM, signal.SIG_DFL)

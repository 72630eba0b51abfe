"""Cleans up after a driver that was killed: its Ray processes, then its temporary folder.

Ray's daemons end with their driver, but two of its agents outlive a SIGKILL by a minute (Ray 2.60: they report the
death to a server that is dead as well). So a driver starts this process and holds a pipe to it. A driver that ends well
says so; if the pipe closes without a word, every process that still has a file of the run's own temporary folder open
is killed by its pid, and the folder is removed. Sandboxes need none of this: they end with the process that made them.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil

_DONE = b"done\n"
_GRACE_S = 1.0
_GIVE_UP_S = 12.0


class Reaper:
    """The driver's end. `dismiss` it when everything was taken down in order."""

    def __init__(self, folder: Path):
        self._process = subprocess.Popen(
            [sys.executable, "-m", "rl.reaper", str(folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            cwd=Path(__file__).parents[1],
            start_new_session=True,  # a Ctrl-C in the terminal is for the driver alone
        )

    def dismiss(self) -> None:
        """Tell it that there is nothing to do. Idempotent."""
        pipe = self._process.stdin
        if pipe is not None and not pipe.closed:
            try:
                pipe.write(_DONE)
                pipe.close()
            except BrokenPipeError:
                return  # it is gone already, so there is nothing left to tell
            self._process.wait(timeout=10)


def holders(folder: Path) -> Iterator[psutil.Process]:
    """Processes of this user, other than this one, that have a file below `folder` open."""
    prefix = f"{folder}/"
    for process in psutil.process_iter():
        try:
            if process.pid != psutil.Process().pid and any(
                file.path.startswith(prefix) for file in process.open_files()
            ):
                yield process
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue


def reap(folder: Path) -> None:
    """Kill what holds `folder` open until nothing does, then remove it."""
    deadline = time.monotonic() + _GIVE_UP_S
    time.sleep(_GRACE_S)
    while (found := list(holders(folder))) and time.monotonic() < deadline:
        for process in found:
            try:
                process.kill()  # psutil checks that the pid still is the process that was seen
            except psutil.NoSuchProcess:
                continue
        time.sleep(0.2)
    shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    if sys.stdin.buffer.read() != _DONE:
        reap(Path(sys.argv[1]))

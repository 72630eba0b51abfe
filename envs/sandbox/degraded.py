"""The degraded sandbox: Landlock, a stricter system-call filter, limits. For machines without namespaces, by name only.

Runs in the fork server and its children. The agent is the same. What it cannot give: a limit on the sum of file sizes
and on the number of files, a /proc of its own, and (unless started by root, where each box has a user id of its own)
an exact limit on processes. Installed packages stay readable. Its one folder lies on the host; the fork server removes
it when the box ends.
"""

from __future__ import annotations

import os
from contextlib import suppress

from envs.sandbox import boxfiles, landlock, namespaces
from envs.sandbox.agent import AgentConfig, offer_to_oom_killer

_DEVICES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom")


def make_folder() -> str:
    """A working folder on the host for one box."""
    folder = f"/tmp/sandbox-{os.urandom(16).hex()}"
    os.mkdir(folder, 0o700)
    return folder


def remove_folder(folder: str) -> None:
    """Remove the folder of an ended box, whatever its code left there."""
    with suppress(OSError):
        boxfiles.wipe((folder,))
        os.rmdir(folder)
        return
    # Trees deeper than a path can name.
    with suppress(OSError):
        os.waitpid(os.posix_spawnp("rm", ["rm", "-rf", "--", folder], os.environ), 0)


def wall_off(folder: str, *, memory_bytes: int, max_output_bytes: int) -> AgentConfig:
    """Confine this process, the agent of a box, and say how it confines each worker further."""
    # The worker's domain has no /proc, so the agent does it for both.
    offer_to_oom_killer()
    uid = namespaces.unused_uid() if os.geteuid() == 0 else None
    if uid is not None:
        os.chown(folder, uid, uid)
        namespaces.drop_bounding_set()
        namespaces.become(uid)
    namespaces.drop_capabilities()
    namespaces.adopt_orphans()
    system, _ = namespaces.system_folders()
    writable = [folder, *_DEVICES]
    landlock.restrict(read_only=[*system, "/proc"], writable=writable)
    return AgentConfig(
        folders=(folder,),
        memory_bytes=memory_bytes,
        max_output_bytes=max_output_bytes,
        owns_all=uid is not None,
        # /proc shows other processes: the agent needs it to find what to kill, the policy's code does not get it.
        confine_worker=lambda: landlock.restrict(read_only=system, writable=writable),
    )


def count_tasks(uid: int) -> int:
    """Threads of all processes of a user on this machine."""
    count = 0
    for name in os.listdir("/proc"):
        if name.isdigit():
            with suppress(OSError):
                if os.stat(f"/proc/{name}").st_uid == uid:
                    count += len(os.listdir(f"/proc/{name}/task"))
    return count

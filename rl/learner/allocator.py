"""The memory allocator of a learner process: one that keeps what is freed, for the next step to use.

A step allocates and frees several times the size of the gradients in large pieces. glibc gives each back to the system
and maps it again, and the system zeroes every page of it: a third to two thirds of the time of an update of 252 million
parameters (RESULTS.md). jemalloc (Evans 2006), which Ray's wheel contains, keeps them when it is told to; the peak is
the same.
"""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path

_KEEP = "dirty_decay_ms:-1,muzzy_decay_ms:-1"


def keeping_memory() -> dict[str, str]:
    """Environment of a process that keeps freed memory; empty where Ray brings no jemalloc, or the user preloads."""
    ray = find_spec("ray")
    library = Path(str(ray.origin)).parent / "core" / "libjemalloc.so" if ray is not None else Path()
    if not library.is_file() or "LD_PRELOAD" in os.environ:
        return {}
    return {"LD_PRELOAD": str(library), "MALLOC_CONF": os.environ.get("MALLOC_CONF", _KEEP)}

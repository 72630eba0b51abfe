"""Tests of Triton kernels, each file in a process of its own.

Triton decides when it is imported whether kernels run on a GPU or in its interpreter, so the files of this folder are
run by a child with `TRITON_INTERPRET=1`: in the parent each is one test, which fails with the child's report. To run
single tests: `TRITON_INTERPRET=1 python -m pytest tests/numerics/triton -k ...`. On a machine with a GPU,
`KERNELS_ON=cuda` runs the same tests on it, in the process itself.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

IN_PROCESS = os.environ.get("TRITON_INTERPRET") == "1" or os.environ.get("KERNELS_ON") == "cuda"


def pytest_collect_file(file_path: Path, parent: pytest.Collector) -> "_Child | None":
    if IN_PROCESS or not file_path.match("test_*.py"):
        return None
    return _Child.from_parent(parent, path=file_path)


@pytest.hookimpl(tryfirst=True)
def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> "_Empty | None":
    """In the parent the file itself is not imported: that would load Triton without the interpreter."""
    return None if IN_PROCESS else _Empty.from_parent(parent, path=module_path)


class _Empty(pytest.Module):
    def collect(self) -> list[pytest.Item]:
        return []


class _Child(pytest.File):
    def collect(self) -> list[pytest.Item]:
        return [_InInterpreter.from_parent(self, name="in_the_interpreter")]


class _InInterpreter(pytest.Item):
    def runtest(self) -> None:
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(self.path)]
        command += ["-m", self.config.getoption("markexpr")]
        child = subprocess.run(
            command,
            cwd=self.config.rootpath,
            env=os.environ | {"TRITON_INTERPRET": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=240,
            check=False,
        )
        if child.returncode:
            raise ChildFailedError(child.stdout)

    def repr_failure(self, excinfo: pytest.ExceptionInfo[BaseException]) -> str:  # pyright: ignore
        if isinstance(excinfo.value, ChildFailedError):
            return str(excinfo.value)
        return str(super().repr_failure(excinfo))

    def reportinfo(self) -> tuple[Path, None, str]:
        return self.path, None, f"{self.path.name}: in the interpreter"


class ChildFailedError(Exception):
    """The output of a child whose tests did not pass."""


@pytest.fixture
def device() -> str:
    """Where tensors of a test live: the interpreter works on CPU tensors."""
    return os.environ.get("KERNELS_ON", "cpu")

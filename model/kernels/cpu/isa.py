"""Which instruction set the CPU kernels are compiled for: the best of this machine, or a lesser one by name.

A set counts when the processor has it (CPUID), the operating system saves its registers (XCR0) and, for AMX, Linux
granted the tiles to this process (arch_prctl); `isa.cpp` asks all three.
"""

from __future__ import annotations

import ctypes
from enum import StrEnum
from functools import cache
from pathlib import Path

import torch  # noqa: F401 (first: libraries loaded after it share its OpenMP threads instead of bringing their own)

from model.kernels.cpu.build import KernelError, build, build_all

_FOLDER = Path(__file__).parent


class Isa(StrEnum):
    """From least to best; each needs all before it."""

    AVX2 = "avx2"
    AVX512 = "avx512"
    AMX = "amx"

    @property
    def flags(self) -> tuple[str, ...]:
        """What the compiler may use."""
        flags = ["-mavx2", "-mfma", "-mf16c", "-mbmi2"]
        if self is not Isa.AVX2:
            flags += ["-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq"]
        if self is Isa.AMX:
            flags += ["-mavx512vbmi", "-mavx512bf16", "-mamx-tile", "-mamx-bf16"]
        return tuple(flags)


@cache
def machine_isa() -> Isa:
    """The best instruction set that this process may use.

    Raises:
        KernelError: The machine is older than AVX2 or not an x86, or there is no compiler.
    """
    library = ctypes.CDLL(str(build(_FOLDER / "isa.cpp", ())))
    level = library.isa_level()
    if level == 0:
        raise KernelError("cpu kernels: need AVX2 and FMA, got a processor without them; set cluster.kernels=torch")
    return list(Isa)[level - 1]


@cache
def available_isas() -> tuple[Isa, ...]:
    """Every instruction set that this process may use, least first. Raises as `machine_isa`."""
    sets = list(Isa)
    return tuple(sets[: sets.index(machine_isa()) + 1])


def build_kernels(isa: Isa) -> None:
    """Build every kernel for `isa` that is not built yet: some ten seconds once a machine. Raises as `load`."""
    build_all(sorted(file for file in _FOLDER.parent.glob("*/*.cpp") if file.name != "isa.cpp"), isa.flags)


@cache
def load(source: Path, isa: Isa) -> ctypes.CDLL:
    """The library of a C++ file compiled for `isa`; built at most once a machine, loaded once a process.

    Raises:
        KernelError: This machine cannot run `isa`, or the build failed.
    """
    if isa not in available_isas():
        raise KernelError(
            f"cpu kernels: this machine cannot run {isa}, got it by name; choose from {[*map(str, available_isas())]}"
        )
    return ctypes.CDLL(str(build(source, isa.flags)))

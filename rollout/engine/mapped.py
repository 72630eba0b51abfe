"""Experts that stay on disk until they are chosen: a model whose experts are larger than the memory still runs.

The published bytes go to a file as the checkpoint is read, one tensor at a time, and the kernel's layout of them to a
second one, one layer at a time; both files vanish with the process. The layout is mapped, so the machine reads an
expert when a token first chooses it. What was read is given back, the experts first that nobody has chosen for longest,
so that at most `budget_bytes` of them are held. The kernel and its bytes are the same, and so are all results.

Shapes: T packed tokens, E experts, K experts of a token, S strips, B blocks.
"""

from __future__ import annotations

import mmap
import os
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import torch

from model.kernels.cpu.build import cache_folder
from model.kernels.cpu.isa import Isa
from model.kernels.grouped_experts.cpu import GroupedExperts, PackedExperts, PackedMatrix
from model.kernels.grouped_experts.reference import Clamp
from model.loaded import Weight, packed_of
from model.snapshot import Format, PackedTensor


class DiskFile:
    """An unnamed file that grows; what is appended can be mapped."""

    def __init__(self) -> None:
        folder = cache_folder().parent / "experts"  # a temporary folder may lie in memory
        folder.mkdir(parents=True, exist_ok=True)
        self._file = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115 (lives as long as what is mapped)
        self._end = 0

    def append(self, *arrays: np.ndarray) -> mmap.mmap:
        """Write the bytes of `arrays` one after the other, and map them."""
        start, length = self._end, sum(array.nbytes for array in arrays)
        for array in arrays:
            self._file.write(np.ascontiguousarray(array).data)
        self._file.write(bytes(-length % mmap.ALLOCATIONGRANULARITY))
        self._file.flush()
        self._end = self._file.tell()
        os.posix_fadvise(self._file.fileno(), start, length, os.POSIX_FADV_RANDOM)
        return mmap.mmap(self._file.fileno(), length, offset=start)


def spool(weights: Iterable[tuple[str, Weight]]) -> dict[str, PackedTensor]:
    """The published bytes of a checkpoint that is read once; those in MXFP4 lie on disk."""
    return dict(_spooled(weights, DiskFile()))


def _spooled(weights: Iterable[tuple[str, Weight]], file: DiskFile) -> Iterator[tuple[str, PackedTensor]]:
    for name, weight in weights:
        packed = packed_of(name, weight)
        if packed.format is Format.MXFP4:
            mapped = np.frombuffer(file.append(packed.payload, packed.scales), np.uint8)
            payload, scales = np.split(mapped, [packed.payload.size])
            packed = PackedTensor(
                format=packed.format,
                shape=packed.shape,
                payload=payload.reshape(packed.payload.shape),
                scales=scales.reshape(packed.scales.shape),
            )
        yield name, packed


@dataclass(frozen=True, slots=True, eq=False)
class _Mapped:
    """A matrix on disk: `pages` hold the codes, then the scales."""

    pages: mmap.mmap
    expert_bytes: tuple[int, int]
    num_experts: int

    def drop(self, expert: int) -> None:
        """Give the memory of one expert back; pages that it shares with its neighbours stay."""
        start = 0
        for size in self.expert_bytes:
            first = -(-(start + expert * size) // mmap.PAGESIZE) * mmap.PAGESIZE
            last = (start + (expert + 1) * size) // mmap.PAGESIZE * mmap.PAGESIZE
            if last > first:
                self.pages.madvise(mmap.MADV_DONTNEED, first, last - first)
            start += size * self.num_experts


class MappedExperts(GroupedExperts):
    """The kernel, with packed matrices on disk. `num_bytes_read` counts what was read because it was chosen."""

    def __init__(self, isa: Isa, *, budget_bytes: int):
        """At most `budget_bytes` of experts are held, and those of one layer's step at least (0: no bound)."""
        super().__init__(isa)
        self._budget = budget_bytes
        self._file = DiskFile()
        self._mapped: dict[int, _Mapped] = {}
        self._held: dict[tuple[int, int], int] = {}
        self.num_bytes_held = 0
        self.num_bytes_read = 0

    def pack_matrix(self, blocks: torch.Tensor, scales: torch.Tensor) -> PackedMatrix:
        """As `GroupedExperts.pack_matrix`."""
        packed = super().pack_matrix(blocks, scales)
        parts = (packed.codes_ESB, packed.scales_ESB)
        pages = self._file.append(*(part.numpy() for part in parts))
        codes, scale_bytes = torch.frombuffer(pages, dtype=torch.uint8).split([part.numel() for part in parts])
        mapped = PackedMatrix(
            codes_ESB=codes.view_as(packed.codes_ESB),
            scales_ESB=scale_bytes.view_as(packed.scales_ESB),
            extreme_ES=packed.extreme_ES,
            num_outputs=packed.num_outputs,
        )
        num = packed.num_matrices
        expert_bytes = packed.codes_ESB.numel() // num, packed.scales_ESB.numel() // num
        self._mapped[mapped.codes_ESB.data_ptr()] = _Mapped(pages, expert_bytes, num)
        return mapped

    def forward(
        self,
        x_TD: torch.Tensor,
        packed: PackedExperts,
        chosen_TK: torch.Tensor,
        weights_TK: torch.Tensor,
        clamp: Clamp | None,
        keep: tuple[torch.Tensor, torch.Tensor] | None,
    ) -> torch.Tensor:
        """As `GroupedExperts.forward`; room is made for the chosen experts first."""
        chosen = [expert for expert in chosen_TK.unique().tolist() if 0 <= expert < packed.down.num_matrices]
        for matrix in (packed.gate_up, packed.down):
            self._choose(matrix.codes_ESB.data_ptr(), chosen)
        self._keep_within_budget(num_needed=2 * len(chosen))
        return super().forward(x_TD, packed, chosen_TK, weights_TK, clamp, keep)

    def _choose(self, matrix: int, experts: list[int]) -> None:
        size = sum(self._mapped[matrix].expert_bytes)
        for expert in experts:
            if self._held.pop((matrix, expert), 0) == 0:
                self.num_bytes_held += size
                self.num_bytes_read += size
            self._held[matrix, expert] = size

    def _keep_within_budget(self, *, num_needed: int) -> None:
        """Drop from the front, where the experts are that nobody has chosen for longest; the newest are needed."""
        while self._budget and self.num_bytes_held > self._budget and len(self._held) > num_needed:
            (matrix, expert), size = next(iter(self._held.items()))
            del self._held[matrix, expert]
            self._mapped[matrix].drop(expert)
            self.num_bytes_held -= size

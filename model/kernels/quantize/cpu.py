"""The MXFP4 quantizer on a CPU: the bytes of `model.mxfp4`, and in the same pass the tiles that products read.

Shapes: N rows, K values of a row, S = ceil(N / 16) strips.
"""

from __future__ import annotations

import ctypes
import math
from pathlib import Path
from typing import NamedTuple

import torch

from model import mxfp4
from model.kernels.cpu.build import KernelError
from model.kernels.cpu.isa import Isa, load
from model.kernels.quantize.reference import STRIP, TILE_BYTES
from model.mxfp4 import BLOCK, BLOCK_BYTES, ScaleRule
from model.mxfp4_rounding import Rounding

_SOURCE = Path(__file__).with_name("cpu.cpp")
_TOO_LARGE = 0x7F600000
"""The fp32 bits of `mxfp4.LIMIT`."""


class Packed(NamedTuple):
    """A weight in both layouts."""

    blocks: torch.Tensor
    """uint8 [..., N, K/32, 16], canonical."""
    scales: torch.Tensor
    """uint8 [..., N, K/32], canonical."""
    tile_codes: torch.Tensor
    """uint8 [..., S, K/32, 256], of `cpu/gemm.h`."""
    tile_scales: torch.Tensor
    """uint8 [..., S, K/32, 16]."""
    extreme: torch.Tensor
    """uint8 [..., S]: 1 where a strip's products are taken in fp32 (`Mxfp4Strip`)."""


class Quantize:
    """The kernel of one instruction set. Rounds to nearest even; errors are those of `mxfp4.quantize`, by word."""

    def __init__(self, isa: Isa) -> None:
        library = load(_SOURCE, isa)
        self._quantize, self._tiles = library.quantize, library.quantize_tiles
        self._quantize.argtypes = [ctypes.c_void_p] * 4 + [ctypes.c_int64, ctypes.c_uint32]
        self._tiles.argtypes = [ctypes.c_void_p] * 7 + [ctypes.c_int64] * 3 + [ctypes.c_uint32]
        self._quantize.restype = self._tiles.restype = ctypes.c_uint32
        self._dequantize = {torch.float32: library.dequantize_fp32, torch.bfloat16: library.dequantize_bf16}
        for run in self._dequantize.values():
            run.argtypes, run.restype = [ctypes.c_void_p] * 3 + [ctypes.c_int64], None

    def __call__(
        self,
        w: torch.Tensor,
        *,
        rule: ScaleRule = ScaleRule.EVEN,
        rounding: Rounding = Rounding.NEAREST_EVEN,
        previous_scales: torch.Tensor | None = None,
        name: str = "tensor",
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As `mxfp4.quantize`: blocks, uint8 [..., K/32, 16], and scales, uint8 [..., K/32].

        Raises:
            MXFP4Error: As there.
            KernelError: The rounding is stochastic.
        """
        w, previous = _operands(w, rule, rounding, previous_scales, name)
        blocks = w.new_empty(*w.shape[:-1], w.shape[-1] // BLOCK, BLOCK_BYTES, dtype=torch.uint8)
        scales = w.new_empty(blocks.shape[:-1], dtype=torch.uint8)
        largest = self._quantize(
            w.data_ptr(), _pointer(previous), blocks.data_ptr(), scales.data_ptr(), scales.numel(), rule.carry
        )
        if largest >= _TOO_LARGE:
            mxfp4.quantize(w, rule=rule, name=name)
        return blocks, scales

    def pack(
        self,
        w: torch.Tensor,
        *,
        rule: ScaleRule = ScaleRule.EVEN,
        rounding: Rounding = Rounding.NEAREST_EVEN,
        previous_scales: torch.Tensor | None = None,
        name: str = "tensor",
    ) -> Packed:
        """Quantize [..., N, K] into both layouts, reading it once. Raises as a call."""
        w, previous = _operands(w, rule, rounding, previous_scales, name)
        if w.ndim < 2:
            raise KernelError(
                f"{name}: tiles are cut from matrices, got shape {tuple(w.shape)}; call the quantizer without tiles"
            )
        blocks = w.new_empty(*w.shape[:-1], w.shape[-1] // BLOCK, BLOCK_BYTES, dtype=torch.uint8)
        packed = self._empty_tiles(blocks, w.new_empty(blocks.shape[:-1], dtype=torch.uint8))
        if self._run_tiles(packed, w, previous, rule) >= _TOO_LARGE:
            mxfp4.quantize(w, rule=rule, name=name)
        return packed

    def tile(self, blocks: torch.Tensor, scales: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """As `reference.tile`. Raises MXFP4Error when the two do not belong together."""
        mxfp4.check_packed("tile", blocks, scales)
        packed = self._empty_tiles(blocks.contiguous(), scales.contiguous())
        self._run_tiles(packed, None, None, ScaleRule.EVEN)
        return packed[2:]

    def dequantize(
        self, blocks: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype = torch.float32
    ) -> torch.Tensor:
        """As `mxfp4.dequantize`: [..., K] in fp32 or bf16. Raises as there."""
        if dtype not in self._dequantize:
            return mxfp4.dequantize(blocks, scales, dtype)
        mxfp4.check_packed("dequantize", blocks, scales)
        blocks, scales = blocks.contiguous(), scales.contiguous()
        values = torch.empty(*scales.shape[:-1], scales.shape[-1] * BLOCK, dtype=dtype)
        self._dequantize[dtype](blocks.data_ptr(), scales.data_ptr(), values.data_ptr(), scales.numel())
        return values

    @staticmethod
    def _empty_tiles(blocks: torch.Tensor, scales: torch.Tensor) -> Packed:
        *lead, num_rows, num_blocks = scales.shape
        tiles = (*lead, -(-num_rows // STRIP), num_blocks)
        empty = (blocks.new_empty(shape) for shape in ((*tiles, TILE_BYTES), (*tiles, STRIP), tiles[:-1]))
        return Packed(blocks, scales, *empty)

    def _run_tiles(self, packed: Packed, w: torch.Tensor | None, previous: torch.Tensor | None, rule: ScaleRule) -> int:
        *lead, num_rows, num_blocks = packed.scales.shape
        pointers = [tensor.data_ptr() for tensor in packed]
        return self._tiles(
            _pointer(w), _pointer(previous), *pointers, math.prod(lead), num_rows, num_blocks, rule.carry
        )


def _operands(
    w: torch.Tensor,
    rule: ScaleRule,
    rounding: Rounding,
    previous_scales: torch.Tensor | None,
    name: str,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Both as the kernel reads them."""
    if rounding is not Rounding.NEAREST_EVEN:
        raise KernelError(f"{name}: the CPU quantizer rounds to nearest even, got {rounding}; use model.mxfp4.quantize")
    lead = (*w.shape[:-1], w.shape[-1] // BLOCK) if w.ndim else ()
    fits = w.ndim > 0 and w.shape[-1] % BLOCK == 0 and w.is_floating_point()
    if previous_scales is not None:
        fits = fits and previous_scales.dtype == torch.uint8 and previous_scales.shape == lead
        previous_scales = previous_scales.contiguous()
    if not fits:
        mxfp4.quantize(w, rule=rule, previous_scales=previous_scales, name=name)  # says what does not fit
    return w.detach().to(torch.float32).contiguous(), previous_scales


def _pointer(tensor: torch.Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()

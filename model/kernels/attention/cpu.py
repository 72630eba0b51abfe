"""Paged attention on a CPU: `reference.write` and `reference.paged_attention`, with bits that follow the query alone.

Shapes: as in `reference.py`.
"""

from __future__ import annotations

import ctypes
from pathlib import Path

import torch

from model.kernels.attention.reference import Pages, PageTable
from model.kernels.cpu.build import KernelError
from model.kernels.cpu.isa import Isa, load

_FOLDER = Path(__file__).parent
_KINDS = {torch.float32: 0, torch.bfloat16: 1, torch.int8: 2, torch.float8_e4m3fn: 3}
_SCALED = {torch.int8, torch.float8_e4m3fn}
_FLOATS = (torch.float32, torch.bfloat16)


class _Pages(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("rows", "scales")),
        *((name, ctypes.c_int64) for name in ("row_stride", "head_stride", "scale_row_stride", "scale_head_stride")),
        *((name, ctypes.c_int64) for name in ("dim", "kind", "slots")),
    )


class _Call(ctypes.Structure):
    _fields_ = (
        *((name, _Pages) for name in ("keys", "values")),
        *((name, ctypes.c_void_p) for name in ("q", "out")),
        *((name, ctypes.c_int64) for name in ("q_row_stride", "q_head_stride", "is_bf16")),
        *((name, ctypes.c_int64) for name in ("tokens", "heads", "kv_heads")),
        *((name, ctypes.c_void_p) for name in ("sinks", "pages", "starts", "counts")),
        *((name, ctypes.c_int64) for name in ("pages_stride", "sequences", "page_size", "window")),
        ("scale", ctypes.c_float),
    )


class PagedAttention:
    """The kernels of one instruction set."""

    def __init__(self, isa: Isa) -> None:
        self._attend = load(_FOLDER / "cpu.cpp", isa).paged_attention
        self._write = load(_FOLDER / "write.cpp", isa).write_pages
        self._attend.argtypes = [ctypes.POINTER(_Call), ctypes.c_int64]
        self._write.argtypes = [ctypes.POINTER(_Pages), *[ctypes.c_void_p] * 2, *[ctypes.c_int64] * 5]
        self._attend.restype = self._write.restype = ctypes.c_int64

    def write(self, pages: Pages, slots_T: torch.Tensor, x_TGd: torch.Tensor) -> None:
        """As `reference.write`, byte for byte.

        Raises:
            KernelError: A slot does not exist, or the pages are of a kind that the kernel cannot store.
        """
        if x_TGd.dtype not in _FLOATS:
            x_TGd = x_TGd.float()
        x_TGd = _dense_rows(x_TGd)
        slots_T = slots_T.to(torch.int64).contiguous()
        if x_TGd.shape != (len(slots_T), *pages.rows_SGd.shape[1:]):
            raise KernelError(
                f"paged write: rows must be [T, G, d] of the pages, got {[*x_TGd.shape]} for {len(slots_T)} slots of "
                f"{[*pages.rows_SGd.shape[1:]]}; pass one row and one slot a token"
            )
        bad = self._write(
            _described(pages),
            slots_T.data_ptr(),
            x_TGd.data_ptr(),
            *x_TGd.shape[:2],
            *x_TGd.stride()[:2],
            x_TGd.dtype == torch.bfloat16,
        )
        if bad:
            raise KernelError(
                f"paged write: slots must lie within the {len(pages.rows_SGd)} of the pages, got "
                f"{int(slots_T[bad - 1])}; take slots from the table"
            )

    def __call__(
        self,
        q_THd: torch.Tensor,
        keys: Pages,
        values: Pages,
        table: PageTable,
        *,
        scale: float,
        window: int = 0,
        sinks_H: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """As `reference.paged_attention`, fp32 or bf16 queries; no gradient.

        Raises:
            KernelError: An operand has a dtype or shape that does not fit, or the table points beyond the pages.
        """
        tokens, heads, dim = q_THd.shape
        kv_heads, key_dim = keys.rows_SGd.shape[1:]
        if q_THd.dtype not in _FLOATS or dim != key_dim or heads % kv_heads or values.rows_SGd.shape[1] != kv_heads:
            raise KernelError(
                f"paged attention: queries must be fp32 or bf16 [T, H, d] for keys and values of G heads, G dividing "
                f"H, got {q_THd.dtype} {[*q_THd.shape]} for {[*keys.rows_SGd.shape[1:]]} and "
                f"{[*values.rows_SGd.shape[1:]]}; pass what the model's layers make"
            )
        q_THd = _dense_rows(q_THd)
        pages_NB, starts_N, counts_N = (x.to(torch.int32).contiguous() for x in table[:3])
        sinks_H = None if sinks_H is None else sinks_H.detach().float().contiguous()
        out_THe = q_THd.new_empty(tokens, heads, values.rows_SGd.shape[2])
        call = _Call(
            keys=_described(keys),
            values=_described(values),
            q=q_THd.data_ptr(),
            out=out_THe.data_ptr(),
            q_row_stride=q_THd.stride(0),
            q_head_stride=q_THd.stride(1),
            is_bf16=q_THd.dtype == torch.bfloat16,
            tokens=tokens,
            heads=heads,
            kv_heads=kv_heads,
            sinks=None if sinks_H is None else sinks_H.data_ptr(),
            pages=pages_NB.data_ptr(),
            starts=starts_N.data_ptr(),
            counts=counts_N.data_ptr(),
            pages_stride=pages_NB.shape[1],
            sequences=len(counts_N),
            page_size=table.page_size,
            window=window,
            scale=scale,
        )
        bad = self._attend(call, torch.get_num_threads())
        if bad < 0:
            raise KernelError(
                f"paged attention: counts of the table must add up to the queries, got {int(counts_N.sum())} for "
                f"{tokens}; build the table from the batch it is used with"
            )
        if bad:
            raise KernelError(
                f"paged attention: pages of sequence {bad - 1} must exist for all its positions, got start "
                f"{int(starts_N[bad - 1])}, count {int(counts_N[bad - 1])} and pages {pages_NB[bad - 1].tolist()[:8]}; "
                f"reserve pages before the call"
            )
        return out_THe


def _dense_rows(x: torch.Tensor) -> torch.Tensor:
    """A tensor whose last axis has stride 1."""
    return x if x.stride(-1) == 1 else x.contiguous()


def _described(pages: Pages) -> _Pages:
    rows, scales = pages
    kind = _KINDS.get(rows.dtype)
    if kind is None or rows.stride(2) != 1 or (scales is None) != (rows.dtype not in _SCALED):
        raise KernelError(
            f"pages: must be fp32 or bf16, or int8 or float8_e4m3fn with scales, dense along the last axis, got "
            f"{rows.dtype} of strides {rows.stride()} {'without' if scales is None else 'with'} scales; "
            f"allocate another cache"
        )
    if scales is not None and scales.dtype != torch.float32:
        raise KernelError(f"pages: scales must be fp32, got {scales.dtype}; allocate another cache")
    scale_strides = (0, 0) if scales is None else scales.stride()
    return _Pages(
        rows.data_ptr(),
        None if scales is None else scales.data_ptr(),
        *rows.stride()[:2],
        *scale_strides,
        rows.shape[2],
        kind,
        len(rows),
    )

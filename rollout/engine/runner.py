"""One step of the model: packed ids, positions and page table in, logits of the rows that sample and all routes out.

Arrays are put together with NumPy, for all rows at once: per token there is no Python work. The page table of every
row is kept between steps, so a decoding row costs one entry every `page_size` steps.

Shapes: T packed tokens, N rows of the step, R all rows, B pages of the longest sequence, V vocabulary, G key-value
heads, H query heads, d head dim of keys, e of values, L layers with experts, K experts a token.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from model.kernels.attention.reference import Attention, PageTable
from model.transformer import Transformer
from rollout.config import EngineConfig
from rollout.engine.kv_cache import KvCache
from rollout.engine.scheduler import Work


class StepOutput(NamedTuple):
    """fp32 logits of the rows that sample, the rows' indices in the step, and each row's routes."""

    logits_NV: torch.Tensor
    samples: list[int]
    routes_TLK: np.ndarray


class Runner:
    """Runs a transformer on the pages of a cache."""

    def __init__(self, model: Transformer, cache: KvCache, config: EngineConfig, attention: Attention):
        self._model = model
        self._cache = cache
        self._attention = attention
        self._pages_RB = np.zeros((config.max_batch_size, cache.pages_per_sequence), np.int32)

    def run(self, step: Sequence[Work]) -> StepOutput:
        """Compute the step's tokens; keys, values and routes are written to the pages."""
        size = self._cache.page_size
        starts = [work.active.num_computed for work in step]
        counts = [work.count for work in step]
        samples = [n for n, work in enumerate(step) if starts[n] + counts[n] == len(work.active.ids)]
        starts_N, counts_N = np.array(starts, np.int32), np.array(counts, np.int32)
        ends_N = np.cumsum(counts_N)
        if len(step) == ends_N[-1]:
            ids = [work.active.ids[start] for work, start in zip(step, starts, strict=True)]
            row_T, positions_T = np.arange(len(step)), starts_N.astype(np.int64)
        else:
            ids = []
            for work, start in zip(step, starts, strict=True):
                ids += work.active.ids[start : start + work.count]
            row_T = np.repeat(np.arange(len(step)), counts_N)
            positions_T = np.arange(ends_N[-1], dtype=np.int64) + (starts_N - ends_N + counts_N)[row_T]
        pages_NB = self._page_rows(step, int((starts_N + counts_N).max()))
        slots_T = pages_NB[row_T, positions_T // size].astype(np.int64) * size + positions_T % size
        table = PageTable(torch.from_numpy(pages_NB), torch.from_numpy(starts_N), torch.from_numpy(counts_N), size)
        attend = PagedAttend(self._cache, self._attention, torch.from_numpy(slots_T), table)
        out = self._model(torch.tensor(ids), torch.from_numpy(positions_T), attend)
        last = torch.from_numpy(ends_N[samples] - 1)
        routes_TLK = out.routes_TLK.numpy()
        self._cache.routes_SLK[slots_T] = routes_TLK
        return StepOutput(self._model.logits(out.hidden_TD[last]), samples, routes_TLK)

    def _page_rows(self, step: Sequence[Work], longest: int) -> np.ndarray:
        """The page table of the step's rows, with the entries that came since the last step."""
        rows: list[int] = []
        for work in step:
            active = work.active
            row, pages, known = active.row, active.pages, active.num_tabled
            rows.append(row)
            if known < len(pages):
                self._pages_RB[row, known : len(pages)] = pages[known:]
                active.num_tabled = len(pages)
        return self._pages_RB[rows, : -(-longest // self._cache.page_size)]


class PagedAttend:
    """One step's attention: writes the new keys and values, then attends to each sequence's whole past."""

    keeps_keys = True

    def __init__(self, cache: KvCache, attention: Attention, slots_T: torch.Tensor, table: PageTable):
        self._cache = cache
        self._attention = attention
        self._slots_T = slots_T
        self._table = table

    def __call__(
        self,
        layer_index: int,
        q_THd: torch.Tensor,
        k_TGd: torch.Tensor,
        v_TGe: torch.Tensor,
        *,
        scale: float | None = None,
        window: int = 0,
        sinks_H: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attention output [T, H, e] of the new tokens; see `model.attention.Attend`."""
        keys, values = self._cache.layer(layer_index)
        self._attention.write(keys, self._slots_T, k_TGd)
        if not self._cache.values_in_keys:
            self._attention.write(values, self._slots_T, v_TGe)
        return self._attention(
            q_THd, keys, values, self._table,
            scale=q_THd.shape[-1] ** -0.5 if scale is None else scale, window=window, sinks_H=sinks_H,
        )  # fmt: skip

"""One step of the model: packed ids, positions and page table in, logits of the rows that sample out.

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
    """fp32 logits of the rows that sample, and their indices in the step."""

    logits_NV: torch.Tensor
    samples: list[int]


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
        ids: list[int] = []
        starts: list[int] = []
        counts: list[int] = []
        samples: list[int] = []
        for n, work in enumerate(step):
            start, end = work.active.num_computed, work.active.num_computed + work.count
            ids += work.active.ids[start:end]
            starts.append(start)
            counts.append(work.count)
            if end == len(work.active.ids):
                samples.append(n)
        starts_N, counts_N = np.array(starts, np.int32), np.array(counts, np.int32)
        firsts_N = np.cumsum(counts_N) - counts_N
        row_T = np.repeat(np.arange(len(step)), counts_N)
        positions_T = np.arange(len(ids)) + (starts_N - firsts_N)[row_T]
        pages_NB = self._page_rows(step, int((starts_N + counts_N).max()))
        page_T, offset_T = np.divmod(positions_T, size)
        slots_T = pages_NB[row_T, page_T].astype(np.int64) * size + offset_T
        table = PageTable(torch.from_numpy(pages_NB), torch.from_numpy(starts_N), torch.from_numpy(counts_N), size)
        attend = PagedAttend(self._cache, self._attention, torch.from_numpy(slots_T), table)
        out = self._model(torch.tensor(ids), torch.from_numpy(positions_T), attend)
        self._cache.routes_SLK[slots_T] = out.routes_TLK.numpy()
        hidden_ND = out.hidden_TD
        if len(samples) < len(ids):
            hidden_ND = hidden_ND[torch.from_numpy((firsts_N + counts_N - 1)[samples])]
        return StepOutput(self._model.logits(hidden_ND), samples)

    def _page_rows(self, step: Sequence[Work], longest: int) -> np.ndarray:
        """The page table of the step's rows, with the entries that came since the last step."""
        rows: list[int] = []
        for work in step:
            active = work.active
            rows.append(active.row)
            if active.num_tabled < len(active.pages):
                known, active.num_tabled = active.num_tabled, len(active.pages)
                self._pages_RB[active.row, known : active.num_tabled] = active.pages[known:]
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

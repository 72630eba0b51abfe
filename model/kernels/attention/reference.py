"""The definition of attention over paged keys and values, for decoding and prefill alike: a loop over sequences.

Position p of a sequence lies in slot `pages[p // page_size] * page_size + p % page_size`. A query at position p sees
the keys of positions 0..p of its sequence, or the `window` newest of them, its own included; their keys and values
have been written before. A sink is one logit a head that takes part in the softmax and has no value.

Pages hold fp32 or bf16, or int8 or float8_e4m3fn with one fp32 scale for each slot and head: value = stored * scale.

Shapes: N sequences, T packed new tokens of all of them, H query heads, G key-value heads (H / G query heads share one),
d head dim of queries and keys, e head dim of values, S slots, B pages of the longest sequence.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch


class Pages(NamedTuple):
    """Keys or values of one layer, [S, G, d], perhaps a view with larger strides (latents: values inside keys)."""

    rows_SGd: torch.Tensor
    scales_SG: torch.Tensor | None = None


class PageTable(NamedTuple):
    """Where the sequences of a batch lie: int32 tensors on the device of the pages.

    Sequence n has `starts_N[n]` positions before its `counts_N[n]` new tokens. Entries of `pages_NB` beyond a
    sequence's pages are not read.
    """

    pages_NB: torch.Tensor
    starts_N: torch.Tensor
    counts_N: torch.Tensor
    page_size: int


def write(pages: Pages, slots_T: torch.Tensor, x_TGd: torch.Tensor) -> None:
    """Store new tokens' keys or values in their slots; int8 and fp8 take the scale from each head's largest value."""
    rows_SGd, scales_SG = pages
    if scales_SG is None:
        rows_SGd[slots_T] = x_TGd.to(rows_SGd.dtype)
        return
    integer = rows_SGd.dtype == torch.int8
    largest = 127.0 if integer else torch.finfo(rows_SGd.dtype).max
    amax_TG = x_TGd.float().abs().amax(-1)
    scale_TG = torch.where(amax_TG > 0, amax_TG / largest, 1.0)
    scaled_TGd = x_TGd.float() / scale_TG.unsqueeze(-1)
    rows_SGd[slots_T] = (scaled_TGd.round() if integer else scaled_TGd).to(rows_SGd.dtype)
    scales_SG[slots_T] = scale_TG


def read(pages: Pages, slots: torch.Tensor) -> torch.Tensor:
    """fp32 [len(slots), G, d]."""
    rows = pages.rows_SGd[slots].float()
    return rows if pages.scales_SG is None else rows * pages.scales_SG[slots].unsqueeze(-1)


def paged_attention(
    q_THd: torch.Tensor,
    keys: Pages,
    values: Pages,
    table: PageTable,
    *,
    scale: float,
    window: int = 0,
    sinks_H: torch.Tensor | None = None,
) -> torch.Tensor:
    """Outputs [T, H, e] in the dtype of `q_THd`; scores, softmax and sums in fp32."""
    shared_by = q_THd.shape[1] // keys.rows_SGd.shape[1]
    outs: list[torch.Tensor] = []
    first = 0
    for pages_B, start, count in zip(table.pages_NB, table.starts_N.tolist(), table.counts_N.tolist(), strict=True):
        position_C = torch.arange(start + count, device=q_THd.device)
        slot_C = pages_B.long()[position_C // table.page_size] * table.page_size + position_C % table.page_size
        k_CHd, v_CHe = (read(pages, slot_C).repeat_interleave(shared_by, 1) for pages in (keys, values))
        q_MHd = q_THd[first : first + count].float()
        scores_HMC = torch.einsum("mhd,chd->hmc", q_MHd, k_CHd) * scale
        age_MC = position_C[start:].unsqueeze(1) - position_C
        hidden_MC = (age_MC < 0) | (age_MC >= window) if window else age_MC < 0
        scores_HMC = scores_HMC.masked_fill(hidden_MC, -torch.inf)
        if sinks_H is not None:
            sinks_HM1 = sinks_H.float().view(-1, 1, 1).expand(-1, count, 1)
            scores_HMC = torch.cat([scores_HMC, sinks_HM1], dim=-1)
        weights_HMC = scores_HMC.softmax(-1)[..., : start + count]
        outs.append(torch.einsum("hmc,che->mhe", weights_HMC, v_CHe))
        first += count
    return torch.cat(outs).to(q_THd.dtype)


class Attention(Protocol):
    """Both operations of one backend: `write` and, as a call, `paged_attention`."""

    def write(self, pages: Pages, slots_T: torch.Tensor, x_TGd: torch.Tensor) -> None:
        """Store keys or values."""
        ...

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
        """Outputs [T, H, e]."""
        ...

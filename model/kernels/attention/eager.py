"""Attention over paged keys and values as a few torch operations, on every device.

Decoding sequences are one padded batch; a sequence with several new tokens is computed alone, without padding. A row's
bits depend on what is computed beside it, so this version is not batch-invariant.

Shapes as in `reference.py`; C positions of the longest sequence of a batch, M new tokens of one sequence.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from model.kernels.attention.reference import Pages, PageTable, read, write


class EagerAttention:
    """Both operations; see `reference.py`."""

    def write(self, pages: Pages, slots_T: torch.Tensor, x_TGd: torch.Tensor) -> None:
        """As `reference.write`."""
        write(pages, slots_T, x_TGd)

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
        """As `reference.paged_attention`."""
        if bool((table.counts_N == 1).all()):
            return _same_count(q_THd, keys, values, table, 1, scale=scale, window=window, sinks_H=sinks_H)
        out_THe = q_THd.new_empty(*q_THd.shape[:2], values.rows_SGd.shape[-1])
        first_N = table.counts_N.cumsum(0) - table.counts_N
        single_N = table.counts_N == 1
        groups = [(single_N.nonzero()[:, 0], 1)]
        groups += [(n.view(1), int(table.counts_N[n])) for n in (~single_N).nonzero()[:, 0]]
        for members_N, count in groups:
            rows = (first_N[members_N].unsqueeze(1) + torch.arange(count, device=q_THd.device)).flatten()
            part = PageTable(
                table.pages_NB[members_N], table.starts_N[members_N], table.counts_N[members_N], table.page_size
            )
            if len(rows):
                out_THe[rows] = _same_count(
                    q_THd[rows], keys, values, part, count, scale=scale, window=window, sinks_H=sinks_H
                )
        return out_THe


def _same_count(
    q_THd: torch.Tensor,
    keys: Pages,
    values: Pages,
    table: PageTable,
    count: int,
    *,
    scale: float,
    window: int,
    sinks_H: torch.Tensor | None,
) -> torch.Tensor:
    """Sequences that have `count` new tokens each."""
    longest = int(table.starts_N.max()) + count
    position_C = torch.arange(longest, device=q_THd.device)
    page_of_C = position_C // table.page_size
    slots_NC = table.pages_NB[:, page_of_C].long() * table.page_size + position_C % table.page_size
    query_NM = table.starts_N.unsqueeze(1) + torch.arange(count, device=q_THd.device)
    held_NC = position_C < (table.starts_N + count).unsqueeze(1)
    slots_NC = slots_NC.masked_fill(~held_NC, 0)
    # A slot beyond a sequence is hidden, and must not be NaN either: 0 times NaN is NaN.
    k_NGCd, v_NGCe = (
        read(pages, slots_NC.flatten()).unflatten(0, slots_NC.shape).masked_fill(~held_NC[..., None, None], 0.0)
        .transpose(1, 2)
        for pages in (keys, values)
    )  # fmt: skip
    age_NMC = query_NM.unsqueeze(-1) - position_C
    seen_NMC = (age_NMC >= 0) & (age_NMC < window) if window else age_NMC >= 0
    num_groups = k_NGCd.shape[1]
    q_NHMd = q_THd.float().unflatten(0, (-1, count)).transpose(1, 2)
    if sinks_H is None and k_NGCd.shape[-1] == v_NGCe.shape[-1]:
        out_NHMe = F.scaled_dot_product_attention(
            q_NHMd, k_NGCd, v_NGCe, attn_mask=seen_NMC.unsqueeze(1), scale=scale,
            enable_gqa=num_groups != q_NHMd.shape[1],
        )  # fmt: skip
        return out_NHMe.transpose(1, 2).flatten(0, 1).to(q_THd.dtype)
    # The query heads of a group are rows of one product, so that the keys they share are read once and not repeated.
    q_NGRMd = q_NHMd.unflatten(1, (num_groups, -1)) * scale
    scores_NGRMC = (q_NGRMd.flatten(2, 3) @ k_NGCd.mT).view(*q_NGRMd.shape[:-1], -1)
    scores_NGRMC = scores_NGRMC.masked_fill(~seen_NMC[:, None, None], -torch.inf)
    if sinks_H is not None:
        sinks_NGRM1 = sinks_H.float().view(num_groups, -1, 1, 1).expand(*scores_NGRMC.shape[:-1], 1)
        scores_NGRMC = torch.cat([scores_NGRMC, sinks_NGRM1], dim=-1)
    weights_NGRMC = scores_NGRMC.softmax(-1)[..., :longest]
    out_NGXe = weights_NGRMC.flatten(2, 3) @ v_NGCe
    out_NHMe = out_NGXe.view(*q_NHMd.shape[:-1], -1)
    return out_NHMe.transpose(1, 2).flatten(0, 1).to(q_THd.dtype)

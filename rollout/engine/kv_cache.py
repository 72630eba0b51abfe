"""The KV cache: one row of slots a session, and the attention that reads and writes it.

Latent attention keeps one latent a token whose leading part is the value (`value_dim` 0): its values are a view of the
keys, so nothing is stored twice.

Invariant: `lengths[s]` positions of session `s` hold keys and values of exactly the ids computed so far under the
current weights; a weight swap drops every session.

Shapes: T packed new tokens, N rows (sessions) of the batch, H query heads, G key/value heads, R = H / G, d head dim of
queries and keys, e of values, C slots (positions) a row, M longest run of new tokens in the batch.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from model.config import ModelConfig
from model.layers import TORCH_DTYPE


class CacheError(ValueError):
    """A request that the cache cannot hold."""


class KvCache:
    """Keys and values of up to `num_rows` sessions of up to `max_tokens` positions.

    A session's row may move (`arrange`), so that the rows of a batch are always the first ones: the hot decode step
    then reads a view of the cache and copies nothing.
    """

    def __init__(
        self,
        *,
        num_layers: int,
        num_rows: int,
        num_kv_heads: int,
        key_dim: int,
        value_dim: int,
        max_tokens: int,
        dtype: torch.dtype,
    ):
        """Reserve all rows; `value_dim` 0 means that values are the leading part of the keys."""
        shape = (num_layers, num_rows, num_kv_heads, max_tokens)
        self.keys_LNGCd = torch.zeros(*shape, key_dim, dtype=dtype)
        self.values_LNGCe = torch.zeros(*shape, value_dim, dtype=dtype)
        self.num_rows = num_rows
        self.max_tokens = max_tokens
        self._sessions: list[int | None] = [None] * num_rows
        self._lengths = [0] * num_rows
        self._row_of: dict[int, int] = {}

    @classmethod
    def of(cls, config: ModelConfig, *, num_rows: int, max_tokens: int) -> KvCache:
        """The cache of a model."""
        latent = config.is_latent
        return cls(
            num_layers=config.num_layers,
            num_rows=num_rows,
            num_kv_heads=1 if latent else config.num_kv_heads,
            key_dim=config.kv_lora_rank + config.qk_rope_head_dim if latent else config.head_dim,
            value_dim=0 if latent else config.head_dim,
            max_tokens=max_tokens,
            dtype=TORCH_DTYPE[config.compute_dtype],
        )

    @property
    def num_free(self) -> int:
        """Rows without a session."""
        return self.num_rows - len(self._row_of)

    def length(self, session: int) -> int:
        """Positions of the session that are computed; 0 when it is unknown."""
        row = self._row_of.get(session)
        return 0 if row is None else self._lengths[row]

    def open(self, session: int) -> None:
        """Give the session a row, unless it has one. Raises CacheError when none is free."""
        if session in self._row_of:
            return
        if not self.num_free:
            raise CacheError(f"kv cache: no free row, got session {session}; close sessions or raise num_rows")
        row = self._sessions.index(None)
        # Slots that a mask hides are still multiplied by 0, and 0 times a NaN of an earlier session is NaN.
        self.keys_LNGCd[:, row] = 0
        self.values_LNGCe[:, row] = 0
        self._sessions[row], self._lengths[row], self._row_of[session] = session, 0, row

    def close(self, session: int) -> None:
        """Give the session's row back. Unknown sessions are fine: closing is idempotent."""
        row = self._row_of.pop(session, None)
        if row is not None:
            self._sessions[row], self._lengths[row] = None, 0

    def clear(self) -> None:
        """Drop every session: their keys and values belong to weights that are gone."""
        for session in list(self._row_of):
            self.close(session)

    def arrange(self, sessions: list[int]) -> None:
        """Move rows so that `sessions` are rows 0..N-1 in this order; other sessions follow."""
        front = [self._row_of[session] for session in sessions]
        if front == list(range(len(front))):
            return
        chosen = set(front)
        # Only rows up to the last that moves, and only positions that hold something, are copied.
        num_moved = max(front) + 1
        order = front + [row for row in range(num_moved) if row not in chosen]
        context = max(self._lengths[:num_moved])
        index = torch.tensor(order)
        for cached_LNGCd in (self.keys_LNGCd, self.values_LNGCe):
            cached_LNGCd[:, :num_moved, :, :context] = cached_LNGCd[:, index, :, :context]
        self._sessions[:num_moved] = [self._sessions[row] for row in order]
        self._lengths[:num_moved] = [self._lengths[row] for row in order]
        self._row_of = {session: row for row, session in enumerate(self._sessions) if session is not None}

    def extend(self, counts: list[int], keep: list[bool]) -> CachedAttention:
        """Attention for `counts[n]` new tokens in row n (rows 0..N-1).

        Rows with `keep` grow; what the others compute is thrown away (it is written where their next token goes).
        """
        starts = [
            length if kept else min(length, self.max_tokens - 1)
            for length, kept in zip(self._lengths, keep, strict=False)  # rows beyond the batch wait
        ]
        ends = [start + count for start, count in zip(starts, counts, strict=True)]
        if max(ends) > self.max_tokens:
            raise CacheError(
                f"kv cache: {self.max_tokens} positions a session, got {max(ends)}; raise env.max_context_tokens"
            )
        for row, (end, kept) in enumerate(zip(ends, keep, strict=True)):
            if kept:
                self._lengths[row] = end
        return CachedAttention(self, starts, counts)


class CachedAttention:
    """One forward's attention: writes the new keys and values, then attends to the row's whole past.

    `positions_T` are the absolute positions of the packed new tokens.
    """

    def __init__(self, cache: KvCache, starts: list[int], counts: list[int]):
        self._cache = cache
        starts_N, counts_N = torch.tensor(starts), torch.tensor(counts)
        self._num_rows = len(counts)
        self._longest = max(counts)
        self._rows_T = torch.repeat_interleave(torch.arange(self._num_rows), counts_N)
        first_N = counts_N.cumsum(0) - counts_N
        self._offsets_T = torch.arange(len(self._rows_T)) - first_N[self._rows_T]
        self.positions_T = starts_N[self._rows_T] + self._offsets_T
        self._context = int((starts_N + counts_N).max())
        if self._longest == 1:
            query_NM = starts_N[:, None]
        else:
            query_NM = starts_N[:, None] + torch.arange(self._longest).clamp(max=counts_N[:, None] - 1)
        self._age_N1MC = (query_NM[..., None] - torch.arange(self._context)).unsqueeze(1)
        self._masks: dict[int, torch.Tensor] = {}

    keeps_keys = True

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
        """Attention output [T, H, e] of the new tokens at `layer_index`; see `model.attention.Attend`."""
        keys, values = self._cache.keys_LNGCd[layer_index], self._cache.values_LNGCe[layer_index]
        keys[self._rows_T, :, self.positions_T] = k_TGd
        if values.shape[-1]:
            values[self._rows_T, :, self.positions_T] = v_TGe
        else:
            values = keys[..., : v_TGe.shape[-1]]
        keys_NGCd, values_NGCe = (cached[: self._num_rows, :, : self._context] for cached in (keys, values))
        q_NHMd = self._by_row(q_THd)
        mask = self._mask(window)
        if sinks_H is None and keys.shape[-1] == values.shape[-1]:
            o_NHMe = F.scaled_dot_product_attention(
                q_NHMd, keys_NGCd, values_NGCe, attn_mask=mask, scale=scale, enable_gqa=q_NHMd.shape[1] != keys.shape[1]
            )
        else:
            o_NHMe = _grouped_attention(q_NHMd, keys_NGCd, values_NGCe, mask, scale=scale, sinks_H=sinks_H)
        if self._longest == 1:
            return o_NHMe.squeeze(2)
        return o_NHMe.transpose(1, 2)[self._rows_T, self._offsets_T]

    def _by_row(self, q_THd: torch.Tensor) -> torch.Tensor:
        """Packed queries as [N, H, M, d], zeros where a row has fewer new tokens."""
        if self._longest == 1:
            return q_THd.unsqueeze(2)
        q_NMHd = q_THd.new_zeros(self._num_rows, self._longest, *q_THd.shape[1:])
        q_NMHd[self._rows_T, self._offsets_T] = q_THd
        return q_NMHd.transpose(1, 2)

    def _mask(self, window: int) -> torch.Tensor:
        """Which slots each query sees, bool [N, 1, M, C]; made once for each window."""
        if window not in self._masks:
            seen = self._age_N1MC >= 0
            self._masks[window] = seen & (self._age_N1MC < window) if window else seen
        return self._masks[window]


def _grouped_attention(
    q_NHMd: torch.Tensor,
    keys_NGCd: torch.Tensor,
    values_NGCe: torch.Tensor,
    mask_N1MC: torch.Tensor,
    *,
    scale: float | None,
    sinks_H: torch.Tensor | None,
) -> torch.Tensor:
    """Attention with sinks, or with values of another size than keys, [N, H, M, e]; softmax and products in fp32.

    The query heads of a group are rows of one product, so that the keys they share are read once and not repeated.
    """
    num_groups = keys_NGCd.shape[1]
    q_NGRMd = q_NHMd.float().unflatten(1, (num_groups, -1)) * (q_NHMd.shape[-1] ** -0.5 if scale is None else scale)
    scores_NGRMC = (q_NGRMd.flatten(2, 3) @ keys_NGCd.float().mT).view(*q_NGRMd.shape[:-1], -1)
    scores_NGRMC = scores_NGRMC.masked_fill(~mask_N1MC.unsqueeze(2), -torch.inf)
    if sinks_H is not None:
        sinks_NGRM1 = sinks_H.view(num_groups, -1, 1, 1).expand(*scores_NGRMC.shape[:-1], 1)
        scores_NGRMC = torch.cat([scores_NGRMC, sinks_NGRM1], dim=-1)
    weights_NGRMC = scores_NGRMC.softmax(-1)[..., : keys_NGCd.shape[2]]
    out_NGXe = weights_NGRMC.flatten(2, 3) @ values_NGCe.float()
    return out_NGXe.view(*q_NHMd.shape[:-1], -1).to(q_NHMd.dtype)

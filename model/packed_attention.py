"""Causal attention within each packed sequence: the definition, and the fast version that the learner runs.

Both are an `Attend` (`model/attention.py`): they see the packed tokens of whole sequences and keep nothing.

Shapes: T packed tokens, H query heads, G key-value heads (H / G query heads share one), d head dim of queries and keys,
e head dim of values, S sequences, L tokens of the longest sequence of a bucket.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any

import torch
import torch.nn.functional as F


class AttentionError(ValueError):
    """Sequence bounds that do not describe the packed tokens."""


def sequence_lengths(cu_seqlens: torch.Tensor | Sequence[int]) -> list[int]:
    """Lengths of the packed sequences from their S + 1 cumulative bounds.

    Raises:
        AttentionError: The bounds do not start at 0 or do not grow.
    """
    bounds = cu_seqlens.tolist() if isinstance(cu_seqlens, torch.Tensor) else list(cu_seqlens)
    lengths = [end - start for start, end in pairwise(bounds)]
    if not lengths or bounds[0] != 0 or min(lengths) < 1:
        raise AttentionError(
            f"cu_seqlens: must start at 0 and grow by at least one token a sequence, got {bounds[:8]}; "
            "drop empty sequences before packing"
        )
    return lengths


class ReferenceAttention:
    """The definition of packed attention: a loop over the sequences, with a full causal softmax in fp32."""

    def __init__(self, cu_seqlens: torch.Tensor | Sequence[int]) -> None:
        self.lengths = sequence_lengths(cu_seqlens)

    keeps_keys = False

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
        """As `Attend`; the layer index plays no part."""
        shared_by = q_THd.shape[1] // k_TGd.shape[1]
        outs = []
        for q, k, v in zip(*(x.float().split(self.lengths) for x in (q_THd, k_TGd, v_TGe)), strict=True):
            k, v = k.repeat_interleave(shared_by, 1), v.repeat_interleave(shared_by, 1)
            scores_HLL = torch.einsum("qhd,khd->hqk", q, k) * (q.shape[-1] ** -0.5 if scale is None else scale)
            hidden_LL = ~visible(len(q), window, q.device)
            scores_HLL = scores_HLL.masked_fill(hidden_LL, -torch.inf)
            if sinks_H is not None:
                sink_HL1 = sinks_H.view(-1, 1, 1).expand(-1, len(q), 1)
                scores_HLL = torch.cat([scores_HLL, sink_HL1], dim=-1)
            probabilities_HLL = scores_HLL.softmax(-1)[..., : len(q)]
            outs.append(torch.einsum("hqk,khd->qhd", probabilities_HLL, v))
        return torch.cat(outs).to(q_THd.dtype)


def visible(length: int, window: int, device: torch.device) -> torch.Tensor:
    """Which key (column) each query (row) of one sequence sees, bool [L, L]."""
    seen_LL = torch.ones(length, length, dtype=torch.bool, device=device).tril()
    return seen_LL.triu(1 - window) if window else seen_LL


class PackedAttention:
    """Causal attention within each packed sequence: `ReferenceAttention`, fast.

    Only queries, keys and values are ever padded. Sequences are grouped into buckets of similar length, each a padded
    [S, H, L, d] batch for torch's fused attention; padding lies after the real tokens, where causality hides it.
    (Batched products with a dense softmax, backward written out, were tried: 1.5 times as fast at 60 tokens, no faster
    at 130, slower from 256 on.)
    """

    def __init__(self, cu_seqlens: torch.Tensor | Sequence[int]) -> None:
        lengths = sequence_lengths(cu_seqlens)
        starts = [0, *accumulate(lengths)]
        self._num_tokens = starts[-1]
        self._buckets = _buckets(lengths)
        slot_of_token = [0] * self._num_tokens
        slot = 0
        for longest, members in self._buckets:
            for sequence in members:
                slot_of_token[starts[sequence] : starts[sequence + 1]] = range(slot, slot + lengths[sequence])
                slot += longest
        self._num_slots = slot
        device = cu_seqlens.device if isinstance(cu_seqlens, torch.Tensor) else None
        self._slot_of_token = torch.tensor(slot_of_token, device=device)

    keeps_keys = False

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
        """As `Attend`; the layer index plays no part.

        On a CPU scores, softmax and products are fp32 in either compute dtype: torch's bf16 attention is slower there.
        """
        if len(q_THd) != self._num_tokens:
            raise AttentionError(
                f"cu_seqlens: must end at the number of packed tokens, got {self._num_tokens} for {len(q_THd)} tokens; "
                "build the attention from the batch it is used with"
            )
        sizes = [longest * len(members) for longest, members in self._buckets]
        score_dtype = torch.float32 if q_THd.device.type == "cpu" else q_THd.dtype
        qkv = (x.to(score_dtype) for x in (q_THd, k_TGd, v_TGe))
        padded = (_Pad.apply(x, self._slot_of_token, self._num_slots).split(sizes) for x in qkv)
        outs = []
        for (longest, _), *bucket in zip(self._buckets, *padded, strict=True):
            q, k, v = (x.view(-1, longest, *x.shape[1:]).transpose(1, 2) for x in bucket)
            out = _causal(
                q, k, v, scale=scale or q.shape[-1] ** -0.5, window=window if window < longest else 0, sinks_H=sinks_H
            )
            outs.append(out.transpose(1, 2).reshape(-1, *out.shape[1::2]))
        packed_THe = _Unpad.apply(torch.cat(outs), self._slot_of_token)
        return packed_THe.to(q_THd.dtype)  # pyright: ignore[reportReturnType]


def _causal(
    q_SHLd: torch.Tensor,
    k_SGLd: torch.Tensor,
    v_SGLe: torch.Tensor,
    *,
    scale: float,
    window: int,
    sinks_H: torch.Tensor | None,
) -> torch.Tensor:
    """Torch's fused attention with a window and sinks, [S, H, L, e].

    The fused kernels have no sinks. So the sink becomes a key before all others, and each query gets one more value:
    the sink's logit over the scale, which the sink's key multiplies by 1 and every other key by 0. A query before all
    others keeps the causal mask square. The fused CPU kernel also wants values as wide as keys.
    """
    value_dim, length = v_SGLe.shape[-1], q_SHLd.shape[2]
    if sinks_H is not None:
        q_SHLd, k_SGLd = F.pad(q_SHLd, (0, 1, 1, 0)), F.pad(k_SGLd, (0, 1, 1, 0))
        v_SGLe = F.pad(v_SGLe, (0, 0, 1, 0))
        lowest = torch.finfo(q_SHLd.dtype).min  # of a sink of -inf, which 0 would turn into NaN
        q_SHLd[..., -1] = (sinks_H / scale).to(q_SHLd.dtype).clamp(min=lowest).view(-1, 1)
        k_SGLd[:, :, 0, -1] = 1.0
    if v_SGLe.shape[-1] < k_SGLd.shape[-1]:
        v_SGLe = F.pad(v_SGLe, (0, k_SGLd.shape[-1] - v_SGLe.shape[-1]))
    mask = None
    if window:
        mask = visible(q_SHLd.shape[2], window, q_SHLd.device)
        if sinks_H is not None:
            mask[:, 0] = True
    out = F.scaled_dot_product_attention(
        q_SHLd,
        k_SGLd,
        v_SGLe,
        attn_mask=mask,
        is_causal=mask is None,
        scale=scale,
        enable_gqa=q_SHLd.shape[1] != k_SGLd.shape[1],
    )
    return out[:, :, -length:, :value_dim]


_BUCKET_RATIO = 0.75
"""Shortest over longest sequence of a bucket, at least: padding costs at most 1 / 0.75^2 of the exact work."""


def _buckets(lengths: Sequence[int]) -> list[tuple[int, list[int]]]:
    """Groups of sequences of similar length: (the longest length, the members' indices), longest group first."""
    buckets: list[tuple[int, list[int]]] = []
    for sequence in sorted(range(len(lengths)), key=lambda index: -lengths[index]):
        if not buckets or lengths[sequence] < _BUCKET_RATIO * buckets[-1][0]:
            buckets.append((lengths[sequence], []))
        buckets[-1][1].append(sequence)
    return buckets


class _Pad(torch.autograd.Function):
    """Rows of [T, ...] to their slots, zeros between; each slot has one row, so both directions are plain copies."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, slot_of_row: torch.Tensor, num_slots: int) -> torch.Tensor:
        ctx.save_for_backward(slot_of_row)
        return x.new_zeros(num_slots, *x.shape[1:]).index_copy_(0, slot_of_row, x)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (slot_of_row,) = ctx.saved_tensors
        return grads[0].index_select(0, slot_of_row), None, None


class _Unpad(torch.autograd.Function):
    """The inverse of `_Pad`: the rows back from their slots."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, slot_of_row: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(slot_of_row)
        ctx.shape = x.shape
        return x.index_select(0, slot_of_row)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (slot_of_row,) = ctx.saved_tensors
        return grads[0].new_zeros(ctx.shape).index_copy_(0, slot_of_row, grads[0]), None

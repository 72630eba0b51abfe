"""Grouped-query self-attention, with the scores left to an object that the caller injects.

The layer projects, rotates and projects back; `attend` decides which keys a query sees. A learner passes
`PackedAttention` (causal within each packed sequence), an engine its cache, and both run the same transformer.

Shapes: T packed tokens, D model dim, H query heads, G key-value heads (H / G query heads share one), d head dim,
S sequences, L tokens of the longest sequence of a bucket.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import nn

from model.config import ModelConfig
from model.layers import TORCH_DTYPE, HeadLinear, Linear
from model.rope import rotate


class AttentionError(ValueError):
    """Sequence bounds that do not describe the packed tokens."""


class Attend(Protocol):
    """Softmax attention over whatever keys the caller holds; scores are scaled by 1 / sqrt(d)."""

    def __call__(self, layer_index: int, q_THd: torch.Tensor, k_TGd: torch.Tensor, v_TGd: torch.Tensor) -> torch.Tensor:
        """Outputs [T, H, d] in the dtype of `q_THd`, for new tokens whose keys and values are given."""
        ...


class Attention(nn.Module):
    """One attention layer."""

    def __init__(self, config: ModelConfig, layer_index: int) -> None:
        super().__init__()
        self.layer_index = layer_index
        self.head_dim = config.head_dim
        self.compute_dtype = TORCH_DTYPE[config.compute_dtype]
        self.q_proj = HeadLinear(config.hidden_size, config.num_heads, config.head_dim)
        self.k_proj = HeadLinear(config.hidden_size, config.num_kv_heads, config.head_dim)
        self.v_proj = Linear(config.hidden_size, config.num_kv_heads * config.head_dim)
        self.o_proj = Linear(config.num_heads * config.head_dim, config.hidden_size)

    def forward(self, x_TD: torch.Tensor, by_T1h: torch.Tensor, attend: Attend) -> torch.Tensor:
        """[T, D] in, [T, D] out in the compute dtype; `by_T1h` is `rope.rotation` of the positions."""
        x_TD = x_TD.to(self.compute_dtype)
        q_THd = rotate(self.q_proj(x_TD), by_T1h)
        k_TGd = rotate(self.k_proj(x_TD), by_T1h)
        v_TGd = self.v_proj(x_TD).view(len(x_TD), -1, self.head_dim)
        out_THd = attend(self.layer_index, q_THd, k_TGd, v_TGd)
        return self.o_proj(out_THd.reshape(len(x_TD), -1))


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

    def __call__(self, layer_index: int, q_THd: torch.Tensor, k_TGd: torch.Tensor, v_TGd: torch.Tensor) -> torch.Tensor:
        """As `Attend`; the layer index plays no part."""
        shared_by = q_THd.shape[1] // k_TGd.shape[1]
        outs = []
        for q, k, v in zip(*(x.float().split(self.lengths) for x in (q_THd, k_TGd, v_TGd)), strict=True):
            k, v = k.repeat_interleave(shared_by, 1), v.repeat_interleave(shared_by, 1)
            scores_HLL = torch.einsum("qhd,khd->hqk", q, k) * q.shape[-1] ** -0.5
            future_LL = torch.ones_like(scores_HLL[0], dtype=torch.bool).triu(1)
            probabilities_HLL = scores_HLL.masked_fill(future_LL, -torch.inf).softmax(-1)
            outs.append(torch.einsum("hqk,khd->qhd", probabilities_HLL, v))
        return torch.cat(outs).to(q_THd.dtype)


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

    def __call__(self, layer_index: int, q_THd: torch.Tensor, k_TGd: torch.Tensor, v_TGd: torch.Tensor) -> torch.Tensor:
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
        qkv = (x.to(score_dtype) for x in (q_THd, k_TGd, v_TGd))
        padded = (_Pad.apply(x, self._slot_of_token, self._num_slots).split(sizes) for x in qkv)
        outs = []
        for (longest, _), *bucket in zip(self._buckets, *padded, strict=True):
            q, k, v = (x.view(-1, longest, *x.shape[1:]).transpose(1, 2) for x in bucket)
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])
            outs.append(out.transpose(1, 2).reshape(-1, *q_THd.shape[1:]))
        packed_THd = _Unpad.apply(torch.cat(outs), self._slot_of_token)
        return packed_THd.to(q_THd.dtype)  # pyright: ignore[reportReturnType]


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

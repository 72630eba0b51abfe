"""The learner's attention with the bits of an engine: the forward is the paged kernel, on keys where they were made.

An engine's cache holds keys and values in the compute dtype, and a query's bits depend neither on the pages nor on the
batch (`kernels/attention/README.md`). So packed keys and values are pages of one token, and nothing is copied.

Shapes: T packed tokens, N sequences, B tokens of the longest, H query heads, G key-value heads, d head dim of queries
and keys, e of values.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch

from model.kernels.attention.reference import Attention, Pages, PageTable
from model.packed_attention import AttentionError, PackedAttention, sequence_lengths


class KernelAttention:
    """An `Attend` (`model/attention.py`) of packed whole sequences: forward by `kernel`, backward by `PackedAttention`.

    `keeps_keys` makes latent attention work on latents, as it does where an engine caches them; only then are the bits
    of such a model the engine's. It says nothing to other models.
    """

    def __init__(
        self, cu_seqlens: torch.Tensor | Sequence[int], kernel: Attention, *, keeps_keys: bool = False
    ) -> None:
        self.keeps_keys = keeps_keys
        self.kernel = kernel
        lengths = sequence_lengths(cu_seqlens)
        self.num_tokens = sum(lengths)
        counts_N = torch.tensor(lengths, dtype=torch.int32)
        first_N = torch.tensor([0, *accumulate(lengths[:-1])], dtype=torch.int32)
        slots_NB = first_N.unsqueeze(1) + torch.arange(max(lengths), dtype=torch.int32)
        self.table = PageTable(slots_NB, torch.zeros_like(counts_N), counts_N, 1)
        self._differentiable = PackedAttention(cu_seqlens)

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
        """As `Attend`; the layer index plays no part. Keys and values are rounded to the dtype of the queries.

        Raises:
            AttentionError: There are more or fewer tokens than the bounds say.
        """
        if len(q_THd) != self.num_tokens:
            raise AttentionError(
                f"cu_seqlens: must end at the number of packed tokens, got {self.num_tokens} for {len(q_THd)} tokens; "
                "build the attention from the batch it is used with"
            )
        scale = q_THd.shape[-1] ** -0.5 if scale is None else scale
        out_THe = _KernelAttention.apply(
            q_THd, k_TGd.to(q_THd.dtype), v_TGe.to(q_THd.dtype), sinks_H, scale, window, self
        )
        return out_THe  # pyright: ignore[reportReturnType]

    def forward(
        self,
        q_THd: torch.Tensor,
        k_TGd: torch.Tensor,
        v_TGe: torch.Tensor,
        sinks_H: torch.Tensor | None,
        scale: float,
        window: int,
    ) -> torch.Tensor:
        """No gradient."""
        k_TGd, v_TGe = (x if x.stride(-1) == 1 else x.contiguous() for x in (k_TGd, v_TGe))
        return self.kernel(q_THd, Pages(k_TGd), Pages(v_TGe), self.table, scale=scale, window=window, sinks_H=sinks_H)

    def differentiable(
        self,
        q_THd: torch.Tensor,
        k_TGd: torch.Tensor,
        v_TGe: torch.Tensor,
        sinks_H: torch.Tensor | None,
        scale: float,
        window: int,
    ) -> torch.Tensor:
        """The same by operations that torch can differentiate."""
        return self._differentiable(0, q_THd, k_TGd, v_TGe, scale=scale, window=window, sinks_H=sinks_H)


class _KernelAttention(torch.autograd.Function):
    """The kernel forward; backward through a second forward in torch."""

    @staticmethod
    def forward(
        ctx: Any,
        q_THd: torch.Tensor,
        k_TGd: torch.Tensor,
        v_TGe: torch.Tensor,
        sinks_H: torch.Tensor | None,
        scale: float,
        window: int,
        attention: KernelAttention,
    ) -> torch.Tensor:
        ctx.save_for_backward(q_THd, k_TGd, v_TGe, sinks_H)
        ctx.scale, ctx.window, ctx.attention = scale, window, attention
        return attention.forward(q_THd, k_TGd, v_TGe, sinks_H, scale, window)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        wanted = ctx.needs_input_grad[:4]
        inputs = [
            None if x is None else x.detach().requires_grad_(needed)
            for x, needed in zip(ctx.saved_tensors, wanted, strict=True)
        ]
        with torch.enable_grad():
            out_THe = ctx.attention.differentiable(*inputs, ctx.scale, ctx.window)
        asked = [x for x in inputs if x is not None and x.requires_grad]
        found = iter(torch.autograd.grad(out_THe, asked, grads[0]))
        return *(next(found) if needed else None for needed in wanted), None, None, None

"""Experts on several ranks: dispatch each row to the rank that holds its expert, compute there, combine at home.

    dispatch   the rows (token, rank of choice) sorted by the slot of their expert (`model/parallel/placement.py`), so
               that each rank's are one slice; none is dropped, and a rank may get none (uneven all-to-all)
    compute    the kernel of a whole layer with one choice a row, of weight 1
    return     the same all-to-all the other way
    combine    each token's rows, times their weights, in the order of its choices

With batch-invariant kernels an expert's row has the same bits wherever it is computed, and the sum is in the same order
as on one rank: so has the layer. Gradients take the same way back: those of a weight sum over the ranks' tokens by
themselves, because all rows of an expert come to its rank.

A rank must run the layer as often as the others of its group, also without a gradient, or they wait for it.

Shapes: T tokens of this rank, K choices a token, N = T K rows, M rows that this rank computes, D model dim, e experts
of this rank, E of the layer, P ranks of the group.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist

from model.kernels.grouped_experts.eager import SortedRows, sort_rows
from model.kernels.grouped_experts.eager import combine as combine_rows


class RowsCompute(Protocol):
    """The experts of this rank."""

    def __call__(self, x_MD: torch.Tensor, expert_M: torch.Tensor) -> torch.Tensor:
        """fp32 [M, D]; `expert_M` (int64) counts from this rank's first slot. M may be 0."""
        ...


class Combine(Protocol):
    """The last step of a layer: `GroupedExperts.combine`, or `eager.combine`."""

    def __call__(self, rows_ND: torch.Tensor, row_TK: torch.Tensor, weights_TK: torch.Tensor) -> torch.Tensor:
        """fp32 [T, D], without a gradient."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class ExpertExchange:
    """The all-to-all of one group in a layer; `slot_E` (int64) tells where each expert is, `None` in its own place."""

    group: dist.ProcessGroup
    num_experts: int
    slot_E: torch.Tensor | None = None

    def __call__(
        self,
        x_TD: torch.Tensor,
        chosen_TK: torch.Tensor,
        weights_TK: torch.Tensor,
        compute: RowsCompute,
        combine: Combine,
    ) -> torch.Tensor:
        """fp32 [T, D]: the weighted sum of each token's chosen experts, wherever they are."""
        slots_TK = chosen_TK if self.slot_E is None else self.slot_E[chosen_TK]
        rows = sort_rows(slots_TK, self.num_experts)
        num_ranks = dist.get_world_size(self.group)
        sent_Pe = torch.tensor(rows.counts, device=x_TD.device).view(num_ranks, -1)
        received_Pe = torch.empty_like(sent_Pe)
        dist.all_to_all_single(received_Pe, sent_Pe, group=self.group)
        to, of = sent_Pe.sum(1).tolist(), received_Pe.sum(1).tolist()
        experts_e = torch.arange(sent_Pe.shape[1], device=x_TD.device)
        expert_M = experts_e.repeat(num_ranks).repeat_interleave(received_Pe.reshape(-1))

        x_MD = _AllToAll.apply(gather_rows(x_TD, rows), to, of, self.group)
        y_MD = compute(x_MD, expert_M)
        y_ND = _AllToAll.apply(y_MD, of, to, self.group)
        return weigh_rows(y_ND, weights_TK, rows, combine)


def gather_rows(x_TD: torch.Tensor, rows: SortedRows) -> torch.Tensor:
    """[N, D], differentiable: each choice's row."""
    return _Rows.apply(x_TD, rows.token_N, rows.row_TK)  # pyright: ignore[reportReturnType]


def weigh_rows(y_ND: torch.Tensor, weights_TK: torch.Tensor, rows: SortedRows, combine: Combine) -> torch.Tensor:
    """fp32 [T, D], differentiable: each token's rows times their weights, in the order of its choices."""
    return _Combine.apply(y_ND, weights_TK, rows.row_TK, rows.order_N, combine)  # pyright: ignore[reportReturnType]


class _Rows(torch.autograd.Function):
    """Each choice's row; a token's gradient sums its rows in the order of its choices, wherever their experts are."""

    @staticmethod
    def forward(ctx: Any, x_TD: torch.Tensor, token_N: torch.Tensor, row_TK: torch.Tensor) -> torch.Tensor:
        ctx.row_TK = row_TK
        return x_TD.index_select(0, token_N)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return combine_rows(grads[0], ctx.row_TK, None).to(grads[0].dtype), None, None


class _AllToAll(torch.autograd.Function):
    """Slices of rows to every rank of the group; the gradient goes the other way."""

    @staticmethod
    def forward(
        ctx: Any, rows_ND: torch.Tensor, to: list[int], of: list[int], group: dist.ProcessGroup
    ) -> torch.Tensor:
        ctx.exchange = (to, of, group)
        return _all_to_all(rows_ND, to, of, group)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        to, of, group = ctx.exchange
        return _all_to_all(grads[0], of, to, group), None, None, None


def _all_to_all(rows_ND: torch.Tensor, to: list[int], of: list[int], group: dist.ProcessGroup) -> torch.Tensor:
    received = rows_ND.new_empty(sum(of), rows_ND.shape[1])
    dist.all_to_all_single(received, rows_ND.contiguous(), of, to, group=group)
    return received


class _Combine(torch.autograd.Function):
    """`combine` with its gradient; nothing is added up twice, so the gradient has one order of sums too."""

    @staticmethod
    def forward(
        ctx: Any,
        rows_ND: torch.Tensor,
        weights_TK: torch.Tensor,
        row_TK: torch.Tensor,
        order_N: torch.Tensor,
        combine: Callable[..., torch.Tensor],
    ) -> torch.Tensor:
        ctx.save_for_backward(rows_ND, weights_TK, row_TK, order_N)
        return combine(rows_ND, row_TK, weights_TK)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        rows_ND, weights_TK, row_TK, order_N = ctx.saved_tensors
        grad_ND = grads[0].index_select(0, order_N // row_TK.shape[1])
        grad_weights_N = torch.linalg.vecdot(grad_ND, rows_ND)
        grad_weights_TK = grad_weights_N.index_select(0, row_TK.reshape(-1)).view(weights_TK.shape)
        weights_N1 = weights_TK.reshape(-1).index_select(0, order_N).unsqueeze(-1)
        return grad_ND * weights_N1, grad_weights_TK, None, None, None

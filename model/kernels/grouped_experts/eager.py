"""The grouped expert MLP as sorted matrix products: torch operations only, forward and backward written out.

Rows (token, rank) are sorted by expert, so that each expert's rows are one contiguous slice and its three products are
plain matrix products. Forward and backward are one autograd function because that lets every product write into its
slice of one buffer: autograd of the same steps would add a copy for each slice (backward of a split or a chunk is a
fill or a concatenation, which at this size costs as much as the products).

Every step is a gather or a product, never a scatter-add, so the result does not depend on the number of threads that
add: repeated calls give the same bits.

Shapes: T packed tokens, D model dim, F expert dim, E experts, K experts a token, N = T K sorted rows.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F

from model.kernels.grouped_experts.reference import Clamp, gated_unit


def experts_forward(
    x_TD: torch.Tensor,
    gate_up_E2FD: torch.Tensor,
    down_EDF: torch.Tensor,
    chosen_TK: torch.Tensor,
    weights_TK: torch.Tensor,
    *,
    gate_up_bias_E2F: torch.Tensor | None = None,
    down_bias_ED: torch.Tensor | None = None,
    clamp: Clamp | None = None,
) -> torch.Tensor:
    """The same function of the same arguments as `reference.experts_forward`."""
    return _SortedExperts.apply(  # pyright: ignore[reportReturnType]
        x_TD, gate_up_E2FD, down_EDF, chosen_TK, weights_TK, gate_up_bias_E2F, down_bias_ED, clamp
    )


class SortedRows(NamedTuple):
    """The rows (token, rank) sorted by expert; tokens stay in order within an expert."""

    order_N: torch.Tensor
    """token * K + rank of each sorted row, int64."""
    token_N: torch.Tensor
    row_TK: torch.Tensor
    """The sorted row of each choice, int64."""
    counts: list[int]
    """Rows of each expert."""


def sort_rows(chosen_TK: torch.Tensor, num_experts: int) -> SortedRows:
    """A stable sort of the choices by expert."""
    flat_N = chosen_TK.reshape(-1)
    order_N = torch.argsort(flat_N, stable=True)
    row_N = torch.empty_like(order_N)
    row_N[order_N] = torch.arange(len(order_N), device=order_N.device)
    counts = torch.bincount(flat_N, minlength=num_experts).tolist()
    return SortedRows(order_N, order_N // chosen_TK.shape[1], row_N.view(chosen_TK.shape), counts)


class Gradients(NamedTuple):
    """Of one layer; `None` where there is no bias."""

    x_TD: torch.Tensor
    gate_up_E2FD: torch.Tensor
    down_EDF: torch.Tensor
    weights_TK: torch.Tensor
    gate_up_bias_E2F: torch.Tensor | None
    down_bias_ED: torch.Tensor | None


class _SortedExperts(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_TD: torch.Tensor,
        gate_up_E2FD: torch.Tensor,
        down_EDF: torch.Tensor,
        chosen_TK: torch.Tensor,
        weights_TK: torch.Tensor,
        gate_up_bias_E2F: torch.Tensor | None,
        down_bias_ED: torch.Tensor | None,
        clamp: Clamp | None,
    ) -> torch.Tensor:
        num_experts, dim, hidden = down_EDF.shape
        rows = sort_rows(chosen_TK, num_experts)
        x_ND = x_TD.index_select(0, rows.token_N)
        h_N2F = x_ND.new_empty(len(x_ND), 2 * hidden)
        _multiply(x_ND, gate_up_E2FD, gate_up_bias_E2F, rows.counts, out=h_N2F)
        unit = make_unit(clamp)
        act_NF = unit.forward(h_N2F)
        out_ND = x_ND.new_empty(len(x_ND), dim)
        _multiply(act_NF, down_EDF, down_bias_ED, rows.counts, out=out_ND)

        ctx.save_for_backward(x_ND, h_N2F, act_NF, out_ND, gate_up_E2FD, down_EDF, weights_TK)
        ctx.rows, ctx.unit = rows, unit
        ctx.has_bias = (gate_up_bias_E2F is not None, down_bias_ED is not None)
        return combine(out_ND, rows.row_TK, weights_TK)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (grad_TD,) = grads
        x_ND, h_N2F, act_NF, out_ND, gate_up_E2FD, down_EDF, weights_TK = ctx.saved_tensors
        found = experts_backward(
            grad_TD, x_ND, h_N2F, act_NF, out_ND, gate_up_E2FD, down_EDF, weights_TK, ctx.rows, ctx.unit, ctx.has_bias
        )
        return (
            found.x_TD,
            found.gate_up_E2FD,
            found.down_EDF,
            None,
            found.weights_TK,
            found.gate_up_bias_E2F,
            found.down_bias_ED,
            None,
        )


def experts_backward(
    grad_TD: torch.Tensor,
    x_ND: torch.Tensor,
    h_N2F: torch.Tensor,
    act_NF: torch.Tensor,
    out_ND: torch.Tensor,
    gate_up_E2FD: torch.Tensor,
    down_EDF: torch.Tensor,
    weights_TK: torch.Tensor,
    rows: SortedRows,
    unit: Unit,
    has_bias: tuple[bool, bool],
) -> Gradients:
    """The backward of a layer whose sorted rows are given: inputs, before and after the unit, outputs unweighted.

    Args:
        grad_TD: fp32 gradient of the layer's output.
        x_ND: Inputs; it, `h_N2F`, `act_NF` and the matrices have the compute dtype.
        h_N2F: Before the unit, [gate | up].
        act_NF: After it.
        out_ND: Rows of the down product, before their weights; any dtype.
        gate_up_E2FD: Gate rows, then up rows.
        down_EDF: Output matrices.
        weights_TK: fp32 factor of each choice.
        rows: Whose rows they are.
        unit: That has done `forward(h_N2F)`.
        has_bias: Of gate_up, of down.
    """
    grad_out_ND = grad_TD.index_select(0, rows.token_N)
    grad_weights_N = torch.linalg.vecdot(grad_out_ND, out_ND.to(grad_out_ND.dtype))
    grad_weights_TK = grad_weights_N.index_select(0, rows.row_TK.reshape(-1)).view(weights_TK.shape)
    grad_out_ND = grad_out_ND.mul_(weights_TK.reshape(-1).index_select(0, rows.order_N).unsqueeze(-1)).to(x_ND.dtype)

    has_gate_up_bias, has_down_bias = has_bias
    grad_down_bias_ED = _sum_rows(grad_out_ND, rows.counts) if has_down_bias else None
    grad_act_NF, grad_down_EDF = _multiply_backward(grad_out_ND, act_NF, down_EDF, rows.counts)
    grad_h_N2F = unit.backward(grad_act_NF, h_N2F)
    grad_gate_up_bias_E2F = _sum_rows(grad_h_N2F, rows.counts) if has_gate_up_bias else None
    grad_x_ND, grad_gate_up_E2FD = _multiply_backward(grad_h_N2F, x_ND, gate_up_E2FD, rows.counts)

    return Gradients(
        combine(grad_x_ND, rows.row_TK, None).to(x_ND.dtype),
        grad_gate_up_E2FD,
        grad_down_EDF,
        grad_weights_TK,
        grad_gate_up_bias_E2F,
        grad_down_bias_ED,
    )


class Unit(Protocol):
    """The gated unit of sorted rows and its gradient."""

    def forward(self, h_N2F: torch.Tensor) -> torch.Tensor:
        """[N, F]."""
        ...

    def backward(self, grad_NF: torch.Tensor, h_N2F: torch.Tensor) -> torch.Tensor:
        """[N, 2F], of the rows that `forward` had; `grad_NF` may be overwritten."""
        ...


def make_unit(clamp: Clamp | None) -> Unit:
    """`reference.gated_unit` for one forward and its backward."""
    return _Swiglu() if clamp is None else _ClampedSwiglu(clamp)


class _Swiglu:
    """silu(g) u and its gradient to the buffer [g | u]; keeps silu(g) between the two."""

    def forward(self, h_N2F: torch.Tensor) -> torch.Tensor:
        gate_NF, up_NF = h_N2F.chunk(2, dim=-1)
        self._silu_NF = F.silu(gate_NF)
        return self._silu_NF * up_NF

    def backward(self, grad_NF: torch.Tensor, h_N2F: torch.Tensor) -> torch.Tensor:
        """The gradient to the buffer; `grad_NF` is overwritten."""
        grad_h_N2F = torch.empty_like(h_N2F)
        (grad_gate_NF, grad_up_NF), (gate_NF, up_NF) = grad_h_N2F.chunk(2, dim=-1), h_N2F.chunk(2, dim=-1)
        torch.mul(grad_NF, self._silu_NF, out=grad_up_NF)
        torch.ops.aten.silu_backward.grad_input(grad_NF.mul_(up_NF), gate_NF, grad_input=grad_gate_NF)
        return grad_h_N2F


class _ClampedSwiglu:
    """gpt-oss's unit (`reference.gated_unit`) and its gradient: where an input is clamped, none passes."""

    def __init__(self, clamp: Clamp) -> None:
        self._clamp = clamp

    def forward(self, h_N2F: torch.Tensor) -> torch.Tensor:
        gate_NF, up_NF = h_N2F.chunk(2, dim=-1)
        return gated_unit(gate_NF, up_NF, self._clamp)

    def backward(self, grad_NF: torch.Tensor, h_N2F: torch.Tensor) -> torch.Tensor:
        """d/dg = s (1 + alpha g (1 - s)) (u + 1) and d/du = g s, with s = sigmoid(alpha g) and g, u clamped."""
        limit, alpha = self._clamp
        gate_NF, up_NF = h_N2F.chunk(2, dim=-1)
        g_NF, u_NF = gate_NF.clamp(max=limit), up_NF.clamp(-limit, limit)
        s_NF = torch.sigmoid(alpha * g_NF)
        slope_NF = s_NF * (1 + alpha * g_NF * (1 - s_NF)) * (u_NF + 1)
        grad_gate_NF = torch.where(gate_NF <= limit, grad_NF * slope_NF, 0)
        grad_up_NF = torch.where(up_NF.abs() <= limit, grad_NF * g_NF * s_NF, 0)
        return torch.cat([grad_gate_NF, grad_up_NF], dim=-1)


def _multiply(
    x_NI: torch.Tensor,
    weight_EOI: torch.Tensor,
    bias_EO: torch.Tensor | None,
    counts: list[int],
    *,
    out: torch.Tensor,
) -> None:
    """Each expert's rows times its transposed matrix; an expert without rows costs no call (decoding touches few)."""
    transposed = weight_EOI.transpose(1, 2).unbind(0)
    for expert, (x, rows) in enumerate(zip(x_NI.split(counts), out.split(counts), strict=True)):
        if not counts[expert]:
            continue
        if bias_EO is None:
            torch.mm(x, transposed[expert], out=rows)
        else:
            torch.addmm(bias_EO[expert], x, transposed[expert], out=rows)


def _sum_rows(grad_NO: torch.Tensor, counts: list[int]) -> torch.Tensor:
    """The gradient of each expert's bias [E, O], summed in fp32 (or wider)."""
    wide = torch.promote_types(grad_NO.dtype, torch.float32)
    return torch.stack([rows.sum(0, dtype=wide) for rows in grad_NO.split(counts)]).to(grad_NO.dtype)


def _multiply_backward(
    grad_NO: torch.Tensor, x_NI: torch.Tensor, weight_EOI: torch.Tensor, counts: list[int]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients of `_multiply` to its rows [N, I] and matrices [E, O, I]; an expert without rows gets zeros."""
    grad_x_NI, grad_weight_EOI = torch.empty_like(x_NI), torch.empty_like(weight_EOI)
    for grad_x, grad_weight, grad, x, weight in zip(
        grad_x_NI.split(counts),
        grad_weight_EOI.unbind(0),
        grad_NO.split(counts),
        x_NI.split(counts),
        weight_EOI.unbind(0),
        strict=True,
    ):
        torch.mm(grad, weight, out=grad_x)
        torch.mm(grad.t(), x, out=grad_weight)
    return grad_x_NI, grad_weight_EOI


def combine(rows_ND: torch.Tensor, row_TK: torch.Tensor, weights_TK: torch.Tensor | None) -> torch.Tensor:
    """Sum each token's rows in rank order, in fp32, each times its weight (`None`: 1)."""
    dtype = torch.promote_types(rows_ND.dtype, torch.float32)
    total_TD = torch.zeros(len(row_TK), rows_ND.shape[1], dtype=dtype, device=rows_ND.device)
    for rank in range(row_TK.shape[1]):
        term_TD = rows_ND.index_select(0, row_TK[:, rank])
        if weights_TK is None:
            total_TD.add_(term_TD)
        else:
            total_TD.addcmul_(term_TD.to(dtype), weights_TK[:, rank : rank + 1])
    return total_TD

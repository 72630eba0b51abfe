"""Adapters as layers: `y + s B A x` beside a frozen product, for a linear layer and for a layer's routed experts.

The frozen product and the adapter stay two products, in the learner as in an engine, with the same kernels and the same
roundings between them: so their logprobs have the same bits. (`model.lora.merged` makes one matrix of both, whose
roundings are others.) The fused kernel of the experts has no place for an adapter, so that its steps are done one by
one here: the rows of an expert through gate and up, the adapter of those, the unit, down, its adapter, the sum.

Every product of an expert's rows is one call of a batch-invariant kernel, and what lies between is one correctly
rounded operation an element: a token's bits do not depend on its batch.

Shapes: T packed tokens, D model dim, F expert dim, E experts, K experts a token, N = T K rows sorted by expert, n those
of one expert, I inputs, O outputs, r rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import nn

from model.config import LoraConfig
from model.kernels.grouped_experts import eager
from model.kernels.grouped_experts.reference import Clamp, gated_unit
from model.parallel.experts import gather_rows, weigh_rows
from model.product import Product
from model.rope import adjacent_pairs


class LowRank(nn.Module):
    """The adapter of a linear layer: A [r, I] and B [O, r], which starts at 0 (Hu et al. 2021, section 4.1)."""

    def __init__(self, in_features: int, out_features: int, lora: LoraConfig, head_dim: int = 0) -> None:
        """`head_dim`: B has the rows of heads whose rotary pairs `HeadLinear` brings together (0: in their order)."""
        super().__init__()
        self.A = nn.Parameter(torch.empty(lora.rank, in_features))
        self.B = nn.Parameter(torch.empty(out_features, lora.rank))
        self.scale = lora.alpha / lora.rank
        self.head_dim = head_dim
        self.enabled = True
        self.products: tuple[Product, Product] | None = None

    def forward(self, y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """`y + s B A x` in the dtype of `y`; each step is rounded to it."""
        if not self.enabled:
            return y
        if self.products is None:
            h = F.linear(x, self.A.to(x.dtype)) * self.scale
            return y + F.linear(h, self.packed_b(self.B).to(x.dtype))
        to_rank, to_output = self.products
        h = to_rank(x, lambda: (self.A, None)) * self.scale
        return y + to_output(h, lambda: (self.packed_b(self.B), None))

    def packed_b(self, b_Or: torch.Tensor) -> torch.Tensor:
        """B with its rows in the order of the layer's output."""
        return adjacent_pairs(b_Or, self.head_dim) if self.head_dim else b_Or


class ExpertMatrices(Protocol):
    """One matrix an expert."""

    def multiply(self, expert: int, x_nI: torch.Tensor) -> torch.Tensor:
        """fp32 [n, O], without a gradient; a row's bits depend on it alone."""
        ...

    def matrix(self, expert: int) -> torch.Tensor:
        """fp32 [O, I]."""
        ...


class PlainMatrices:
    """[E, O, I] in any floating dtype; multiplied in fp32."""

    def __init__(self, weight_EOI: torch.Tensor) -> None:
        self._weight_EOI = weight_EOI.detach()

    def multiply(self, expert: int, x_nI: torch.Tensor) -> torch.Tensor:
        """See `ExpertMatrices`."""
        return x_nI.float() @ self.matrix(expert).T

    def matrix(self, expert: int) -> torch.Tensor:
        """See `ExpertMatrices`."""
        return self._weight_EOI[expert].float()


class LowRankExperts(nn.Module):
    """The adapters of one fused matrix: A [E, r, I] and B [E, O, r], one pair an expert; it lives where its expert is.

    Both products are accumulated and kept in fp32, as the rows that they are added to.
    """

    def __init__(self, num_experts: int, in_features: int, out_features: int, lora: LoraConfig) -> None:
        super().__init__()
        self.A = nn.Parameter(torch.empty(num_experts, lora.rank, in_features))
        self.B = nn.Parameter(torch.empty(num_experts, out_features, lora.rank))
        self.scale = lora.alpha / lora.rank
        self.enabled = True
        self.products: tuple[ExpertMatrices, ExpertMatrices] | None = None

    def forward(self, y_NO: torch.Tensor, x_NI: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
        """fp32; `counts` are the rows of each expert."""
        if not self.enabled:
            return y_NO
        to_rank, to_output = self.products or (PlainMatrices(self.A), PlainMatrices(self.B))
        h_Nr = multiply_rows(x_NI, to_rank, counts, weight_EOI=self.A) * self.scale
        return y_NO + multiply_rows(h_Nr, to_output, counts, weight_EOI=self.B)


class AdaptedKernels(Protocol):
    """The steps of a layer on packed weights."""

    @property
    def gate_up(self) -> ExpertMatrices:
        """F gate outputs, then F up outputs, of D inputs."""
        ...

    @property
    def down(self) -> ExpertMatrices:
        """D outputs of F inputs."""
        ...

    @property
    def biases(self) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Of gate_up [E, 2F] and of down [E, D], in any floating dtype."""
        ...

    def gated_unit(self, h_N2F: torch.Tensor) -> torch.Tensor:
        """SwiGLU, differentiable."""
        ...

    def combine(self, rows_ND: torch.Tensor, row_TK: torch.Tensor, weights_TK: torch.Tensor) -> torch.Tensor:
        """See `model.parallel.experts.Combine`."""
        ...


class PlainKernels:
    """A layer's frozen tensors in plain torch."""

    def __init__(
        self,
        gate_up_E2FD: torch.Tensor,
        down_EDF: torch.Tensor,
        biases: tuple[torch.Tensor | None, torch.Tensor | None],
    ) -> None:
        self.gate_up, self.down = PlainMatrices(gate_up_E2FD), PlainMatrices(down_EDF)
        self.biases = biases
        self.combine: Callable[..., torch.Tensor] = eager.combine

    def gated_unit(self, h_N2F: torch.Tensor) -> torch.Tensor:
        """See `AdaptedKernels`."""
        gate_NF, up_NF = h_N2F.chunk(2, dim=-1)
        return gated_unit(gate_NF, up_NF, None)


def adapted_experts(
    kernels: AdaptedKernels,
    clamp: Clamp | None,
    gate_up_lora: LowRankExperts,
    down_lora: LowRankExperts,
    x_TD: torch.Tensor,
    chosen_TK: torch.Tensor,
    weights_TK: torch.Tensor,
) -> torch.Tensor:
    """fp32 [T, D]: as `grouped_experts/reference.py`, with adapters on both matrices of every expert.

    The layer's own tensors are frozen: the gradient reaches the adapters, `x_TD` and `weights_TK`.
    """
    rows = eager.sort_rows(chosen_TK, len(gate_up_lora.A))
    gate_up_bias_E2F, down_bias_ED = kernels.biases
    x_ND = gather_rows(x_TD, rows)
    h_N2F = multiply_rows(x_ND, kernels.gate_up, rows.counts)
    h_N2F = gate_up_lora(_with_bias(h_N2F, gate_up_bias_E2F, rows.counts), x_ND, rows.counts)
    act_NF = _unit(h_N2F, clamp, kernels).to(x_TD.dtype)
    out_ND = multiply_rows(act_NF, kernels.down, rows.counts)
    out_ND = down_lora(_with_bias(out_ND, down_bias_ED, rows.counts), act_NF, rows.counts)
    return weigh_rows(out_ND, weights_TK, rows, kernels.combine)


def _with_bias(y_NO: torch.Tensor, bias_EO: torch.Tensor | None, counts: Sequence[int]) -> torch.Tensor:
    if bias_EO is None:
        return y_NO
    return y_NO + bias_EO.float().repeat_interleave(torch.tensor(counts, device=bias_EO.device), dim=0)


def _unit(h_N2F: torch.Tensor, clamp: Clamp | None, kernels: AdaptedKernels) -> torch.Tensor:
    """`reference.gated_unit` by the kernel of SwiGLU: g sigmoid(a g) (u + 1) = silu(a g) (u + 1) / a."""
    if clamp is None:
        return kernels.gated_unit(h_N2F)
    gate_NF, up_NF = h_N2F.chunk(2, dim=-1)
    gate_NF, up_NF = gate_NF.clamp(max=clamp.limit) * clamp.alpha, up_NF.clamp(-clamp.limit, clamp.limit) + 1
    return kernels.gated_unit(torch.cat([gate_NF, up_NF], dim=-1)) * (1 / clamp.alpha)


def multiply_rows(
    x_NI: torch.Tensor, matrices: ExpertMatrices, counts: Sequence[int], weight_EOI: torch.Tensor | None = None
) -> torch.Tensor:
    """Each expert's rows times its transposed matrix, fp32 [N, O].

    The gradient goes to `x_NI` and to `weight_EOI`, the tensor that `matrices` were made of (`None`: it is frozen, and
    nothing of its size is kept for the backward).
    """
    return _MultiplyRows.apply(x_NI, weight_EOI, matrices, list(counts))  # pyright: ignore[reportReturnType]


class _MultiplyRows(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x_NI: torch.Tensor, weight_EOI: torch.Tensor | None, matrices: ExpertMatrices, counts: list[int]
    ) -> torch.Tensor:
        ctx.matrices, ctx.counts, ctx.num_inputs = matrices, counts, x_NI.shape[1]
        ctx.x_dtype = x_NI.dtype
        ctx.save_for_backward(x_NI if weight_EOI is not None else None, weight_EOI)
        parts = [matrices.multiply(expert, x_nI) for expert, x_nI in enumerate(x_NI.split(counts)) if counts[expert]]
        return torch.cat(parts) if parts else x_NI.new_empty(0, len(matrices.matrix(0)), dtype=torch.float32)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x_NI, weight_EOI = ctx.saved_tensors
        counts: list[int] = ctx.counts
        grad_NO = grads[0].float()
        grad_x_NI = grad_NO.new_empty(len(grad_NO), ctx.num_inputs)
        grad_weight_EOI = None
        for expert, (grad_nO, grad_x_nI) in enumerate(zip(grad_NO.split(counts), grad_x_NI.split(counts), strict=True)):
            if counts[expert]:
                torch.mm(grad_nO, ctx.matrices.matrix(expert), out=grad_x_nI)
        if weight_EOI is not None:
            grad_weight_EOI = torch.zeros(weight_EOI.shape, device=grad_NO.device)
            for expert, (grad_nO, x_nI) in enumerate(zip(grad_NO.split(counts), x_NI.split(counts), strict=True)):
                torch.mm(grad_nO.T, x_nI.float(), out=grad_weight_EOI[expert])
            grad_weight_EOI = grad_weight_EOI.to(weight_EOI.dtype)
        return grad_x_NI.to(ctx.x_dtype), grad_weight_EOI, None, None

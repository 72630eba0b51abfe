"""The small layers: linear maps, the embedding, RMSNorm and the plain gated MLP.

A layer is plain torch until `model/binding.py` gives it kernels and its packed weight; the arithmetic here is then the
definition, and the way of the gradient.

Invariant: parameters may be held, or swapped in, as fp32 or as the published bf16 view; each layer casts to the dtype
it computes in, and a cast to the same dtype is no operation. So the fp32 path has no rounding but its arithmetic's.

Shapes: T packed tokens, D model dim, V vocabulary, H heads, d head dim.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from model.config import ComputeDtype
from model.low_rank import LowRank
from model.product import Parameters, Product
from model.rope import adjacent_pairs

TORCH_DTYPE = {ComputeDtype.fp32: torch.float32, ComputeDtype.bf16: torch.bfloat16}


class Linear(nn.Module):
    """`x @ weight.T + bias`, computed and returned in the dtype of `x`."""

    def __init__(self, in_features: int, out_features: int, *, bias: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(out_features, in_features))
        self.bias = nn.Parameter(torch.empty(out_features)) if bias else None
        self.product: Product | None = None
        self.lora: LowRank | None = None

    def forward(self, x_TD: torch.Tensor) -> torch.Tensor:
        """[T, in] to [T, out]."""
        y_TD = self._multiply(x_TD)
        return y_TD if self.lora is None else self.lora(y_TD, x_TD)

    def _multiply(self, x_TD: torch.Tensor) -> torch.Tensor:
        if self.product is not None:
            return self.product(x_TD, self.packed_parameters)
        bias = None if self.bias is None else self.bias.to(x_TD.dtype)
        return F.linear(x_TD, self.weight.to(x_TD.dtype), bias)

    def packed_parameters(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Weight and bias with their rows in the order of the output."""
        return self.weight, self.bias


class HeadLinear(Linear):
    """A query or key projection: its parameters are in the checkpoint's order, its output has rotary pairs adjacent."""

    def __init__(
        self, in_features: int, num_heads: int, head_dim: int, *, bias: bool = False, adjacent: bool = False
    ) -> None:
        """`adjacent`: the checkpoint's own pairs are adjacent already."""
        super().__init__(in_features, num_heads * head_dim, bias=bias)
        self.head_dim = head_dim
        self.adjacent = adjacent

    def forward(self, x_TD: torch.Tensor) -> torch.Tensor:
        """[T, in] to [T, H, d]."""
        weight, bias = self.packed_parameters()
        bias = None if bias is None else bias.to(x_TD.dtype)
        y_TD = F.linear(x_TD, weight.to(x_TD.dtype), bias)
        y_TD = y_TD if self.lora is None else self.lora(y_TD, x_TD)
        return y_TD.view(len(x_TD), -1, self.head_dim)

    def packed_parameters(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """As `Linear.packed_parameters`."""
        if self.adjacent:
            return self.weight, self.bias
        bias = None if self.bias is None else adjacent_pairs(self.bias, self.head_dim)
        return adjacent_pairs(self.weight, self.head_dim), bias


def side_by_side(*layers: Linear) -> Parameters:
    """The parameters of one product that gives the outputs of several layers, one after the other."""

    def parameters() -> tuple[torch.Tensor, torch.Tensor | None]:
        weights, biases = zip(*(layer.packed_parameters() for layer in layers), strict=True)
        return torch.cat(weights), None if biases[0] is None else torch.cat(biases)

    return parameters


def with_adapters(y: torch.Tensor, x: torch.Tensor, *layers: Linear) -> torch.Tensor:
    """What that product gave of `x`, with the adapters of its layers."""
    adapters = [layer.lora for layer in layers]
    if not any(adapters):
        return y
    parts = y.split([layer.weight.shape[0] for layer in layers], dim=-1)
    return torch.cat(
        [part if lora is None else lora(part, x) for part, lora in zip(parts, adapters, strict=True)], dim=-1
    )


class Mlp(nn.Module):
    """down(silu(gate x) * (up x)): a dense layer's feed-forward part, and the expert that every token passes."""

    def __init__(self, hidden_size: int, width: int) -> None:
        super().__init__()
        self.gate_proj = Linear(hidden_size, width)
        self.up_proj = Linear(hidden_size, width)
        self.down_proj = Linear(width, hidden_size)
        self.gate_up: Product | None = None
        self.gated_unit: Callable[[torch.Tensor], torch.Tensor] | None = None

    def forward(self, x_TD: torch.Tensor) -> torch.Tensor:
        """[T, D] in the dtype of `x_TD`."""
        if self.gate_up is not None and self.gated_unit is not None:
            h_T2F = self.gate_up(x_TD, side_by_side(self.gate_proj, self.up_proj))
            return self.down_proj(self.gated_unit(h_T2F))
        return self.down_proj(F.silu(self.gate_proj(x_TD)) * self.up_proj(x_TD))


class Embedding(nn.Module):
    """Rows of a table, returned as fp32: they start the residual stream."""

    def __init__(self, vocab_size: int, hidden_size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(vocab_size, hidden_size))

    def forward(self, ids_T: torch.Tensor) -> torch.Tensor:
        """int64 [T] to fp32 [T, D]."""
        return F.embedding(ids_T, self.weight).float()


def project_logits(hidden_TD: torch.Tensor, weight_VD: torch.Tensor) -> torch.Tensor:
    """fp32 logits [T, V] of final hidden states, in either compute dtype."""
    return F.linear(hidden_TD.float(), weight_VD.float())


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight over the last axis, in fp32 (Zhang and Sennrich 2019, eq. 4)."""

    def __init__(self, hidden_size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(hidden_size))
        self.eps = eps
        self.kernel: Callable[[torch.Tensor, torch.Tensor, float], torch.Tensor] | None = None

    def forward(self, x_TD: torch.Tensor) -> torch.Tensor:
        """Any floating dtype in, fp32 out."""
        if self.kernel is not None:
            return self.kernel(x_TD, self.weight, self.eps)
        return _RMSNorm.apply(x_TD.float(), self.weight.float(), self.eps)  # pyright: ignore[reportReturnType]


class HeadNorm(nn.Module):
    """RMSNorm of what `HeadLinear` returns: over each head, or over all of them together (OLMoE)."""

    def __init__(self, num_heads: int, head_dim: int, eps: float, *, together: bool, adjacent: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_heads * head_dim if together else head_dim))
        self.eps = eps
        self.head_dim = head_dim
        self.adjacent = adjacent
        self.together = together

    def packed_weight(self) -> torch.Tensor:
        """fp32, [d] or [H d], in the order of `HeadLinear`'s outputs."""
        weight = self.weight.float()
        return weight if self.adjacent else adjacent_pairs(weight, self.head_dim)

    def forward(self, x_THd: torch.Tensor) -> torch.Tensor:
        """[T, H, d] in any floating dtype to fp32."""
        weight = self.packed_weight()
        x = x_THd.float().reshape(-1, len(weight))
        return _RMSNorm.apply(x, weight, self.eps).view(x_THd.shape)  # pyright: ignore[reportAttributeAccessIssue]


class _RMSNorm(torch.autograd.Function):
    """The norm with its backward written out: half the passes over memory that autograd makes on a CPU."""

    @staticmethod
    def forward(ctx: Any, x_TD: torch.Tensor, weight_D: torch.Tensor, eps: float) -> torch.Tensor:
        inverse_T1 = torch.linalg.vecdot(x_TD, x_TD).div_(x_TD.shape[-1]).add_(eps).rsqrt_().unsqueeze(-1)
        normed_TD = x_TD * inverse_T1
        ctx.save_for_backward(normed_TD, inverse_T1, weight_D)
        return normed_TD * weight_D

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (grad_TD,) = grads
        normed_TD, inverse_T1, weight_D = ctx.saved_tensors
        product_TD = grad_TD * normed_TD
        grad_weight_D = product_TD.sum(tuple(range(grad_TD.ndim - 1)))
        along_T1 = torch.mv(product_TD.view(-1, len(weight_D)), weight_D).div_(len(weight_D)).view_as(inverse_T1)
        grad_x_TD = (grad_TD * weight_D).addcmul_(normed_TD, along_T1, value=-1.0).mul_(inverse_T1)
        return grad_x_TD, grad_weight_D, None

"""Logprobs and entropies of hidden states, without the logits of all rows: a chunk of rows at a time.

    logits = hidden weight^T        z = logits / temperature        logprob = z[id] - log sum e^z

At a vocabulary of 151,936 the logits of 8,192 rows take 4.6 GiB in fp32, and their gradient as much again. Here a chunk
of at most `CHUNK_BYTES` is projected, reduced to one number a row, and dropped; the backward projects it again and adds
its share to the gradients of the hidden states and of the weight, in fp32. Both directions project and reduce by the
functions that a sampler calls, so with batch-invariant kernels a chunk boundary changes no bit of a logprob.

What fits into one chunk keeps its logits, which costs no second projection and no more memory than a chunk may take.

Shapes: R rows, D model dim, V vocabulary, C rows of a chunk.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Protocol

import torch

from model.kernels.dispatch import Kernels

CHUNK_BYTES = 64 * 2**20
"""Of fp32 logits, at most; the backward holds their gradient beside them.

glibc always gives blocks above 32 MiB back when they are freed. Smaller ones stay in its heap, where results of a few
bytes keep the next chunk from taking their place: with 32 MiB the process grew to 2.7 GiB.
"""


@dataclass(frozen=True, slots=True, eq=False)
class Unembedding:
    """How hidden states [R, D] become logits [R, V]: `project(hidden, weight)`, and the weight that takes a gradient.

    `project` is `Transformer.logits`: a bound model reads its packed weight, and `weight_VD` holds the same values.
    """

    project: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    weight_VD: torch.Tensor
    chunk_bytes: int = CHUNK_BYTES

    def __call__(self, hidden_RD: torch.Tensor) -> torch.Tensor:
        """fp32 [R, V], all at once."""
        return self.project(hidden_RD, self.weight_VD)

    def chunks(self, num_rows: int) -> list[slice]:
        """Consecutive rows, as few chunks as the memory allows, of sizes that differ by one at most."""
        most = max(1, self.chunk_bytes // (4 * len(self.weight_VD)))
        num = max(1, -(-num_rows // most))
        bounds = [num_rows * index // num for index in range(num + 1)]
        return [slice(*pair) for pair in pairwise(bounds)]

    def has_gradient(self, hidden_RD: torch.Tensor) -> bool:
        """Whether logits of these hidden states would take part in a graph."""
        return torch.is_grad_enabled() and (hidden_RD.requires_grad or self.weight_VD.requires_grad)


def logprobs(
    unembedding: Unembedding,
    hidden_RD: torch.Tensor,
    ids_R: torch.Tensor,
    temperatures_R: torch.Tensor,
    kernels: Kernels,
) -> torch.Tensor:
    """fp32 [R], nats, of int64 ids at positive fp32 temperatures; differentiable in hidden states and weight."""
    if len(unembedding.chunks(len(hidden_RD))) == 1:
        return kernels.logprobs(unembedding(hidden_RD), ids_R, temperatures_R)
    return _by_chunks(unembedding, hidden_RD, ids_R, temperatures_R, _Logprobs(kernels))


def entropies(
    unembedding: Unembedding,
    hidden_RD: torch.Tensor,
    ids_R: torch.Tensor,
    temperatures_R: torch.Tensor,
    kernels: Kernels,
) -> torch.Tensor:
    """Entropies of softmax(logits / temperature), fp32 [R], nats; differentiable in hidden states and weight.

    `ids_R` are any ids of the rows: the kernel gives both numbers, and checks them.
    """
    return _by_chunks(unembedding, hidden_RD, ids_R, temperatures_R, _Entropies(kernels))


@torch.no_grad()
def with_entropies(
    unembedding: Unembedding,
    hidden_RD: torch.Tensor,
    ids_R: torch.Tensor,
    temperatures_R: torch.Tensor,
    kernels: Kernels,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Logprobs, fp32 [R], and entropies, float64 [R], from one projection and without gradient."""
    parts = [
        kernels.logprobs_with_entropies(unembedding(hidden_RD[rows]), ids_R[rows], temperatures_R[rows])
        for rows in unembedding.chunks(len(hidden_RD))
    ]
    logprobs, entropies = zip(*parts, strict=True)
    return torch.cat(logprobs), torch.cat(entropies)


class _Reduction(Protocol):
    """From the logits of a chunk, which it may overwrite, to one fp32 number a row, and back."""

    def forward(self, logits_CV: torch.Tensor, ids_C: torch.Tensor, temperatures_C: torch.Tensor) -> torch.Tensor:
        """[C], without a graph."""
        ...

    def backward(
        self, logits_CV: torch.Tensor, ids_C: torch.Tensor, temperatures_C: torch.Tensor, grad_C: torch.Tensor
    ) -> torch.Tensor:
        """The gradient of the logits, fp32 [C, V]."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class _Logprobs:
    kernels: Kernels

    def forward(self, logits_CV: torch.Tensor, ids_C: torch.Tensor, temperatures_C: torch.Tensor) -> torch.Tensor:
        return self.kernels.logprobs(logits_CV, ids_C, temperatures_C)

    def backward(
        self, logits_CV: torch.Tensor, ids_C: torch.Tensor, temperatures_C: torch.Tensor, grad_C: torch.Tensor
    ) -> torch.Tensor:
        with torch.enable_grad():
            leaf_CV = logits_CV.requires_grad_()
            logprobs_C = self.kernels.logprobs(leaf_CV, ids_C, temperatures_C)
        return torch.autograd.grad(logprobs_C, leaf_CV, grad_C)[0]


@dataclass(frozen=True, slots=True, eq=False)
class _Entropies:
    kernels: Kernels

    def forward(self, logits_CV: torch.Tensor, ids_C: torch.Tensor, temperatures_C: torch.Tensor) -> torch.Tensor:
        return self.kernels.logprobs_with_entropies(logits_CV, ids_C, temperatures_C)[1].float()

    def backward(
        self, logits_CV: torch.Tensor, ids_C: torch.Tensor, temperatures_C: torch.Tensor, grad_C: torch.Tensor
    ) -> torch.Tensor:
        """-p (log p + H) / temperature, with H = -sum p log p."""
        logprobs_CV = torch.log_softmax(logits_CV.div_(temperatures_C.unsqueeze(-1)), -1)
        probabilities_CV = logprobs_CV.exp()
        entropies_C = -torch.linalg.vecdot(probabilities_CV, logprobs_CV)
        factor_C = -grad_C / temperatures_C
        return logprobs_CV.add_(entropies_C.unsqueeze(-1)).mul_(probabilities_CV).mul_(factor_C.unsqueeze(-1))


def _by_chunks(
    unembedding: Unembedding,
    hidden_RD: torch.Tensor,
    ids_R: torch.Tensor,
    temperatures_R: torch.Tensor,
    reduction: _Reduction,
) -> torch.Tensor:
    if unembedding.has_gradient(hidden_RD):
        return _Chunked.apply(  # pyright: ignore[reportReturnType]
            hidden_RD, unembedding.weight_VD, ids_R, temperatures_R, unembedding, reduction
        )
    return _reduced(unembedding, hidden_RD, ids_R, temperatures_R, reduction)


@torch.no_grad()
def _reduced(
    unembedding: Unembedding,
    hidden_RD: torch.Tensor,
    ids_R: torch.Tensor,
    temperatures_R: torch.Tensor,
    reduction: _Reduction,
) -> torch.Tensor:
    return torch.cat(
        [
            reduction.forward(unembedding(hidden_RD[rows]), ids_R[rows], temperatures_R[rows])
            for rows in unembedding.chunks(len(hidden_RD))
        ]
    )


class _Chunked(torch.autograd.Function):
    """Both directions a chunk at a time; kept between them: hidden states, weight, ids and temperatures."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_RD: torch.Tensor,
        weight_VD: torch.Tensor,
        ids_R: torch.Tensor,
        temperatures_R: torch.Tensor,
        unembedding: Unembedding,
        reduction: _Reduction,
    ) -> torch.Tensor:
        ctx.save_for_backward(hidden_RD, weight_VD, ids_R, temperatures_R)
        # The weight itself is a saved tensor: held here as well, it would keep its graph alive in a cycle.
        ctx.project, ctx.rows, ctx.reduction = unembedding.project, unembedding.chunks(len(hidden_RD)), reduction
        return _reduced(unembedding, hidden_RD, ids_R, temperatures_R, reduction)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        hidden_RD, weight_VD, ids_R, temperatures_R = ctx.saved_tensors
        wide_VD = weight_VD.float()
        grad_hidden_RD = torch.zeros(hidden_RD.shape, device=hidden_RD.device) if ctx.needs_input_grad[0] else None
        grad_weight_VD = torch.zeros(weight_VD.shape, device=weight_VD.device) if ctx.needs_input_grad[1] else None
        for rows in ctx.rows:
            hidden_CD = hidden_RD[rows]
            logits_CV = ctx.project(hidden_CD, weight_VD)
            grad_CV = ctx.reduction.backward(logits_CV, ids_R[rows], temperatures_R[rows], grads[0][rows].contiguous())
            if grad_hidden_RD is not None:
                torch.mm(grad_CV, wide_VD, out=grad_hidden_RD[rows])
            if grad_weight_VD is not None:
                grad_weight_VD.addmm_(grad_CV.T, hidden_CD.float())
            del logits_CV, grad_CV  # before the next chunk's are made
        return (
            None if grad_hidden_RD is None else grad_hidden_RD.to(hidden_RD.dtype),
            None if grad_weight_VD is None else grad_weight_VD.to(weight_VD.dtype),
            None,
            None,
            None,
            None,
        )

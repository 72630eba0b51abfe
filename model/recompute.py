"""Activation checkpointing (Chen et al. 2016, arXiv 1604.06174): only the input of a block is kept for its backward.

The backward runs the block again, with the same weights, the same input and the experts that the first run chose, never
a new choice: so it has the same bits, and so have all gradients. The second run's router logits and choices go nowhere;
what a loss or a count reads is what the first one gave.

Forward and backward of a block are one autograd function: so on every rank the second run is whole, between the
backward of the block above and that of the block below, and its all-to-alls meet those of the other ranks. Differs from
`torch.utils.checkpoint`, which has the same bits with its early stop off: that builds and keeps the graph of the first
run, hence all that an autograd function holds outside of its saved tensors (the eager experts' gated unit), and it
would have to be told the first run's choices on the side.

Shapes: T packed tokens, D model dim, K experts a token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from model.attention import Attend
from model.moe import Routing


def recomputed(
    block: nn.Module, x_TD: torch.Tensor, by_T1h: torch.Tensor, attend: Attend, replay_TK: torch.Tensor | None
) -> tuple[torch.Tensor, Routing | None]:
    """`block(x_TD, by_T1h, attend, replay_TK)`, a `model.transformer.Block`, and no tensor from inside of it kept.

    The gradient goes to `x_TD` and to the tensors that are the block's parameters now, be they those of a surrounding
    `torch.func.functional_call`. What its kernels have packed must stay as it is until the backward is done.
    """
    names, weights = zip(*block.named_parameters(), strict=True)
    run = _Run(block, names, by_T1h, attend)
    x_TD, *routing = _Recomputed.apply(run, replay_TK, x_TD, *weights)  # pyright: ignore[reportGeneralTypeIssues]
    return x_TD, Routing(*routing) if routing else None


@dataclass(frozen=True, slots=True, eq=False)
class _Run:
    """A block and what it reads besides tensors that take gradients."""

    block: nn.Module
    names: Sequence[str]
    by_T1h: torch.Tensor
    attend: Attend

    def __call__(
        self, x_TD: torch.Tensor, weights: Sequence[torch.Tensor], replay_TK: torch.Tensor | None
    ) -> tuple[torch.Tensor, ...]:
        """The residual stream, then the fields of `Routing` if the block has experts."""
        parameters = dict(zip(self.names, weights, strict=True))
        x_TD, routing = torch.func.functional_call(self.block, parameters, (x_TD, self.by_T1h, self.attend, replay_TK))
        return (x_TD,) if routing is None else (x_TD, *routing)


class _Recomputed(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, run: _Run, replay_TK: torch.Tensor | None, x_TD: torch.Tensor, *weights: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        out_TD, *routing = run(x_TD, weights, replay_TK)
        chosen_TK = None
        if routing:
            chosen_TK = Routing(*routing).chosen_TK
            ctx.mark_non_differentiable(chosen_TK)
        ctx.save_for_backward(chosen_TK, x_TD, *weights)
        ctx.run = run
        ctx.set_materialize_grads(False)
        return out_TD, *routing

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        chosen_TK, *inputs = ctx.saved_tensors
        wanted = ctx.needs_input_grad[2:]
        leaves = [x.detach().requires_grad_(needed) for x, needed in zip(inputs, wanted, strict=True)]
        with torch.enable_grad():
            outs = ctx.run(leaves[0], leaves[1:], chosen_TK)
        given = [(out, grad) for out, grad in zip(outs, grads, strict=True) if grad is not None]
        found = iter(
            torch.autograd.grad(
                [out for out, _ in given],
                [leaf for leaf in leaves if leaf.requires_grad],
                [grad for _, grad in given],
                allow_unused=True,
            )
        )
        return None, None, *(next(found) if needed else None for needed in wanted)

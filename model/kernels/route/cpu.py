"""Routing on a CPU: `reference.route`, with a token's choice and bits independent of the other tokens and the threads.

Shapes: T packed tokens, E experts, K experts a token.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from model.kernels.cpu.build import KernelError
from model.kernels.cpu.isa import Isa, load
from model.kernels.route import reference

_SOURCE = Path(__file__).with_name("cpu.cpp")
MAX_EXPERTS, MAX_CHOICES = 1024, 64


class Route:
    """The kernel of one instruction set. The gradient of the weights is that of `reference.weigh`."""

    def __init__(self, isa: Isa) -> None:
        self._run = load(_SOURCE, isa).route
        self._run.argtypes = [ctypes.c_void_p] * 4 + [ctypes.c_int64] * 5 + [ctypes.c_bool] * 3 + [ctypes.c_float]
        self._run.restype = None

    def __call__(
        self,
        logits_TE: torch.Tensor,
        *,
        top_k: int,
        scores: str,
        normalize: bool,
        scaling: float,
        selection_bias: torch.Tensor | None = None,
        num_groups: int = 1,
        top_groups: int = 1,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As `reference.route`: choices, int64 [T, K], best first, and weights, fp32 [T, K].

        Raises:
            KernelError: More experts or choices than the kernel holds, or numbers that do not belong together.
        """
        num_experts = logits_TE.shape[-1]
        groups_fit = num_groups == 1 or (num_experts % num_groups == 0 and num_experts >= 2 * num_groups)
        if not groups_fit or not 1 <= top_groups <= num_groups:
            raise KernelError(
                f"route: groups need the same number of experts, 2 or more, got {top_groups} of {num_groups} groups of "
                f"{num_experts} experts; choose a divisor"
            )
        if selection_bias is not None and selection_bias.shape != (num_experts,):
            raise KernelError(
                f"route: need one selection bias an expert, got {tuple(selection_bias.shape)} for {num_experts} "
                "experts; pass the layer's own"
            )

        def run(logits_TE: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            chosen_TK = torch.empty(len(logits_TE), top_k, dtype=torch.int64)
            bias_E = None if selection_bias is None else selection_bias.detach().float().contiguous()
            return chosen_TK, self._route(
                logits_TE, chosen_TK, bias_E, num_groups, top_groups, scores, normalize, False, scaling
            )

        return _differentiable(run, logits_TE, top_k, scores, normalize, scaling)

    def weigh(
        self, logits_TE: torch.Tensor, chosen_TK: torch.Tensor, *, scores: str, normalize: bool, scaling: float
    ) -> torch.Tensor:
        """As `reference.weigh`: the weights of a recorded choice, with the bits that choosing it gives.

        Raises:
            KernelError: As a call, or an expert that does not exist.
        """
        num_experts = logits_TE.shape[-1]
        chosen_TK = chosen_TK.long().contiguous()
        if chosen_TK.numel() and not 0 <= int(chosen_TK.min()) <= int(chosen_TK.max()) < num_experts:
            raise KernelError(
                f"route: choices must be in [0, {num_experts}), got {int(chosen_TK.min())} to {int(chosen_TK.max())}; "
                "replay a choice of this model"
            )

        def run(logits_TE: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return chosen_TK, self._route(logits_TE, chosen_TK, None, 1, 1, scores, normalize, True, scaling)

        return _differentiable(run, logits_TE, chosen_TK.shape[-1], scores, normalize, scaling)[1]

    def _route(
        self,
        logits_TE: torch.Tensor,
        chosen_TK: torch.Tensor,
        bias_E: torch.Tensor | None,
        num_groups: int,
        top_groups: int,
        scores: str,
        normalize: bool,
        replay: bool,
        scaling: float,
    ) -> torch.Tensor:
        """The weights; fills `chosen_TK` unless it is replayed."""
        weights_TK = torch.empty(chosen_TK.shape)
        self._run(
            logits_TE.data_ptr(), None if bias_E is None else bias_E.data_ptr(), chosen_TK.data_ptr(),
            weights_TK.data_ptr(), *logits_TE.shape, chosen_TK.shape[-1], num_groups, top_groups, scores == "sigmoid",
            normalize, replay, scaling,
        )  # fmt: skip
        return weights_TK


_Run = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


def _differentiable(
    run: _Run, logits_TE: torch.Tensor, top_k: int, scores: str, normalize: bool, scaling: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """What `run` gives for contiguous fp32 logits."""
    if (
        logits_TE.ndim != 2
        or logits_TE.shape[1] > MAX_EXPERTS
        or not 1 <= top_k <= min(logits_TE.shape[1], MAX_CHOICES)
    ):
        raise KernelError(
            f"route: need logits [T, E] of at most {MAX_EXPERTS} experts and 1 to {MAX_CHOICES} choices of them, "
            f"got {tuple(logits_TE.shape)} and {top_k}; use kernels=eager"
        )
    if scores not in ("softmax", "sigmoid"):
        raise KernelError(f"route: scores must be softmax or sigmoid, got {scores!r}; choose one")
    logits_TE = logits_TE.float().contiguous()
    if torch.is_grad_enabled() and logits_TE.requires_grad:
        weighing = {"scores": scores, "normalize": normalize, "scaling": scaling}
        return _Weights.apply(logits_TE, run, weighing)  # pyright: ignore[reportReturnType]
    return run(logits_TE)


class _Weights(torch.autograd.Function):
    """The kernel forward; backward in torch, through the definition of the weights."""

    @staticmethod
    def forward(
        ctx: Any, logits_TE: torch.Tensor, run: _Run, weighing: dict[str, Any]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        chosen_TK, weights_TK = run(logits_TE)
        chosen_TK = chosen_TK.clone()  # an output of its own, whether made or replayed
        ctx.save_for_backward(logits_TE, chosen_TK)
        ctx.mark_non_differentiable(chosen_TK)
        ctx.weighing = weighing
        return chosen_TK, weights_TK

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        logits_TE, chosen_TK = ctx.saved_tensors
        with torch.enable_grad():
            leaf_TE = logits_TE.detach().requires_grad_()
            weights_TK = reference.weigh(leaf_TE, chosen_TK, **ctx.weighing)
        (grad_TE,) = torch.autograd.grad(weights_TK, leaf_TE, grads[1])
        return grad_TE, None, None

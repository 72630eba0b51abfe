"""Choose a version of an operation once, by name, and say so in the log. Nothing falls back silently.

Each operation has one folder; `reference` in it is the definition. `auto` is the fastest version that this build has
for the machine, and the log names what it became.
"""

from __future__ import annotations

from typing import Protocol

import torch

from model.kernels.cpu.build import KernelError
from model.kernels.grouped_experts import eager, reference


class ExpertsForward(Protocol):
    """The grouped expert MLP; `grouped_experts/reference.py` defines it."""

    def __call__(
        self,
        x_TD: torch.Tensor,
        gate_up_E2FD: torch.Tensor,
        down_EDF: torch.Tensor,
        chosen_TK: torch.Tensor,
        weights_TK: torch.Tensor,
        *,
        gate_up_bias_E2F: torch.Tensor | None = None,
        down_bias_ED: torch.Tensor | None = None,
        clamp: reference.Clamp | None = None,
    ) -> torch.Tensor:
        """fp32 [T, D]."""
        ...


GROUPED_EXPERTS: dict[str, ExpertsForward] = {
    "reference": reference.experts_forward,
    "eager": eager.experts_forward,
}


def grouped_experts(name: str) -> ExpertsForward:
    """The expert MLP in plain torch called `name`.

    Raises:
        KernelError: There is none of that name.
    """
    if name not in GROUPED_EXPERTS:
        known = ", ".join(GROUPED_EXPERTS)
        raise KernelError(f"grouped_experts: there is no version of this name, got {name!r}; choose one of {known}")
    return GROUPED_EXPERTS[name]

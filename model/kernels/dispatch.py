"""Choose what computes, once, by name, and say so in the log. Nothing falls back silently.

Each operation has one folder; `reference` in it is the definition. The kernels of one instruction set are
batch-invariant: a row's bits depend on that row alone, so whoever runs the same set gets the same bits. Not so torch's.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Protocol

import torch

from model.config import KernelChoice
from model.kernels.attention import eager as eager_attention
from model.kernels.attention.cpu import PagedAttention
from model.kernels.attention.reference import Attention
from model.kernels.cpu.build import KernelError
from model.kernels.cpu.isa import Isa, available_isas, build_kernels, machine_isa
from model.kernels.gated_unit.cpu import GatedUnit
from model.kernels.grouped_experts import eager, reference
from model.kernels.grouped_experts.cpu import GroupedExperts
from model.kernels.linear.cpu import Linear
from model.kernels.logprob import eager as eager_logprobs
from model.kernels.logprob.cpu import Logprobs
from model.kernels.quantize.cpu import Quantize
from model.kernels.rms_norm.cpu import RmsNorm
from model.kernels.rotary.cpu import Rotary
from model.kernels.route.cpu import Route
from model.kernels.sample import reference as reference_sample
from model.kernels.sample.cpu import Sample
from model.kernels.sample.reference import Sampled
from model.mxfp4 import dequantize, quantize

log = logging.getLogger(__name__)


class ExpertsForward(Protocol):
    """The grouped expert MLP on plain tensors; `grouped_experts/reference.py` defines it."""

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


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LayerKernels:
    """What the layers of a model call on packed weights (`model/binding.py`)."""

    linear: Linear
    experts: GroupedExperts
    rms_norm: RmsNorm
    rotary: Rotary
    gated_unit: GatedUnit
    route: Route


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Kernels:
    """Every operation of one backend; `layers` None: the layers' own torch arithmetic."""

    name: KernelChoice
    layers: LayerKernels | None
    attention: Attention
    logprobs: Callable[..., torch.Tensor]
    """(logits_RV, ids_R, temperature) to fp32 [R], differentiable."""
    logprobs_with_entropies: Callable[..., tuple[torch.Tensor, torch.Tensor]]
    sample: Callable[..., Sampled]
    quantize: Callable[..., tuple[torch.Tensor, torch.Tensor]]
    dequantize: Callable[..., torch.Tensor]

    @property
    def batch_invariant(self) -> bool:
        """Whether a row's bits depend on that row alone."""
        return self.layers is not None


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


@cache
def resolve_kernels(choice: KernelChoice) -> Kernels:
    """The kernels of this process; each choice is resolved and logged once.

    Raises:
        KernelError: An instruction set was asked for by name that cannot be used here.
    """
    if choice is KernelChoice.torch:
        log.info("kernels: torch (requested by name); results depend on the batch")
        return _torch()
    if choice is not KernelChoice.auto:
        log.info("kernels: %s (requested by name)", choice)
        return _cpu(Isa(choice.value))
    try:
        isa = machine_isa()
        kernels = _cpu(isa)
    except KernelError as error:
        log.warning("kernels: torch, which is slower and depends on the batch (auto: %s)", error)
        return _torch()
    log.info("kernels: %s (auto: the best that this machine has)", isa)
    return kernels


def _cpu(isa: Isa) -> Kernels:
    if isa in available_isas():
        build_kernels(isa)
    logprobs = Logprobs(isa)
    quantizer = Quantize(isa)
    return Kernels(
        name=KernelChoice(isa.value),
        layers=LayerKernels(
            linear=Linear(isa),
            experts=GroupedExperts(isa),
            rms_norm=RmsNorm(isa),
            rotary=Rotary(isa),
            gated_unit=GatedUnit(isa),
            route=Route(isa),
        ),
        attention=PagedAttention(isa),
        logprobs=logprobs,
        logprobs_with_entropies=logprobs.with_entropies,
        sample=Sample(isa),
        quantize=quantizer,
        dequantize=quantizer.dequantize,
    )


def _torch() -> Kernels:
    return Kernels(
        name=KernelChoice.torch,
        layers=None,
        attention=eager_attention.EagerAttention(),
        logprobs=eager_logprobs.logprobs,
        logprobs_with_entropies=eager_logprobs.with_entropies,
        sample=reference_sample.sample,
        quantize=quantize,
        dequantize=dequantize,
    )

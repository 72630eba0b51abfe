"""A checkpoint in memory, whoever wrote it, and its two readings: fp32 masters and published bytes.

Invariant: what is already in the published format passes through byte for byte; everything else keeps its stored bits
until a reading rounds it, and `rounded` says what publishing would round.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

import torch

from model.config import ModelConfig
from model.snapshot import PackedTensor, publish_tensor, view

Weight = torch.Tensor | PackedTensor
"""A parameter: the published bytes, or values in the dtype they were stored in."""


class CheckpointError(ValueError):
    """A checkpoint folder that is incomplete, damaged or of another model."""


class Form(StrEnum):
    """What the stored tensors are: our fp32 masters, our published bytes, or what another program stored."""

    MASTER = "master"
    PUBLISHED = "published"
    FOREIGN = "foreign"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LoadedModel:
    """A checkpoint in memory.

    `weights` are in the parameters' order: fp32 for masters, packed for published ones, either for a foreign
    checkpoint, whose `notes` are what a user should know of how it was read.
    """

    config: ModelConfig
    form: Form
    weights: Mapping[str, Weight]
    metadata: Mapping[str, str]
    notes: tuple[str, ...] = ()

    def masters(self) -> dict[str, torch.Tensor]:
        """fp32 tensors; published bytes are decoded, so that publishing them again gives the same values."""
        return {name: master_of(weight) for name, weight in self.weights.items()}

    def packed(self) -> dict[str, PackedTensor]:
        """Published bytes; whatever is not in that format is rounded by `publish_tensor`."""
        return {name: packed_of(name, weight) for name, weight in self.weights.items()}

    def rounded(self) -> dict[str, int]:
        """For each parameter that publishing does not keep exactly, how many of its values change."""
        counts = {
            name: int((view(packed_of(name, weight)) != weight.float()).sum())
            for name, weight in self.weights.items()
            if not isinstance(weight, PackedTensor)
        }
        return {name: count for name, count in counts.items() if count}


def master_of(weight: Weight) -> torch.Tensor:
    """The fp32 values."""
    return view(weight) if isinstance(weight, PackedTensor) else weight.float()


def packed_of(name: str, weight: Weight) -> PackedTensor:
    """The published bytes."""
    return weight if isinstance(weight, PackedTensor) else publish_tensor(name, weight.float())

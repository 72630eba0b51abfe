"""The reference: the policy that the run started from, frozen, as it was published at version 0.

It is kept as the bytes of that snapshot (4.25 bits an expert parameter), read by the same forward as the policy, so at
version 0 the KL between the two is exactly 0. Every checkpoint holds a copy: the start folder may be a cache entry or a
remote one, and a run that resumes from a checkpoint must not take the checkpoint's policy for its start.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch

from model.checkpoint import load_model, save_model
from model.config import ModelConfig
from model.kernels.dispatch import Kernels
from model.loaded import Form
from model.parallel.groups import Ranks
from model.parallel.placement import ExpertPlacement
from model.snapshot import PackedTensor
from rl.batch import Batch
from rl.learner.policy import PolicyOutput, PublishedPolicy

REFERENCE_FOLDER = "reference"


class MissingReferenceError(ValueError):
    """A checkpoint without the reference that the run needs, or with another model's."""


class Reference:
    """A policy whose weights never change: `packed` is this rank's part of them. Its fp32 masters are given up.

    All ranks call its methods together.
    """

    def __init__(self, config: ModelConfig, kernels: Kernels, ranks: Ranks, packed: Mapping[str, PackedTensor]):
        self._config = config
        self._policy = PublishedPolicy(config, kernels, ranks)
        for master in self._policy.parameters():
            master.requires_grad_(False)
            master.data = torch.empty(0)
        self._policy.read(packed)

    def place(self, placement: ExpertPlacement) -> None:
        """See `PublishedPolicy.place`."""
        self._policy.place(placement)

    @torch.no_grad()
    def __call__(self, batch: Batch) -> PolicyOutput:
        """What the reference makes of a batch, without gradient."""
        return self._policy(batch)

    def save(self, folder: Path) -> None:
        """Write it into a checkpoint's folder, as a published model of its own; rank 0 writes the whole of it."""
        whole = self._policy.whole()
        if whole is not None:
            inner = folder / REFERENCE_FOLDER
            inner.mkdir()
            save_model(inner, self._config, whole, {})

    def load(self, folder: Path) -> None:
        """Read what `save` wrote. Raises MissingReferenceError when it is not there, or is not of this model."""
        inner = folder / REFERENCE_FOLDER
        if not inner.is_dir():
            raise MissingReferenceError(
                f"algorithm.kl_coef: needs the reference that the checkpoint holds, got {folder.name} without one; "
                "resume with the algorithm.kl_coef it was saved with"
            )
        loaded = load_model(inner)
        packed = {name: weight for name, weight in loaded.weights.items() if isinstance(weight, PackedTensor)}
        if loaded.config != self._config or loaded.form is not Form.PUBLISHED:
            raise MissingReferenceError(
                f"checkpoint {folder.name}: its reference must be of the model of this run, got {loaded.config}; "
                "use the model settings it was saved with"
            )
        self._policy.read(self._policy.own_packed(packed))

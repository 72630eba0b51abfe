"""The published bytes in a checkpoint, where the masters alone do not tell them (hysteresis, random rounding).

They are a model folder of their own, which exports and engines read in place of the masters
(`model.checkpoint.policy_folder`).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from model.checkpoint import PUBLISHED_FOLDER, load_model, save_model
from model.config import ModelConfig
from model.loaded import Form
from model.snapshot import PackedTensor
from rl.learner.policy import PublishedPolicy


class MissingPublishedError(ValueError):
    """A checkpoint without the published bytes that the run needs, or with another model's."""


def save_published(policy: PublishedPolicy, config: ModelConfig, folder: Path) -> None:
    """Write the bytes that `policy` reads into a checkpoint's folder; all ranks call it, rank 0 writes."""
    whole = policy.whole()
    if whole is not None:
        inner = folder / PUBLISHED_FOLDER
        inner.mkdir()
        save_model(inner, config, whole, {})


def load_published(policy: PublishedPolicy, config: ModelConfig, folder: Path) -> dict[str, PackedTensor]:
    """This rank's part of what `save_published` wrote. Raises MissingPublishedError when it is not there."""
    inner = folder / PUBLISHED_FOLDER
    if not inner.is_dir():
        raise MissingPublishedError(
            f"learner.quantization: needs the published bytes that the checkpoint holds, got {folder.name} without "
            "them; resume with the learner.quantization it was saved with"
        )
    loaded = load_model(inner)
    if loaded.config != config or loaded.form is not Form.PUBLISHED:
        raise MissingPublishedError(
            f"checkpoint {folder.name}: {PUBLISHED_FOLDER} must hold published bytes of the model of this run, "
            f"got those of form {loaded.form} of {loaded.config}; use the model settings it was saved with"
        )
    return policy.own_packed(loaded.packed())


def differing(saved: Mapping[str, PackedTensor], now: Mapping[str, PackedTensor]) -> list[str]:
    """Names of the tensors whose bytes differ."""
    return [
        name
        for name, packed in saved.items()
        if not np.array_equal(packed.payload, now[name].payload) or not np.array_equal(packed.scales, now[name].scales)
    ]

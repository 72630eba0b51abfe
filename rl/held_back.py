"""Published versions that are held back, so that the workers sample with older weights than the learner trains.

An experiment's means to samples of a known staleness (`rollout.hold_back_versions`): with N, the workers run what the
learner had N updates ago, and in the first N rounds the start's. What is held back are the published bytes, in this
process and in every checkpoint, so that a resumed run sends the same ones.
"""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from pathlib import Path

from model.checkpoint import load_model, save_model
from model.config import ModelConfig
from model.snapshot import PackedTensor, WeightSnapshot, make_snapshot
from rl.checkpoint import CheckpointError
from rollout.types import WeightVersion

HELD_BACK_FOLDER = "held_back"


class HeldBack:
    """The last `num_versions` + 1 published versions of a model, oldest first."""

    def __init__(self, model: ModelConfig, num_versions: int):
        self._model = model
        self._num_versions = num_versions
        self._kept: deque[WeightSnapshot] = deque(maxlen=num_versions + 1)

    def pass_through(self, snapshot: WeightSnapshot) -> WeightSnapshot:
        """The version that is due to the workers now that the learner has `snapshot`."""
        if not self._num_versions:
            return snapshot
        self._kept.append(_copied(snapshot))
        return self._kept[0]

    @property
    def due(self) -> WeightSnapshot:
        """The version that the workers run. There must be one that was held back."""
        return self._kept[0]

    @property
    def newest(self) -> WeightSnapshot:
        """The learner's version. There must be one that was held back."""
        return self._kept[-1]

    def save(self, folder: Path) -> None:
        """Write into a checkpoint's folder what lies before the newest version, which the learner itself restores."""
        for snapshot in list(self._kept)[:-1]:
            inner = folder / HELD_BACK_FOLDER / str(snapshot.version)
            inner.mkdir(parents=True)
            save_model(inner, self._model, snapshot.tensors, {})

    def load(self, folder: Path, version: WeightVersion) -> None:
        """Hold again what `save` wrote when the learner had `version`. Raises CheckpointError where one is missing."""
        self._kept.clear()
        for number in range(max(0, version - self._num_versions), version):
            inner = folder / HELD_BACK_FOLDER / str(number)
            if not inner.is_dir():
                raise CheckpointError(
                    f"checkpoint {folder.name}: rollout.hold_back_versions={self._num_versions} needs version "
                    f"{number}, got none; resume with the value it was saved with"
                )
            weights = load_model(inner).weights
            packed = {name: weight for name, weight in weights.items() if isinstance(weight, PackedTensor)}
            self._kept.append(make_snapshot(WeightVersion(number), packed))


def _copied(snapshot: WeightSnapshot) -> WeightSnapshot:
    """The same bytes in memory of their own: as they arrive, they are views that fill Ray's object store."""
    tensors = {
        name: replace(packed, payload=packed.payload.copy(), scales=packed.scales.copy())
        for name, packed in snapshot.tensors.items()
    }
    return replace(snapshot, tensors=tensors)

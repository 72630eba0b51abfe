"""The Ray shell around a learner rank: it moves arguments and owns no logic."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import ray

from model.snapshot import CodeChanges, WeightSnapshot
from rl.algorithms.base import Loss
from rl.batch import TrainSample
from rl.learner.deepspeed import Rendezvous
from rl.learner.learner import Learner, LearnerSpec
from rl.learner.update_report import UpdateReport
from rl.parity import ParityReport
from rollout.types import WeightVersion


@ray.remote(max_restarts=0)
class LearnerActor:
    """One rank in its own process. Call `meeting_point` on rank 0, then `start` on every rank with its answer."""

    def __init__(self, spec: LearnerSpec):
        self._spec = spec

    def meeting_point(self) -> tuple[str, int]:
        """This process's address and a free port."""
        with socket.socket() as probe:
            probe.bind(("", 0))
            return ray.util.get_node_ip_address(), probe.getsockname()[1]

    def pid(self) -> int:
        """Of this process."""
        return os.getpid()

    def start(self, rendezvous: Rendezvous) -> None:
        """Build the learner; all ranks at the same time."""
        self._learner = Learner(self._spec, rendezvous)

    def parity(self, samples: Sequence[TrainSample]) -> ParityReport:
        """See `Learner.parity`."""
        return self._learner.parity(samples)

    def update(self, minibatches: Sequence[Sequence[TrainSample]], algorithm: Loss, lr: float) -> UpdateReport | None:
        """See `Learner.update`."""
        return self._learner.update(minibatches, algorithm, lr)

    def fit(self, samples: Sequence[TrainSample], lr: float) -> float:
        """See `Learner.fit`."""
        return self._learner.fit(samples, lr)

    def snapshot(self, version: WeightVersion) -> tuple[WeightSnapshot, Mapping[str, CodeChanges]] | None:
        """See `Learner.snapshot`."""
        return self._learner.snapshot(version)

    def digests(self) -> dict[str, str] | None:
        """See `Learner.digests`."""
        return self._learner.digests()

    def view_differences(self, running: Mapping[str, np.ndarray]) -> dict[str, float]:
        """See `Learner.view_differences`."""
        return self._learner.view_differences(running)

    def save(self, folder: Path) -> None:
        """See `Learner.save`."""
        self._learner.save(folder)

    def load(self, folder: Path) -> None:
        """See `Learner.load`."""
        self._learner.load(folder)

    def close(self) -> None:
        """See `Learner.close`."""
        self._learner.close()

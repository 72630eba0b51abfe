"""The Ray shell around a rollout worker: it moves arguments and owns no logic."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

import numpy as np
import ray

from model.snapshot import WeightSnapshot
from rollout.episode import EpisodeJob
from rollout.types import Answer, Trajectory
from rollout.worker import RolloutWorker, WorkerSpec


@ray.remote(max_restarts=0)
class RolloutActor:
    """One worker in its own process."""

    def __init__(self, spec: WorkerSpec):
        self._worker = RolloutWorker(spec)

    def pid(self) -> int:
        """The process that runs the worker."""
        return os.getpid()

    def receive(self, snapshot: WeightSnapshot, may_go_back: bool) -> Mapping[str, str]:
        """See `RolloutWorker.receive`."""
        return self._worker.receive(snapshot, may_go_back=may_go_back)

    def running_views(self) -> Mapping[str, np.ndarray]:
        """See `RolloutWorker.running_views`."""
        return self._worker.running_views()

    def run(self, jobs: Sequence[EpisodeJob], fresh_grading: bool) -> list[Trajectory]:
        """See `RolloutWorker.run`."""
        return self._worker.run(jobs, fresh_grading=fresh_grading)

    def demonstrate(self, jobs: Sequence[EpisodeJob], answers: Sequence[tuple[Answer, ...]]) -> list[Trajectory]:
        """See `RolloutWorker.demonstrate`."""
        return self._worker.demonstrate(jobs, answers)

    def close(self) -> None:
        """See `RolloutWorker.close`."""
        self._worker.close()

"""The learner's ranks as one object: starts the actors, calls all of them, waits with a deadline and a name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import ray
from ray.exceptions import GetTimeoutError, RayActorError

from model.snapshot import WeightSnapshot
from rl.algorithms.base import Loss
from rl.batch import TrainSample
from rl.learner.actor import LearnerActor
from rl.learner.deepspeed import Rendezvous
from rl.learner.learner import LearnerSpec, UpdateReport
from rl.parity import ParityReport
from rollout.types import WeightVersion


class LearnerGroupError(RuntimeError):
    """A rank died or did not answer in time, or there are more ranks than can work together."""


class LearnerGroup:
    """`num_ranks` learner actors. Use as a context manager: leaving it ends their processes."""

    def __init__(self, spec: LearnerSpec, *, num_ranks: int, deadline_s: float):
        if num_ranks != 1:
            raise LearnerGroupError(
                f"learner.num_ranks: only rank 0 is called and more would wait for each other, "
                f"got {num_ranks}; set it to 1"
            )
        self._deadline_s = deadline_s
        actor_class: Any = LearnerActor  # Ray's decorator hides the class from the type checker
        self._actors: list[Any] = [actor_class.options(num_cpus=1).remote(spec) for _ in range(num_ranks)]
        address, port, self.pid = self._get("start", self._actors[0].meeting_point.remote())
        starting = [
            actor.start.remote(Rendezvous(rank=rank, world_size=num_ranks, address=address, port=port))
            for rank, actor in enumerate(self._actors)
        ]
        for reference in starting:
            self._get("build its engine", reference)

    def __enter__(self) -> LearnerGroup:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def parity(self, samples: Sequence[TrainSample]) -> ParityReport:
        """See `Learner.parity`."""
        return self._call("compute the parity gate", "parity", samples)

    def update(self, minibatches: Sequence[Sequence[TrainSample]], algorithm: Loss, lr: float) -> UpdateReport | None:
        """See `Learner.update`."""
        return self._call("update", "update", minibatches, algorithm, lr)

    def fit(self, samples: Sequence[TrainSample], lr: float) -> float:
        """See `Learner.fit`."""
        return self._call("fit", "fit", samples, lr)

    def snapshot(self, version: WeightVersion) -> tuple[WeightSnapshot, Mapping[str, tuple[int, int]]]:
        """See `Learner.snapshot`."""
        return self._call("requantize", "snapshot", version)

    def digests(self) -> dict[str, str]:
        """See `Learner.digests`."""
        return self._call("digest its weights", "digests")

    def view_differences(self, running: Mapping[str, np.ndarray]) -> dict[str, float]:
        """See `Learner.view_differences`."""
        return self._call("compare weights", "view_differences", running)

    def save(self, folder: Path) -> None:
        """See `Learner.save`."""
        self._call("save", "save", folder)

    def load(self, folder: Path) -> None:
        """See `Learner.load`."""
        self._call("load", "load", folder)

    def close(self) -> None:
        """End the ranks. Idempotent."""
        actors, self._actors = self._actors, []
        closing = [actor.close.remote() for actor in actors]
        if closing:
            ray.wait(closing, num_returns=len(closing), timeout=5.0)
        for actor in actors:
            ray.kill(actor)

    def _call(self, what: str, method: str, *arguments: Any) -> Any:
        """Call rank 0, which owns the whole model while `num_ranks` is 1."""
        return self._get(what, getattr(self._actors[0], method).remote(*arguments))

    def _get(self, what: str, reference: Any) -> Any:
        try:
            return ray.get(reference, timeout=self._deadline_s)
        except GetTimeoutError as error:
            raise LearnerGroupError(
                f"learner: rank 0 did not {what} in time, got nothing for {self._deadline_s:.0f} s; look at its stack "
                "with `py-spy dump`, or raise learner.call_deadline_s"
            ) from error
        except RayActorError as error:
            raise LearnerGroupError(
                f"learner: rank 0 died while it should {what}, got {str(error).splitlines()[0]}; run the same command "
                "again to resume from the last checkpoint"
            ) from error

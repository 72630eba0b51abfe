"""The learner's ranks as one object: starts the actors, calls all of them at once, waits with a deadline and a name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayTaskError
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from model.snapshot import CodeChanges, WeightSnapshot
from rl.algorithms.base import Loss
from rl.batch import TrainSample
from rl.learner.actor import LearnerActor
from rl.learner.allocator import keeping_memory
from rl.learner.deepspeed import Rendezvous
from rl.learner.learner import LearnerSpec
from rl.learner.update_report import UpdateReport
from rl.parity import ParityReport
from rollout.types import WeightVersion
from rollout.waiting import StillWaitingError, as_they_finish

_LAST_WORDS_S = 5.0
"""How long another rank may take to die of what made this one fail."""


class LearnerGroupError(RuntimeError):
    """A rank did not answer in time, or the cluster has no room for all."""


class RankDiedError(LearnerGroupError):
    """The process of a rank ended; the last checkpoint holds what is left of its work."""


class LearnerGroup:
    """`num_ranks` learner actors. Use as a context manager: leaving it ends their processes.

    Every call goes to all ranks, which work on it together; the answer is that of rank 0.
    """

    def __init__(self, spec: LearnerSpec, *, num_ranks: int, deadline_s: float):
        self._deadline_s = deadline_s
        self._actors: list[Any] = []
        self._bundles = placement_group([{"CPU": 1}] * num_ranks, strategy="PACK")
        if not self._bundles.wait(deadline_s):
            remove_placement_group(self._bundles)
            raise LearnerGroupError(
                f"learner.num_ranks: the cluster must have a free CPU for each, got {num_ranks} ranks and "
                f"{ray.available_resources().get('CPU', 0):.0f} free CPUs after {deadline_s:.0f} s; use fewer"
            )
        self.pids: list[int] = []
        try:
            self._start(spec, num_ranks)
        except BaseException:
            self.close()
            raise

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

    def snapshot(self, version: WeightVersion) -> tuple[WeightSnapshot, Mapping[str, CodeChanges]]:
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
            remove_placement_group(self._bundles)

    def _start(self, spec: LearnerSpec, num_ranks: int) -> None:
        actor_class: Any = LearnerActor  # Ray's decorator hides the class from the type checker
        environment = {"env_vars": keeping_memory()} if spec.keep_memory else {}
        for rank in range(num_ranks):
            place = PlacementGroupSchedulingStrategy(self._bundles, placement_group_bundle_index=rank)
            options = {"num_cpus": 1, "scheduling_strategy": place, "runtime_env": environment}
            self._actors.append(actor_class.options(**options).remote(spec))
        self.pids = self._call_all("start", "pid")
        address, port = self._collect("start", [self._actors[0].meeting_point.remote()])[0]
        meetings = [
            Rendezvous(rank=rank, world_size=num_ranks, address=address, port=port) for rank in range(num_ranks)
        ]
        starting = [actor.start.remote(meeting) for actor, meeting in zip(self._actors, meetings, strict=True)]
        self._collect("build its engine", starting)

    def _call(self, what: str, method: str, *arguments: Any) -> Any:
        return self._call_all(what, method, *arguments)[0]

    def _call_all(self, what: str, method: str, *arguments: Any) -> list[Any]:
        stored = [ray.put(argument) for argument in arguments]  # once for all ranks
        return self._collect(what, [getattr(actor, method).remote(*stored) for actor in self._actors])

    def _collect(self, what: str, references: Sequence[Any]) -> list[Any]:
        """Every rank's answer; the first failure of any of them ends the wait, for the others now wait for it."""
        answers: list[Any] = [None] * len(references)
        try:
            for rank, reference in as_they_finish(references, self._deadline_s):
                try:
                    answers[rank] = ray.get(reference)
                except RayActorError as error:
                    raise self._died(what, rank, error) from error
                except RayTaskError as error:
                    self._look_for_a_death(what, references, error)
                    raise
        except StillWaitingError as error:
            raise LearnerGroupError(
                f"learner: rank {', '.join(map(str, error.pending))} did not {what} in time, got nothing for "
                f"{self._deadline_s:.0f} s; look at its stack with `py-spy dump`, or raise learner.call_deadline_s"
            ) from error
        return answers

    def _look_for_a_death(self, what: str, references: Sequence[Any], failure: RayTaskError) -> None:
        """A rank whose partner died fails in a collective, which says nothing of the cause: raise that instead."""
        ray.wait(list(references), num_returns=len(references), timeout=_LAST_WORDS_S)
        for rank, reference in enumerate(references):
            try:
                ray.get(reference, timeout=0)
            except RayActorError as error:
                raise self._died(what, rank, error) from failure
            except (RayTaskError, GetTimeoutError):
                continue

    @staticmethod
    def _died(what: str, rank: int, error: RayActorError) -> RankDiedError:
        return RankDiedError(
            f"learner: rank {rank} died while it should {what}, got {str(error).splitlines()[0]}; look for its reason "
            "(out of memory?), and run the same command again to resume from the last checkpoint"
        )

"""The pool of rollout workers: splits the episodes of a round, collects the groups, forwards new weights.

The split is a function of the jobs alone (round robin), so a resumed run samples what an uninterrupted one does.
Every wait has a deadline and names the worker it waits for.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import ray
from ray.exceptions import RayActorError

from model.snapshot import WeightSnapshot
from rollout.actor import RolloutActor
from rollout.episode import EpisodeJob
from rollout.types import Answer, Task, TaskLimits, Trajectory, TrajectoryGroup
from rollout.waiting import StillWaitingError, as_they_finish
from rollout.worker import WorkerSpec


class PoolError(RuntimeError):
    """A worker died, stalled, or runs other weights than were published."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplePlan:
    """How a set of tasks is sampled. Every random number of the episodes follows from `seed_key`."""

    group_size: int
    temperature: float
    limits: TaskLimits
    max_context_tokens: int
    seed_key: tuple[int, ...]
    fresh_grading: bool = False


class RolloutPool:
    """Rollout workers as Ray actors. Use as a context manager: leaving it ends their sandboxes and processes."""

    def __init__(self, spec: WorkerSpec, *, num_workers: int, deadline_s: float):
        self._deadline_s = deadline_s
        actor_class: Any = RolloutActor  # Ray's decorator hides the class from the type checker
        self._actors: list[Any] = [actor_class.options(num_cpus=1).remote(spec) for _ in range(num_workers)]
        self._pids: list[int] = []
        self._digests: list[Mapping[str, str]] = []
        try:
            self._pids = self._call("start", "pid", [() for _ in self._actors])
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> RolloutPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def publish(self, snapshot: WeightSnapshot, *, may_go_back: bool = False) -> None:
        """Send `snapshot` to every worker and check that each now runs exactly these bytes.

        It is newer than what they run, unless it `may_go_back`.
        """
        reference = ray.put(snapshot)
        self._digests = self._call("receive weights", "receive", [(reference, may_go_back) for _ in self._actors])
        for index, digests in enumerate(self._digests):
            wrong = sorted(name for name, digest in snapshot.digests.items() if digests.get(name) != digest)
            if wrong or set(digests) != set(snapshot.digests):
                raise PoolError(
                    f"publish: worker {index} runs other weights than version {snapshot.version}, got a difference in "
                    f"{wrong[:3] or sorted(set(digests) ^ set(snapshot.digests))[:3]}; restart the run"
                )

    def digests(self) -> list[Mapping[str, str]]:
        """The digest of every tensor that each worker computed from the bytes it swapped in last."""
        return self._digests

    def running_views(self) -> list[Mapping[str, np.ndarray]]:
        """The weights that each worker decodes with, in fp32 (for a diagnosis: everything is copied)."""
        return self._call("send its weights", "running_views", [() for _ in self._actors])

    def rollout(self, tasks: Sequence[Task], plan: SamplePlan) -> list[TrajectoryGroup]:
        """`plan.group_size` trajectories of every task, grouped, in the order of the tasks."""
        jobs = [
            EpisodeJob(
                task=task,
                sample_index=sample,
                session=position * plan.group_size + sample,
                seed=_seed(*plan.seed_key, position, sample),
                temperature=plan.temperature,
                limits=plan.limits,
                max_context_tokens=plan.max_context_tokens,
            )
            for position, task in enumerate(tasks)
            for sample in range(plan.group_size)
        ]
        trajectories = self._spread(
            "run episodes", "run", [(jobs[k :: self.num_workers], plan.fresh_grading) for k in range(self.num_workers)]
        )
        return [
            TrajectoryGroup(
                task=task,
                trajectories=tuple(trajectories[position * plan.group_size : (position + 1) * plan.group_size]),
            )
            for position, task in enumerate(tasks)
        ]

    def demonstrate(
        self, scripts: Sequence[tuple[Task, tuple[Answer, ...]]], *, max_tokens_per_turn: int, max_context_tokens: int
    ) -> list[Trajectory]:
        """The episodes of a scripted solver, each ending with its script; in the order of `scripts`."""
        jobs = [
            EpisodeJob(
                task=task,
                sample_index=0,
                session=session,
                seed=0,
                temperature=0.0,
                limits=TaskLimits(max_turns=len(answers), max_tokens_per_turn=max_tokens_per_turn),
                max_context_tokens=max_context_tokens,
            )
            for session, (task, answers) in enumerate(scripts)
        ]
        answers = [script for _, script in scripts]
        n = self.num_workers
        return self._spread("demonstrate", "demonstrate", [(jobs[k::n], answers[k::n]) for k in range(n)])

    @property
    def num_workers(self) -> int:
        """Workers in the pool."""
        return len(self._actors)

    def close(self) -> None:
        """End every worker's sandboxes, then its process. Idempotent."""
        actors, self._actors = self._actors, []
        closing = [actor.close.remote() for actor in actors]
        ray.wait(closing, num_returns=len(closing), timeout=5.0) if closing else None
        for actor in actors:
            ray.kill(actor)

    def _spread(self, what: str, method: str, arguments: Sequence[tuple[Any, ...]]) -> list[Trajectory]:
        """Undo the round robin: item i came from worker i % num_workers."""
        parts = self._call(what, method, arguments)
        merged: list[Trajectory | None] = [None] * sum(len(part) for part in parts)
        for k, part in enumerate(parts):
            merged[k :: self.num_workers] = part
        return [trajectory for trajectory in merged if trajectory is not None]

    def _call(self, what: str, method: str, arguments: Sequence[tuple[Any, ...]]) -> list[Any]:
        """Call `method` on every worker and wait for all, in the order in which they finish.

        Raises PoolError as soon as a worker died, and when the deadline passed; it names the workers. What the method
        itself raised is raised here.
        """
        calls = [getattr(actor, method).remote(*args) for actor, args in zip(self._actors, arguments, strict=True)]
        results: list[Any] = [None] * len(calls)
        try:
            for index, reference in as_they_finish(calls, self._deadline_s):
                try:
                    results[index] = ray.get(reference)
                except RayActorError as error:
                    raise PoolError(
                        f"rollout: {self._who(index)} died while it should {what}, {_why(error)}"
                    ) from error
        except StillWaitingError as error:
            raise PoolError(
                f"rollout: {', '.join(map(self._who, error.pending))} did not {what} in time, got nothing for "
                f"{self._deadline_s:.0f} s; look at the stack with `py-spy dump`, or raise rollout.round_deadline_s"
            ) from error
        return results

    def _who(self, index: int) -> str:
        return f"worker {index}" + (f" (pid {self._pids[index]})" if self._pids else "")


def _why(error: RayActorError) -> str:
    """What is known of a death, and the remedy."""
    lines = str(error).strip().splitlines()
    if error.actor_init_failed:
        return f"got {lines[-1]}; remove this cause, the worker never ran"
    return f"got {lines[0]}; run the same command again to resume from the last checkpoint"


def _seed(*key: int) -> int:
    """A 63-bit seed that depends on `key` alone."""
    return int(np.random.SeedSequence(key).generate_state(1, np.uint64)[0] >> np.uint64(1))

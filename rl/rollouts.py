"""The episodes of a round: which tasks, under which random numbers.

Both follow from the round's number, the attempt, and the cursor, which every checkpoint holds: a resumed run takes the
tasks that an uninterrupted one does, however many a round has taken.
"""

from __future__ import annotations

from dataclasses import dataclass

from envs.base import TaskSource
from rl.checkpoint import CheckpointError, RunState
from rl.config import RunConfig
from rollout.pool import RolloutPool, SamplePlan
from rollout.types import TaskLimits, TrajectoryGroup

_TRAINING, _FURTHER = 1, 3
"""Keep the random numbers of a round, and of its further attempts, apart from every other use of the run's seed."""


@dataclass(slots=True, kw_only=True)
class Rollouts:
    """Collects groups of trajectories from the pool. `cursor` is the index of the next training task."""

    config: RunConfig
    tasks: TaskSource
    pool: RolloutPool
    cursor: int = 0

    def resume(self, state: RunState) -> None:
        """Go on where a checkpoint stopped. Raises CheckpointError when the run would skip tasks or repeat them."""
        due = (state.next_round - 1) * self.config.rollout.prompts_per_round
        most = due * (1 + self.config.algorithm.max_resample_rounds)
        if not due <= state.data_cursor <= most:
            wanted = f"task {due}" if due == most else f"a task of {due} to {most}"
            raise CheckpointError(
                f"checkpoint: round {state.next_round} must begin with {wanted}, got {state.data_cursor}; resume with "
                "the rollout.prompts_per_round it was saved with"
            )
        self.cursor = state.data_cursor

    def collect(self, number: int, *, attempt: int = 0, num_tasks: int | None = None) -> list[TrajectoryGroup]:
        """The groups of round `number` (counted from 1), or of a further attempt in it, with so many more tasks."""
        count = self.config.rollout.prompts_per_round if num_tasks is None else num_tasks
        tasks = [self.tasks.train(self.cursor + i) for i in range(count)]
        seed = self.config.run.seed
        plan = SamplePlan(
            group_size=self.config.rollout.group_size,
            temperature=self.config.rollout.temperature,
            limits=task_limits(self.config),
            max_context_tokens=self.config.env.max_context_tokens,
            seed_key=(seed, _FURTHER, number, attempt) if attempt else (seed, _TRAINING, number),
        )
        groups = self.pool.rollout(tasks, plan)
        self.cursor += count
        return groups


def task_limits(config: RunConfig) -> TaskLimits:
    """The limits of an episode."""
    return TaskLimits(max_turns=config.env.max_turns, max_tokens_per_turn=config.env.max_tokens_per_turn)

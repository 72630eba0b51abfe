"""The episodes of a round: which tasks, under which random numbers. Both follow from the round's number alone."""

from __future__ import annotations

from dataclasses import dataclass

from envs.base import TaskSource
from rl.checkpoint import CheckpointError, RunState
from rl.config import RunConfig
from rollout.pool import RolloutPool, SamplePlan
from rollout.types import TaskLimits, TrajectoryGroup

_TRAINING = 1
"""Keeps training's random numbers apart from every other use of the run's seed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollouts:
    """Collects groups of trajectories from the pool. `cursor` of a round is its first task's index."""

    config: RunConfig
    tasks: TaskSource
    pool: RolloutPool

    def cursor(self, number: int) -> int:
        """Index of the first training task of round `number` (counted from 1)."""
        return (number - 1) * self.config.rollout.prompts_per_round

    def check_cursor(self, state: RunState) -> None:
        """Raises CheckpointError when a resumed run would skip tasks or repeat them."""
        if state.data_cursor != self.cursor(state.next_round):
            raise CheckpointError(
                f"checkpoint: round {state.next_round} must begin with task {self.cursor(state.next_round)}, got "
                f"{state.data_cursor}; resume with the rollout.prompts_per_round it was saved with"
            )

    def collect(self, number: int) -> list[TrajectoryGroup]:
        """The groups of round `number`."""
        first = self.cursor(number)
        tasks = [self.tasks.train(first + i) for i in range(self.config.rollout.prompts_per_round)]
        plan = SamplePlan(
            group_size=self.config.rollout.group_size,
            temperature=self.config.rollout.temperature,
            limits=task_limits(self.config),
            max_context_tokens=self.config.env.max_context_tokens,
            seed_key=(self.config.run.seed, _TRAINING, number),
        )
        return self.pool.rollout(tasks, plan)


def task_limits(config: RunConfig) -> TaskLimits:
    """The limits of an episode."""
    return TaskLimits(max_turns=config.env.max_turns, max_tokens_per_turn=config.env.max_tokens_per_turn)

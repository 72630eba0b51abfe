"""Held-out evaluation: one function for before, during and after.

The same tasks, seeds, decoding and turns every time, graded in sandboxes that have run nothing before.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from envs.base import TaskSource
from rewards.base import Reward, score_group
from rl.config import EvalSection
from rl.report import EvalResult, HeldOut, episode_sample
from rl.statistics import PassRate
from rollout.pool import RolloutPool, SamplePlan
from rollout.types import ScoredTrajectory, Task, TaskLimits, Trajectory

_SEED_KEY = (20_261, 7)
"""Held-out sampling has its own random numbers, the same in every run."""


class Decoding(StrEnum):
    """How held-out answers are chosen."""

    GREEDY = "greedy"
    SAMPLED = "sampled"


def is_passed(trajectory: Trajectory) -> bool:
    """Whether every hidden check passed, by an answer that left the grader alone."""
    return trajectory.evidence.hidden.all_passed and not trajectory.evidence.tampered


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """Pass rates on `tasks`: after repair (any turn) and on the first turn. Masked episodes are in neither."""

    decoding: Decoding
    after_repair: PassRate
    first_turn: PassRate
    num_masked: int
    tasks: tuple[Task, ...]
    scored: tuple[ScoredTrajectory, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluator:
    """Evaluates the weights that the pool runs."""

    pool: RolloutPool
    reward: Reward
    tasks: TaskSource
    limits: TaskLimits
    max_context_tokens: int
    settings: EvalSection

    def full(self) -> list[Evaluation]:
        """Greedy and sampled on all held-out tasks: before the first round and after the last."""
        tasks = self.tasks.held_out(self.settings.num_tasks)
        return [self._evaluate(tasks, decoding) for decoding in Decoding]

    def brief(self) -> list[Evaluation]:
        """Greedy on fewer tasks, during the run."""
        return [self._evaluate(self.tasks.held_out(self.settings.during_num_tasks), Decoding.GREEDY)]

    def held_out(self, evaluations: Sequence[Evaluation]) -> HeldOut:
        """The evaluations as they are kept for the report, with the first greedy episodes to read."""
        results = tuple(
            EvalResult(
                decoding=evaluation.decoding.value,
                passed=evaluation.after_repair,
                first_turn=evaluation.first_turn,
                num_tasks=len(evaluation.tasks),
                max_turns=self.limits.max_turns,
            )
            for evaluation in evaluations
        )
        shown = list(zip(evaluations[0].tasks, evaluations[0].scored, strict=True))
        episodes = tuple(episode_sample(*each) for each in shown[: self.settings.num_report_episodes])
        return HeldOut(results=results, episodes=episodes)

    def _evaluate(self, tasks: Sequence[Task], decoding: Decoding) -> Evaluation:
        """One episode a task."""
        plan = SamplePlan(
            group_size=1,
            temperature=0.0 if decoding is Decoding.GREEDY else 1.0,
            limits=self.limits,
            max_context_tokens=self.max_context_tokens,
            seed_key=_SEED_KEY,
            fresh_grading=True,
        )
        scored = [score_group(self.reward, group).scored[0] for group in self.pool.rollout(tasks, plan)]
        valid = [each.trajectory for each in scored if each.total is not None]
        passed = [trajectory for trajectory in valid if is_passed(trajectory)]
        return Evaluation(
            decoding=decoding,
            after_repair=PassRate(passed=len(passed), total=len(valid)),
            first_turn=PassRate(passed=sum(t.num_turns == 1 for t in passed), total=len(valid)),
            num_masked=len(scored) - len(valid),
            tasks=tuple(tasks),
            scored=tuple(scored),
        )

from typing import Any

import pytest

from rl.config import EvalSection
from rl.evaluate import Decoding, Evaluator, is_passed
from rl.statistics import PassRate
from rollout.pool import SamplePlan
from rollout.types import Split, Task, TaskLimits, Trajectory, TrajectoryGroup


class Tasks:
    def __init__(self, hand):
        self._hand = hand

    def held_out(self, count: int) -> tuple[Task, ...]:
        return tuple(self._hand.task(f"task-{i}", Split.HELD_OUT) for i in range(count))


class Pool:
    """Answers every task with the same kinds of episodes, in turn."""

    def __init__(self, hand):
        once, twice = hand.segment((1,), ((), (5,))), hand.segment((1,), ((), (5,)), ((9,), (6,)))
        self._kinds = [
            hand.trajectory(once, passed=4),
            hand.trajectory(twice, passed=4),
            hand.trajectory(once, passed=3),
            hand.trajectory(once, broken="box gone"),
            hand.trajectory(once, passed=4, tampered=True),
        ]
        self.calls: list[tuple[tuple[str, ...], SamplePlan]] = []

    def rollout(self, tasks: tuple[Task, ...], plan: SamplePlan) -> list[TrajectoryGroup]:
        self.calls.append((tuple(task.id for task in tasks), plan))
        return [TrajectoryGroup(task=task, trajectories=(self._kinds[i % 5],)) for i, task in enumerate(tasks)]


def reward(task: Task, trajectory: Trajectory, evidence: Any) -> float:
    return evidence.hidden.fraction


@pytest.fixture
def pool(hand) -> Pool:
    return Pool(hand)


@pytest.fixture
def evaluator(hand, pool: Pool) -> Evaluator:
    any_pool: Any = pool
    any_tasks: Any = Tasks(hand)
    return Evaluator(
        pool=any_pool,
        reward=reward,
        tasks=any_tasks,
        limits=TaskLimits(max_turns=2, max_tokens_per_turn=8),
        max_context_tokens=99,
        settings=EvalSection(num_tasks=10, during_num_tasks=5, num_report_episodes=2),
    )


def test_the_full_evaluation_by_hand(evaluator: Evaluator):
    greedy, sampled = evaluator.full()
    assert (greedy.decoding, sampled.decoding) == (Decoding.GREEDY, Decoding.SAMPLED)
    for each in (greedy, sampled):
        # Of each five: one passes at once, one after repair, one fails, one broke (in neither rate), one tampered.
        assert each.after_repair == PassRate(passed=4, total=8)
        assert each.first_turn == PassRate(passed=2, total=8)
        assert each.num_masked == 2
        assert len(each.tasks) == len(each.scored) == 10


def test_before_during_and_after_are_the_same_but_for_the_number_of_tasks(evaluator: Evaluator, pool: Pool):
    evaluator.full()
    evaluator.brief()
    evaluator.full()
    (all_tasks, greedy), (same_tasks, sampled), (fewer, during), *after = pool.calls
    assert same_tasks == all_tasks == tuple(f"task-{i}" for i in range(10))
    assert fewer == all_tasks[:5]
    assert after == [(all_tasks, greedy), (all_tasks, sampled)]
    assert during == greedy
    assert (greedy.temperature, sampled.temperature) == (0.0, 1.0)
    assert greedy.seed_key == sampled.seed_key
    for plan in (greedy, sampled):
        assert plan.group_size == 1
        assert plan.fresh_grading
        assert (plan.limits, plan.max_context_tokens) == (evaluator.limits, 99)


def test_the_report_keeps_results_of_all_and_the_first_greedy_episodes(evaluator: Evaluator):
    kept = evaluator.held_out(evaluator.full())
    assert [(r.decoding, r.passed, r.first_turn, r.num_tasks, r.max_turns) for r in kept.results] == [
        ("greedy", PassRate(passed=4, total=8), PassRate(passed=2, total=8), 10, 2),
        ("sampled", PassRate(passed=4, total=8), PassRate(passed=2, total=8), 10, 2),
    ]
    assert [(e.task_id, e.passed, len(e.turns)) for e in kept.episodes] == [("task-0", True, 1), ("task-1", True, 2)]


def test_an_answer_that_touched_the_grader_has_not_passed(hand):
    segment = hand.segment((1,), ((), (5,)))
    assert is_passed(hand.trajectory(segment, passed=4))
    assert not is_passed(hand.trajectory(segment, passed=3))
    assert not is_passed(hand.trajectory(segment, passed=4, tampered=True))
    assert not is_passed(hand.trajectory(segment, broken="box gone"))

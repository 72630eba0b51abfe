from typing import Any

import pytest

from rl.checkpoint import CheckpointError, RunState
from rl.config import RunConfig
from rl.rollouts import Rollouts
from rollout.pool import SamplePlan


class Tasks:
    def train(self, index: int) -> int:
        return index


class Pool:
    def __init__(self):
        self.calls: list[tuple[list[int], SamplePlan]] = []

    def rollout(self, tasks: list[int], plan: SamplePlan) -> list[int]:
        self.calls.append((tasks, plan))
        return tasks


def rollouts(pool: Pool, *, bound: int = 0) -> Rollouts:
    config = RunConfig()
    config.rollout.prompts_per_round, config.algorithm.max_resample_rounds, config.run.seed = 4, bound, 7
    parts: dict[str, Any] = {"tasks": Tasks(), "pool": pool}
    return Rollouts(config=config, **parts)


def state(next_round: int, cursor: int) -> RunState:
    return RunState(next_round=next_round, data_cursor=cursor, weight_version=0, seed=7, wandb_id="id")


def test_every_task_is_taken_once_in_order_and_every_attempt_has_its_own_random_numbers():
    pool = Pool()
    subject = rollouts(pool, bound=2)
    subject.collect(1)
    subject.collect(1, attempt=1, num_tasks=2)
    subject.collect(1, attempt=2, num_tasks=1)
    subject.collect(2)
    assert [tasks for tasks, _ in pool.calls] == [[0, 1, 2, 3], [4, 5], [6], [7, 8, 9, 10]]
    assert subject.cursor == 11
    keys = [plan.seed_key for _, plan in pool.calls]
    assert keys == [(7, 1, 1), (7, 3, 1, 1), (7, 3, 1, 2), (7, 1, 2)]


def test_a_round_that_was_not_finished_takes_no_task():
    pool = Pool()
    subject = rollouts(pool)

    def broken(tasks: object, plan: object) -> None:
        raise RuntimeError("worker died")

    pool.rollout = broken  # type: ignore[method-assign]
    with pytest.raises(RuntimeError):
        subject.collect(1)
    assert subject.cursor == 0


@pytest.mark.parametrize(("bound", "fine", "wrong"), [(0, [8], [0, 7, 9, 12]), (2, [8, 11, 24], [7, 25])])
def test_a_cursor_that_no_run_of_this_kind_can_have_is_refused(bound: int, fine: list[int], wrong: list[int]):
    for cursor in fine:
        subject = rollouts(Pool(), bound=bound)
        subject.resume(state(3, cursor))
        assert subject.cursor == cursor
    for cursor in wrong:
        with pytest.raises(CheckpointError, match=rf"^checkpoint: round 3 must begin with .*task .*, got {cursor}; "):
            rollouts(Pool(), bound=bound).resume(state(3, cursor))

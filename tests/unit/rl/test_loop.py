from collections import Counter
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rl.advantage import Weighing
from rl.algorithms.config import Aggregation
from rl.algorithms.grpo import Grpo
from rl.algorithms.surrogate import Clip
from rl.batch import TrainSample
from rl.checkpoint import Checkpoints, RunState
from rl.config import RunConfig
from rl.loop import Parts, learning_rate, minibatches, train
from rl.parity import ParityError, ParityReport
from rl.publish import Published
from rl.shaping import Shaping
from rollout.types import TrajectoryGroup, WeightVersion


def config(**algorithm: Any) -> RunConfig:
    built = RunConfig()
    built.run.rounds = 10
    for name, value in algorithm.items():
        setattr(built.algorithm, name, value)
    return built


def sample(number: int, *, trained: bool = True) -> TrainSample:
    return TrainSample(
        key=f"{number:04d}",
        ids_T=np.array([1, 2]),
        targets_R=np.array([1]),
        behavior_logprobs_R=np.zeros(1, np.float32),
        advantages_R=np.zeros(1, np.float32),
        routes_TLK=np.zeros((1, 1, 1), np.uint8),
        weight_version=0,
        trained=trained,
    )


def test_the_learning_rate_falls_linearly_to_its_floor():
    rates = [learning_rate(config(lr=2.0, lr_end_frac=0.25), number) for number in range(1, 11)]
    # 1 - (n - 1) / 10 of the peak, and never below a quarter.
    np.testing.assert_allclose(rates, [2.0, 1.8, 1.6, 1.4, 1.2, 1.0, 0.8, 0.6, 0.5, 0.5])


@pytest.mark.parametrize("count", [1, 2, 3, 7])
def test_minibatches_use_each_trained_sample_once(count: int):
    samples = [sample(i, trained=i % 3 != 0) for i in range(20)]
    parts = minibatches(config(num_minibatches=count), 4, samples)
    assert len(parts) == count
    used = Counter(each.key for part in parts for each in part)
    assert used == Counter(each.key for each in samples if each.trained)
    sizes = [len(part) for part in parts]
    assert max(sizes) - min(sizes) <= 1


def test_minibatches_follow_from_seed_and_round_alone():
    samples = [sample(i) for i in range(16)]

    def drawn(seed: int, number: int) -> list[list[str]]:
        settings = config(num_minibatches=2)
        settings.run.seed = seed
        return [[each.key for each in part] for part in minibatches(settings, number, samples)]

    assert drawn(0, 4) == drawn(0, 4)
    assert drawn(0, 4) != drawn(0, 5)
    assert drawn(0, 4) != drawn(1, 4)
    assert drawn(1, 23) != drawn(12, 3)  # seed and round are not run together
    assert [each.key for each in samples] == [f"{i:04d}" for i in range(16)]  # the round's list is left as it is


def test_no_trained_sample_gives_empty_minibatches():
    assert minibatches(config(num_minibatches=2), 1, [sample(0, trained=False)]) == [[], []]


class Stages:
    """Every part of a run as far as the loop uses it; notes what is called, in order."""

    def __init__(self, hand: Any, stop_after: int = 99, closed_in: int = 99):
        self.calls: list[str] = []
        self.version = WeightVersion(0)
        self.rows: list[tuple[int, Any]] = []
        self.states: list[RunState] = []
        self.round = self.cursor = 0
        self._hand, self._stop_after, self._closed_in = hand, stop_after, closed_in

    @contextmanager
    def stage(self, name: str):
        self.calls.append(name)
        yield

    def collect(self, number: int, *, attempt: int, num_tasks: int) -> list[TrajectoryGroup]:
        self.round = number
        self.cursor += num_tasks
        scored = self._hand.group(0.0, 1.0)
        return [TrajectoryGroup(task=scored.task, trajectories=tuple(each.trajectory for each in scored.scored))]

    def check_parity(self, samples: object) -> ParityReport:
        if self.round >= self._closed_in:
            raise ParityError("closed")
        return ParityReport(
            num_tokens=1,
            num_routed=1,
            mean_abs_nats=0,
            max_abs_nats=0,
            num_flipped=0,
            num_flipped_tokens=0,
            worst_layer=0,
            entropy=0,
        )

    def update(self, parts: list[list[TrainSample]], algorithm: object, lr: float) -> None:
        self.calls.append(f"lr {lr:.2e}")

    def publish(self, version: WeightVersion) -> Published:
        self.version = version
        return Published(version=version, num_bytes=1, bits_per_expert_param=4.25, codes_changed={})

    @contextmanager
    def newest(self):
        self.calls.append("newest")
        yield

    def brief(self) -> list[Any]:
        self.calls.append(f"brief after {self.round}")
        return []

    def full(self) -> list[Any]:
        self.calls.append(f"full after {self.round}")
        return ["the last"]

    def save(self, state: RunState | Path, write: object = None) -> None:
        if isinstance(state, RunState):
            self.states.append(state)

    def record(self, number: int, facts: Any, evaluations: list[Any]) -> None:
        self.rows.append((number, facts))

    def should_stop(self) -> bool:
        return self.round >= self._stop_after


def reward(task: Any, trajectory: Any, evidence: Any) -> float:
    return float(trajectory.sample_index)


def parts(stages: Stages, settings: RunConfig) -> Parts:
    one: Any = stages
    algorithm = Grpo(clip=Clip(0.2, 0.28), normalize=False)
    return Parts(
        config=settings, rollouts=one, reward=reward, algorithm=algorithm, shaping=Shaping(), loss=algorithm,
        weighing=Weighing(aggregation=Aggregation.token_mean, length_unit=1),
        learners=one, publisher=one, evaluator=one, checkpoints=one, recorder=one, companions={}, wandb_id="id",
        on_round=lambda number: stages.calls.append(f"done {number}"), should_stop=stages.should_stop,
    )  # fmt: skip


ROUND = ["rollout", "reward", "parity", "credit", "update", "publish", "evaluate", "checkpoint"]


def test_a_round_goes_through_its_stages_in_order(hand: Any):
    stages, settings = Stages(hand), config()
    settings.run.rounds = 1
    train(parts(stages, settings), 1)
    assert [call for call in stages.calls if call in ROUND] == ROUND
    ((number, facts),) = stages.rows
    assert (number, facts.learner_version, facts.published.version, stages.version) == (1, 0, 1, 1)


def test_rounds_go_on_from_the_first_and_checkpoints_hold_the_next(hand: Any):
    stages, settings = Stages(hand), config()
    settings.run.checkpoint_every = settings.run.eval_every = 4
    stages.version, stages.cursor = WeightVersion(2), 48
    assert train(parts(stages, settings), 3) == ["the last"]
    assert [number for number, _ in stages.rows] == list(range(3, 11))
    assert [state.next_round for state in stages.states] == [5, 9, 11]  # after 4, 8 and the last
    assert [state.data_cursor for state in stages.states] == [96, 192, 240]
    assert [state.weight_version for state in stages.states] == [4, 8, 10]
    assert [call for call in stages.calls if call.startswith("brief")] == ["brief after 4", "brief after 8"]
    assert [call for call in stages.calls if call.startswith("full")] == ["full after 10"]
    assert stages.calls.count("newest") == 3
    assert all(stages.calls[at - 1] == "newest" for at, call in enumerate(stages.calls) if " after " in call)
    assert [call for call in stages.calls if call.startswith("done")] == [f"done {n}" for n in range(3, 11)]


def test_asked_to_stop_it_finishes_and_saves_the_round(hand: Any):
    stages = Stages(hand, stop_after=2)
    train(parts(stages, config()), 1)
    assert [number for number, _ in stages.rows] == [1, 2]
    assert [state.next_round for state in stages.states] == [3]
    assert stages.calls[-1] == "done 2"


def test_a_closed_gate_ends_the_run_before_the_update(hand: Any):
    stages = Stages(hand, closed_in=2)
    with pytest.raises(ParityError, match="closed"):
        train(parts(stages, config()), 1)
    assert [number for number, _ in stages.rows] == [1]
    assert stages.version == 1
    assert sum(call.startswith("lr") for call in stages.calls) == 1


def test_a_checkpoint_is_a_model_folder_with_its_tokenizer_and_template(hand: Any, tmp_path: Path):
    class Learners:
        def save(self, folder: Path) -> None:
            assert folder.is_absolute()  # it is written by another process, with its own working directory
            (folder / "model.safetensors").write_text("weights")

    stages: Any = Stages(hand)
    stages.cursor = 120
    built = parts(stages, config())
    learners: Any = Learners()
    checkpoints = Checkpoints(tmp_path, keep=1)
    companions = {"tokenizer.json": b"{}", "chat_template.jinja": "ü".encode()}
    replace(built, learners=learners, checkpoints=checkpoints, companions=companions).save(5)
    latest = checkpoints.latest()
    assert latest is not None
    assert latest[1] == RunState(next_round=6, data_cursor=120, weight_version=0, seed=0, wandb_id="id")
    assert {name: (latest[0] / name).read_bytes() for name in companions} == companions
    assert (latest[0] / "model.safetensors").read_text() == "weights"


class SomeFlat(Stages):
    """Groups that differ or not, as `script` says; task n is called n."""

    def __init__(self, hand: Any, *script: bool):
        super().__init__(hand)
        self.script, self.asked = script, list[tuple[int, int, int]]()

    def collect(self, number: int, *, attempt: int, num_tasks: int) -> list[TrajectoryGroup]:
        self.round = number
        self.asked.append((number, attempt, num_tasks))
        numbers = range(self.cursor, self.cursor + num_tasks)
        self.cursor += num_tasks
        scored = [self._hand.group(0.0, 1.0 if self.script[n] else 0.0, name=str(n)) for n in numbers]
        groups = []
        for n, one in zip(numbers, scored, strict=True):
            episodes = tuple(
                replace(each.trajectory, sample_index=self.script[n] * i) for i, each in enumerate(one.scored)
            )
            groups.append(TrajectoryGroup(task=one.task, trajectories=episodes))
        return groups


@pytest.mark.parametrize(
    ("script", "bound", "asked", "taught"),
    [
        ([True, False, False, True, False, True], 3, [(1, 0, 3), (1, 1, 2), (1, 2, 1)], 3),
        ([True, False, False, True, False, True], 1, [(1, 0, 3), (1, 1, 2)], 2),  # then with what there is
        ([True, False, False], 0, [(1, 0, 3)], 1),
        ([True, True, True], 3, [(1, 0, 3)], 3),
        ([False] * 12, 3, [(1, 0, 3), (1, 1, 3), (1, 2, 3), (1, 3, 3)], 0),  # a policy that solves nothing, or all
    ],
)
def test_groups_without_variance_are_followed_by_further_tasks_within_the_bound(
    hand: Any, script: list[bool], bound: int, asked: list[tuple[int, int, int]], taught: int
):
    stages, settings = SomeFlat(hand, *script), config(max_resample_rounds=bound)
    settings.run.rounds, settings.rollout.prompts_per_round = 1, 3
    train(parts(stages, settings), 1)
    assert stages.asked == asked
    ((_, facts),) = stages.rows
    num_groups = sum(num_tasks for _, _, num_tasks in asked)
    assert (len(facts.groups), facts.num_resampled) == (num_groups, num_groups - 3)
    assert [group.task.id for group in facts.groups] == [str(n) for n in range(num_groups)]
    assert facts.credit.no_variance_frac == pytest.approx(1 - taught / num_groups)
    assert stages.states[-1].data_cursor == num_groups


def test_a_resumed_run_takes_the_tasks_that_an_uninterrupted_one_does(hand: Any):
    """However many a round has taken: the cursor is in the checkpoint."""
    script = np.random.default_rng(1).random(200) < 0.6
    settings = config(max_resample_rounds=2)
    settings.run.rounds, settings.rollout.prompts_per_round, settings.run.checkpoint_every = 6, 5, 1
    straight = SomeFlat(hand, *script)
    train(parts(straight, settings), 1)
    assert len(straight.asked) > 8, "the control: some rounds sampled more"
    for stop in (1, 2, 3, 5):
        first, then = SomeFlat(hand, *script), SomeFlat(hand, *script)
        first._stop_after = stop
        train(parts(first, settings), 1)
        then.cursor = first.states[-1].data_cursor
        train(parts(then, settings), first.states[-1].next_round)
        assert [*first.asked, *then.asked] == straight.asked
        taken = [[group.task.id for group in facts.groups] for _, facts in [*first.rows, *then.rows]]
        assert taken == [[group.task.id for group in facts.groups] for _, facts in straight.rows]

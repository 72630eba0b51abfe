from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from model.snapshot import CodeChanges
from rl.advantage import Credit
from rl.batch import TrainSample
from rl.evaluate import Decoding, Evaluation
from rl.learner.update_report import UpdateReport
from rl.metrics import MetricsLog, metric_info, read_metrics
from rl.parity import ParityReport
from rl.publish import Published
from rl.recorder import Recorder, RoundFacts, evaluation_metrics, round_metrics
from rl.statistics import PassRate
from rollout.types import RewardNode, ScoredGroup, StopReason, WeightVersion

UPDATE = UpdateReport(
    num_steps=2,
    num_tokens=7,
    policy_loss=-0.5,
    balance_loss=2.0,
    router_z_loss=3.0,
    clip_frac=0.25,
    kl_behavior_policy=0.125,
    grad_norm=1.5,
    peak_bytes=2**30,
    expert_load_LE=np.array([[0.5, 0.5, 0.0], [0.125, 0.75, 0.125]]),
    terms={"loss/kl": 0.03125},
    watched={"kl/reference_policy": 0.0625},
)


SAMPLES = tuple(
    TrainSample(
        key=str(number),
        ids_T=np.arange(3),
        targets_R=np.array([1, 2]),
        behavior_logprobs_R=np.zeros(2, np.float32),
        advantages_R=np.array(advantages, np.float32),
        routes_TLK=np.zeros((2, 1, 1), np.uint8),
        weight_version=4,
        trained=number < 2,
    )
    for number, advantages in enumerate([(1.0, 1.0), (-1.0, -1.0), (9.0, 9.0)])
)


CHANGES = {
    "model.layers.0.mlp.experts.gate_up_proj": CodeChanges(1, 4, 2, 2),
    "model.layers.0.mlp.experts.down_proj": CodeChanges(1, 12, 1, 2),
}


def part(name: str, score: float | None) -> RewardNode:
    return RewardNode(name=name, score=score, masked=None if score is not None else "broken")


@pytest.fixture
def facts(hand) -> RoundFacts:
    """Two groups of three episodes: solved at once | solved after repair | wrong, cut | broken | tampered | wrong."""
    once, twice = hand.segment((1,), ((), (5, 6)), version=4), hand.segment((1,), ((), (5,)), ((9,), (6, 7)), version=3)
    first = (
        hand.scored(hand.trajectory(once, passed=4), 1.0, part("tests", 1.0), part("style", 0.5)),
        hand.scored(hand.trajectory(twice, passed=4, index=1), 0.5, part("tests", 1.0), part("style", None)),
        hand.scored(
            hand.trajectory(once, passed=2, index=2, stop=StopReason.TRUNCATED_TOKENS), 0.0, part("tests", 0.5)
        ),
    )
    second = (
        hand.scored(hand.trajectory(once, broken="box gone"), "sandbox: box gone"),
        hand.scored(hand.trajectory(once, passed=4, tampered=True, index=1), 0.0),
        hand.scored(hand.trajectory(once, passed=0, index=2), 0.0),
    )
    return RoundFacts(
        groups=(ScoredGroup(task=hand.task("a"), scored=first), ScoredGroup(task=hand.task("b"), scored=second)),
        credit=Credit(samples=SAMPLES, num_masked=1, no_variance_frac=0.5, explained_variance=0.75),
        parity=ParityReport(
            num_tokens=13,
            num_routed=9,
            mean_abs_nats=1e-7,
            max_abs_nats=2e-6,
            num_flipped=1,
            num_flipped_tokens=3,
            worst_layer=0,
            entropy=0.75,
        ),
        update=UPDATE,
        published=Published(
            version=WeightVersion(5), num_bytes=4096, codes_changed=CHANGES, bits_per_expert_param=4.25
        ),
        lr=3e-4,
        learner_version=4,
        load_balance_coef=0.5,
        router_z_coef=0.25,
        num_resampled=1,
        punishments=[0.0, -0.5],
    )


def test_the_metrics_of_a_round_by_hand(facts: RoundFacts):
    got = round_metrics(facts, rollout_s=2.0)
    expected = {
        "reward/total": 1.5 / 5,  # the broken episode is not a 0
        "reward/tests": 2.5 / 3,
        "reward/style": 0.5,
        "pass_rate/train": 2 / 5,  # the tampered one did not pass
        "pass_rate/first_turn": 1 / 5,
        "entropy": 0.75,
        "parity/mean_abs_nats": 1e-7,
        "parity/max_abs_nats": 2e-6,
        "parity/flipped_routes": 1.0,
        "parity/flipped_tokens": 3.0,
        "staleness/mean": 3 / 13,  # 3 of 13 sampled tokens are one version old
        "staleness/max": 1.0,
        "groups/total": 2.0,
        "groups/no_variance_frac": 0.5,
        "groups/resampled": 1.0,
        "episodes/total": 6.0,
        "episodes/overlong_punishment": -0.25,
        "episodes/masked": 1.0,
        "episodes/truncated": 1.0,
        "episodes/tampered": 1.0,
        "episodes/mean_turns": 7 / 6,
        "episodes/violations": 0.0,
        "calls/total": 14.0,
        "calls/failed": 7.0,
        "tokens/sampled": 13.0,
        "tokens_per_s": 6.5,
        "lr": 3e-4,
        "codes_changed_frac": 2 / 16,
        "scales_changed_frac": 3 / 4,
        "codes_changed/layer_0": 2 / 16,
        "publish/bytes": 4096.0,
        "publish/bits_per_expert_param": 4.25,
        "value/explained_variance": 0.75,
        "loss/total": -0.5 + 1.0 + 0.75 + 0.03125,
        "loss/policy": -0.5,
        "loss/balance": 1.0,
        "loss/router_z": 0.75,
        "clip_frac": 0.25,
        "advantage/std": 1.0,
        "kl/behavior_policy": 0.125,
        "loss/kl": 0.03125,
        "kl/reference_policy": 0.0625,
        "grad_norm": 1.5,
        "tokens/trained": 7.0,
        "memory/peak_bytes": 2.0**30,
        "expert_load/max_frac": 0.75,
        "expert_load/min_frac": 0.0,
        "experts/dead": 1.0,
    }
    assert got == pytest.approx(expected)


def test_an_update_that_did_not_happen_is_left_out(facts: RoundFacts):
    with_update = round_metrics(facts, rollout_s=2.0)
    without = round_metrics(replace(facts, update=None), rollout_s=2.0)
    left_out = with_update.keys() - without.keys()
    assert left_out == {
        "loss/total", "loss/policy", "loss/balance", "loss/router_z", "clip_frac", "advantage/std",
        "kl/behavior_policy", "grad_norm",
        "loss/kl", "kl/reference_policy", "tokens/trained", "expert_load/max_frac", "expert_load/min_frac",
        "experts/dead", "memory/peak_bytes",
    }  # fmt: skip
    assert without == {name: value for name, value in with_update.items() if name not in left_out}


def test_memory_that_the_kernel_does_not_tell_is_left_out(facts: RoundFacts):
    got = round_metrics(replace(facts, update=replace(UPDATE, peak_bytes=None)), rollout_s=2.0)
    assert got.keys() == round_metrics(facts, rollout_s=2.0).keys() - {"memory/peak_bytes"}


def test_the_loads_of_the_ranks_are_shown_where_there_are_several(facts: RoundFacts):
    loads = {"expert_load/rank_max_over_mean": 1.25, "expert_load/rank_max_over_mean_contiguous": 2.0}
    got = round_metrics(replace(facts, update=replace(UPDATE, rank_loads=loads)), rollout_s=2.0)
    assert got == round_metrics(facts, rollout_s=2.0) | loads
    assert all(metric_info(name).name == name for name in loads)


def test_without_a_critic_nothing_is_explained(facts: RoundFacts):
    got = round_metrics(replace(facts, credit=replace(facts.credit, explained_variance=None)), rollout_s=2.0)
    assert "value/explained_variance" not in got


def test_no_valid_episode_has_no_reward_entry(facts: RoundFacts):
    masked = facts.groups[1].scored[:1]
    got = round_metrics(replace(facts, groups=(replace(facts.groups[1], scored=masked),)), rollout_s=0.0)
    assert "reward/total" not in got
    assert (got["pass_rate/train"], got["tokens_per_s"]) == (0.0, 0.0)


def evaluation(passed: int, total: int, decoding: Decoding = Decoding.GREEDY, num_tasks: int = 4) -> Evaluation:
    tasks: Any = (None,) * num_tasks
    return Evaluation(
        decoding=decoding,
        after_repair=PassRate(passed=passed, total=total),
        first_turn=PassRate(passed=1, total=total),
        num_masked=num_tasks - total,
        tasks=tasks,
        scored=(),
    )


def test_an_evaluation_has_its_rates_and_its_tasks():
    got = evaluation_metrics(evaluation(2, 4, Decoding.SAMPLED))
    assert got.pop("eval/sampled_low") < 0.5 < got.pop("eval/sampled_high")
    assert got == {"eval/sampled": 0.5, "eval/sampled_first_turn": 0.25, "eval/num_tasks": 4.0}


class Progress:
    def __init__(self):
        self.stages: list[str] = []
        self.shown: list[dict[str, Any]] = []

    def stage(self, name: str) -> None:
        self.stages.append(name)

    def advance(self, **values: Any) -> None:
        self.shown.append(values)


class Tracker:
    def __init__(self):
        self.rows: list[tuple[int, dict[str, float]]] = []

    def log(self, number: int, values: dict[str, float]) -> None:
        self.rows.append((number, values))


def test_a_row_a_round_with_the_times_of_its_stages(facts: RoundFacts, tmp_path, monkeypatch: pytest.MonkeyPatch):
    clock = [100.0]
    monkeypatch.setattr("rl.recorder.time.monotonic", lambda: clock[0])
    progress: Any = Progress()
    tracker: Any = Tracker()
    with MetricsLog(tmp_path / "metrics.jsonl") as log:
        recorder = Recorder(log=log, tracker=tracker, progress=progress)
        with recorder.stage("evaluate"):
            clock[0] += 3
        recorder.record_start([evaluation(3, 4), evaluation(1, 4, Decoding.SAMPLED)], warm_start_loss=0.625)
        for _ in range(2):
            for name, seconds in (("rollout", 2.0), ("update", 1.0), ("rollout", 2.0)):
                with recorder.stage(name):
                    clock[0] += seconds
            clock[0] += 0.5
            recorder.record(len(tracker.rows), facts, [evaluation(2, 4)])
    start, first, second = (row.values for row in read_metrics(tmp_path / "metrics.jsonl"))
    assert {name: value for name, value in start.items() if name.startswith("time/")} == {
        "time/evaluate_s": 3.0, "time/round_s": 3.0
    }  # fmt: skip
    assert (start["eval/greedy"], start["eval/sampled"]) == (0.75, 0.25)
    assert start["loss/warm_start"] == 0.625
    for values in (first, second):
        assert {name: value for name, value in values.items() if name.startswith("time/")} == {
            "time/rollout_s": 4.0, "time/update_s": 1.0, "time/round_s": 5.5
        }  # fmt: skip
        assert values["tokens_per_s"] == 13 / 4
        assert values["eval/greedy"] == 0.5
    assert [number for number, _ in tracker.rows] == [0, 1, 2]
    assert tracker.rows[1][1] == first
    assert progress.shown[0] == {
        "reward": pytest.approx(0.3), "pass_rate": 0.4, "tokens_per_s": 13 / 4, "parity": 1e-7, "held_out": "50.0%"
    }  # fmt: skip
    assert progress.stages[:2] == ["evaluate", "rollout"]

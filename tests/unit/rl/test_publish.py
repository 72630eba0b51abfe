from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
import torch

from model.config import ComputeDtype
from model.snapshot import CodeChanges, PackedTensor, published_view
from rl.batch import TrainSample
from rl.parity import BOUNDS, ParityError, ParityReport
from rl.publish import Published, Publisher
from rl.scores import SampleScores
from rollout.types import WeightVersion

CLOSED = ParityReport(
    num_tokens=9,
    num_routed=10,
    mean_abs_nats=0.5,
    max_abs_nats=2.0,
    num_flipped=0,
    num_flipped_tokens=0,
    worst_layer=3,
    entropy=1.0,
)
OPEN = ParityReport(
    num_tokens=9,
    num_routed=10,
    mean_abs_nats=1e-8,
    max_abs_nats=1e-6,
    num_flipped=0,
    num_flipped_tokens=0,
    worst_layer=0,
    entropy=1.0,
)


SAMPLE = TrainSample(
    key="0",
    ids_T=np.arange(3),
    targets_R=np.array([1, 2]),
    behavior_logprobs_R=np.array([-1.0, -2.0], np.float32),
    advantages_R=np.zeros(2, np.float32),
    routes_TLK=np.zeros((2, 1, 1), np.uint8),
    weight_version=0,
    trained=True,
)


def scored(report: ParityReport, logprobs: list[float]) -> ParityReport:
    """The report of a learner that gives `SAMPLE` these logprobs."""
    return replace(report, scores={SAMPLE.key: SampleScores(proximal_logprobs_R=np.array(logprobs, np.float32))})


CHANGES = {
    "model.layers.1.mlp.experts.gate_up_proj": CodeChanges(1, 8, 0, 1),
    "model.layers.1.mlp.experts.down_proj": CodeChanges(3, 8, 1, 1),
}
EXPERT, NORM = torch.ones(2, 4, 64), torch.ones(7)
TENSORS = published_view({"model.layers.1.mlp.experts.down_proj": EXPERT, "model.norm.weight": NORM})


@dataclass(frozen=True)
class Snapshot:
    version: WeightVersion
    digests: Mapping[str, str]
    num_bytes: int = 1000
    tensors: Mapping[str, PackedTensor] = field(default_factory=dict[str, PackedTensor])


class Queue:
    """Holds `num_versions` back."""

    def __init__(self, num_versions: int = 0):
        self._num_versions = num_versions
        self._kept: list[Snapshot] = []

    def pass_through(self, snapshot: Snapshot) -> Snapshot:
        self._kept = [*self._kept, snapshot][-self._num_versions - 1 :]
        return self.due

    @property
    def due(self) -> Snapshot:
        return self._kept[0]

    @property
    def newest(self) -> Snapshot:
        return self._kept[-1]


class Learners:
    def __init__(self, report: ParityReport = OPEN, differences: list[dict[str, float]] | None = None):
        self.report = report
        self.differences = differences or []
        self.asked: list[Any] = []

    def snapshot(self, version: WeightVersion):
        self.asked.append(version)
        return Snapshot(version, {"a": f"d{version}"}, tensors=TENSORS), CHANGES

    def parity(self, samples: object) -> ParityReport:
        self.asked.append(samples)
        return self.report

    def digests(self) -> dict[str, str]:
        return {"a": "d0", "b": "d1"}

    def view_differences(self, running: dict[str, int]) -> dict[str, float]:
        return self.differences[running["worker"]]


class Pool:
    def __init__(self, num_workers: int = 1, failure: Exception | None = None):
        self.num_workers = num_workers
        self.failure = failure
        self.received: list[Snapshot] = []
        self.digests_of_one = {"a": "d0", "b": "d1"}

    def publish(self, snapshot: Snapshot, *, may_go_back: bool = False) -> None:
        if self.failure is not None:
            raise self.failure
        assert not self.received or may_go_back == (snapshot.version < self.received[-1].version)
        self.received.append(snapshot)

    def digests(self) -> list[dict[str, str]]:
        return [self.digests_of_one] * self.num_workers

    def running_views(self) -> list[dict[str, int]]:
        return [{"worker": worker} for worker in range(self.num_workers)]


def publisher(learners: Learners, pool: Pool, hold_back: int = 0) -> Publisher:
    any_learners: Any = learners
    any_pool: Any = pool
    queue: Any = Queue(hold_back)
    subject = Publisher(any_learners, any_pool, BOUNDS[ComputeDtype.fp32], queue)
    subject.publish(WeightVersion(0))
    return subject


def test_publishing_carries_one_snapshot_of_the_version_and_counts_what_changed():
    learners, pool = Learners(), Pool()
    published = publisher(learners, pool).publish(WeightVersion(3))
    assert learners.asked == [0, 3]
    assert [snapshot.version for snapshot in pool.received] == [0, 3]
    assert (published.version, published.num_bytes, published.codes_changed_frac) == (3, 1000, 0.25)
    assert published.scales_changed_frac == 0.5
    assert published.codes_changed_by_layer == {1: 4 / 16}
    assert published.bits_per_expert_param == 4.25, "the norm travels, and is no expert's"


def test_the_first_version_changed_nothing():
    first = Published(version=WeightVersion(0), num_bytes=1, bits_per_expert_param=4.25, codes_changed={})
    assert (first.codes_changed_frac, first.scales_changed_frac, first.codes_changed_by_layer) == (0.0, 0.0, {})


def test_the_version_counts_only_once_every_worker_runs_it():
    pool = Pool()
    subject = publisher(Learners(), pool)
    assert subject.version == 0
    pool.failure = RuntimeError("worker 1 died")
    with pytest.raises(RuntimeError, match="worker 1 died"):
        subject.publish(WeightVersion(1))
    assert subject.version == 0


def test_an_open_gate_returns_the_report():
    samples: Any = ["a sample"]
    learners = Learners(OPEN)
    assert publisher(learners, Pool()).check_parity(samples) is OPEN
    assert learners.asked == [0, samples]


def test_a_closed_gate_names_the_worker_and_its_worst_tensor():
    learners = Learners(CLOSED, [{}, {"router": 0.01, "experts": 0.75, "norm": 0.5}])
    with pytest.raises(ParityError) as caught:
        publisher(learners, Pool(num_workers=2)).check_parity([])
    assert str(caught.value) == (
        "parity gate: behavior and policy logprobs must agree before the update, got mean |difference| 5.00e-01 nats "
        "> 1e-05; max |difference| 2.00e+00 nats > 1e-03; worker 1 runs another experts than was published (largest "
        "difference 0.75, 3 tensors in all): the transfer is at fault, restart"
    )


def test_a_closed_gate_with_equal_weights_names_the_layer():
    with pytest.raises(ParityError, match=r"the weights are equal, so the two forwards differ, most in layer 3: "):
        publisher(Learners(CLOSED, [{}, {}]), Pool(num_workers=2)).check_parity([])


def test_a_worker_that_holds_a_nan_or_lacks_a_tensor_differs_without_bound():
    import torch

    from model.config import KernelChoice, ModelConfig
    from model.kernels.dispatch import resolve_kernels
    from model.parallel.groups import Ranks
    from model.transformer import init_weights
    from rl.learner.policy import PublishedPolicy

    policy = PublishedPolicy(
        ModelConfig(vocab_size=8, hidden_size=32, num_layers=1, num_heads=1, num_kv_heads=1, head_dim=32,
                    expert_hidden_size=32, num_experts=2, num_experts_per_tok=1),
        resolve_kernels(KernelChoice.torch), Ranks(),
    )  # fmt: skip
    init_weights(policy.model, 0)
    policy.refresh()
    running = {name: tensor.numpy().copy() for name, tensor in policy._views.items()}
    assert policy.view_differences(running) == {}
    running["model.norm.weight"][3] = np.nan
    running["model.layers.0.mlp.router.weight"][1, 1] += 0.5
    del running["model.embed_tokens.weight"]
    differences = policy.view_differences(running)
    assert differences.keys() == {
        "model.norm.weight", "model.layers.0.mlp.router.weight", "model.embed_tokens.weight"
    }  # fmt: skip
    assert differences["model.norm.weight"] == differences["model.embed_tokens.weight"] == float("inf")
    assert differences["model.layers.0.mlp.router.weight"] == pytest.approx(0.5)
    assert torch.isfinite(policy._views["model.norm.weight"]).all()  # the comparison wrote nothing


@pytest.mark.parametrize("running", [{"a": "d0", "b": "other"}, {"a": "d0"}, {"a": "d0", "b": "d1", "c": "d2"}])
def test_other_bytes_close_the_gate_even_when_no_logprob_shows_them(running: dict[str, str]):
    pool = Pool()
    pool.digests_of_one = running
    with pytest.raises(ParityError, match=r"^parity gate: .*, got other bytes in 1 tensors of worker 0, such as "):
        publisher(Learners(OPEN, [{"b": 0.5}]), pool).check_parity([])


def test_held_back_versions_arrive_that_many_updates_later():
    pool = Pool()
    subject = publisher(Learners(), pool, hold_back=2)
    sent = [subject.publish(WeightVersion(number)).num_bytes for number in range(1, 5)]
    assert [snapshot.version for snapshot in pool.received] == [0, 1, 2]
    assert sent == [0, 0, 1000, 1000]  # the start runs already, and is not sent again
    assert subject.version == 4


def test_what_is_held_out_is_judged_on_the_newest_version():
    pool = Pool()
    subject = publisher(Learners(), pool, hold_back=2)
    for number in range(1, 4):
        subject.publish(WeightVersion(number))
    with subject.newest():
        assert pool.received[-1].version == 3
    assert [snapshot.version for snapshot in pool.received] == [0, 1, 3, 1]
    subject.publish(WeightVersion(4))
    assert pool.received[-1].version == 2


def test_without_held_back_versions_the_newest_is_not_sent_again():
    pool = Pool()
    with publisher(Learners(), pool).newest():
        assert [snapshot.version for snapshot in pool.received] == [0]
    assert len(pool.received) == 1


def test_the_gate_lets_other_logprobs_pass_from_the_version_that_was_sent():
    learners, pool = Learners(CLOSED, [{}, {}]), Pool(num_workers=2)
    subject = publisher(learners, pool, hold_back=1)
    with pytest.raises(ParityError):  # the workers run the learner's version still
        subject.check_parity([])
    subject.publish(WeightVersion(1))
    pool.digests_of_one = {"a": "d0"}
    learners.report = scored(CLOSED, [-1.5, -3.0])
    report = subject.check_parity([SAMPLE])
    assert (report.mean_abs_nats, report.max_abs_nats) == (0.75, 1.0)  # |-1.5 + 1| and |-3 + 2|, flipped or not
    assert report.entropy == CLOSED.entropy


@pytest.mark.parametrize(
    ("logprob", "digests", "problem"),
    [
        (-1.5, {"a": "d1"}, "other bytes in 1 tensors of worker 0, such as a"),  # the learner's, but not what was sent
        (float("nan"), {"a": "d0"}, "mean |difference| nan nats > 2e+308; max |difference| nan nats > 2e+308"),
        (-float("inf"), {"a": "d0"}, "mean |difference| inf nats > 2e+308; max |difference| inf nats > 2e+308"),
    ],
    ids=["bytes", "nan", "inf"],
)
def test_the_gate_closes_on_other_bytes_than_were_sent(logprob: float, digests: dict[str, str], problem: str):
    pool = Pool()
    subject = publisher(Learners(scored(OPEN, [logprob, -3.0])), pool, hold_back=1)
    subject.publish(WeightVersion(1))
    pool.digests_of_one = digests
    with pytest.raises(ParityError) as caught:
        subject.check_parity([SAMPLE])
    assert str(caught.value) == (
        "parity gate: the workers must run version 0 as it was sent, and give finite logprobs, got "
        f"{problem}; the transfer or the update before it is at fault, restart"
    )

"""What two real runs write to metrics.jsonl: every declared metric, with its reason where it is only there at times."""

from __future__ import annotations

from pathlib import Path

import pytest

from rl.machine import peak_memory_bytes
from rl.metrics import METRICS, metric_info, read_metrics
from tests.integration.test_resume import run_to_the_end

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(420)]

SHORT = ["run.rounds=2", "run.eval_every=1", "run.checkpoint_every=2"]

ONLY_WITH = {
    "loss/kl": "algorithm.kl_coef: no penalty, no term of the loss",
    "kl/reference_policy": "algorithm.kl_coef: without it no reference is held",
    "loss/entropy": "algorithm.entropy_coef: without it no entropy is computed in an update",
    "loss/value": "algorithm=ppo: the others have no critic",
    "value/explained_variance": "algorithm=ppo: the others have no critic",
    "importance/mean": "algorithm.importance: without it no token is weighed",
    "importance/cut_frac": "algorithm.importance: without it no token is weighed",
    "expert_load/rank_max_over_mean": "learner.expert_parallel: one rank has all experts",
    "expert_load/rank_max_over_mean_contiguous": "learner.expert_parallel: one rank has all experts",
}
"""Metrics that only a setting makes, and why."""

ONLY_QUANTIZED = {"parity/mean_abs_nats", "parity/max_abs_nats"}
"""Left out with learner.quantization.enabled=false: the two sides differ by the quantization, so none is compared."""

ALL_SETTINGS = [
    "algorithm=ppo", "algorithm.kl_coef=0.1", "algorithm.entropy_coef=0.01", "algorithm.importance=truncate",
    "cluster=local_ep2",
]  # fmt: skip

ONLY_AT_THE_START = {"loss/warm_start"}
EVERY_EVALUATION = {name for name in METRICS if name.startswith("eval/")}
GREEDY_ALONE = {name for name in EVERY_EVALUATION if "sampled" not in name}
EVERY_TIME = {"time/round_s"}
NOT_TOLD = set[str]() if peak_memory_bytes() else {"memory/peak_bytes"}
"""By the kernel of this machine."""


def written(folder: Path, *more: str) -> list[set[str]]:
    """The names in each row of a run's log, all of them finite numbers."""
    run_to_the_end(folder, *SHORT, *more)
    rows = read_metrics(folder / "coding" / "metrics.jsonl")
    assert [row.round for row in rows] == [0, 1, 2]
    for row in rows:
        for name, value in row.values.items():
            assert value is not None, (row.round, name)  # null: NaN or infinite
            metric_info(name)  # raises for one that is not declared
    for family in ("time/", "codes_changed/"):  # the reward of these runs has one node, its root
        assert any(name.startswith(family) and name not in METRICS for name in rows[1].values), family
    return [set(row.values) & set(METRICS) for row in rows]


@pytest.mark.parametrize(
    ("settings", "absent"), [([], set(ONLY_WITH)), (ALL_SETTINGS, set[str]())], ids=["as shipped", "all settings"]
)
def test_a_run_writes_every_metric_that_is_declared(settings: list[str], absent: set[str], tmp_path: Path) -> None:
    assert ONLY_WITH.keys() <= METRICS.keys()
    start, first, last = written(tmp_path, *settings)
    assert start == ONLY_AT_THE_START | EVERY_EVALUATION | EVERY_TIME
    of_a_round = set(METRICS) - ONLY_AT_THE_START - EVERY_EVALUATION - absent - NOT_TOLD
    assert first == of_a_round | GREEDY_ALONE
    assert last == of_a_round | EVERY_EVALUATION


def test_a_run_without_quantization_says_so_and_compares_no_logprobs(tmp_path: Path) -> None:
    more = ["learner.quantization.enabled=false", "algorithm.importance=truncate"]
    start, first, last = written(tmp_path, *more)
    absent = ONLY_WITH.keys() - {"importance/mean", "importance/cut_frac"} | ONLY_QUANTIZED | NOT_TOLD
    assert start == ONLY_AT_THE_START | EVERY_EVALUATION | EVERY_TIME
    for names in (first, last):
        assert names | EVERY_EVALUATION == set(METRICS) - ONLY_AT_THE_START - absent
    _, *rounds = (row.values for row in read_metrics(tmp_path / "coding" / "metrics.jsonl"))
    for values in rounds:
        assert values["importance/mean"] != 1.0, "the control: sampler and learner run different weights"
        assert values["codes_changed_frac"] > 0, "the masters' codes are published"
        assert values["publish/bits_per_expert_param"] == 4.25
    said = run_to_the_end(tmp_path, *SHORT, *more, "run.rounds=3")
    assert "parity gate: compares the published bytes and no logprobs (learner.quantization.enabled=false)" in said
    assert "resuming before round 3" in said
    assert "parity not compared" in said
    (checkpoint,) = (tmp_path / "coding" / "checkpoints").glob("round-000004")
    assert not (checkpoint / "published").exists(), "the bytes follow from the masters"

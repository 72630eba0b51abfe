import json
import logging
import os
from pathlib import Path

import numpy as np
import pytest

from rl.metrics import (
    METRICS,
    PREFIXES,
    Direction,
    MetricsError,
    MetricsLog,
    eval_metrics,
    metric_info,
    read_metrics,
    stage_time,
)
from rl.statistics import PassRate


def write_rounds(path: Path, rounds: range) -> None:
    with MetricsLog(path) as log:
        for number in rounds:
            log.write(number, {"reward/total": number / 10})


def test_a_row_is_one_json_line_on_disk_when_write_returns(tmp_path: Path):
    path = tmp_path / "run" / "metrics.jsonl"
    log = MetricsLog(path)
    log.write(0, {"reward/total": 0.25, "episodes/masked": 2})
    assert path.read_text() == '{"round": 0, "reward/total": 0.25, "episodes/masked": 2}\n'
    log.write(1, {"lr": np.float32(0.5), "tokens/sampled": np.int64(7)})
    assert json.loads(path.read_text().splitlines()[1]) == {"round": 1, "lr": 0.5, "tokens/sampled": 7.0}
    log.close()


def test_each_row_is_synced_to_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    log = MetricsLog(tmp_path / "metrics.jsonl")
    synced: list[int] = []
    monkeypatch.setattr(os, "fsync", synced.append)
    log.write(1, {"lr": 1.0})
    log.write(2, {"lr": 1.0})
    log.close()
    assert len(synced) == 2


def test_rows_read_back_in_order(tmp_path: Path):
    path = tmp_path / "metrics.jsonl"
    write_rounds(path, range(3))
    assert [(row.round, row.values["reward/total"]) for row in read_metrics(path)] == [(0, 0.0), (1, 0.1), (2, 0.2)]
    assert read_metrics(tmp_path / "absent.jsonl") == ()


def test_rounds_only_grow(tmp_path: Path):
    with MetricsLog(tmp_path / "metrics.jsonl") as log:
        log.write(3, {"lr": 1.0})
        for number in (3, 2):
            with pytest.raises(MetricsError, match=rf"round: must grow, got {number} after 3; "):
                log.write(number, {"lr": 1.0})


def test_a_resumed_run_has_each_round_once(tmp_path: Path):
    path = tmp_path / "metrics.jsonl"
    write_rounds(path, range(6))
    with MetricsLog(path, resume_round=4) as log:
        assert log.last_round == 3
        assert [row.round for row in read_metrics(path)] == [0, 1, 2, 3]
        log.write(4, {"reward/total": 9.0})
        log.write(5, {"reward/total": 9.5})
    rows = read_metrics(path)
    assert [row.round for row in rows] == [0, 1, 2, 3, 4, 5]
    assert [row.values["reward/total"] for row in rows] == [0.0, 0.1, 0.2, 0.3, 9.0, 9.5]
    assert list(tmp_path.iterdir()) == [path]


def test_resuming_a_log_that_was_never_written_starts_it(tmp_path: Path):
    with MetricsLog(tmp_path / "metrics.jsonl", resume_round=0) as log:
        assert log.last_round is None
        log.write(0, {"lr": 1.0})


@pytest.mark.parametrize("torn_bytes", [1, 12, 25])
def test_a_torn_last_line_is_left_out_and_cut_on_resume(tmp_path: Path, torn_bytes: int):
    path = tmp_path / "metrics.jsonl"
    write_rounds(path, range(2))
    with path.open("ab") as file:
        file.write(b'{"round": 2, "reward/total": 0.2}\n'[:torn_bytes])
    assert [row.round for row in read_metrics(path)] == [0, 1]
    with MetricsLog(path, resume_round=2) as log:
        log.write(2, {"reward/total": 0.5})
    assert path.read_text().splitlines()[2] == '{"round": 2, "reward/total": 0.5}'


def test_a_last_line_that_lost_only_its_newline_is_kept(tmp_path: Path):
    path = tmp_path / "metrics.jsonl"
    write_rounds(path, range(2))
    path.write_bytes(path.read_bytes()[:-1])
    with MetricsLog(path, resume_round=2) as log:
        log.write(2, {"lr": 1.0})
    assert [row.round for row in read_metrics(path)] == [0, 1, 2]


def test_damage_before_the_last_line_is_an_error(tmp_path: Path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"round": 0}\n{"rou\n{"round": 2}\n')
    with pytest.raises(MetricsError, match="line 2 is not a row of metrics"):
        read_metrics(path)


def test_two_runs_in_one_folder_are_an_error(tmp_path: Path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"round": 0}\n{"round": 1}\n{"round": 1}\n')
    with pytest.raises(MetricsError, match="rounds must grow, got 1 after 1 in line 3"):
        read_metrics(path)


def test_a_new_run_never_overwrites_an_old_one(tmp_path: Path):
    path = tmp_path / "metrics.jsonl"
    write_rounds(path, range(2))
    with pytest.raises(MetricsError, match=r"needs an empty log, got 2 rows; .*run\.name"):
        MetricsLog(path)
    assert len(read_metrics(path)) == 2


def test_nan_and_infinity_become_null_and_are_counted(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    path = tmp_path / "metrics.jsonl"
    with MetricsLog(path) as log, caplog.at_level(logging.WARNING):
        log.write(0, {"entropy": float("nan"), "grad_norm": float("inf"), "lr": 1.0})
        log.write(1, {"entropy": np.float32("nan")})
    assert log.num_not_finite == {"entropy": 2, "grad_norm": 1}
    assert "entropy: nan written as null (2 so far in this run)" in caplog.messages
    assert "NaN" not in path.read_text()
    first, second = read_metrics(path)
    assert first.values == {"entropy": None, "grad_norm": None, "lr": 1.0}
    assert second.values == {"entropy": None}


@pytest.mark.parametrize("value", [None, "fast", [1.0]])
def test_a_value_that_is_no_number_is_refused(tmp_path: Path, value: object):
    with MetricsLog(tmp_path / "metrics.jsonl") as log, pytest.raises(MetricsError, match="lr: a metric is a number"):
        log.write(0, {"lr": value})


def test_a_typo_is_refused_with_the_nearest_name(tmp_path: Path):
    path = tmp_path / "metrics.jsonl"
    with MetricsLog(path) as log:
        with pytest.raises(MetricsError, match=r"clip_fraction: unknown metric, .* did you mean clip_frac\?"):
            log.write(0, {"clip_fraction": 0.1})
        with pytest.raises(MetricsError, match=r"log it as custom/zzzz"):
            log.write(0, {"zzzz": 0.1})
        assert path.read_text() == ""


def test_declared_families_accept_names_made_at_run_time():
    assert metric_info("reward/tests_pass").description.endswith(": tests_pass")
    assert metric_info("custom/my_env.latency").unit == ""
    assert metric_info(stage_time("rollout")).unit == "s"
    assert stage_time("rollout") == "time/rollout_s"
    with pytest.raises(MetricsError, match=r"log seconds as time/rollout_s"):
        metric_info("time/rollout")
    for prefix in PREFIXES:
        with pytest.raises(MetricsError, match="unknown metric"):
            metric_info(prefix)


def test_the_table_describes_every_metric_once():
    for name, info in METRICS.items():
        assert info.name == name
        assert info.description
        assert info.description[-1] != "."
        assert name.endswith("_s") == (info.unit in ("s", "tokens/s"))
    assert metric_info("parity/max_abs_nats").direction is Direction.LOWER
    assert {name for name in METRICS if name.endswith("_frac")} >= {"codes_changed_frac", "groups/no_variance_frac"}


def test_eval_metrics_carry_the_interval():
    values = eval_metrics("greedy", passed=PassRate(passed=105, total=200), first_turn=PassRate(passed=50, total=200))
    assert list(values) == ["eval/greedy", "eval/greedy_low", "eval/greedy_high", "eval/greedy_first_turn"]
    assert values["eval/greedy"] == 0.525
    assert values["eval/greedy_low"] == pytest.approx(0.455974, abs=1e-6)
    assert values["eval/greedy_first_turn"] == 0.25
    assert all(metric_info(name) for name in values)
    nothing = PassRate(passed=0, total=0)
    assert eval_metrics("greedy", passed=nothing, first_turn=nothing) == {}

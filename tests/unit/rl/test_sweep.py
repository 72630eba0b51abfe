"""Sweeps: a folder for each job, a failed job does not end the others, the same command goes on."""

import json
import sys
from pathlib import Path

import pytest

from rl import entry, sweep
from rl.config import RunConfig
from rl.run_folder import RunFolder, RunResult


def run(monkeypatch, root: Path, run_one, *given: str) -> int:
    monkeypatch.setattr(sys, "argv", ["rl.train", "-m", "+experiment=coding", f"run.root={root}", *given])
    return entry.hydra_main(run_one, module="rl.train")


class Runs:
    """A stand-in for training: fails at learning rates above one half."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def __call__(self, config: RunConfig) -> None:
        with RunFolder.open(config) as folder:
            if folder.is_finished:
                return
            self.names.append(config.run.name)
            if config.algorithm.lr > 0.5:
                raise RuntimeError("the loss is not finite")
            after = 0.5 + config.run.seed / 10
            folder.finish(
                RunResult(
                    rounds=config.run.rounds,
                    held_out_before=0.5,
                    held_out_after=after,
                    reward_first=0.1,
                    reward_last=0.2,
                    minutes=1.5,
                )
            )


def test_a_failed_job_is_recorded_and_the_others_run(monkeypatch, tmp_path: Path, capsys) -> None:
    runs = Runs()
    assert run(monkeypatch, tmp_path, runs, "algorithm.lr=0.7,1e-4", "run.seed=2") == 1
    assert runs.names == ["coding-sweep/algorithm.lr=0.7", "coding-sweep/algorithm.lr=0.0001"]
    results = json.loads((tmp_path / "coding-sweep" / "results.json").read_text())
    assert [(job["overrides"], job["error"]) for job in results] == [
        (["algorithm.lr=0.7"], "RuntimeError: the loss is not finite"),
        (["algorithm.lr=0.0001"], None),
    ]
    assert results[1]["result"]["held_out_after"] == 0.7
    out, err = capsys.readouterr()
    assert "50.0% -> 70.0%" in out
    assert f"  2  {tmp_path}/coding-sweep/algorithm.lr=0.0001\n" in out
    assert "job 1 of 2: algorithm.lr=0.7\njob 1 failed: RuntimeError: the loss is not finite\njob 2 of 2" in err
    assert "Traceback" not in err


def test_the_same_sweep_again_runs_what_is_left(monkeypatch, tmp_path: Path) -> None:
    given = ("algorithm.lr=0.7,1e-4",)
    run(monkeypatch, tmp_path, Runs(), *given)
    again = Runs()
    assert run(monkeypatch, tmp_path, again, *given) == 1
    assert again.names == ["coding-sweep/algorithm.lr=0.7"]


def test_a_sweep_without_a_failure_is_a_success(monkeypatch, tmp_path: Path) -> None:
    runs = Runs()
    assert run(monkeypatch, tmp_path, runs, "run.seed=range(0,3)", "run.name=seeds") == 0
    assert runs.names == [f"seeds-sweep/run.seed={seed}" for seed in range(3)]


def test_a_mistake_in_one_job_is_found_before_the_first_runs(monkeypatch, tmp_path: Path, capsys) -> None:
    runs = Runs()
    assert run(monkeypatch, tmp_path, runs, "rollout.group_size=8,1") == 2
    assert runs.names == []
    assert capsys.readouterr().err.startswith("rollout.group_size: grpo compares the episodes of a group")
    assert list(tmp_path.iterdir()) == []


def test_an_interrupt_ends_the_sweep(monkeypatch, tmp_path: Path) -> None:
    names: list[str] = []

    def interrupted(config: RunConfig) -> None:
        names.append(config.run.name)
        raise KeyboardInterrupt

    assert run(monkeypatch, tmp_path, interrupted, "run.seed=1,2") == 130
    assert names == ["coding-sweep/run.seed=1"]


def test_ray_is_down_between_jobs(monkeypatch, tmp_path: Path) -> None:
    class FakeRay:
        running = False
        shutdowns = 0

        def is_initialized(self) -> bool:
            return self.running

        def shutdown(self) -> None:
            self.running = False
            self.shutdowns += 1

    ray = FakeRay()
    monkeypatch.setitem(sys.modules, "ray", ray)

    def leaves_ray_up(config: RunConfig) -> None:
        assert not ray.running
        ray.running = True

    assert run(monkeypatch, tmp_path, leaves_ray_up, "run.seed=1,2") == 0
    assert ray.shutdowns == 2


@pytest.mark.parametrize(
    ("swept", "name"),
    [
        (["algorithm.lr=0.0001", "run.seed=1"], "algorithm.lr=0.0001,run.seed=1"),
        (["+experiment=coding"], "experiment=coding"),
        (["env.dataset=/data/my tasks.jsonl"], "env.dataset=_data_my_tasks.jsonl"),
        ([], "all"),
    ],
)
def test_job_names_are_folder_names(swept: list[str], name: str) -> None:
    assert sweep.job_name(swept) == name


def test_long_job_names_stay_short_and_distinct() -> None:
    first, second = (sweep.job_name([f"env.dataset={'x' * 200}{end}"]) for end in "ab")
    assert first != second
    assert len(first) <= 110

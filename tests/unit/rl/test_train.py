"""The command itself: exit codes, one line, and nothing heavy before the checks."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rl import entry, train
from rl.checkpoint import CheckpointError
from rl.config import RunConfig

ROOT = Path(__file__).parents[3]
HEAVY = ("torch", "ray", "deepspeed", "triton", "datasets", "wandb")


def run(monkeypatch, root: Path, run_one, *given: str) -> int:
    monkeypatch.setattr(sys, "argv", ["rl.train", *given, f"run.root={root}"])
    return entry.hydra_main(run_one, module="rl.train")


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["algorithm.clip_hgih=0.3"], "algorithm.clip_hgih: no such key, got 0.3; did you mean 'algorithm.clip_high'?"),
        (
            ["+experiment=coding", "+rollout.max_turn=3"],
            "rollout.max_turn: no such key, got 3; did you mean 'env.max_turns'?",
        ),
        (
            ["+experiment=coding", "env=codng"],
            "env: no such option, got codng; did you mean 'coding'? choose one of: "
            "bfcl, codeio, coding, custom, humaneval",
        ),
        (
            ["+experiment=coding", "run.rounds=many"],
            "run.rounds: must be a whole number, got many; the default is 30",
        ),
    ],
)
def test_a_typo_costs_seconds_and_starts_nothing(tmp_path: Path, arguments: list[str], line: str) -> None:
    # Exactly `python -m rl.train`, in a process that tells what it had loaded when it left.
    code = (
        "import atexit, runpy, sys; "
        f"atexit.register(lambda: print(sorted(set(sys.modules) & set({HEAVY!r})))); "
        "sys.argv[0] = 'rl.train'; runpy.run_module('rl.train', run_name='__main__')"
    )
    started = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments, f"run.root={tmp_path}"],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={key: value for key, value in os.environ.items() if key != "HYDRA_FULL_ERROR"},
    )
    assert (done.returncode, done.stderr, done.stdout) == (2, f"{line}\n", "[]\n")
    assert time.monotonic() - started < 5
    assert list(tmp_path.iterdir()) == []


def test_without_an_experiment_the_experiments_are_named(monkeypatch, tmp_path: Path, capsys) -> None:
    assert run(monkeypatch, tmp_path, train.run_one) == 2
    assert capsys.readouterr().err == (
        f"experiment: none chosen, got run.root={tmp_path}; write python -m rl.train +experiment=coding, or bring your "
        "own: env=custom env.target=my_package.my_env:MyEnv\n"
    )


def test_a_run_gets_the_composed_configuration(monkeypatch, tmp_path: Path) -> None:
    seen: list[RunConfig] = []
    assert run(monkeypatch, tmp_path, seen.append, "+experiment=coding", "run.seed=7") == 0
    assert [(config.run.name, config.run.seed) for config in seen] == [("coding", 7)]


def test_a_failure_shows_its_traceback_and_its_line(monkeypatch, tmp_path: Path, capsys) -> None:
    def fails(config: RunConfig) -> None:
        raise RuntimeError("the loss\nis not finite")

    assert run(monkeypatch, tmp_path, fails, "+experiment=coding") == 1
    err = capsys.readouterr().err
    assert "Traceback (most recent call last):" in err
    assert err.endswith("run failed: RuntimeError: the loss is not finite\n")
    assert "HYDRA_FULL_ERROR" not in err


def test_a_run_that_its_folder_refuses_is_a_mistake_in_the_configuration(monkeypatch, tmp_path: Path, capsys) -> None:
    def opens(config: RunConfig) -> None:
        from rl.run_folder import RunFolder

        RunFolder.open(config).close()

    assert run(monkeypatch, tmp_path, opens, "+experiment=coding") == 0
    assert run(monkeypatch, tmp_path, opens, "+experiment=coding", "run.seed=3") == 2
    line = f"run.seed: {tmp_path}/coding was started with 0, got 3; put it back"
    assert capsys.readouterr().err.startswith(line)


def test_an_interrupt_has_its_own_exit_code(monkeypatch, tmp_path: Path, capsys) -> None:
    def interrupted(config: RunConfig) -> None:
        raise KeyboardInterrupt

    assert run(monkeypatch, tmp_path, interrupted, "+experiment=coding") == 130
    assert capsys.readouterr().err == "interrupted: the same command goes on from what was saved\n"


@pytest.mark.parametrize(
    ("arguments", "start"),
    [
        (["--experiment=coding"], "command line: unrecognized arguments: --experiment=coding, got "),
        (["--config-name=other"], "--config-name: not used here, got other; put your own groups below --config-dir"),
        (["--config-dir=/nope"], "--config-dir: no such folder, got /nope; name a folder of YAML groups"),
        (["-m", "--cfg=job"], "command line: one mode at a time, got --cfg --multirun; keep one of them"),
        (["--resolve"], "--resolve: only read with --cfg, got no --cfg; add --cfg job"),
    ],
)
def test_flags_that_go_around_the_checks_are_refused(
    monkeypatch, tmp_path: Path, capsys, arguments: list[str], start: str
) -> None:
    assert run(monkeypatch, tmp_path, train.run_one, *arguments) == 2
    err = capsys.readouterr().err
    assert err.startswith(start)
    assert err.count("\n") == 1


def test_a_folder_of_ones_own_adds_experiments(monkeypatch, tmp_path: Path) -> None:
    (tmp_path / "conf" / "experiment").mkdir(parents=True)
    (tmp_path / "conf" / "experiment" / "mine.yaml").write_text("# @package _global_\nrun: {name: mine, rounds: 3}\n")
    seen: list[RunConfig] = []
    given = ("--config-dir", str(tmp_path / "conf"), "+experiment=mine")
    assert run(monkeypatch, tmp_path / "runs", seen.append, *given) == 0
    assert [(config.run.name, config.run.rounds) for config in seen] == [("mine", 3)]


def test_help_lists_what_can_be_chosen_and_set(monkeypatch, tmp_path: Path, capsys) -> None:
    assert run(monkeypatch, tmp_path, train.run_one, "--help") == 0
    out = capsys.readouterr().out
    for expected in (
        "python -m rl.train +experiment=coding\n",
        "env=        bfcl, codeio, coding, custom, humaneval",
        "run.rounds = 30",
    ):
        assert expected in out
    assert "schema" not in out


def test_the_composed_configuration_can_be_shown(monkeypatch, tmp_path: Path, capsys) -> None:
    given = ("+experiment=coding", "--cfg", "job", "env.max_turns=3")
    assert run(monkeypatch, tmp_path, train.run_one, *given) == 0
    assert "max_turns: 3" in capsys.readouterr().out


class _RayError(Exception):
    """Ray's error for what an actor raised: the original is its `cause`."""

    def __init__(self, cause: Exception):
        super().__init__("a long traceback of the actor")
        self.cause = cause


@pytest.mark.parametrize("wrapped", [False, True])
def test_an_error_of_the_project_is_one_line_and_any_other_keeps_its_traceback(
    monkeypatch, tmp_path: Path, capsys, wrapped: bool
) -> None:
    def failing(error: Exception) -> str:
        def fail(config: RunConfig) -> None:
            raise _RayError(error) if wrapped else error

        assert run(monkeypatch, tmp_path, fail, "+experiment=coding") == 1
        return capsys.readouterr().err

    assert failing(CheckpointError("checkpoint: damaged, got\n x; remove it")) == (
        "run failed: checkpoint: damaged, got x; remove it\n"
    )
    foreign = failing(ZeroDivisionError("division by zero"))
    assert foreign.endswith("run failed: ZeroDivisionError: division by zero\n")
    assert "Traceback" in foreign


def test_a_sigterm_that_ray_answers_is_an_interrupt(monkeypatch, tmp_path: Path, capsys) -> None:
    def terminated(config: RunConfig) -> None:
        raise SystemExit(15)

    assert run(monkeypatch, tmp_path, terminated, "+experiment=coding") == 130
    assert capsys.readouterr().err == "interrupted: the same command goes on from what was saved\n"

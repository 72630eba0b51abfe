"""Run folders: resume, refuse by name, one owner, and what a dead process leaves behind."""

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from rl import run_folder
from rl.config import RunConfig
from rl.config_check import ConfigError, flatten
from rl.learner.config import ActivationCheckpointing
from rl.machine import ProcessIdentity, current_process
from rl.run_folder import RunFolder, RunResult, RunState

RESULT = RunResult(rounds=30, held_out_before=0.5, held_out_after=0.9, reward_first=0.4, reward_last=0.8, minutes=12.0)


def config_in(root: Path, **run: object) -> RunConfig:
    config = RunConfig()
    config.run.root = str(root)
    for name, value in run.items():
        setattr(config.run, name, value)
    return config


def dead_process() -> ProcessIdentity:
    """A process of this machine that has just ended."""
    code = "import json, dataclasses; from rl.machine import current_process as me; "
    code += "print(json.dumps(dataclasses.asdict(me())))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return ProcessIdentity(**json.loads(done.stdout))


def write_owner(folder: Path, owner: ProcessIdentity) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "owner.json").write_text(json.dumps(dataclasses.asdict(owner)))


def test_a_new_run_records_its_configuration_and_commit(tmp_path: Path) -> None:
    with RunFolder.open(config_in(tmp_path)) as folder:
        assert folder.state is RunState.RUNNING
        assert not folder.is_resumed
        assert not folder.is_finished
        stored = yaml.safe_load((folder.path / "config.yaml").read_text())
        assert stored["env"]["sandbox"] == "local"
        assert set(flatten(RunConfig())) >= {f"run.{key}" for key in stored["run"]}
    record = run_folder.read_state(tmp_path / "run")
    assert record is not None
    assert record["state"] == "interrupted"  # left without `finish`
    assert len(record["starts"][0]["commit"]) == 40
    assert not (tmp_path / "run" / "owner.json").exists()


def test_the_same_command_goes_on_with_an_unfinished_run(tmp_path: Path) -> None:
    with RunFolder.open(config_in(tmp_path)) as folder:
        folder.record_round(7)
    with RunFolder.open(config_in(tmp_path)) as folder:
        assert folder.is_resumed
        assert folder.rounds_done == 7
        assert folder.state is RunState.RUNNING


def test_a_finished_run_shows_its_result_and_the_two_ways_on(tmp_path: Path) -> None:
    with RunFolder.open(config_in(tmp_path)) as folder:
        folder.finish(RESULT)
    with RunFolder.open(config_in(tmp_path)) as folder:
        assert folder.is_finished
        assert folder.result() == RESULT
        assert folder.finished_lines() == [
            f"{tmp_path}/run: finished, 30 rounds",
            "held-out 50.0% -> 90.0%, reward 0.400 -> 0.800, 12.0 minutes",
            "more rounds:  run.rounds=40 (the learning rate then falls over all of them)",
            "another run:  run.name=run-2",
        ]
    assert run_folder.read_state(tmp_path / "run")["state"] == "finished"  # pyright: ignore[reportOptionalSubscript]


def test_more_rounds_continue_a_finished_run(tmp_path: Path) -> None:
    with RunFolder.open(config_in(tmp_path)) as folder:
        folder.finish(RESULT)
    with RunFolder.open(config_in(tmp_path, rounds=40)) as folder:
        assert not folder.is_finished
        assert folder.is_resumed
        assert folder.rounds_done == 30
    record = run_folder.read_state(tmp_path / "run")
    assert record is not None
    assert record["starts"][1]["changes"] == {"run.rounds": [30, 40]}


def test_fewer_rounds_than_are_done_are_refused(tmp_path: Path) -> None:
    with RunFolder.open(config_in(tmp_path)) as folder:
        folder.record_round(20)
    with pytest.raises(ConfigError) as caught:
        RunFolder.open(config_in(tmp_path, rounds=10))
    assert str(caught.value) == (
        f"run.rounds: {tmp_path}/run has done 20 rounds already, got 10; ask for more, or choose another run.name"
    )


def test_a_change_that_makes_it_another_run_is_refused_by_name(tmp_path: Path) -> None:
    with RunFolder.open(config_in(tmp_path)) as folder:
        folder.record_round(3)
    before = (tmp_path / "run" / "config.yaml").read_text()
    with pytest.raises(ConfigError) as caught:
        RunFolder.open(config_in(tmp_path, seed=1))
    assert str(caught.value) == (
        f"run.seed: {tmp_path}/run was started with 0, got 1; put it back to go on with that run, or choose another "
        "run.name for a new one"
    )
    assert (tmp_path / "run" / "config.yaml").read_text() == before
    with RunFolder.open(config_in(tmp_path)) as folder:  # the refusal gave the folder back
        assert folder.rounds_done == 3


def test_what_only_says_how_the_run_is_carried_out_may_change(tmp_path: Path) -> None:
    RunFolder.open(config_in(tmp_path)).close()
    config = config_in(tmp_path, checkpoint_every=1)
    config.logging.project, config.rollout.num_workers, config.parity.max_abs_nats = "other", 1, 0.1
    config.learner.activation_checkpointing = ActivationCheckpointing.block
    with RunFolder.open(config) as folder:
        assert folder.is_resumed
    assert set(flatten(RunConfig())) >= run_folder.FREE_TO_CHANGE


def test_a_key_that_was_unknown_then_had_its_default(tmp_path: Path) -> None:
    RunFolder.open(config_in(tmp_path)).close()
    file = tmp_path / "run" / "config.yaml"
    stored = yaml.safe_load(file.read_text())
    del stored["algorithm"]["router_z_coef"]
    file.write_text(yaml.safe_dump(stored))
    config = config_in(tmp_path)
    config.algorithm.router_z_coef = 0.1
    with pytest.raises(ConfigError) as caught:
        RunFolder.open(config)
    assert str(caught.value) == (
        f"algorithm.router_z_coef: {tmp_path}/run was started without this key, which meant 0.0, got 0.1; put it back "
        "to go on with that run, or choose another run.name for a new one"
    )
    RunFolder.open(config_in(tmp_path)).close()
    with pytest.raises(ConfigError, match=r"^algorithm\.router_z_coef: .* was started with 0\.0, got 0\.1; put it"):
        RunFolder.open(config)


def test_a_failure_is_recorded_with_its_traceback(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError), RunFolder.open(config_in(tmp_path)):
        raise RuntimeError("diverged\nbadly")
    record = run_folder.read_state(tmp_path / "run")
    assert record is not None
    assert (record["state"], record["error"]) == ("failed", "diverged badly")
    assert "RuntimeError: diverged" in (tmp_path / "run" / "failure.txt").read_text()
    with RunFolder.open(config_in(tmp_path)) as folder:
        folder.finish(RESULT)
    assert not (tmp_path / "run" / "failure.txt").exists()


@pytest.mark.parametrize("signal", [KeyboardInterrupt, SystemExit])
def test_an_interrupt_is_no_failure(tmp_path: Path, signal: type[BaseException]) -> None:
    with pytest.raises(signal), RunFolder.open(config_in(tmp_path)):
        raise signal
    record = run_folder.read_state(tmp_path / "run")
    assert record is not None
    assert record["state"] == "interrupted"


def test_a_live_owner_is_not_disturbed(tmp_path: Path) -> None:
    with RunFolder.open(config_in(tmp_path)):
        with pytest.raises(ConfigError) as caught:
            RunFolder.open(config_in(tmp_path))
        me = current_process()
        assert str(caught.value) == (
            f"run.name: {tmp_path}/run is being run already, got its owner process {me.pid} on {me.host}; wait for it, "
            "stop it, or choose another run.name"
        )
    RunFolder.open(config_in(tmp_path)).close()


def test_a_dead_owners_folder_is_taken_over(tmp_path: Path) -> None:
    RunFolder.open(config_in(tmp_path)).close()
    write_owner(tmp_path / "run", dead_process())
    with RunFolder.open(config_in(tmp_path)) as folder:
        assert folder.is_resumed


def test_a_process_number_used_again_is_not_the_owner(tmp_path: Path) -> None:
    write_owner(tmp_path / "run", dataclasses.replace(current_process(), start_ticks=1))
    RunFolder.open(config_in(tmp_path)).close()


def test_a_reboot_ends_every_owner_and_another_machine_is_unknown() -> None:
    me = current_process()
    assert me.is_alive() is True
    assert dead_process().is_alive() is False
    assert dataclasses.replace(me, boot_id="former").is_alive() is False
    assert dataclasses.replace(me, boot_id="other", host="elsewhere").is_alive() is None
    assert dataclasses.replace(me, pid_namespace="pid:[1]", host="container").is_alive() is None


def test_a_killed_run_leaves_a_state_that_the_next_start_takes_over(tmp_path: Path) -> None:
    code = (
        "import os, sys; from rl.run_folder import RunFolder; from rl.config import RunConfig; c = RunConfig(); "
        f"c.run.root = {str(tmp_path)!r}; f = RunFolder.open(c); f.record_round(4); os.kill(os.getpid(), 9)"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == -9
    record = run_folder.read_state(tmp_path / "run")
    assert record is not None
    assert record["state"] == "running"
    with RunFolder.open(config_in(tmp_path)) as folder:
        assert folder.rounds_done == 4


def test_only_the_temporary_folders_of_the_dead_are_removed(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(run_folder, "_TEMP_ROOT", tmp_path)
    mine = run_folder.short_temp_folder()
    assert len(mine.name) == len("rl-") + 8
    write_owner(tmp_path / "rl-dead0000", dead_process())
    write_owner(tmp_path / "rl-unknown0", dataclasses.replace(current_process(), boot_id="b", host="elsewhere"))
    write_owner(tmp_path / "someone-else", dead_process())
    (tmp_path / "rl-nobodys0").mkdir()
    (tmp_path / "rl-link0000").symlink_to(tmp_path / "someone-else")
    assert run_folder.remove_dead_folders(tmp_path) == [tmp_path / "rl-dead0000"]
    left = {path.name for path in tmp_path.iterdir()}
    assert left == {mine.name, "rl-unknown0", "someone-else", "rl-nobodys0", "rl-link0000"}


def test_temporary_folders_are_short_enough_for_sockets() -> None:
    path = run_folder.short_temp_folder()
    try:
        assert len(str(path)) <= 16
        assert oct(path.stat().st_mode)[-3:] == "700"
    finally:
        (path / "owner.json").unlink()
        path.rmdir()

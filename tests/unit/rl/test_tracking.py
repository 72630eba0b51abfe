import logging
import os
from pathlib import Path
from typing import Any

import pytest

from rl.tracking import Tracker, TrackingChoice, TrackingError, TrackingMode, new_run_id, resolve_mode

OFFLINE = TrackingChoice(mode=TrackingMode.OFFLINE, reason="a test")
DISABLED = TrackingChoice(mode=TrackingMode.DISABLED, reason="a test")


class FakeWandbError(Exception):
    pass


class FakeRun:
    def __init__(self, fails: type[Exception] | None = None) -> None:
        self.fails = fails
        self.calls: list[tuple[str, Any]] = []
        self.summary: dict[str, Any] = {}

    def define_metric(self, name: str, step_metric: str | None = None) -> None:
        self.calls.append(("define_metric", (name, step_metric)))

    def log(self, data: dict[str, Any], *, step: int, commit: bool) -> None:
        self.calls.append(("log", (step, commit, data)))
        if self.fails:
            raise self.fails("disk full")

    def finish(self, exit_code: int) -> None:
        self.calls.append(("finish", exit_code))


class FakeWandb:
    Error = FakeWandbError

    class Settings:
        model_fields = ("console", "silent", "init_timeout")

        def __init__(self, **values: Any) -> None:
            self.values = values

    class Table:
        def __init__(self, columns: list[str], data: list[list[Any]]) -> None:
            self.columns, self.data = columns, data

    def __init__(self, *runs: FakeRun, fails: type[Exception] | None = None) -> None:
        self.runs = list(runs)
        self.fails = fails
        self.inits: list[dict[str, Any]] = []

    def init(self, **arguments: Any) -> FakeRun:
        self.inits.append(arguments)
        if self.fails:
            raise self.fails("no network")
        return self.runs.pop(0)


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch):
    def put(wandb: FakeWandb) -> FakeWandb:
        monkeypatch.setitem(__import__("sys").modules, "wandb", wandb)
        return wandb

    return put


def open_tracker(folder: Path, choice: TrackingChoice = OFFLINE, run_id: str = "abc") -> Tracker:
    return Tracker(folder, choice, project="p", run_id=run_id, name="n", config={"a": {"b": 1}}, tags=("t",))


def test_auto_is_online_with_a_key_and_offline_without(tmp_path: Path):
    home = {"HOME": str(tmp_path)}
    assert resolve_mode("auto", home).mode is TrackingMode.OFFLINE
    assert resolve_mode("auto", home).reason == "no WANDB_API_KEY and no netrc file"
    assert resolve_mode("auto", home | {"WANDB_API_KEY": "k"}).mode is TrackingMode.ONLINE
    assert resolve_mode("auto", home | {"WANDB_API_KEY": ""}).mode is TrackingMode.OFFLINE


def test_auto_reads_the_netrc_entry_of_the_wandb_host(tmp_path: Path):
    (tmp_path / ".netrc").write_text("machine api.wandb.ai login user password secret\n")
    home = {"HOME": str(tmp_path)}
    choice = resolve_mode("auto", home)
    assert choice == TrackingChoice(mode=TrackingMode.ONLINE, reason="netrc has an entry for api.wandb.ai")
    own = resolve_mode("auto", home | {"WANDB_BASE_URL": "https://wandb.example.org:8443"})
    assert own.mode is TrackingMode.OFFLINE
    assert "no entry for wandb.example.org" in own.reason
    (tmp_path / ".netrc").write_text("machine api.wandb.ai nonsense x\n")
    assert "cannot be read" in resolve_mode("auto", home).reason


def test_auto_follows_wandb_mode(tmp_path: Path):
    environ = {"HOME": str(tmp_path), "WANDB_API_KEY": "k"}
    assert resolve_mode("auto", environ | {"WANDB_MODE": "offline"}).mode is TrackingMode.OFFLINE
    assert resolve_mode("auto", environ | {"WANDB_MODE": "disabled"}).mode is TrackingMode.DISABLED
    assert resolve_mode("auto", environ | {"WANDB_MODE": "online"}).mode is TrackingMode.ONLINE


def test_a_requested_mode_is_taken_or_refused_never_replaced(tmp_path: Path):
    home = {"HOME": str(tmp_path)}
    assert resolve_mode("disabled", home | {"WANDB_API_KEY": "k"}).mode is TrackingMode.DISABLED
    assert resolve_mode("offline", home | {"WANDB_API_KEY": "k"}).mode is TrackingMode.OFFLINE
    with pytest.raises(TrackingError, match="online needs an API key, got none"):
        resolve_mode("online", home)
    with pytest.raises(TrackingError, match="unknown mode, got ofline; choose one of auto, online, offline, disabled"):
        resolve_mode("ofline", home)


def test_the_run_is_opened_by_id_under_the_run_folder(tmp_path: Path, install: Any, caplog: pytest.LogCaptureFixture):
    run = FakeRun()
    wandb = install(FakeWandb(run))
    with caplog.at_level(logging.INFO), open_tracker(tmp_path / "run"):
        pass
    (arguments,) = wandb.inits
    settings = arguments.pop("settings")
    assert arguments == {
        "project": "p", "id": "abc", "name": "n", "config": {"a": {"b": 1}}, "tags": ["t"],
        "dir": str(tmp_path / "run"), "mode": "offline", "resume": "allow", "reinit": "create_new",
    }  # fmt: skip
    assert settings.values == {"console": "off", "silent": True, "init_timeout": 60.0}
    assert run.calls[:2] == [("define_metric", ("round", None)), ("define_metric", ("*", "round"))]
    assert "wandb: offline, because a test" in caplog.messages


def test_a_round_is_logged_at_once_under_its_own_step(tmp_path: Path, install: Any):
    run = FakeRun()
    install(FakeWandb(run))
    with open_tracker(tmp_path) as tracker:
        tracker.log(4, {"reward/total": 0.5, "entropy": None})
        tracker.log_table("episodes/before", ["task", "answer"], [("t1", "x")])
    assert run.calls[2] == ("log", (4, True, {"round": 4, "reward/total": 0.5}))
    table = run.summary["episodes/before"]
    assert (table.columns, table.data) == (["task", "answer"], [["t1", "x"]])


def test_a_second_tracker_is_a_second_run(tmp_path: Path, install: Any):
    first, second = FakeRun(), FakeRun()
    wandb = install(FakeWandb(first, second))
    with open_tracker(tmp_path / "a", run_id="one") as tracker:
        tracker.log(0, {"lr": 1.0})
    with open_tracker(tmp_path / "b", run_id="two") as tracker:
        tracker.log(0, {"lr": 2.0})
    assert [(init["id"], init["dir"]) for init in wandb.inits] == [
        ("one", str(tmp_path / "a")), ("two", str(tmp_path / "b")),
    ]  # fmt: skip
    assert first.calls[-1] == second.calls[-1] == ("finish", 0)
    assert [call for call in second.calls if call[0] == "log"] == [("log", (0, True, {"round": 0, "lr": 2.0}))]


@pytest.mark.parametrize(
    ("error", "exit_code"),
    [
        (RuntimeError("boom"), 1),
        (KeyboardInterrupt(), 130),
        (SystemExit(3), 3),
        (SystemExit("no"), 1),
        (SystemExit(), 0),
    ],
)
def test_a_failed_run_is_finished_as_failed(tmp_path: Path, install: Any, error: BaseException, exit_code: int):
    run = FakeRun()
    install(FakeWandb(run))
    with pytest.raises(type(error)), open_tracker(tmp_path):
        raise error
    assert run.calls[-1] == ("finish", exit_code)


@pytest.mark.parametrize("kind", [OSError, FakeWandbError, TimeoutError, ConnectionResetError])
def test_a_wandb_failure_stops_tracking_once_and_not_training(
    tmp_path: Path, install: Any, caplog: pytest.LogCaptureFixture, kind: type[Exception]
):
    run = FakeRun(fails=kind)
    install(FakeWandb(run))
    with caplog.at_level(logging.WARNING), open_tracker(tmp_path) as tracker:
        assert tracker.is_active
        tracker.log(0, {"lr": 1.0})
        assert not tracker.is_active
        tracker.log(1, {"lr": 1.0})
        tracker.log_table("episodes/before", ["a"], [])
    assert [call[0] for call in run.calls].count("log") == 1
    (warning,) = caplog.messages
    assert warning.startswith(
        f"wandb: log failed, got {kind.__name__}: disk full; tracking stops here, training goes on"
    )


def test_a_mistake_of_the_caller_is_not_swallowed(tmp_path: Path, install: Any):
    install(FakeWandb(FakeRun(fails=TypeError)))
    with pytest.raises(TypeError, match="disk full"), open_tracker(tmp_path) as tracker:
        tracker.log(0, {"lr": 1.0})


def test_a_run_that_cannot_be_opened_is_an_error_with_a_remedy(tmp_path: Path, install: Any):
    install(FakeWandb(fails=FakeWandbError))
    with pytest.raises(TrackingError, match=r"could not be opened, got FakeWandbError: no network; .*wandb=offline"):
        open_tracker(tmp_path)
    assert "WANDB_DATA_DIR" not in os.environ


def test_disabled_tracking_never_imports_wandb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(__import__("sys").modules, "wandb", None)
    with open_tracker(tmp_path / "run", DISABLED) as tracker:
        tracker.log(0, {"lr": 1.0})
        tracker.log_table("episodes/before", ["a"], [["x"]])
        assert not tracker.is_active
    assert not (tmp_path / "run").exists()


def test_run_ids_are_fresh():
    assert new_run_id() != new_run_id()
    assert len(new_run_id()) == 8

import json
import os
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from rl.checkpoint import CheckpointError, Checkpoints, RunState, publish_folder, seal, verify_seal

STATE = RunState(next_round=6, data_cursor=120, weight_version=5, seed=3, wandb_id="abc")


def write(folder: Path) -> None:
    (folder / "weights").write_bytes(bytes(range(256)))
    (folder / "empty").touch()


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.fixture
def checkpoints(tmp_path: Path) -> Checkpoints:
    return Checkpoints(tmp_path / "run" / "checkpoints", keep=2)


def test_what_is_saved_is_what_is_loaded(checkpoints: Checkpoints):
    assert checkpoints.latest() is None
    folder = checkpoints.save(STATE, write)
    assert folder.name == "round-000006"
    assert checkpoints.latest() == (folder, STATE)
    assert (folder / "weights").read_bytes() == bytes(range(256))
    assert names(folder) == ["empty", "manifest.json", "state.json", "weights"]
    assert names(folder.parent) == ["round-000006"]


def test_the_manifest_lists_every_file_with_size_and_digest(checkpoints: Checkpoints):
    folder = checkpoints.save(STATE, write)
    manifest = json.loads((folder / "manifest.json").read_text())
    assert manifest.keys() == {"empty", "state.json", "weights"}
    assert manifest["weights"]["bytes"] == 256
    # python -c "import hashlib; print(hashlib.blake2b(b'').hexdigest()[:32])"
    assert manifest["empty"] == {"bytes": 0, "blake2b": "786a02f742015903c6c6fd852552d272"}


def test_the_newest_stays_with_as_many_as_are_kept(checkpoints: Checkpoints):
    for number in (5, 10, 100, 1000):
        folder = checkpoints.save(replace(STATE, next_round=number), write)
    assert names(folder.parent) == ["round-000100", "round-001000"]
    latest = checkpoints.latest()
    assert latest is not None
    assert latest[1].next_round == 1000


def test_keeping_one_keeps_the_one_just_written(tmp_path: Path):
    checkpoints = Checkpoints(tmp_path, keep=1)
    for number in (1, 2):
        checkpoints.save(replace(STATE, next_round=number), write)
    assert names(tmp_path) == ["round-000002"]


class Crash(BaseException):
    """Stands for the end of the process: nothing catches it."""


def crash(folder: Path) -> None:
    (folder / "weights").write_bytes(b"half")
    raise Crash


def test_a_crash_while_writing_leaves_the_checkpoint_of_before(checkpoints: Checkpoints):
    before = checkpoints.save(STATE, write)
    with pytest.raises(Crash):
        checkpoints.save(replace(STATE, next_round=11), crash)
    assert checkpoints.latest() == (before, STATE)
    assert names(before.parent) == ["round-000006"]  # the trace of the crash is gone


@pytest.mark.parametrize("step", range(12))
@pytest.mark.parametrize("again", [False, True], ids=["new round", "same round"])
def test_a_crash_at_any_step_of_saving_never_leaves_half_a_checkpoint(
    checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch, step: int, again: bool
):
    """The process ends before its `step`-th call that changes the disk; `latest` then is a whole checkpoint."""
    older, newer = replace(STATE, next_round=1), replace(STATE, next_round=6 if again else 7, wandb_id="new")
    checkpoints.save(older, write)
    checkpoints.save(STATE, write)
    calls = 0
    rmtree = shutil.rmtree

    def counted(function):
        def call(*args, **kwargs):
            nonlocal calls
            calls += 1
            if calls > step:
                if function is rmtree and args[0].is_dir():
                    min(args[0].iterdir()).unlink()  # it ends half-way through the folder
                raise Crash
            return function(*args, **kwargs)

        return call

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", counted(os.fsync))
        patch.setattr(Path, "rename", counted(Path.rename))
        patch.setattr(shutil, "rmtree", counted(shutil.rmtree))
        patch.setattr(Path, "write_text", counted(Path.write_text))
        try:
            checkpoints.save(newer, write)
        except Crash:
            pass
        else:
            assert step >= calls
    latest = checkpoints.latest()
    assert latest is not None
    folder, state = latest
    assert state in (older, STATE, newer)
    if not again:
        assert state != older  # the newest whole one is not lost
    assert (folder / "weights").read_bytes() == bytes(range(256))
    assert not [name for name in names(folder.parent) if name.startswith(".")]


def test_a_killed_process_leaves_a_whole_checkpoint(tmp_path: Path):
    """The same, without simulating: SIGKILL while one checkpoint after the other is written."""
    code = (
        "from pathlib import Path\nfrom rl.checkpoint import Checkpoints, RunState\n"
        f"c = Checkpoints(Path({str(tmp_path)!r}), keep=2)\n"
        "def write(folder):\n    [(folder / str(i)).write_bytes(bytes([i]) * 3000) for i in range(20)]\n"
        "for n in range(10**6):\n"
        "    c.save(RunState(next_round=n, data_cursor=n, weight_version=n, seed=0, wandb_id=''), write)\n"
        "    print(n, flush=True)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    for _ in range(5):
        done = int(process.stdout.readline())
    process.send_signal(signal.SIGKILL)
    process.wait()
    latest = Checkpoints(tmp_path, keep=2).latest()
    assert latest is not None
    assert latest[1].next_round >= done
    assert sum(path.stat().st_size for path in latest[0].glob("[0-9]*")) == 60_000


def test_a_folder_that_was_never_renamed_is_not_a_checkpoint(checkpoints: Checkpoints):
    folder = checkpoints.save(STATE, write)
    torn = folder.with_name(".round-000011.99")
    shutil.copytree(folder, torn)
    assert checkpoints.latest() == (folder, STATE)
    assert not torn.exists()
    shutil.rmtree(folder)
    assert checkpoints.latest() is None


def damage_bit(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-1] + b"\x00")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda f: damage_bit(f / "weights"), r"round-000006: weights is damaged, got digest [0-9a-f]{32}; remove "),
        (lambda f: (f / "weights").write_bytes(b"short"), r"round-000006: weights must have 256 bytes, got 5; remove "),
        (lambda f: (f / "weights").unlink(), r"round-000006: weights must have 256 bytes, got no file; remove "),
        (lambda f: damage_bit(f / "state.json"), r"round-000006: state\.json is damaged, "),
        (lambda f: (f / "manifest.json").unlink(), r"checkpoint: no manifest, got .*round-000006; remove "),
        (lambda f: (f / "manifest.json").write_text('{"wei'), r"round-000006: manifest\.json is damaged, got "),
    ],
    ids=["flipped", "short", "missing", "state", "no manifest", "torn manifest"],
)
def test_a_damaged_checkpoint_is_named_and_not_skipped(checkpoints: Checkpoints, damage, message: str):
    checkpoints.save(replace(STATE, next_round=1), write)
    folder = checkpoints.save(STATE, write)
    verify_seal(folder)
    damage(folder)
    with pytest.raises(CheckpointError, match=message):
        checkpoints.latest()


def test_the_state_of_another_release_is_named(checkpoints: Checkpoints):
    folder = checkpoints.save(STATE, write)
    (folder / "state.json").write_text(json.dumps({"next_round": 6, "step": 4}))
    seal(folder)
    with pytest.raises(CheckpointError, match=r"round-000006: state\.json must hold the counters of a run, got .*step"):
        checkpoints.latest()


def test_publishing_a_folder_replaces_the_one_of_its_name(tmp_path: Path):
    for text in ("one", "two"):
        staging = tmp_path / ".staging"
        staging.mkdir()
        (staging / "file").write_text(text)
        publish_folder(staging, tmp_path / "final")
    assert names(tmp_path) == ["final"]
    assert (tmp_path / "final" / "file").read_text() == "two"


def test_files_in_folders_below_are_sealed_too(checkpoints: Checkpoints):
    def with_folder(folder: Path) -> None:
        write(folder)
        (folder / "reference").mkdir()
        write(folder / "reference")

    folder = checkpoints.save(STATE, with_folder)
    assert checkpoints.latest() == (folder, STATE)
    assert "reference/weights" in json.loads((folder / "manifest.json").read_text())
    (folder / "reference" / "weights").write_bytes(bytes(256))
    with pytest.raises(CheckpointError, match=r"^checkpoint round-000006: reference/weights is damaged, got digest "):
        checkpoints.latest()

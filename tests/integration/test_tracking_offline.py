"""The real W&B client, offline: what is on disk after a kill, after a resume, and when its service dies."""

import json
import os
import signal
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from wandb.proto import wandb_internal_pb2

SCRIPT = """
import json, os, signal, sys, time
from pathlib import Path
from rl.tracking import Tracker, TrackingChoice, TrackingMode

folder, first, last, end = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
choice = TrackingChoice(mode=TrackingMode.OFFLINE, reason="a test")
with Tracker(folder, choice, project="p", run_id="abc", name="n", config={"lr": 0.5}) as tracker:
    for number in range(first, last):
        tracker.log(number, {"reward/total": number / 8, "entropy": None})
    tracker.log_table("episodes/before", ["answer"], [["</script>"]])
    if end == "kill":
        time.sleep(3)
        os.kill(os.getpid(), signal.SIGKILL)
    if end == "lose_service":
        for entry in Path("/proc").glob("[0-9]*"):
            try:
                status = (entry / "stat").read_text().rsplit(")", 1)
            except OSError:
                continue
            if int(status[1].split()[1]) == os.getpid() and "wandb-core" in status[0]:
                os.kill(int(entry.name), signal.SIGKILL)
        time.sleep(0.5)
        for number in range(last, last + 3):
            tracker.log(number, {"reward/total": 1.0})
            time.sleep(0.2)
        assert not tracker.is_active
        print("training went on")
    if end == "fail":
        raise RuntimeError("boom")
"""


def track(folder: Path, first: int, last: int, end: str) -> subprocess.CompletedProcess[str]:
    root = Path(__file__).parents[2]
    environ = {**os.environ, "PYTHONPATH": str(root), "HOME": str(folder / "home")}
    command = [sys.executable, "-c", SCRIPT, str(folder), str(first), str(last), end]
    return subprocess.run(command, env=environ, cwd=root, capture_output=True, text=True, timeout=120, check=False)


def records(path: Path) -> Iterator[Any]:
    """The records of a `.wandb` file: LevelDB log framing (7-byte headers in 32 KiB blocks) around protobuf."""
    data, position, buffer = path.read_bytes(), 7, b""
    while position + 7 <= len(data):
        left = 32768 - position % 32768
        if left < 7:
            position += left
            continue
        _, length, kind = struct.unpack("<IHB", data[position : position + 7])
        piece = data[position + 7 : position + 7 + length]
        position += 7 + length
        buffer = piece if kind in (1, 2) else buffer + piece
        if kind in (1, 4):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(buffer)
            yield record


def history(path: Path) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for record in records(path):
        if record.WhichOneof("record_type") == "history":
            items = record.history.item
            rows.append({item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in items})
    return rows


def exit_codes(path: Path) -> list[int]:
    return [record.exit.exit_code for record in records(path) if record.WhichOneof("record_type") == "exit"]


def test_a_killed_and_resumed_run_keeps_its_id_and_its_rounds(tmp_path: Path):
    assert track(tmp_path, 0, 3, "kill").returncode == -signal.SIGKILL
    (killed,) = tmp_path.glob("wandb/offline-run-*-abc/run-abc.wandb")
    assert [(row["round"], row["_step"], row["reward/total"]) for row in history(killed)] == [
        (0, 0, 0.0), (1, 1, 0.125), (2, 2, 0.25),
    ]  # fmt: skip
    assert exit_codes(killed) == []

    resumed = track(tmp_path, 3, 5, "finish")
    assert (resumed.returncode, resumed.stdout, resumed.stderr) == (0, "", "")
    (second,) = set(tmp_path.glob("wandb/offline-run-*-abc/run-abc.wandb")) - {killed}
    assert [(row["round"], row["_step"]) for row in history(second)] == [(3, 3), (4, 4)]
    assert all("entropy" not in row for row in history(second))
    assert exit_codes(second) == [0]
    (table,) = second.parent.rglob("*.table.json")
    assert json.loads(table.read_text())["data"] == [["</script>"]]
    # Nothing outside the run's folder: neither a cache nor staged tables in the home directory.
    assert not (tmp_path / "home").exists()


def test_a_failed_run_is_not_shown_as_finished(tmp_path: Path):
    failed = track(tmp_path, 0, 1, "fail")
    assert "RuntimeError: boom" in failed.stderr
    (path,) = tmp_path.glob("wandb/offline-run-*-abc/run-abc.wandb")
    assert exit_codes(path) == [1]


def test_training_outlives_the_wandb_service(tmp_path: Path):
    lost = track(tmp_path, 0, 2, "lose_service")
    assert lost.returncode == 0, lost.stderr
    assert lost.stdout == "training went on\n"
    assert lost.stderr.count("tracking stops here, training goes on") == 1

"""The two scripts that fail a build: sizes, and the rise of a run."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parents[3] / "scripts"


def script(name: str, *arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPTS / name), *arguments]
    env = {"PYTHONPATH": str(SCRIPTS.parent), "PATH": "/usr/bin:/bin:/usr/local/bin"}
    return subprocess.run(command, capture_output=True, text=True, cwd=cwd, env=env, check=False)


def write_run(folder: Path, *, state: str = "finished", before: float = 0.5, after: float = 0.9) -> None:
    folder.mkdir(parents=True)
    (folder / "run.json").write_text(json.dumps({"state": state, "rounds_done": 25, "starts": []}))
    if state == "finished":
        result = {"rounds": 25, "held_out_before": before, "held_out_after": after}
        result |= {"reward_first": 0.1, "reward_last": 0.2, "minutes": 8.0}
        (folder / "result.json").write_text(json.dumps(result))


def test_a_rise_of_enough_points_passes(tmp_path: Path) -> None:
    write_run(tmp_path / "ci")
    done = script("check_rise.py", "ci", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (
        0,
        "ci: held-out 50.0% -> 90.0%, +40.0 points in 25 rounds, 8.0 minutes (at least 15 points wanted)\n",
    )


@pytest.mark.parametrize(
    ("run", "code", "line"),
    [
        ({"after": 0.64}, 1, "ci: rose by less than 15 points, got held-out 50.0% -> 64.0%, +14.0 points"),
        ({"after": 0.2}, 1, "ci: rose by less than 15 points, got held-out 50.0% -> 20.0%, -30.0 points"),
        ({"state": "failed"}, 1, "ci: not finished, got the state failed; see its failure.txt"),
        (None, 2, "ci: no run there, got no run.json; name the folder of a run"),
    ],
)
def test_anything_else_fails(tmp_path: Path, run: dict | None, code: int, line: str) -> None:
    if run is not None:
        write_run(tmp_path / "ci", **run)
    done = script("check_rise.py", "ci", cwd=tmp_path)
    assert done.returncode == code
    assert done.stderr.startswith(line)


def test_a_long_file_needs_a_reason(tmp_path: Path) -> None:
    subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True)
    (tmp_path / "long.py").write_text("x = 1\n" * 501)
    (tmp_path / "excused.py").write_text('"""A table.\n\nsize: one row for each case."""\n' + "x = 1\n" * 501)
    (tmp_path / "fits.cpp").write_text("int x;\n" * 500)
    subprocess.run(["git", "add", "."], cwd=tmp_path, check=True)
    done = script("check_sizes.py", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (
        1,
        "long.py: more than 500 lines, got 501; split it, or state `size: <reason>` in its first 20 lines\n",
    )
    (tmp_path / "long.py").write_text("x = 1\n")
    assert script("check_sizes.py", cwd=tmp_path).returncode == 0

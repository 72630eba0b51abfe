"""Kill -9 the driver in every stage: nothing is left, and the same command ends where an undisturbed run ends."""

from __future__ import annotations

import hashlib
import json
import os
import random
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

pytestmark = [pytest.mark.ray, pytest.mark.slow]

ROOT = Path(__file__).parents[2]
GONE_WITHIN_S = 15.0
UNREPEATABLE = ("time/", "tokens_per_s", "memory/")

FILES = (
    "model.safetensors", "optimizer.safetensors", "tokenizer.json", "value_head.safetensors",
    "adapters.safetensors", "published/model.safetensors",
)  # fmt: skip

SMALL = [
    "+experiment=coding",
    "run.rounds=4",
    "run.checkpoint_every=2",
    "run.eval_every=3",
    "model.num_layers=2",
    "model.hidden_size=64",
    "model.expert_hidden_size=64",
    "rollout.prompts_per_round=3",
    "rollout.group_size=4",
    "evaluation.num_tasks=8",
    "evaluation.during_num_tasks=4",
    "warm_start.num_demonstrations=96",
    "warm_start.steps=12",
    "warm_start.warmup_steps=4",
    "warm_start.batch_size=16",
    "warm_start.checkpoint_every=4",
    "reward=custom",
    "reward.target=tests.integration.dense_reward:answer_length",
    "logging.wandb=offline",
]


TWO_RANKS = ["cluster=local_ep2", "run.rounds=20", "run.checkpoint_every=4", "run.eval_every=10"]


def command(folder: Path, *more: str, kill: tuple[str, int] | None = None) -> list[str]:
    arguments = [*SMALL, f"run.root={folder}", f"warm_start.cache={folder}/warm", *more]
    if kill is None:
        return [sys.executable, "-m", "rl.train", *arguments]
    return [sys.executable, "-m", "tests.integration.kill_at", kill[0], str(kill[1]), "--", *arguments]


def start(argv: list[str], marker: str) -> subprocess.Popen[str]:
    """The run, with a marker in the environment that every process it starts inherits (sandboxes clear theirs)."""
    environ = {**os.environ, "RL_TEST_MARKER": marker}
    return subprocess.Popen(
        argv, cwd=ROOT, env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )


def descendants(pid: int) -> list[psutil.Process]:
    try:
        return psutil.Process(pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def run_to_the_end(folder: Path, *more: str, kill: tuple[str, int] | None = None) -> str:
    argv = command(folder, *more, kill=kill)
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


def outcome(folder: Path) -> dict[str, object]:
    """What a run computed: every repeatable metric of every round, and the bytes of its last checkpoint."""
    run = folder / "coding"
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    kept = [{k: v for k, v in row.items() if not k.startswith(UNREPEATABLE)} for row in rows]
    last = max((run / "checkpoints").glob("round-*"))
    files = {name: hashlib.sha256((last / name).read_bytes()).hexdigest() for name in FILES if (last / name).is_file()}
    after = json.loads((run / "held_out_after.json").read_text())
    episodes = [[turn["answer"] for turn in episode["turns"]] for episode in after["episodes"]]
    return {"rows": kept, "files": files, "answers": episodes}


compares_with_the_undisturbed_run = pytest.mark.xdist_group("undisturbed")
"""One process makes that run for all tests that compare with it."""


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, object]:
    folder = tmp_path_factory.mktemp("undisturbed")
    run_to_the_end(folder)
    result = outcome(folder)
    rows = result["rows"]
    assert isinstance(rows, list)
    assert [row["round"] for row in rows] == [0, 1, 2, 3, 4]
    assert all(row["codes_changed_frac"] > 0 for row in rows[1:]), "the control: every round trains"
    return result


@compares_with_the_undisturbed_run
@pytest.mark.timeout(420)
@pytest.mark.parametrize(
    ("stage", "number"),
    [("demonstrations", 1), ("warm_start", 7), ("rollout", 3), ("update", 3), ("publish", 4), ("checkpoint", 3)],
)
def test_killed_run_resumes_and_ends_equal(
    stage: str, number: int, undisturbed: dict[str, object], tmp_path: Path
) -> None:
    process = start(command(tmp_path, kill=(stage, number)), marker=f"{stage}-{os.getpid()}")
    seen: dict[int, psutil.Process] = {}
    deadline = time.monotonic() + 180
    while process.poll() is None:
        assert time.monotonic() < deadline, "the run was not killed in its stage"
        seen |= {child.pid: child for child in descendants(process.pid)}
        time.sleep(0.2)
    assert process.returncode == -9, process.stdout.read() if process.stdout else ""
    assert len(seen) >= 5, "the control: Ray, workers and sandboxes were seen running"
    killed_at = time.monotonic()
    alive = [each for each in seen.values() if each.is_running()]
    while alive and time.monotonic() < killed_at + GONE_WITHIN_S:
        time.sleep(0.2)
        alive = [each for each in alive if each.is_running() and each.status() != psutil.STATUS_ZOMBIE]
    assert not alive, f"left after {GONE_WITHIN_S} s: {alive}"

    run_to_the_end(tmp_path)
    assert outcome(tmp_path) == undisturbed
    leftovers = [path for path in Path("/tmp").glob("rl-*") if (path / "owner.json").is_file()]
    assert not [p for p in leftovers if json.loads((p / "owner.json").read_text())["pid"] == process.pid]


@pytest.mark.timeout(660)
@pytest.mark.parametrize("algorithm", ["ppo", "dapo"])
def test_a_reference_a_value_head_and_further_tasks_survive_a_kill(algorithm: str, tmp_path: Path) -> None:
    """Killed in round 4, after the checkpoint of round 2: critic, reference and cursor go on from it."""
    more = [
        f"algorithm={algorithm}",
        "algorithm.kl_coef=0.1",
        "reward.target=tests.integration.dense_reward:every_third_length",
    ]
    run_to_the_end(tmp_path / "undisturbed", *more)
    expected = outcome(tmp_path / "undisturbed")
    rows = expected["rows"]
    assert isinstance(rows, list)
    assert all(row["kl/reference_policy"] > 0 for row in rows[1:] if "loss/kl" in row)
    if algorithm == "ppo":
        assert all(row["loss/value"] > 0 for row in rows[1:]), "the control: the critic learns"
    else:
        assert sum(row["groups/resampled"] for row in rows[1:3]) > 0, "the control: the cursor is no formula"
    process = start(command(tmp_path / "killed", *more, kill=("update", 4)), marker=f"{algorithm}-{os.getpid()}")
    output, _ = process.communicate(timeout=240)
    assert process.returncode == -9, output
    run_to_the_end(tmp_path / "killed", *more)
    assert outcome(tmp_path / "killed") == expected


@compares_with_the_undisturbed_run
@pytest.mark.timeout(660)
@pytest.mark.parametrize("setting", ["rounding=stochastic", "hysteresis=0.02"])
def test_codes_that_the_masters_do_not_tell_survive_a_kill(
    setting: str, undisturbed: dict[str, object], tmp_path: Path
) -> None:
    """Killed in round 4: rounds 3 and 4 go on from the published bytes in the checkpoint of round 2."""
    more = f"learner.quantization.{setting}"
    run_to_the_end(tmp_path / "undisturbed", more)
    expected, nearest = outcome(tmp_path / "undisturbed"), undisturbed["rows"]
    rows, files = expected["rows"], expected["files"]
    assert isinstance(rows, list)
    assert isinstance(nearest, list)
    assert isinstance(files, dict)
    assert "published/model.safetensors" in files
    assert {row["parity/max_abs_nats"] for row in rows[1:]} == {row["parity/max_abs_nats"] for row in nearest[1:]}
    # The control: in the same first update, as many codes move as the setting has it.
    moved, usual = rows[1]["codes_changed_frac"], nearest[1]["codes_changed_frac"]
    assert 0 < moved < usual if setting.startswith("hysteresis") else moved > 2 * usual, (moved, usual)
    process = start(command(tmp_path / "killed", more, kill=("update", 4)), marker=f"{setting}-{os.getpid()}")
    output, _ = process.communicate(timeout=240)
    assert process.returncode == -9, output
    run_to_the_end(tmp_path / "killed", more)
    assert outcome(tmp_path / "killed") == expected


@compares_with_the_undisturbed_run
@pytest.mark.timeout(660)
def test_held_back_versions_make_samples_so_stale_and_survive_a_kill(
    undisturbed: dict[str, object], tmp_path: Path
) -> None:
    """Killed in round 4: the checkpoint of round 2 holds the versions 0 and 1, which rounds 3 and 4 sample with."""
    more = ["rollout.hold_back_versions=2", "algorithm.importance=truncate"]
    run_to_the_end(tmp_path / "undisturbed", *more)
    expected = outcome(tmp_path / "undisturbed")
    rows, fresh = expected["rows"], undisturbed["rows"]
    assert isinstance(rows, list)
    assert isinstance(fresh, list)
    assert [row["staleness/mean"] for row in rows[1:]] == [0.0, 1.0, 2.0, 2.0]
    assert [row["staleness/mean"] for row in fresh[1:]] == [0.0] * 4
    assert rows[0] == fresh[0]
    assert rows[1]["reward/total"] == fresh[1]["reward/total"], "the first round runs the start in both"
    assert [row["publish/bytes"] > 0 for row in rows[1:]] == [False, False, True, True]
    # The control: the same bytes on both sides, and logprobs apart where, and only where, the versions are.
    assert [row["parity/max_abs_nats"] > 0 for row in rows[1:]] == [False, True, True, True]
    assert [row["importance/mean"] == 1.0 for row in rows[1:]] == [True, False, False, False]
    process = start(command(tmp_path / "killed", *more, kill=("update", 4)), marker=f"held-{os.getpid()}")
    output, _ = process.communicate(timeout=240)
    assert process.returncode == -9, output
    (checkpoint,) = (tmp_path / "killed" / "coding" / "checkpoints").glob("round-*")
    assert sorted(path.name for path in (checkpoint / "held_back").iterdir()) == ["0", "1"]
    run_to_the_end(tmp_path / "killed", *more)
    assert outcome(tmp_path / "killed") == expected


@pytest.mark.timeout(660)
def test_a_run_whose_learner_rank_is_killed_goes_on_by_itself_and_ends_equal(tmp_path: Path) -> None:
    """Twenty rounds of two ranks that share the experts out; one is killed in some round between two checkpoints."""
    run_to_the_end(tmp_path / "undisturbed", *TWO_RANKS)
    expected = outcome(tmp_path / "undisturbed")
    rows = expected["rows"]
    assert isinstance(rows, list)
    assert [row["round"] for row in rows] == list(range(21))
    assert {row["parity/max_abs_nats"] for row in rows[1:]} == {0.0}
    number = random.Random().choice([6, 7, 8, 10, 11, 12, 14, 15])
    said = run_to_the_end(tmp_path / "killed", *TWO_RANKS, kill=("rank", number))
    assert "learner: rank 1 died while it should update" in said, number
    assert "starting again from the last checkpoint" in said
    assert outcome(tmp_path / "killed") == expected, number

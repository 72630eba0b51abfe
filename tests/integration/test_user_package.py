"""A user's environment with tools and reward, in a package that pip installs, train by command line only."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from rl.run_folder import read_result

pytestmark = [pytest.mark.ray, pytest.mark.slow]

ROOT = Path(__file__).parents[2]
(LEDGER,) = (
    block
    for block in re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    if "class Ledger" in block
)
REWARD = """
def paid(task, trajectory, evidence, bonus=0.5):
    return evidence.hidden.fraction + bonus * sum(turn.num_calls for turn in evidence.turns)
"""
PROJECT = """
[build-system]
requires = ["setuptools"]
build-backend = "setuptools.build_meta"

[project]
name = "my-ledger"
version = "1"

[tool.setuptools]
packages = ["my_ledger"]
"""
SHORT = (
    "run.rounds=1", "run.eval_every=1", "model.num_layers=2", "model.hidden_size=64", "model.expert_hidden_size=64",
    "rollout.prompts_per_round=3", "rollout.group_size=4", "evaluation.num_tasks=4", "evaluation.during_num_tasks=4",
    "warm_start.num_demonstrations=64", "warm_start.steps=30", "warm_start.warmup_steps=4", "warm_start.batch_size=16",
    "warm_start.tokenizer_vocab_size=320", "logging.wandb=disabled",
)  # fmt: skip


@pytest.fixture
def environ(tmp_path):
    source, site = tmp_path / "source", tmp_path / "site"
    package = source / "my_ledger"
    package.mkdir(parents=True)
    (source / "pyproject.toml").write_text(PROJECT)
    (package / "__init__.py").write_text("")
    (package / "world.py").write_text(LEDGER)
    (package / "reward.py").write_text(REWARD)
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    subprocess.run([*pip, "--target", str(site), str(source)], check=True, timeout=120)
    path = os.pathsep.join(filter(None, [str(site), os.environ.get("PYTHONPATH")]))
    return {**os.environ, "PYTHONPATH": path}


def test_an_installed_environment_and_reward_train(environ, tmp_path):
    own = ("env=custom", "env.target=my_ledger.world:Ledger", "env.max_turns=3")
    judged = ("reward=custom", "reward.target=my_ledger.reward:paid", "+reward.params.bonus=0.25")
    where = (f"run.root={tmp_path}", "run.name=ledger", f"warm_start.cache={tmp_path / 'warm'}")
    argv = [sys.executable, "-m", "rl.train", *own, *judged, *where, *SHORT]
    done = subprocess.run(argv, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert read_result(tmp_path / "ledger") is not None
    demonstrated = next(line for line in done.stdout.splitlines() if "demonstrations" in line)
    assert "100.0% of them right" in demonstrated
    after = json.loads((tmp_path / "ledger" / "held_out_after.json").read_text())
    assert after["episodes"]
    (start,) = (tmp_path / "warm").glob("*/tokenizer.json")
    assert "<call>" in [token["content"] for token in json.loads(start.read_text())["added_tokens"]]

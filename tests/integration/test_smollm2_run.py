"""Two rounds with a real small model: the command of the README, with fewer and shorter episodes."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from model.config import ComputeDtype
from model.kernels.cpu.isa import available_isas
from rl.parity import BOUNDS, EXACT

CHECKPOINT = Path("runs/models/smollm2_moe")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.ray,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not CHECKPOINT.is_dir(), reason="needs its checkpoint: run `make model-smollm2`"),
]

SHORT = [
    "rollout.prompts_per_round=2", "rollout.group_size=3", "env.max_turns=1", "env.max_tokens_per_turn=40",
    "algorithm.num_minibatches=1", "evaluation.num_tasks=2", "evaluation.during_num_tasks=2", "run.rounds=2",
]  # fmt: skip


def test_two_rounds_of_the_upcycled_model_pass_the_gate_and_leave_a_checkpoint(tmp_path):
    command = [sys.executable, "-m", "rl.train", "+experiment=coding", "model=smollm2_moe", *SHORT]
    done = subprocess.run(
        [*command, f"run.root={tmp_path}", "run.name=short"],
        capture_output=True,
        text=True,
        timeout=800,
        check=False,
        env={**os.environ, "WANDB_MODE": "offline"},
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert "chat format smollm2: writes what the checkpoint's chat template does" in done.stdout + done.stderr
    rows = [json.loads(line) for line in (tmp_path / "short" / "metrics.jsonl").read_text().splitlines()]
    rounds = [row for row in rows if row["round"] > 0]
    assert [row["round"] for row in rounds] == [1, 2]
    bounds = EXACT if available_isas() else BOUNDS[ComputeDtype.fp32]
    for row in rounds:
        assert row["tokens/sampled"] > 20
        assert row["parity/mean_abs_nats"] <= bounds.mean_abs_nats
        assert row["parity/max_abs_nats"] <= bounds.max_abs_nats
        assert row["parity/flipped_routes"] >= 0  # counted, and held to its bound by the gate that the run has passed
        assert row["episodes/masked"] == 0
    assert (tmp_path / "short" / "checkpoints" / "round-000003" / "model.safetensors").is_file()

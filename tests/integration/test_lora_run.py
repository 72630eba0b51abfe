"""A run of adapters on a frozen base: the gate is exact, only adapters travel, and a killed run ends equal."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from model.checkpoint import load_model
from model.config import LoraConfig
from model.export import main
from model.lora import adapter_shapes
from tests.integration.test_resume import command as run_command
from tests.integration.test_resume import outcome, run_to_the_end, start

pytestmark = [pytest.mark.ray, pytest.mark.slow]

LORA = ["learner.lora.rank=8", "algorithm.kl_coef=0.1", "algorithm.num_minibatches=1"]


@pytest.mark.timeout(660)
@pytest.mark.parametrize("more", [[], ["cluster=local_ep2"]], ids=["one rank", "two ranks share the experts"])
def test_a_killed_run_of_adapters_ends_equal(more: list[str], tmp_path: Path) -> None:
    run_to_the_end(tmp_path / "undisturbed", *LORA, *more)
    expected = outcome(tmp_path / "undisturbed")
    rows = expected["rows"]
    assert isinstance(rows, list)
    assert [row["round"] for row in rows] == [0, 1, 2, 3, 4]
    assert {row["parity/max_abs_nats"] for row in rows[1:]} == {0.0}
    assert all(row["grad_norm"] > 0 for row in rows[1:]), "the control: every round trains the adapters"
    assert rows[1]["kl/reference_policy"] == 0, "the reference is the base, where the run starts"
    assert all(row["kl/reference_policy"] > 0 for row in rows[2:])
    checkpoints = tmp_path / "undisturbed" / "coding" / "checkpoints"
    model = load_model(checkpoints / "base").config
    numbers = [_product(shape) for shape in adapter_shapes(model, LoraConfig(rank=8)).values()]
    assert {row["publish/bytes"] for row in rows[1:]} == {2 * sum(numbers)}, "adapters in bf16, and nothing else"
    last = max(checkpoints.glob("round-*"))
    assert main([str(last), str(tmp_path / "merged"), "--format", "mxfp4"]) == 0
    assert load_model(tmp_path / "merged").config == model

    argv = run_command(tmp_path / "killed", *LORA, *more, kill=("update", 4))
    process = start(argv, marker=f"lora-{os.getpid()}")
    output, _ = process.communicate(timeout=240)
    assert process.returncode == -9, output
    run_to_the_end(tmp_path / "killed", *LORA, *more)
    assert outcome(tmp_path / "killed") == expected
    manifest = json.loads((last / "manifest.json").read_text())
    assert "adapters.safetensors" in manifest
    assert "model.safetensors" not in manifest


def _product(shape: tuple[int, ...]) -> int:
    total = 1
    for size in shape:
        total *= size
    return total

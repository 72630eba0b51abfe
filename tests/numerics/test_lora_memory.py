"""What a learner process grows by, with adapters on a frozen base and without."""

from __future__ import annotations

import dataclasses
import gc
import json
import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import torch

from model.checkpoint import save_model
from model.config import KernelChoice, LoraConfig, ModelConfig
from model.size import ModelSize, num_adapter_parameters
from model.snapshot import published_view
from model.transformer import Transformer, init_weights
from rl.learner.deepspeed import OptimizerSettings, Rendezvous
from rl.learner.learner import Learner, LearnerSpec
from tests.numerics.test_learner import sample
from tests.ports import free_port

MODEL = ModelConfig(
    vocab_size=64, hidden_size=256, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=64, expert_hidden_size=512,
    num_experts=64, num_experts_per_tok=2, max_positions=64,
)  # fmt: skip
LORA = LoraConfig(rank=4)


def grown_bytes(start: Path, rank: int) -> int:
    """Resident memory that a learner holds after a step of maximum likelihood; in a process of its own."""
    argv = [sys.executable, "-m", "tests.numerics.test_lora_memory", str(start), str(rank)]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
def test_a_frozen_base_has_no_masters_gradients_or_moments(tmp_path: Path) -> None:
    model = Transformer(MODEL)
    init_weights(model, 0)
    published = published_view({name: p.detach() for name, p in model.named_parameters()})
    start = tmp_path / "start"
    start.mkdir()
    save_model(start, MODEL, published, {})
    whole, adapted = grown_bytes(start, 0), grown_bytes(start, LORA.rank)
    parameters = ModelSize.of(MODEL).num_total
    trained = num_adapter_parameters(MODEL, LORA)
    assert trained < 0.05 * parameters
    # Master, two moments and gradient are 16 bytes a parameter, without the view; a base is its bytes and those packed
    # for kernels: 1.1 together. The rest is what the start was read into, as far as the allocator keeps it.
    assert whole > 16 * parameters, whole
    assert adapted < 4 * parameters, adapted
    assert adapted < whole / 4, (adapted, whole)


def meeting() -> Rendezvous:
    return Rendezvous(rank=0, world_size=1, address="127.0.0.1", port=free_port())


def main(start: Path, rank: int) -> None:
    torch.set_num_threads(1)
    spec = LearnerSpec(
        model=MODEL,
        optimizer=OptimizerSettings(beta1=0.9, beta2=0.95, weight_decay=0.0, max_grad_norm=1.0, zero_stage=1),
        start=start,
        num_threads=1,
        micro_batch_tokens=10_000,
        kernels=KernelChoice.auto,
        lora=LoraConfig(rank=rank),
    )
    # What the libraries take is no part of the comparison, so a small learner loads them first.
    small = dataclasses.replace(MODEL, num_experts=2)
    model = Transformer(small)
    init_weights(model, 0)
    folder = start.parent / f"small-{rank}"
    folder.mkdir()
    save_model(folder, small, dict(model.named_parameters()), {})
    first = Learner(dataclasses.replace(spec, model=small, start=folder), meeting())
    first.fit([sample(0, 24)], 1e-3)
    process = psutil.Process(os.getpid())
    before = process.memory_info().rss
    learner = Learner(spec, meeting())
    for _ in range(2):
        learner.fit([sample(0, 24)], 1e-3)
    gc.collect()
    sys.stdout.write(f"{process.memory_info().rss - before}\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))

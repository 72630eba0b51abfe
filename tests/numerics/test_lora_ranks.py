"""Adapters on two ranks that share the experts, and with them their adapters, out, against the same on one rank."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from model.adapter_file import ADAPTERS_FILE, BASE_FOLDER
from model.checkpoint import save_model
from model.config import Family, LoraConfig, LoraTargets
from model.lora import adapter_shapes
from rl.algorithms.config import AlgorithmConfig
from rl.learner.config import ActivationCheckpointing, PlacementConfig, PlacementKind
from rl.parity import ParityReport
from tests.numerics import ranks
from tests.numerics.families import MINI, make_model
from tests.numerics.ranks import Case, Found
from tests.numerics.test_expert_parallel import BALANCE, EVERY_FAMILY, TOLERANCE, assert_close, sample
from tests.numerics.test_placement import assert_same

LORA = LoraConfig(rank=4, alpha=8.0)
PARTS: dict[str, Any] = {
    t.value: LoraConfig(rank=4, alpha=8.0, targets=t) for t in (LoraTargets.attention, LoraTargets.experts)
}


@pytest.fixture
def common(tmp_path: Path) -> dict[str, Any]:
    """What all cases share but the family's model."""
    return {"start": tmp_path / "start", "algorithm": AlgorithmConfig(kl_coef=0.1), "lora": LORA}


def of_family(family: Family, common: dict[str, Any]) -> dict[str, Any]:
    config = MINI[family]
    common["start"].mkdir()
    save_model(common["start"], config, dict(make_model(config).named_parameters()), {})
    samples = tuple(sample(i, 12 + i, config) for i in range(5))
    return {**common, "model": config, "samples": samples, "replay": True, "balance": BALANCE}


def folder(path: Path) -> Path:
    path.mkdir(parents=True)
    return path


def logprobs_of(found: Found) -> ParityReport:
    """All but the entropy, whose sum is in the order of the micro-batches."""
    assert found.parity is not None
    return dataclasses.replace(found.parity, entropy=0.0)


@pytest.mark.parametrize("family", EVERY_FAMILY)
@pytest.mark.parametrize("zero_stage", [1, 2])
def test_two_ranks_that_share_the_experts_out_are_one(
    family: Family, zero_stage: int, common: dict[str, Any], tmp_path: Path
):
    common = {**of_family(family, common), "zero_stage": zero_stage}
    saved = folder(tmp_path / "one" / "checkpoint")
    one = ranks.run(
        [
            Case(**common, name="five steps", sgd=True, num_steps=5, max_grad_norm=0.5),
            Case(**common, name="adam", num_steps=2, save=saved),
            Case(**common, name="next", load=saved),
            *(Case(**common | {"lora": lora}, name=name, sgd=True, num_steps=2) for name, lora in PARTS.items()),
        ],
        1,
        tmp_path / "alone",
    )
    again = folder(tmp_path / "two" / "checkpoint")
    two = ranks.run(
        [
            Case(**common, name="five steps", sgd=True, num_steps=5, max_grad_norm=0.5, expert_parallel=2),
            Case(**common, name="each all experts", sgd=True, num_steps=5, max_grad_norm=0.5),
            Case(**common, name="next", load=saved, expert_parallel=2),
            Case(**common, name="again", load=saved, num_steps=0, save=again, expert_parallel=2),
            *(
                Case(**common | {"lora": lora}, name=name, sgd=True, num_steps=2, expert_parallel=2)
                for name, lora in PARTS.items()
            ),
        ],
        2,
        tmp_path / "together",
    )
    for name in ("five steps", "each all experts", *PARTS):
        got, expected = two[name], one["five steps" if name == "each all experts" else name]
        assert logprobs_of(got) == logprobs_of(expected), "the same logprobs, base and routes, to the last bit"
        np.testing.assert_allclose(got.losses[0], expected.losses[0], rtol=TOLERANCE, atol=TOLERANCE)
        np.testing.assert_allclose(got.grad_norms[0], expected.grad_norms[0], rtol=TOLERANCE)
        assert_close(got.masters, expected.masters)
    assert logprobs_of(two["next"]) == logprobs_of(one["next"])
    assert two["next"].digests.keys() == one["next"].digests.keys()
    assert_close(two["next"].moments, one["next"].moments)
    assert one["five steps"].masters.keys() == adapter_shapes(common["model"], LORA).keys()
    # The controls: adapters of experts are shared out, and every factor of every adapter has moved.
    shared_out = sum(m.numel() for n, m in one["five steps"].masters.items() if ".experts." in n)
    assert two["five steps"].num_own_parameters == one["five steps"].num_own_parameters - shared_out // 2
    assert all(master.any() for master in one["five steps"].masters.values())
    assert all(moment.any() for moment in one["next"].moments.values())
    for name in (f"checkpoint/{ADAPTERS_FILE}", "checkpoint/optimizer.safetensors", f"{BASE_FOLDER}/model.safetensors"):
        assert (tmp_path / "two" / name).read_bytes() == (tmp_path / "one" / name).read_bytes(), name


def test_where_the_experts_are_changes_no_bit_of_their_adapters(common: dict[str, Any], tmp_path: Path):
    """Experts move, and their adapters with them, when a checkpoint is loaded into learners that are placed by load."""
    common = of_family(Family.qwen3_moe, common)
    saved = folder(tmp_path / "saved" / "checkpoint")
    kind = PlacementConfig(kind=PlacementKind.balanced)
    found = ranks.run(
        [
            Case(**common, name="made", num_steps=2, save=saved, expert_parallel=2, placement=kind),
            Case(**common, name="placed", load=saved, expert_parallel=2, placement=kind),
            Case(**common, name="in order", load=saved, expert_parallel=2),
        ],
        2,
        tmp_path / "job",
    )
    placed, in_order = found["placed"], found["in order"]
    assert not np.array_equal(placed.expert_LS, np.sort(placed.expert_LS)), "the control: experts moved"
    assert placed.losses == in_order.losses
    assert placed.digests == in_order.digests
    assert placed.masters.keys() == in_order.masters.keys()
    assert all(torch.equal(placed.masters[name], master) for name, master in in_order.masters.items())
    assert placed.parity == in_order.parity


def test_a_value_head_learns_beside_the_adapters(common: dict[str, Any], tmp_path: Path):
    common = of_family(Family.mixtral, common) | {"algorithm": AlgorithmConfig(name="ppo")}
    found = ranks.run([Case(**common, name="ppo", num_steps=3)], 1, tmp_path / "job")["ppo"]
    assert found.head["weight"].any()
    assert all(terms["loss/value"] > 0 for terms in found.terms)
    assert all(master.any() for master in found.masters.values())


@pytest.mark.parametrize("family", [Family.gpt_oss, Family.deepseek_v3])
def test_blocks_that_run_again_have_the_same_bits_with_adapters(family: Family, tmp_path: Path):
    config = MINI[family]
    (tmp_path / "start").mkdir()
    save_model(tmp_path / "start", config, dict(make_model(config).named_parameters()), {})
    common: dict[str, Any] = {
        "model": config, "start": tmp_path / "start", "samples": tuple(sample(i, 12 + i, config) for i in range(4)),
        "expert_parallel": 2, "num_steps": 2, "lora": LoraConfig(rank=4), "replay": True,
    }  # fmt: skip
    ways = tuple(ActivationCheckpointing)
    found = ranks.run([Case(**common, name=way, activation_checkpointing=way) for way in ways], 2, tmp_path / "job")
    kept, again = (found[way] for way in ways)
    assert kept.grad_norms[0] > 0, "the control"
    assert_same(again, kept)

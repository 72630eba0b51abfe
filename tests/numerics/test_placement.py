"""Learners whose experts are placed by load against the same learners with the experts in their order.

Where an expert is changes no bit of its rows, and its gradient sums them in the order of ranks and tokens either way:
without clipping (whose norm sums a rank's experts) everything a learner makes is the same to the last bit.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from model.checkpoint import save_model
from model.config import Family
from model.parallel.groups import Ranks
from model.parallel.placement import PlacementError, read_load, write_load
from rl.algorithms.config import AlgorithmConfig
from rl.learner.config import CodeRounding, PlacementConfig, PlacementKind, QuantizationConfig
from rl.learner.placement import LOAD_FILE, Placer
from tests.numerics import ranks
from tests.numerics.families import MINI, make_model
from tests.numerics.ranks import Case, Found
from tests.numerics.test_expert_parallel import BALANCE, EVERY_FAMILY, QUICK, assert_close, sample

METRIC = "expert_load/rank_max_over_mean"
BALANCED = PlacementConfig(kind=PlacementKind.balanced)


@pytest.fixture
def common(request: pytest.FixtureRequest, tmp_path: Path) -> dict[str, Any]:
    """What all cases of a family share; the recorded routes keep to the first half of the experts."""
    config = MINI[request.param]
    (tmp_path / "start").mkdir()
    save_model(tmp_path / "start", config, dict(make_model(config).named_parameters()), {})
    samples = tuple(sample(i, 12 + i, config) for i in range(5))
    return {"model": config, "start": tmp_path / "start", "samples": samples, "replay": True, "balance": BALANCE}


def skewed(common: dict[str, Any], file: Path) -> PlacementConfig:
    """Planned from a load with two heavy experts that are neighbours, others in each layer, so that many must move."""
    config = common["model"]
    load_LE = np.ones((len(config.moe_layers), config.num_experts))
    for layer, load_E in enumerate(load_LE):
        load_E[[(2 * layer) % config.num_experts, (2 * layer + 1) % config.num_experts]] = 9, 8
    write_load(file, load_LE)
    return dataclasses.replace(BALANCED, load_file=str(file))


def assert_same(got: Found, expected: Found) -> None:
    assert got.losses == expected.losses
    assert got.digests == expected.digests
    assert got.parity == expected.parity
    np.testing.assert_array_equal(got.loads_LE, expected.loads_LE)
    for kind in ("masters", "moments"):
        ours, theirs = getattr(got, kind), getattr(expected, kind)
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[name], tensor) for name, tensor in theirs.items())


def stored(file: Path) -> tuple[dict[str, Any], bytes]:
    """The header and the tensors' bytes; a safetensors file has its metadata in an order of its own."""
    content = file.read_bytes()
    length = int.from_bytes(content[:8], "little")
    return json.loads(content[8 : 8 + length]), content[8 + length :]


def moves(found: Found) -> bool:
    return not np.array_equal(found.expert_LS, np.sort(found.expert_LS))


@pytest.mark.parametrize("common", EVERY_FAMILY, indirect=True)
def test_where_the_experts_are_changes_no_bit(common: dict[str, Any], tmp_path: Path):
    placed = skewed(common, tmp_path / "load.json")
    free = tuple(dataclasses.replace(one, routes_TLK=np.zeros((0, 0, 0), np.uint8)) for one in common["samples"])
    cases = [
        Case(**common, name="replayed", num_steps=2),
        Case(**common | {"samples": free, "replay": False}, name="own routes", num_steps=2),
        Case(**common, name="reference", algorithm=AlgorithmConfig(kl_coef=0.1)),
        Case(**common, name="random", quantization=QuantizationConfig(rounding=CodeRounding.stochastic)),
        Case(**common, name="clipped", max_grad_norm=0.5),
        # One sample, so that one rank computes padding.
        Case(**common | {"samples": common["samples"][:1]}, name="padding"),
    ]
    job = [dataclasses.replace(case, expert_parallel=2) for case in cases]
    job += [dataclasses.replace(case, name=f"{case.name}, placed", placement=placed) for case in job]
    found = ranks.run(job, 2, tmp_path / "job")
    for case in cases:
        got, expected = found[f"{case.name}, placed"], found[case.name]
        assert moves(got), "the control"
        assert not moves(expected)
        if case.name == "clipped":
            assert_close(got.masters, expected.masters)
            np.testing.assert_allclose(got.grad_norms, expected.grad_norms, rtol=1e-6)
        else:
            assert_same(got, expected)
    # All choices are of the first half, which rank 0 has to itself in the contiguous order.
    for name in ("replayed", "replayed, placed"):
        assert found[name].rank_loads[0][f"{METRIC}_contiguous"] == 2.0
    assert found["replayed"].rank_loads[0][METRIC] == 2.0
    assert found["replayed, placed"].rank_loads[0][METRIC] < 2.0


@pytest.mark.parametrize("common", EVERY_FAMILY, indirect=True)
def test_masters_and_moments_follow_their_expert_from_plan_to_plan(common: dict[str, Any], tmp_path: Path):
    """Contiguous, then planned from a file, resumed as planned from the checkpoint, then one rank: one state."""
    folders = [tmp_path / name for name in ("contiguous", "placed", "again", "one", "on", "on placed")]
    for folder in folders:
        folder.mkdir()
    contiguous, placed, again, one, on, on_placed = folders
    from_file = skewed(common, tmp_path / "load.json")
    resumed = dataclasses.replace(BALANCED, load_file=from_file.load_file)
    two: dict[str, Any] = common | {"expert_parallel": 2, "algorithm": AlgorithmConfig(kl_coef=0.1)}
    found = ranks.run(
        [
            Case(**two, name="contiguous", num_steps=2, save=contiguous),
            Case(**two, name="placed", num_steps=2, save=placed, placement=from_file),
            Case(**two, name="again", num_steps=0, load=placed, save=again, placement=resumed),
            Case(**two, name="on", num_steps=2, load=contiguous, save=on),
            Case(**two, name="on placed", num_steps=2, load=again, save=on_placed, placement=BALANCED),
        ],
        2,
        tmp_path / "job two",
    )
    alone = {name: value for name, value in two.items() if name != "expert_parallel"}
    back = Case(**alone, name="back", num_steps=0, load=again, save=one, placement=BALANCED)
    ranks.run([back], 1, tmp_path / "job one")

    for name in ("model.safetensors", "optimizer.safetensors", "reference/model.safetensors"):
        for folder in (placed, again, one):
            assert stored(folder / name) == stored(contiguous / name), (folder.name, name)
        assert stored(on_placed / name) == stored(on / name), name
    # The load that the run began with is still in what it counted.
    assert (one / LOAD_FILE).read_bytes() == (again / LOAD_FILE).read_bytes() == (placed / LOAD_FILE).read_bytes()
    assert found["placed"].digests == found["again"].digests == found["contiguous"].digests
    assert_same(found["on placed"], found["on"])
    orders = [found[name].expert_LS.tolist() for name in ("placed", "again", "contiguous")]
    assert all(moves(found[name]) for name in ("placed", "again", "on placed")), "the control"
    assert orders[0] != orders[1], "the control: the plan follows the load"
    assert found["on placed"].rank_loads[0][METRIC] < found["on"].rank_loads[0][METRIC] == 2.0


@pytest.mark.slow
@pytest.mark.parametrize("common", [Family.gpt_oss], indirect=True)
def test_two_groups_are_placed_alike(common: dict[str, Any], tmp_path: Path):
    placed = dataclasses.replace(skewed(common, tmp_path / "load.json"), ranks_per_node=1)
    case = Case(**common, name="contiguous", expert_parallel=2, zero_stage=2, num_steps=2)
    job = [case, dataclasses.replace(case, name="placed", placement=placed)]
    found = ranks.run(job, 4, tmp_path / "job")
    assert moves(found["placed"])
    assert found["placed"].losses[0] == found["contiguous"].losses[0]
    assert_close(found["placed"].masters, found["contiguous"].masters)


def test_older_rounds_fade_and_a_checkpoint_keeps_the_load_to_the_last_bit(tmp_path: Path):
    config = MINI[QUICK]
    placer = Placer(PlacementConfig(), config, Ranks())
    shape = (len(config.moe_layers), config.num_experts)
    placer.save(tmp_path)
    assert not (tmp_path / LOAD_FILE).exists(), "nothing was counted"
    once, twice = np.random.default_rng(0).integers(0, 100, (2, *shape))
    placer.observe(once)
    placer.observe(twice)
    placer.save(tmp_path)
    np.testing.assert_array_equal(read_load(tmp_path / LOAD_FILE), 0.9 * once + twice)
    again = Placer(PlacementConfig(), config, Ranks())
    again.load(tmp_path)
    again.save(tmp_path / "..")
    assert json.loads((tmp_path / ".." / LOAD_FILE).read_text()) == json.loads((tmp_path / LOAD_FILE).read_text())
    assert again.rank_loads(once) == {}, "one rank is always even"


def test_the_load_of_another_model_is_one_line(tmp_path: Path):
    config = MINI[QUICK]
    shape = (len(config.moe_layers), config.num_experts)
    write_load(tmp_path / "load.json", np.ones((1, 3)))
    with pytest.raises(PlacementError) as caught:
        Placer(dataclasses.replace(BALANCED, load_file=str(tmp_path / "load.json")), config, Ranks())
    assert str(caught.value) == (
        f"expert load: load.json must be of {shape[0]} layers and {shape[1]} experts, got 1 and 3; use one that this "
        "model wrote"
    )

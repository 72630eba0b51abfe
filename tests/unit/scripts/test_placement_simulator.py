"""The simulator of placements: its costs by hand, and the options that it refuses."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest

from model.parallel.placement import ExpertPlacement, PlacementError, write_load
from scripts import placement as simulator
from scripts.placement import Machine, compare, group_of, simulate, traffic_weight, zipf_load

MACHINE = Machine(
    gpus_per_node=1, intra_gb_per_s=100.0, inter_gb_per_s=1.0, latency_us=0.0, tflops=1.0, tokens_per_gpu=10, top_k=1,
    hidden=1000, expert_hidden=500,
)  # fmt: skip


@pytest.mark.parametrize(
    ("load_NE", "cost"),
    [
        # 20 choices, 10 a rank, 5 across each way: 5 x 1000 x (2 + 2) bytes at 1 GB/s, 10 x 3e6 operations at 1 T/s.
        ([[0.25, 0.25], [0.25, 0.25]], (1.0, 0.5, 0.5, 1e3 * (20e-6 + 30e-6))),
        # Expert 0 gets all of them: 10 across, 20 on its rank.
        ([[0.5, 0.0], [0.5, 0.0]], (2.0, 0.5, 1.0, 1e3 * (40e-6 + 60e-6))),
        # Each node chooses its own expert: 10 x 1000 x 4 bytes at 100 GB/s within the nodes.
        ([[0.5, 0.0], [0.0, 0.5]], (1.0, 0.0, 0.0, 1e3 * (0.4e-6 + 30e-6))),
    ],
)
def test_the_cost_of_a_layer_by_hand(load_NE: list[list[float]], cost: tuple[float, ...]):
    got = simulate(MACHINE, np.array([load_NE]), ExpertPlacement.contiguous(1, 2, 2))
    assert (got.rank_max_over_mean, got.cross_node_frac, got.node_traffic, got.layer_ms) == pytest.approx(cost)


def test_a_message_has_a_latency_each_way():
    load_LNE, placement = np.full((1, 2, 2), 0.25), ExpertPlacement.contiguous(1, 2, 2)
    slow = Machine(**{**{name: getattr(MACHINE, name) for name in MACHINE.__slots__}, "latency_us": 100.0})
    added = simulate(slow, load_LNE, placement).layer_ms - simulate(MACHINE, load_LNE, placement).layer_ms
    assert added == pytest.approx(0.2)


def test_the_weight_of_traffic_is_its_time_over_that_of_compute():
    # 10 choices of a node on its link: 40 us; 10 choices of a rank: 30 us.
    assert traffic_weight(MACHINE) == pytest.approx(40 / 30)


@pytest.mark.parametrize("locality", [0.0, 0.5])
def test_zipf_loads_are_shares_with_as_many_tokens_a_node(locality: float):
    load_LNE = zipf_load(3, 16, 1.0, 4, locality, seed=0)
    np.testing.assert_allclose(load_LNE.sum(2), 0.25)
    if locality:
        assert (load_LNE.max(1) / load_LNE.sum(1)).min() > 0.4, "an expert has a home"
    else:
        assert np.allclose(load_LNE, load_LNE[:, :1])
        np.testing.assert_allclose(np.sort(load_LNE.sum(1))[:, ::-1][:, :3] * [1, 2, 3], load_LNE.sum(1).max())
    assert not np.array_equal(load_LNE[0], load_LNE[1])


def test_what_is_planned_is_faster_than_what_is_not():
    machine = Machine(gpus_per_node=4)
    costs = compare(machine, zipf_load(2, 32, 0.5, 2, 0.5, seed=1), 8)
    assert costs["planned"].layer_ms < min(costs["contiguous"].layer_ms, costs["random"].layer_ms)
    assert costs["planned"].cross_node_frac < costs["contiguous"].cross_node_frac


def test_groups_share_the_experts_evenly():
    assert group_of(Machine(), 8, 256) == (8, 1)
    assert group_of(Machine(), 512, 256) == (256, 32)
    with pytest.raises(
        PlacementError, match=r"^gpus: must make up whole nodes of 8, and share 256 experts evenly, got 12; "
    ):
        group_of(Machine(), 12, 256)


def test_a_measured_load_is_simulated_and_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys):
    write_load(tmp_path / "load.json", np.array([[9.0, 9.0, 1.0, 1.0]]))
    out = tmp_path / "out.json"
    given = ["--load-file", str(tmp_path / "load.json"), "--gpus", "2", "--out", str(out)]
    monkeypatch.setattr(sys, "argv", ["placement.py", *given])
    assert simulator.main() == 0
    [row] = json.loads(out.read_text())["rows"]
    assert (row["contiguous"]["rank_max_over_mean"], row["planned"]["rank_max_over_mean"]) == (1.8, 1.0)
    assert "| 2 (2) | load.json, 0 | 1.80 / " in capsys.readouterr().out
    monkeypatch.setattr(sys, "argv", ["placement.py", "--gpus", "3", "--out", str(out)])
    assert simulator.main() == 1

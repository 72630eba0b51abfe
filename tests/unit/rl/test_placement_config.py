"""Mistakes in `learner.placement`."""

from pathlib import Path

import pytest

from tests.unit.rl.test_config_check import check, problem

BALANCED = "learner.placement.kind=balanced"


@pytest.mark.parametrize(
    ("given", "line"),
    [
        (
            [BALANCED, "learner.placement.ranks_per_node=0"],
            "learner.placement.ranks_per_node: must be at least 1, got 0; the default is 8",
        ),
        (
            [BALANCED, "learner.placement.traffic_weight=-1"],
            "learner.placement.traffic_weight: must be at least 0, got -1.0; the default is 1.0",
        ),
        (
            ["learner.placement.ranks_per_node=4"],
            "learner.placement.ranks_per_node: only read with learner.placement.kind=balanced, got 4; drop it, or add "
            "learner.placement.kind=balanced",
        ),
        (
            ["learner.placement.load_file=load.json"],
            "learner.placement.load_file: only read with learner.placement.kind=balanced, got load.json; drop it, or "
            "add learner.placement.kind=balanced",
        ),
        (
            [BALANCED, "learner.num_ranks=4", "learner.expert_parallel=4", "learner.placement.ranks_per_node=3"],
            "learner.placement.ranks_per_node: groups of learner.expert_parallel=4 ranks must fill whole nodes, or a "
            "node whole groups, got 3; use a divisor or a multiple of 4",
        ),
        (
            [BALANCED, "learner.placement.load_file=/nowhere/load.json"],
            "learner.placement.load_file: no such file, got /nowhere/load.json; name the expert_load.json of a "
            "checkpoint",
        ),
    ],
)
def test_settings_that_do_not_fit_are_one_line(given: list[str], line: str) -> None:
    assert problem("+experiment=coding", *given) == line


@pytest.mark.parametrize("ranks_per_node", [1, 2, 4, 8])
def test_nodes_of_whole_groups_and_groups_of_whole_nodes_are_fine(ranks_per_node: int, tmp_path: Path) -> None:
    (tmp_path / "load.json").write_text("{}")
    given = [BALANCED, "learner.num_ranks=4", "learner.expert_parallel=4"]
    given += [f"learner.placement.ranks_per_node={ranks_per_node}"]
    given += [f"learner.placement.load_file={tmp_path}/load.json"]
    check("+experiment=coding", *given)

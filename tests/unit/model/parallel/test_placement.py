"""The placement planner against brute force, and what its plans may not depend on."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest

from model.parallel.placement import ExpertPlacement, PlacementError, plan, read_load, write_load


def objective(load_NE: np.ndarray, rank_E: Sequence[int], node_of_rank: Sequence[int], weight: float) -> float:
    """J of one layer, choice by choice, as the module's docstring has it."""
    num_ranks, num_nodes = len(node_of_rank), max(node_of_rank) + 1
    ranks, arrive, leave = [0.0] * num_ranks, [0.0] * num_nodes, [0.0] * num_nodes
    for source, load_E in enumerate(load_NE):
        for rank, load in zip(rank_E, load_E, strict=True):
            ranks[rank] += load
            if node_of_rank[rank] != source:
                arrive[node_of_rank[rank]] += load
                leave[source] += load
    return (num_ranks * max(ranks) + weight * num_nodes * max(arrive + leave)) / load_NE.sum()


def assignments(num_experts: int, num_ranks: int) -> Iterator[list[int]]:
    """Every way to give each rank as many experts."""

    def fill(rank_E: list[int], room: list[int]) -> Iterator[list[int]]:
        if len(rank_E) == num_experts:
            yield rank_E
        for rank in range(num_ranks):
            if room[rank]:
                yield from fill([*rank_E, rank], [left - (r == rank) for r, left in enumerate(room)])

    yield from fill([], [num_experts // num_ranks] * num_ranks)


def ranks_of(placement: ExpertPlacement, layer: int) -> list[int]:
    per_rank = placement.expert_LS.shape[1] // placement.num_ranks
    return [int(slot) // per_rank for slot in placement.slots(layer)]


def random_load(seed: int, num_nodes: int, num_experts: int) -> np.ndarray:
    """Few experts with most of the load, and each node with favourites of its own: integers [2, N, E]."""
    rng = np.random.default_rng(seed)
    return (1000 * rng.gamma(0.4, size=(2, num_nodes, num_experts))).astype(np.int64)


@pytest.mark.parametrize(
    ("num_experts", "nodes"),
    [(6, [0, 0, 0]), (8, [0, 0, 0, 0]), (6, [0, 1]), (8, [0, 1]), (8, [0, 0, 1, 1]), (6, [0, 1, 2])],
)
@pytest.mark.parametrize("weight", [0.0, 1.0])
def test_plans_are_next_to_the_best_of_all_placements(num_experts: int, nodes: list[int], weight: float):
    ratios: list[float] = []
    for seed in range(5):
        load_LNE = random_load(seed, max(nodes) + 1, num_experts)
        made = plan(load_LNE, nodes, traffic_weight=weight)
        for layer, load_NE in enumerate(load_LNE):
            best = min(objective(load_NE, each, nodes, weight) for each in assignments(num_experts, len(nodes)))
            own = objective(load_NE, ranks_of(made.placement, layer), nodes, weight)
            contiguous = [expert // (num_experts // len(nodes)) for expert in range(num_experts)]
            assert made.objective_L[layer] == pytest.approx(own)
            assert made.contiguous_L[layer] == pytest.approx(objective(load_NE, contiguous, nodes, weight))
            assert made.bound_L[layer] <= best * (1 + 1e-12)
            assert own <= made.contiguous_L[layer] + 1e-12
            ratios.append(own / best)
    assert max(ratios) <= 1.1, "measured: a descent by swaps may end in a local minimum"
    assert sum(ratio < 1 + 1e-9 for ratio in ratios) >= 0.7 * len(ratios)


def test_the_heaviest_experts_are_spread():
    # Contiguous, rank 0 has 40 of 52; a rank with one of the heavy experts and one of the light ones has 11 of 52.
    load_E = [10, 10, 10, 10, 1, 1, 1, 1]
    made = plan(np.array([load_E]), [0, 0, 0, 0])
    assert sorted(ranks_of(made.placement, 0)[:4]) == [0, 1, 2, 3]
    assert made.placement.rank_loads(np.array([load_E])).tolist() == [[11.0] * 4]
    assert made.placement.imbalance(np.array([load_E])) == 1.0 == made.objective_L[0] == made.bound_L[0]
    contiguous = ExpertPlacement.contiguous(1, 8, 4)
    assert contiguous.imbalance(np.array([load_E])) == made.contiguous_L[0] == 20 / 11


def test_experts_move_to_the_node_whose_tokens_choose_them():
    # All experts are as heavy: only what crosses between nodes can be saved. Node 1 chooses 0 and 1, node 0 the others.
    load_NE = np.array([[0, 0, 6, 6], [6, 6, 0, 0]])
    made = plan(load_NE[None], [0, 1], traffic_weight=1.0)
    assert ranks_of(made.placement, 0) == [1, 1, 0, 0]
    assert (made.contiguous_L[0], made.objective_L[0], made.bound_L[0]) == (2.0, 1.0, 1.0)
    assert plan(load_NE[None], [0, 1], traffic_weight=0.0).placement.is_contiguous
    assert plan(load_NE[None].sum(1), [0, 1]).placement.is_contiguous, "what no count tells is not planned for"


def test_the_node_of_a_hot_expert_gets_the_light_ones():
    # One expert is heavier than a mean rank whatever is done. The node map decides where the others go.
    load_E = np.array([20, 5, 5, 5, 1, 1, 1, 1])
    spread = plan(load_E[None], [0, 0, 1, 1], traffic_weight=1.0).placement
    of_node = [load_E[[r // 2 == node for r in ranks_of(spread, 0)]].sum() for node in (0, 1)]
    assert sorted(of_node) == [16, 23]
    assert max(of_node) == min(
        max(load_E[[r // 2 == node for r in each]].sum() for node in (0, 1)) for each in assignments(8, 4)
    )


def test_plans_are_the_same_whatever_the_unit_and_every_time():
    load_LE = random_load(3, 1, 32)[:, 0]
    once = plan(load_LE, [0] * 8).placement.expert_LS
    assert not (once == np.arange(32)).all()
    for factor in (1, 8, 2.0**-10):
        np.testing.assert_array_equal(plan(load_LE * factor, [0] * 8).placement.expert_LS, once)


def test_layers_are_planned_by_themselves():
    load_LE = random_load(4, 1, 16)[:, 0]
    both = plan(load_LE, [0, 0, 1, 1])
    for layer in range(2):
        alone = plan(load_LE[[layer]], [0, 0, 1, 1])
        np.testing.assert_array_equal(both.placement.expert_LS[layer], alone.placement.expert_LS[0])


def test_renaming_the_experts_costs_nothing():
    load_LE = random_load(5, 1, 16)[:, 0]
    made = plan(load_LE, [0] * 4)
    for seed in range(3):
        order_E = np.random.default_rng(seed).permutation(16)
        again = plan(load_LE[:, order_E], [0] * 4)
        np.testing.assert_allclose(again.bound_L, made.bound_L)
        np.testing.assert_allclose(again.objective_L, made.objective_L, rtol=0.02)  # measured; starts differ


@pytest.mark.parametrize("load", [np.zeros((2, 8)), np.ones((2, 8)), np.full((2, 8), 7)])
def test_nothing_is_moved_where_nothing_is_won(load: np.ndarray):
    assert plan(load, [0, 0, 1, 1]).placement.is_contiguous
    assert plan(load, [0, 0, 1, 1]).placement.imbalance(load) == 1.0


def test_a_plan_is_a_permutation_with_a_rank_s_experts_in_their_order():
    placement = plan(random_load(6, 1, 64)[:, 0], [0] * 8 + [1] * 8).placement
    for layer in range(2):
        assert sorted(placement.expert_LS[layer]) == list(range(64))
        np.testing.assert_array_equal(placement.expert_LS[layer][placement.slots(layer)], np.arange(64))
        own = [placement.experts(layer, rank) for rank in range(16)]
        assert all((np.diff(each) > 0).all() and len(each) == 4 for each in own)
        np.testing.assert_array_equal(np.concatenate(own), placement.expert_LS[layer])


def test_one_rank_holds_everything_in_order():
    made = plan(random_load(7, 1, 8)[:, 0], [0])
    assert made.placement.is_contiguous
    np.testing.assert_allclose([made.objective_L, made.bound_L], 1.0, rtol=1e-12)


@pytest.mark.parametrize(
    ("load", "nodes", "weight", "line"),
    [
        (
            np.ones((1, 6)),
            [0] * 4,
            1.0,
            "expert load: the experts of a layer must be a multiple of the 4 ranks, got 6; each rank holds as many as "
            "every other",
        ),
        (
            np.ones(8),
            [0, 0],
            1.0,
            "expert load: must be of [layers, experts], or [layers, 1 nodes, experts], got shape (8,); count the "
            "choices of every expert",
        ),
        (
            np.array([[1.0, -2.0]]),
            [0, 0],
            1.0,
            "expert load: must be finite and not negative, got -2.0; count the choices of every expert",
        ),
        (
            np.array([[1.0, np.nan]]),
            [0, 0],
            1.0,
            "expert load: must be finite and not negative, got nan; count the choices of every expert",
        ),
        (
            np.ones((1, 8)),
            [0, 0, 1],
            1.0,
            "node map: nodes must be numbered from 0, with as many ranks each, got [0, 0, 1]; number the nodes of one "
            "expert-parallel group",
        ),
        (
            np.ones((1, 8)),
            [0, 2],
            1.0,
            "node map: nodes must be numbered from 0, with as many ranks each, got [0, 2]; number the nodes of one "
            "expert-parallel group",
        ),
        (
            np.ones((1, 8)),
            [0, 0],
            -1.0,
            "traffic_weight: must not be negative, got -1.0; 0 plans for load alone",
        ),
    ],
)
def test_what_cannot_be_planned_is_one_line(load: np.ndarray, nodes: list[int], weight: float, line: str):
    with pytest.raises(PlacementError) as caught:
        plan(load, nodes, traffic_weight=weight)
    assert str(caught.value) == line


def test_a_load_is_read_as_it_was_written(tmp_path: Path):
    load_LE = np.random.default_rng(0).random((3, 8)) / 3
    write_load(tmp_path / "load.json", load_LE)
    np.testing.assert_array_equal(read_load(tmp_path / "load.json"), load_LE)


@pytest.mark.parametrize(
    ("text", "line"),
    [
        (
            "{}",
            "expert load: load.json must hold a number for each layer and expert, got KeyError ('load'); use the file "
            "of a checkpoint",
        ),
        (
            '{"load": [1, 2]}',
            "expert load: load.json must hold a row of experts for each layer, got 1 dimensions; use the file of a "
            "checkpoint",
        ),
    ],
)
def test_a_file_of_something_else_is_one_line(tmp_path: Path, text: str, line: str):
    (tmp_path / "load.json").write_text(text)
    with pytest.raises(PlacementError) as caught:
        read_load(tmp_path / "load.json")
    assert str(caught.value) == line

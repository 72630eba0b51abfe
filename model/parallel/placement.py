"""Which rank holds which expert: planned from how often each is chosen and from which ranks share a node.

A rank waits for the slowest of its group in every layer, so each layer is planned by itself. With load l[e] (choices of
expert e), of which l[n, e] come from tokens of node n, and an equal number of experts on each of P ranks on N nodes:

    J = P max_r R[r] / l  +  w N max_n max(A[n], B[n]) / l

    l      all choices of the layer
    R[r]   choices that rank r computes
    A[n]   choices that reach node n from others,   sum of l[e] - l[n, e] over the experts on n
    B[n]   choices that leave node n for others,    sum of l[n, e] over the experts elsewhere
    w      what a mean node's share of choices costs on the wire, over what a mean rank's share costs to compute

The first term is 1 at best. Where tokens of all nodes choose alike, the sum of A is (N - 1) / N of all choices under
every placement: then only how it is spread over the nodes can be planned. Which experts are chosen together does not
matter, because the exchange sends each choice of a token by itself (`model/parallel/experts.py`).

The plan is the better of two descents by swaps of two experts, from the contiguous order and from LPT (heaviest expert
first, to the lightest rank with room: Graham 1969). So it is never worse than the contiguous order, which it is where
nothing is won. It does not depend on the unit of the load, and each run gives the same one.

Shapes: L layers with experts, E experts, S = E slots, P ranks of a group, N nodes of a group.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

_EPSILON = 1e-9
"""Of J: less than that is rounding, not progress. One choice of a layer's 2^20 is more."""


class PlacementError(ValueError):
    """A load or a node map that no placement can be planned from."""


@dataclass(frozen=True, slots=True, eq=False)
class ExpertPlacement:
    """Slot s of layer l holds expert `expert_LS[l, s]`; rank r of `num_ranks` has the r-th slice of the slots."""

    expert_LS: Ints
    num_ranks: int

    @classmethod
    def contiguous(cls, num_layers: int, num_experts: int, num_ranks: int) -> ExpertPlacement:
        """Experts in their own order."""
        return cls(np.tile(np.arange(num_experts), (num_layers, 1)), num_ranks)

    @property
    def is_contiguous(self) -> bool:
        """Whether every expert's slot is its own number."""
        return bool((self.expert_LS == np.arange(self.expert_LS.shape[1])).all())

    def slots(self, layer: int) -> Ints:
        """The slot of each expert, int64 [E]."""
        return np.argsort(self.expert_LS[layer])

    def experts(self, layer: int, rank: int) -> Ints:
        """The experts of a rank in the order of its slots, int64 [E / P]."""
        return self.expert_LS[layer].reshape(self.num_ranks, -1)[rank]

    def rank_loads(self, load_LE: npt.NDArray[Any]) -> Floats:
        """What each rank computes, fp64 [L, P]."""
        placed_LS = np.take_along_axis(np.asarray(load_LE, np.float64), self.expert_LS, 1)
        return placed_LS.reshape(len(placed_LS), self.num_ranks, -1).sum(2)

    def imbalance(self, load_LE: npt.NDArray[Any]) -> float:
        """Load of the heaviest rank over the mean one, mean of the layers that have a load; 1 where none has."""
        loads_LP = self.rank_loads(load_LE)
        loads_LP = loads_LP[loads_LP.sum(1) > 0]
        return float((loads_LP.max(1) / loads_LP.mean(1)).mean()) if len(loads_LP) else 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A placement, and J of each layer: its own, the contiguous order's, and one that none can go below (fp64 [L])."""

    placement: ExpertPlacement
    objective_L: Floats
    contiguous_L: Floats
    bound_L: Floats


def plan(load: npt.NDArray[Any], node_of_rank: Sequence[int], *, traffic_weight: float = 1.0) -> Plan:
    """Place the experts of every layer.

    Args:
        load: Choices of each expert [L, E], when tokens of all nodes choose alike; or by the token's node [L, N, E].
        node_of_rank: The node of each rank of the group; 0 to N - 1, each with as many ranks as the others.
        traffic_weight: w.

    Raises:
        PlacementError: A load that is negative or not finite, experts that ranks cannot share evenly, a node map with
            gaps or uneven nodes.
    """
    node_P = _checked_nodes(node_of_rank)
    load_LNE = _checked_load(np.asarray(load, np.float64), len(node_P), int(node_P.max()) + 1)
    if not traffic_weight >= 0:
        raise PlacementError(f"traffic_weight: must not be negative, got {traffic_weight}; 0 plans for load alone")
    layers = [_Layer(load_NE, node_P, traffic_weight) for load_NE in load_LNE]
    contiguous_E = np.arange(load_LNE.shape[2]) // (load_LNE.shape[2] // len(node_P))
    placed = [layer.solve(contiguous_E) for layer in layers]
    # A rank keeps its experts in their own order; a stable sort of ranks is one by (rank, expert).
    expert_LS = np.array([np.argsort(rank_E, kind="stable") for rank_E in placed])
    return Plan(
        placement=ExpertPlacement(expert_LS, len(node_P)),
        objective_L=np.array([layer.at(rank_E).objective for layer, rank_E in zip(layers, placed, strict=True)]),
        contiguous_L=np.array([layer.at(contiguous_E).objective for layer in layers]),
        bound_L=np.array([layer.bound() for layer in layers]),
    )


def read_load(file: Path) -> Floats:
    """What `write_load` wrote, fp64 [L, E].

    Raises:
        PlacementError: It holds something else.
    """
    try:
        load_LE = np.array(json.loads(file.read_text())["load"], np.float64)
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise PlacementError(
            f"expert load: {file.name} must hold a number for each layer and expert, got "
            f"{type(error).__name__} ({str(error).splitlines()[0]}); use the file of a checkpoint"
        ) from error
    if load_LE.ndim != 2:
        raise PlacementError(
            f"expert load: {file.name} must hold a row of experts for each layer, got {load_LE.ndim} dimensions; use "
            "the file of a checkpoint"
        )
    return load_LE


def write_load(file: Path, load_LE: Floats) -> None:
    """Keep a load [L, E], to the last bit, in JSON."""
    file.write_text(json.dumps({"load": load_LE.tolist()}))


def _checked_nodes(node_of_rank: Sequence[int]) -> Ints:
    node_P = np.asarray(node_of_rank, np.int64)
    counts = np.bincount(node_P) if node_P.ndim == 1 and node_P.size and node_P.min() >= 0 else np.zeros(1)
    if counts.min() == 0 or counts.min() != counts.max():
        raise PlacementError(
            f"node map: nodes must be numbered from 0, with as many ranks each, got {list(node_of_rank)}; number the "
            "nodes of one expert-parallel group"
        )
    return node_P


def _checked_load(load: Floats, num_ranks: int, num_nodes: int) -> Floats:
    if load.ndim == 2:
        load = np.repeat(load[:, None], num_nodes, 1) / num_nodes
    if load.ndim != 3 or load.shape[1] != num_nodes:
        raise PlacementError(
            f"expert load: must be of [layers, experts], or [layers, {num_nodes} nodes, experts], got shape "
            f"{load.shape}; count the choices of every expert"
        )
    if not load.size or load.shape[2] % num_ranks:
        raise PlacementError(
            f"expert load: the experts of a layer must be a multiple of the {num_ranks} ranks, got {load.shape[2]}; "
            "each rank holds as many as every other"
        )
    if not np.isfinite(load).all() or load.min() < 0:
        raise PlacementError(
            f"expert load: must be finite and not negative, got {load[~(load >= 0) | ~np.isfinite(load)][0]}; count "
            "the choices of every expert"
        )
    return load


@dataclass(slots=True, eq=False)
class _State:
    """Sums under one assignment; `spread` tells apart what has the same J."""

    rank_P: Floats
    arrive_N: Floats
    leave_N: Floats
    objective: float
    spread: float


class _Layer:
    """One layer, its load in units that make both terms of J plain maxima: R[r] and w max(A[n], B[n])."""

    def __init__(self, load_NE: Floats, node_P: Ints, traffic_weight: float):
        total = load_NE.sum()
        self._has_load = total > 0
        self._load_NE = load_NE / total if self._has_load else load_NE
        self._load_E = self._load_NE.sum(0)
        self._node_P = node_P
        self._num_ranks, self._num_nodes = len(node_P), len(load_NE)
        self._weight = traffic_weight if self._num_nodes > 1 else 0.0

    def at(self, rank_E: Ints) -> _State:
        """The sums when expert e is on `rank_E[e]`."""
        node_E = self._node_P[rank_E]
        of_home_E = self._load_NE[node_E, np.arange(len(node_E))]
        at_home_N = _sums(node_E, of_home_E, self._num_nodes)
        arrive_N = _sums(node_E, self._load_E, self._num_nodes) - at_home_N
        leave_N = self._load_NE.sum(1) - at_home_N
        rank_P = _sums(rank_E, self._load_E, self._num_ranks)
        traffic_N = np.maximum(arrive_N, leave_N)
        objective = self._num_ranks * rank_P.max() + self._weight * self._num_nodes * traffic_N.max()
        spread = self._num_ranks * (rank_P**2).sum() + self._weight * self._num_nodes * (traffic_N**2).sum()
        return _State(rank_P, arrive_N, leave_N, float(objective), float(spread))

    def bound(self) -> float:
        """No placement has a lower J: bounds of its two terms by themselves."""
        if not self._has_load:
            return 0.0
        per_rank = len(self._load_E) // self._num_ranks
        ascending_E = np.sort(self._load_E)
        heaviest = 1 / self._num_ranks
        for together in range(1, per_rank + 1):
            # Of the (together - 1) P + 1 heaviest, some rank has `together` or more; its other experts are no lighter
            # than the lightest of all.
            first = len(ascending_E) - ((together - 1) * self._num_ranks + 1)
            least = ascending_E[first : first + together].sum() + ascending_E[: per_rank - together].sum()
            heaviest = max(heaviest, least)
        crossing = (self._load_E - self._load_NE.max(0)).sum()  # if every expert were where most of its tokens are
        return float(self._num_ranks * heaviest + self._weight * crossing)

    def solve(self, contiguous_E: Ints) -> Ints:
        """The rank of each expert."""
        if not self._has_load:
            return contiguous_E
        best_E, best = contiguous_E, self.at(contiguous_E).objective
        for start_E in (contiguous_E, self._heaviest_first()):
            rank_E = self._descend(start_E)
            objective = self.at(rank_E).objective
            if objective < best - _EPSILON:
                best_E, best = rank_E, objective
        return best_E

    def _heaviest_first(self) -> Ints:
        """LPT: each expert to the lightest rank with room, on the node that costs least of those as light."""
        per_rank = len(self._load_E) // self._num_ranks
        rank_E = np.empty(len(self._load_E), np.int64)
        load_P, room_P = np.zeros(self._num_ranks), np.full(self._num_ranks, per_rank)
        node_load_N = np.zeros(self._num_nodes)
        for expert in np.argsort(-self._load_E, kind="stable"):
            arriving_N = node_load_N + self._load_E[expert] - self._load_NE[:, expert]
            keys = (arriving_N[self._node_P], load_P, room_P == 0)
            rank = rank_E[expert] = int(np.lexsort(keys)[0])
            load_P[rank] += self._load_E[expert]
            room_P[rank] -= 1
            node_load_N[self._node_P[rank]] = arriving_N[self._node_P[rank]]
        return rank_E

    def _descend(self, rank_E: Ints) -> Ints:
        """Swap an expert of the worst rank or node with another one as long as that lowers J, or its spread."""
        rank_E, state = rank_E.copy(), self.at(rank_E)
        while True:
            swap = self._best_swap(rank_E, state)
            tried_E = rank_E.copy()
            tried_E[list(swap)] = rank_E[list(swap[::-1])]
            tried = self.at(tried_E)
            gain = state.objective - tried.objective
            if gain < -_EPSILON or (gain <= _EPSILON and tried.spread >= state.spread - _EPSILON):
                return rank_E
            rank_E, state = tried_E, tried

    def _best_swap(self, rank_E: Ints, state: _State) -> tuple[int, int]:
        """Of every swap of an expert i on the worst rank or node with an expert j, the one with the least J."""
        node_E = self._node_P[rank_E]
        worst = rank_E == state.rank_P.argmax()
        if self._weight:
            worst |= node_E == np.maximum(state.arrive_N, state.leave_N).argmax()
        i = np.flatnonzero(worst)[:, None]
        j = np.arange(len(rank_E))[None]
        a, b, m, n = rank_E[i], rank_E[j], node_E[i], node_E[j]

        change = self._load_E[j] - self._load_E[i]
        of_a, of_b = state.rank_P[a] + change, state.rank_P[b] - change
        heaviest = np.maximum(_largest_but(state.rank_P, a, b), np.maximum(of_a, of_b))
        objective = self._num_ranks * heaviest
        spread = self._num_ranks * (of_a**2 + of_b**2 - state.rank_P[a] ** 2 - state.rank_P[b] ** 2)
        if self._weight:
            traffic_N = np.maximum(state.arrive_N, state.leave_N)
            home_m, home_n = self._load_NE[m, j] - self._load_NE[m, i], self._load_NE[n, i] - self._load_NE[n, j]
            of_m = np.maximum(state.arrive_N[m] + change - home_m, state.leave_N[m] - home_m)
            of_n = np.maximum(state.arrive_N[n] - change - home_n, state.leave_N[n] - home_n)
            of_m, of_n = np.where(m == n, traffic_N[m], of_m), np.where(m == n, traffic_N[n], of_n)
            busiest = np.maximum(_largest_but(traffic_N, m, n), np.maximum(of_m, of_n))
            objective = objective + self._weight * self._num_nodes * busiest
            squares = of_m**2 + of_n**2 - traffic_N[m] ** 2 - traffic_N[n] ** 2
            spread = spread + self._weight * self._num_nodes * np.where(m == n, 0.0, squares)
        objective = np.where(a == b, np.inf, objective)  # which is no swap
        least = np.where(objective <= objective.min() + _EPSILON, spread, np.inf)
        row, column = np.unravel_index(int(least.argmin()), least.shape)
        return int(i[row, 0]), int(column)


def _sums(place_E: Ints, load_E: Floats, num_places: int) -> Floats:
    """What each place holds of the experts' loads."""
    return np.bincount(place_E, load_E, minlength=num_places).astype(np.float64)


def _largest_but(values: Floats, first: Ints, second: Ints) -> Floats:
    """The largest value but those of two indices; `-inf` where there is no other. Broadcasts the indices."""
    order = np.argsort(-values, kind="stable")[:3]
    found = np.full(np.broadcast_shapes(first.shape, second.shape), -np.inf)
    for index in order[::-1]:
        found = np.where((first == index) | (second == index), found, values[index])
    return found

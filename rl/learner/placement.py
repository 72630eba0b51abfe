"""Where the learner's experts are: planned when it starts and when it resumes, from the choices it has counted.

The load is the choices of each expert in the rounds so far, a round at 0.9 of the one after it, so that it follows the
routers. It travels in the checkpoint whatever the placement is, and like everything else there it does not tell how
many ranks there were. Before the first checkpoint it is that of `learner.placement.load_file`, if there is one.

Samples are dealt out to the ranks anew at every step, so tokens of all nodes are taken to choose alike.

Shapes: L layers with experts, E experts.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from model.config import ModelConfig
from model.parallel.groups import Ranks
from model.parallel.placement import ExpertPlacement, Floats, PlacementError, plan, read_load, write_load
from rl.learner.config import PlacementConfig, PlacementKind

LOAD_FILE = "expert_load.json"
_FADE = 0.9
"""The weight of a round's choices in the load, when the next round is added."""


def with_absolute_file(settings: PlacementConfig) -> PlacementConfig:
    """The settings as a process with another working directory needs them."""
    file = settings.load_file
    return settings if file is None else dataclasses.replace(settings, load_file=str(Path(file).resolve()))


class Placer:
    """The placement of one learner and the load that the next one is planned from; every rank has one.

    Ranks make all its calls together. Raises PlacementError for a load file that is not of this model.
    """

    def __init__(self, settings: PlacementConfig, model: ModelConfig, ranks: Ranks):
        self._settings = settings
        self._ranks = ranks
        self._shape = (len(model.moe_layers), model.num_experts)
        self._contiguous = ExpertPlacement.contiguous(*self._shape, ranks.expert_parallel)
        self._load_LE: Floats = np.zeros(self._shape)
        if settings.load_file is not None:
            self._load_LE = self._read(Path(settings.load_file))
        self.placement = self._planned()

    def observe(self, counts_LE: npt.NDArray[Any]) -> None:
        """Add the choices of a round, those of all ranks."""
        self._load_LE = _FADE * self._load_LE + counts_LE

    def rank_loads(self, counts_LE: npt.NDArray[Any]) -> dict[str, float]:
        """How uneven the ranks' shares of these choices are, as placed and in the contiguous order, by metric."""
        if self._ranks.expert_group is None:
            return {}
        return {
            "expert_load/rank_max_over_mean": self.placement.imbalance(counts_LE),
            "expert_load/rank_max_over_mean_contiguous": self._contiguous.imbalance(counts_LE),
        }

    def save(self, folder: Path) -> None:
        """Write the load, if any was counted; rank 0 does."""
        if self._ranks.rank == 0 and self._load_LE.any():
            write_load(folder / LOAD_FILE, self._load_LE)

    def load(self, folder: Path) -> None:
        """Plan from what `save` wrote; a checkpoint without it changes nothing."""
        if (folder / LOAD_FILE).is_file():
            self._load_LE = self._read(folder / LOAD_FILE)
            self.placement = self._planned()

    def _read(self, file: Path) -> Floats:
        load_LE = read_load(file)
        if load_LE.shape != self._shape:
            raise PlacementError(
                f"expert load: {file.name} must be of {self._shape[0]} layers and {self._shape[1]} experts, got "
                f"{load_LE.shape[0]} and {load_LE.shape[1]}; use one that this model wrote"
            )
        return load_LE

    def _planned(self) -> ExpertPlacement:
        num_ranks = self._ranks.expert_parallel
        if self._settings.kind is PlacementKind.contiguous or num_ranks == 1:
            return self._contiguous
        planned = self._contiguous
        if self._ranks.rank == 0:  # sums may have other bits on other processors: one rank plans for all
            node_of_rank = np.arange(num_ranks) // self._settings.ranks_per_node
            weight = self._settings.traffic_weight
            planned = plan(self._load_LE, node_of_rank.tolist(), traffic_weight=weight).placement
        return self._ranks.gather(planned)[0]

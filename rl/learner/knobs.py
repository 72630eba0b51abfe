"""Settings of the learner that are fine alone and not together; no import is heavy.

Every problem is one line: `<full.key>: <problem>, got <value>; <remedy>`.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from rl.learner.config import LearnerConfig, PlacementConfig, PlacementKind


def placement_mistakes(learner: LearnerConfig) -> Iterator[str]:
    """What is wrong in `learner.placement`, on this machine."""
    given, default = learner.placement, PlacementConfig()
    if given.kind is PlacementKind.contiguous:
        for knob in ("ranks_per_node", "traffic_weight", "load_file"):
            if getattr(given, knob) != getattr(default, knob):
                yield (
                    f"learner.placement.{knob}: only read with learner.placement.kind=balanced, got "
                    f"{getattr(given, knob)}; drop it, or add learner.placement.kind=balanced"
                )
        return
    size, on_node = learner.expert_parallel, given.ranks_per_node
    if size % on_node and on_node % size:
        yield (
            f"learner.placement.ranks_per_node: groups of learner.expert_parallel={size} ranks must fill whole nodes, "
            f"or a node whole groups, got {on_node}; use a divisor or a multiple of {size}"
        )
    if given.load_file is not None and not Path(given.load_file).is_file():
        yield (
            f"learner.placement.load_file: no such file, got {given.load_file}; name the expert_load.json of a "
            "checkpoint"
        )

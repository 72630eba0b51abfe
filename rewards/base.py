"""The contract of a reward, and the boundary around its code.

A reward is a pure function of (task, trajectory, evidence) and returns a number or a tree of named nodes. It never
reaches into an environment. What goes wrong inside it (an exception, a NaN, something that is not a number) is a masked
node with the reason, never a 0: a masked trajectory is counted and leaves the batch, a 0 would be trained on.

Every parent of a tree whose score is the weighted sum of its children passes credit down to them, so a node may carry
the turn it belongs to; `per_turn` gives each turn its part, and the parts sum to the total.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import replace
from numbers import Real
from typing import Protocol

from rollout.types import (
    Evidence,
    RewardNode,
    ScoredGroup,
    ScoredTrajectory,
    Task,
    Trajectory,
    TrajectoryGroup,
    Verdict,
)

ROOT = "total"
"""Name of the root of every tree."""


class RewardError(ValueError):
    """A reward setting that cannot work."""


class Reward(Protocol):
    """Anything that judges an episode."""

    def __call__(self, task: Task, trajectory: Trajectory, evidence: Evidence, /) -> RewardNode | float:
        """The worth of the episode, as a number or as a tree of named nodes."""
        ...


def masked(name: str, reason: str) -> RewardNode:
    """A node without a score."""
    return RewardNode(name=name, score=None, masked=reason)


def measure(name: str, reward: Reward, task: Task, trajectory: Trajectory) -> RewardNode:
    """Run one reward inside the boundary: a timed node called `name`, masked when the reward's code fails."""
    start = time.perf_counter()
    result = _guarded(reward, task, trajectory)
    milliseconds = (time.perf_counter() - start) * 1e3
    return replace(_as_node(name, result), milliseconds=milliseconds)


def _guarded(reward: Reward, task: Task, trajectory: Trajectory) -> object:
    """What the reward returned, or the exception that it raised."""
    try:
        return reward(task, trajectory, trajectory.evidence)
    except Exception as problem:  # noqa: BLE001 (the boundary around a user's code: the reason travels in the node)
        return problem


def _as_node(name: str, result: object) -> RewardNode:
    if isinstance(result, Exception):
        return masked(name, f"raised {type(result).__name__}: {result}"[:200])
    if isinstance(result, RewardNode):
        for node in result.walk():
            if node.score is not None and not math.isfinite(node.score):
                return masked(name, f"node {node.name} is not finite, got {node.score}")
        return replace(result, name=name)
    if isinstance(result, bool) or not isinstance(result, Real):
        return masked(name, f"not a number, got {result!r}"[:200])
    if not math.isfinite(result):
        return masked(name, f"not finite, got {result}")
    return RewardNode(name=name, score=float(result))


def score(reward: Reward, task: Task, trajectory: Trajectory) -> ScoredTrajectory:
    """Judge one trajectory. Where infrastructure failed, the root is masked and the reward's code does not run."""
    if trajectory.failure is not None:
        boundary, message = trajectory.failure.boundary.value, trajectory.failure.message
        return ScoredTrajectory(trajectory=trajectory, reward=masked(ROOT, f"{boundary}: {message}"))
    if trajectory.evidence.verdict is Verdict.MASKED:
        return ScoredTrajectory(trajectory=trajectory, reward=masked(ROOT, f"evidence: {trajectory.evidence.reason}"))
    return ScoredTrajectory(trajectory=trajectory, reward=measure(ROOT, reward, task, trajectory))


def score_group(reward: Reward, group: TrajectoryGroup) -> ScoredGroup:
    """Judge the trajectories of one task, in their order."""
    return ScoredGroup(
        task=group.task,
        scored=tuple(score(reward, group.task, trajectory) for trajectory in group.trajectories),
    )


def weighted_sum(name: str, children: Sequence[RewardNode]) -> RewardNode:
    """A parent whose score is the weighted sum of its children; masked when a child that counts is masked."""
    for child in children:
        if child.score is None and child.weight != 0:
            return RewardNode(name=name, score=None, masked=f"{child.name}: {child.masked}", children=tuple(children))
    total = sum(child.weight * child.score for child in children if child.score is not None)
    return RewardNode(name=name, score=float(total), children=tuple(children))


def per_turn(node: RewardNode, num_turns: int) -> tuple[float, ...]:
    """The reward of each turn; the parts sum to the node's score. A node without a turn belongs to the last one.

    Raises `RewardError` when the node is masked, when there is no turn to give the reward to, or when a node carries a
    turn outside the episode.
    """
    if node.score is None:
        raise RewardError(f"reward {node.name}: no total to share out, got masked ({node.masked}); drop the trajectory")
    if num_turns < 1:
        raise RewardError(f"reward {node.name}: no turn to credit, got {num_turns} turns; drop the trajectory")
    parts = [0.0] * num_turns
    _share(node, 1.0, num_turns - 1, parts)
    return tuple(parts)


def _share(node: RewardNode, factor: float, turn: int, parts: list[float]) -> None:
    turn = turn if node.turn is None else node.turn
    if not 0 <= turn < len(parts):
        raise RewardError(f"reward {node.name}: turn must lie in 0..{len(parts) - 1}, got {turn}; count turns from 0")
    if node.score is None:
        return
    scored = [child for child in node.children if child.score is not None and child.weight != 0]
    if scored and math.isclose(sum(child.weight * _score(child) for child in scored), node.score, abs_tol=1e-9):
        for child in scored:
            _share(child, factor * child.weight, turn, parts)
    else:
        parts[turn] += factor * node.score


def _score(node: RewardNode) -> float:
    return 0.0 if node.score is None else node.score

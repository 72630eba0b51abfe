"""The price of extra turns, paid by solved episodes only.

An unsolved episode pays nothing: were a failed second try cheaper to avoid than to make, the policy would learn to give
up. `max_penalty` keeps a late solution above no solution, whatever the number of turns.
"""

from __future__ import annotations

from dataclasses import dataclass

from rewards.tests_pass import is_solved
from rollout.types import Evidence, RewardNode, Task, Trajectory


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnPenalty:
    """Minus `penalty` for each turn after the first, at most `max_penalty` in sum."""

    penalty: float
    max_penalty: float

    def __call__(self, task: Task, trajectory: Trajectory, evidence: Evidence) -> RewardNode:
        """One child for each extra turn of a solved episode."""
        num_turns = trajectory.num_turns if is_solved(evidence) else 0
        children: list[RewardNode] = []
        paid = 0.0
        for turn in range(1, num_turns):
            price = min(self.penalty, self.max_penalty - paid)
            paid += price
            children.append(RewardNode(name=f"turn_penalty_{turn}", score=-price, turn=turn))
        return RewardNode(name="turn_penalty", score=-paid if paid else 0.0, children=tuple(children))

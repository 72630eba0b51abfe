"""Prices of extra turns and of failed tool calls, paid by solved episodes only.

An unsolved episode pays nothing: were a failed second try cheaper to avoid than to make, the policy would learn to give
up. A cap keeps a late or clumsy solution above no solution, whatever it took.
"""

from __future__ import annotations

from collections.abc import Iterable
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
        turns = range(1, trajectory.num_turns if is_solved(evidence) else 0)
        return _paid("turn_penalty", ((turn, self.penalty) for turn in turns), self.max_penalty)


@dataclass(frozen=True, slots=True, kw_only=True)
class CallPenalty:
    """Minus `penalty` for each tool call that did nothing or broke off, at most `max_penalty` in sum."""

    penalty: float
    max_penalty: float

    def __call__(self, task: Task, trajectory: Trajectory, evidence: Evidence) -> RewardNode:
        """One child for each turn of a solved episode with such a call."""
        turns = enumerate(evidence.turns if is_solved(evidence) else ())
        prices = ((turn, self.penalty * judged.num_call_errors) for turn, judged in turns if judged.num_call_errors)
        return _paid("call_penalty", prices, self.max_penalty)


def _paid(name: str, prices: Iterable[tuple[int, float]], most: float) -> RewardNode:
    """A child for each (turn, price), until `most` has been paid in sum."""
    children: list[RewardNode] = []
    paid = 0.0
    for turn, wanted in prices:
        price = min(wanted, most - paid)
        paid += price
        children.append(RewardNode(name=f"{name}_{turn}", score=-price, turn=turn))
    return RewardNode(name=name, score=-paid if paid else 0.0, children=tuple(children))

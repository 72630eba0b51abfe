"""The form of the answers: the share of turns that had the form that was asked for.

A turn that the environment never read (cut off at the token limit) counts as malformed, and an episode without turns
scores 0: silence and truncation stay below an honest try.
"""

from __future__ import annotations

from rollout.types import Evidence, RewardNode, Task, Trajectory


def well_formed(task: Task, trajectory: Trajectory, evidence: Evidence) -> RewardNode:
    """One child a turn, so that each turn answers for its own form."""
    num_turns = max(len(evidence.turns), trajectory.num_turns)
    share = 1.0 / num_turns if num_turns else 0.0
    children = tuple(
        RewardNode(name=f"format_{turn}", score=1.0 if judged.well_formed else 0.0, weight=share, turn=turn)
        for turn, judged in enumerate(evidence.turns)
    )
    return RewardNode(
        name="format",
        score=share * sum(judged.well_formed for judged in evidence.turns),
        children=children,
    )

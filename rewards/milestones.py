"""Progress towards the goal: a potential over the milestones of the task, paid as differences from turn to turn.

    score of turn t = phi(after turn t) - phi(before it),   phi = share of the declared milestones that hold

The sum is phi at the end (Ng, Harada and Russell 1999, without a discount): leaving a milestone takes back what
reaching it gave, so no cycle earns anything. The environment does not count what held at the start, so doing nothing
earns nothing. An episode that broke a rule, or the grader's protocol, has made no progress.
"""

from __future__ import annotations

from rollout.types import Evidence, RewardNode, Task, Trajectory


def progress(task: Task, trajectory: Trajectory, evidence: Evidence) -> RewardNode:
    """One child for each turn that changed the potential."""
    children: list[RewardNode] = []
    before = 0.0
    spoiled = evidence.tampered or any(turn.violations for turn in evidence.turns)
    for index, turn in enumerate(() if spoiled else evidence.turns):
        after = turn.milestones.fraction
        if after != before:
            children.append(RewardNode(name=f"progress_{index}", score=after - before, turn=index))
        before = after
    return RewardNode(name="progress", score=before, children=tuple(children))

"""Hidden checks: whether all of them passed, and which fraction.

Checks count against those declared, so a program that crashes at load cannot shrink the denominator. An answer that
broke the grader's protocol (`tampered`) has passed nothing.
"""

from __future__ import annotations

from rollout.types import Evidence, Task, Trajectory, Verdict


def is_solved(evidence: Evidence) -> bool:
    """Whether the last answer passed every hidden check."""
    return evidence.verdict is Verdict.VALID and not evidence.tampered and evidence.hidden.all_passed


def all_passed(task: Task, trajectory: Trajectory, evidence: Evidence) -> float:
    """1 when every hidden check passed, else 0."""
    return 1.0 if is_solved(evidence) else 0.0


def fraction_passed(task: Task, trajectory: Trajectory, evidence: Evidence) -> float:
    """The passed share of the declared hidden checks."""
    if evidence.verdict is not Verdict.VALID or evidence.tampered:
        return 0.0
    return evidence.hidden.fraction

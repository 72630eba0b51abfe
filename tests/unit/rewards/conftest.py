"""Trajectories written by hand, for tests of rewards."""

from collections.abc import Callable, Sequence

import pytest

from rollout.types import (
    Checks,
    Evidence,
    Message,
    Role,
    Segment,
    SpanOrigin,
    Split,
    StopReason,
    Task,
    TokenSpan,
    Trajectory,
    Turn,
    TurnEvidence,
    Verdict,
)

TASK = Task(id="t", messages=(Message(role=Role.USER, content="go"),), payload={}, split=Split.TRAIN, seed=0)


def _evidence(
    passed: int,
    declared: int = 6,
    *,
    well_formed: Sequence[bool] = (True,),
    verdict: Verdict = Verdict.VALID,
    tampered: bool = False,
    reason: str = "",
) -> Evidence:
    return Evidence(
        verdict=verdict,
        turns=tuple(TurnEvidence(well_formed=ok, visible=Checks(passed=0, declared=6)) for ok in well_formed),
        hidden=Checks(passed=passed, declared=declared),
        tampered=tampered,
        reason=reason,
    )


def _trajectory(
    judged: Evidence, *, num_turns: int | None = None, stop: StopReason = StopReason.TERMINATED
) -> Trajectory:
    count = len(judged.turns) if num_turns is None else num_turns
    turn = Turn(spans=(), message=Message(role=Role.ASSISTANT, content="answer"))
    return Trajectory(
        task_id=TASK.id,
        sample_index=0,
        segments=(Segment(opening=TokenSpan(origin=SpanOrigin.CONTEXT, ids=(1,)), turns=(turn,) * count),),
        stop=stop,
        failure=None,
        evidence=judged,
        seconds=0.0,
    )


@pytest.fixture
def task() -> Task:
    return TASK


@pytest.fixture
def evidence() -> Callable[..., Evidence]:
    return _evidence


@pytest.fixture
def trajectory() -> Callable[..., Trajectory]:
    return _trajectory

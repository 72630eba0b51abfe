"""Trajectories written by hand, for tests of what the round does with them."""

from collections.abc import Sequence

import numpy as np
import pytest

from rollout.types import (
    Boundary,
    Checks,
    Evidence,
    Failure,
    Message,
    RewardNode,
    Role,
    SampledBy,
    SamplingParams,
    ScoredGroup,
    ScoredTrajectory,
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
    WeightVersion,
)

_LAYERS, _TOP_K = 2, 2


_TURN = TurnEvidence(well_formed=True, visible=Checks(passed=0, declared=2), num_calls=2, num_call_errors=1)


class Hand:
    """Builds the travelling types with few words. Routes are the token's id in every layer."""

    def task(self, name: str = "t", split: Split = Split.TRAIN) -> Task:
        return Task(id=name, messages=(Message(role=Role.USER, content=f"do {name}"),), payload={}, split=split, seed=0)

    def span(
        self, origin: SpanOrigin, ids: Sequence[int], *, version: int = 0, temperature: float = 1.0, fed: bool = True
    ) -> TokenSpan:
        """A sampled token's logprob is minus its id over 100. `fed` false: the last token was never computed."""
        routed = ids if fed else ids[:-1]
        return TokenSpan(
            origin=origin,
            ids=tuple(ids),
            sampled_by=SampledBy(
                logprobs_T=-np.array(ids, dtype=np.float32) / 100,
                weight_version=WeightVersion(version),
                params=SamplingParams(temperature=temperature),
            )
            if origin is SpanOrigin.SAMPLED
            else None,
            routes_TLK=np.broadcast_to(
                np.array(routed, dtype=np.uint8)[:, None, None], (len(routed), _LAYERS, _TOP_K)
            ).copy(),
        )

    def segment(
        self,
        opening: Sequence[int],
        *turns: tuple[Sequence[int], Sequence[int]],
        version: int = 0,
        temperature: float = 1.0,
    ) -> Segment:
        """Each turn is (observation ids before it, sampled ids); an empty observation has no span."""
        built: list[Turn] = []
        for number, (seen, said) in enumerate(turns):
            spans = [self.span(SpanOrigin.OBSERVATION, seen)] if seen else []
            last = number == len(turns) - 1
            spans.append(self.span(SpanOrigin.SAMPLED, said, version=version, temperature=temperature, fed=not last))
            built.append(Turn(spans=tuple(spans), message=Message(role=Role.ASSISTANT, content=f"answer {number}")))
        return Segment(opening=self.span(SpanOrigin.CONTEXT, opening), turns=tuple(built))

    def trajectory(
        self,
        *segments: Segment,
        index: int = 0,
        passed: int = 0,
        tampered: bool = False,
        stop: StopReason = StopReason.TERMINATED,
        broken: str | None = None,
        task: str = "t",
    ) -> Trajectory:
        """Hidden checks are `passed` of 4; `broken` is the message of an infrastructure failure."""
        failure = None if broken is None else Failure(boundary=Boundary.SANDBOX, message=broken)
        num_turns = sum(len(segment.turns) for segment in segments)
        return Trajectory(
            task_id=task,
            sample_index=index,
            segments=segments,
            stop=None if failure else stop,
            failure=failure,
            evidence=Evidence(
                verdict=Verdict.MASKED if failure else Verdict.VALID,
                turns=(_TURN,) * num_turns,
                hidden=Checks(passed=passed, declared=4),
                tampered=tampered,
                reason=broken or "",
            ),
            seconds=0.0,
        )

    def scored(self, trajectory: Trajectory, reward: float | str, *parts: RewardNode) -> ScoredTrajectory:
        """`reward` is the total, or the reason of a mask."""
        is_mask = isinstance(reward, str)
        node = RewardNode(
            name="total", score=None if is_mask else reward, masked=reward if is_mask else None, children=parts
        )
        return ScoredTrajectory(trajectory=trajectory, reward=node)

    def group(self, *rewards: float | str, name: str = "t") -> ScoredGroup:
        """One-turn episodes whose sampled ids tell them apart: episode i says (20 + i, 21 + i)."""
        return ScoredGroup(
            task=self.task(name),
            scored=tuple(
                self.scored(
                    self.trajectory(self.segment((1, 2), ((), (20 + index, 21 + index))), index=index, task=name),
                    reward,
                )
                for index, reward in enumerate(rewards)
            ),
        )


@pytest.fixture
def hand() -> Hand:
    return Hand()

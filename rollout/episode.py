"""One episode: the policy and the environment take turns until one of them ends it.

No Ray, no model: a sampler continues ids, the environment answers messages, the renderer stands between. Whatever
breaks here is data, not a crash: it becomes a `Failure` (masked, retried), never a reward of 0.
"""

from __future__ import annotations

import time
import traceback
from dataclasses import dataclass, field

import numpy as np

from envs.base import Env, EnvError, SandboxLost
from rollout.renderers.base import Renderer
from rollout.types import (
    Boundary,
    Checks,
    Evidence,
    Failure,
    FinishReason,
    Generation,
    Message,
    SampledBy,
    Sampler,
    SampleRequest,
    SamplingParams,
    Segment,
    SpanOrigin,
    StopReason,
    Task,
    TaskLimits,
    TokenSpan,
    Trajectory,
    TrajectoryError,
    Turn,
    Verdict,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeJob:
    """One episode to run. `session` is unique in its batch; `seed` keys every sampled token."""

    task: Task
    sample_index: int
    session: int
    seed: int
    temperature: float
    limits: TaskLimits
    max_context_tokens: int


async def run_episode(job: EpisodeJob, env: Env, sampler: Sampler, renderer: Renderer) -> Trajectory:
    """Run `job` to its end and return the trajectory, whatever happens. Closes `env` and the sampler's session."""
    started = time.monotonic()
    history = _History()
    try:
        stop, evidence = await _play(job, env, sampler, renderer, history)
        failure = None
    except SandboxLost as lost:
        stop, failure = None, Failure(boundary=Boundary.SANDBOX, message=str(lost))
        evidence = _masked(failure)
    except Exception:  # noqa: BLE001 (the episode boundary: a broken episode must not end the round)
        # A negative limit keeps the innermost calls, where it broke.
        stop, failure = None, Failure(boundary=Boundary.EPISODE, message=traceback.format_exc(limit=-8))
        evidence = _masked(failure)
    return Trajectory(
        task_id=job.task.id,
        sample_index=job.sample_index,
        segments=history.segments(),
        stop=stop,
        failure=failure,
        evidence=evidence,
        seconds=time.monotonic() - started,
    )


async def _play(
    job: EpisodeJob, env: Env, sampler: Sampler, renderer: Renderer, history: _History
) -> tuple[StopReason, Evidence]:
    """The turns and the grading. Sampler and environment are closed whatever happens; failing at that fails it all."""
    try:
        stop = await _take_turns(job, env, sampler, renderer, history)
        evidence: object = await env.evidence()
        if not isinstance(evidence, Evidence):
            raise EnvError(
                f"environment: evidence() must return an Evidence, got {type(evidence).__name__}; see envs/base.py"
            )
        return stop, evidence
    finally:
        try:
            sampler.close_session(job.session)
        finally:
            await env.close()


def _masked(failure: Failure) -> Evidence:
    return Evidence(verdict=Verdict.MASKED, turns=(), hidden=Checks(passed=0, declared=0), reason=failure.message)


async def _take_turns(job: EpisodeJob, env: Env, sampler: Sampler, renderer: Renderer, history: _History) -> StopReason:
    """Alternate until the environment terminates or a limit truncates; `history` grows turn by turn."""
    history.add_context(renderer.opening(await env.reset(job.task), job.task.tools))
    for turn_index in range(job.limits.max_turns):
        room = job.max_context_tokens - len(history.ids)
        if room < 1:
            return StopReason.TRUNCATED_CONTEXT
        params = SamplingParams(temperature=job.temperature, max_tokens=min(job.limits.max_tokens_per_turn, room))
        generation = await sampler.sample(
            SampleRequest(session=job.session, prompt_ids=tuple(history.ids), params=params, seed=job.seed)
        )
        message = renderer.answer(generation.ids)
        history.add_turn(generation, params, message)
        if generation.finish is FinishReason.LENGTH:
            # An unfinished answer is not acted on: it was cut, and what is missing may change its meaning.
            cut_by_context = room < job.limits.max_tokens_per_turn
            return StopReason.TRUNCATED_CONTEXT if cut_by_context else StopReason.TRUNCATED_TOKENS
        result = await env.step(message)
        history.observe(result.observations)
        if result.terminated:
            return StopReason.TERMINATED
        if turn_index + 1 < job.limits.max_turns:
            history.add_context(renderer.observation(result.observations))
    return StopReason.TRUNCATED_TURNS


@dataclass(slots=True)
class _History:
    """The ids so far and the spans they came in; routes are cut to the spans at the end."""

    ids: list[int] = field(default_factory=list[int])
    opening: TokenSpan | None = None
    turns: list[tuple[list[TokenSpan], Message, tuple[Message, ...]]] = field(default_factory=list)
    pending: TokenSpan | None = None
    routes: list[np.ndarray] = field(default_factory=list)

    def add_context(self, span: TokenSpan) -> None:
        self.ids += span.ids
        if self.opening is None:
            self.opening = span
        else:
            self.pending = span

    def add_turn(self, generation: Generation, params: SamplingParams, message: Message) -> None:
        sampled = [
            TokenSpan(
                origin=SpanOrigin.SAMPLED,
                ids=generation.ids[start:end],
                sampled_by=SampledBy(
                    logprobs_T=generation.logprobs_T[start:end], weight_version=version, params=params
                ),
            )
            for start, end, version in generation.version_runs()
        ]
        spans = sampled if self.pending is None else [self.pending, *sampled]
        self.pending = None
        self.ids += generation.ids
        self.turns.append((spans, message, ()))
        self.routes.append(generation.routes_TLK)
        num_rows = sum(len(rows) for rows in self.routes)
        # A scripted sampler computes nothing, so it has no routes to give.
        if num_rows not in (0, len(self.ids) - 1):
            self.routes = []
            raise TrajectoryError(
                f"routes: one row a computed token, got {num_rows} for {len(self.ids) - 1} tokens after turn "
                f"{len(self.turns)}; a session must not be closed within its episode"
            )

    def observe(self, observations: tuple[Message, ...]) -> None:
        spans, message, _ = self.turns[-1]
        self.turns[-1] = (spans, message, observations)

    def segments(self) -> tuple[Segment, ...]:
        """The finished segment, each span with its own rows of the routes."""
        if self.opening is None:
            return ()
        rows = np.concatenate(self.routes) if self.routes else None
        routes = _Cutter(rows) if rows is not None and len(rows) else None
        opening = _routed(self.opening, routes)
        turns = tuple(
            Turn(spans=tuple(_routed(span, routes) for span in spans), message=message, observations=observations)
            for spans, message, observations in self.turns
        )
        return (Segment(opening=opening, turns=turns),)


@dataclass(slots=True)
class _Cutter:
    """Hands out consecutive rows."""

    rows: np.ndarray
    start: int = 0

    def take(self, count: int) -> np.ndarray:
        taken = self.rows[self.start : self.start + count]
        self.start += count
        return taken


def _routed(span: TokenSpan, routes: _Cutter | None) -> TokenSpan:
    if routes is None:
        return span
    return TokenSpan(
        origin=span.origin, ids=span.ids, sampled_by=span.sampled_by, routes_TLK=routes.take(len(span.ids))
    )

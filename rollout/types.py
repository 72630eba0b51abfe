"""The types that travel between the stages of a round.

A leaf module: it imports the standard library and numpy only, and every package may import it. One frozen type a
stage: a stage wraps the one before it, and nothing is `None` now and filled in later.

    Task -> Trajectory (Segments of Turns of TokenSpans, + Evidence) -> TrajectoryGroup -> ScoredGroup

Shapes: T tokens of a span, L MoE layers, K experts chosen for a token.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, NewType, Protocol, TypeAlias, cast

import numpy as np
import numpy.typing as npt

WeightVersion = NewType("WeightVersion", int)
"""Count of published updates; 0 is the start checkpoint. It only grows."""

Json: TypeAlias = "bool | int | float | str | Sequence[Json] | Mapping[str, Json] | None"
"""Any value that JSON can hold."""


class TrajectoryError(ValueError):
    """A trajectory, span or group that breaks an invariant of its type."""


class Role(StrEnum):
    """Who wrote a message."""

    SYSTEM = "system"
    USER = "user"
    ASSISTANT = "assistant"
    TOOL = "tool"


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    """A call that can be carried out. `id` is unique within its message; the tool's message names it."""

    id: str
    name: str
    arguments: Mapping[str, Json]


@dataclass(frozen=True, slots=True, kw_only=True)
class MalformedToolCall:
    """What stands where a call should: `raw` is the text as it was written, `problem` one line for the policy.

    It is data, so that the environment can answer it (`id` as in `ToolCall`) and a reward can count it.
    """

    id: str
    raw: str
    problem: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """One chat message, as text. The policy's own messages are carried as token ids beside it (`TokenSpan`).

    Of the assistant: `content` is what it says to the user, `reasoning` what it thought (where the chat format keeps
    the two apart), `tool_calls` what it asks for, in order. Of a tool: `name` is the tool's and `tool_call_id` the
    call's that it answers; both are empty when it answers the turn as a whole.
    """

    role: Role
    content: str
    reasoning: str = ""
    tool_calls: tuple[ToolCall | MalformedToolCall, ...] = ()
    name: str = ""
    tool_call_id: str = ""


Answer: TypeAlias = str | Message
"""A turn of a scripted policy: a message of the assistant, or the content of one that makes no calls."""


class Split(StrEnum):
    """Which part of the data a task belongs to; held-out tasks never occur in demonstrations or training."""

    TRAIN = "train"
    HELD_OUT = "held_out"


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskLimits:
    """Bounds of one episode."""

    max_turns: int
    max_tokens_per_turn: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One task of an environment. `payload` is the environment's own data (JSON); the policy never sees it."""

    id: str
    messages: tuple[Message, ...]
    payload: Mapping[str, Any]
    split: Split
    seed: int
    tools: tuple[Mapping[str, Any], ...] = ()

    def __post_init__(self) -> None:
        if not self.messages:
            raise TrajectoryError(f"task {self.id}: no opening message, got an empty tuple; give at least one message")


class SpanOrigin(StrEnum):
    """Where the tokens of a span come from; only `SAMPLED` tokens are trained on."""

    CONTEXT = "context"
    SAMPLED = "sampled"
    OBSERVATION = "observation"
    SCAFFOLD = "scaffold"


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How tokens are chosen, and when to stop.

    `temperature` 0 is greedy decoding. Sampled is from the `top_k` likeliest tokens (0: all), of those from the fewest
    that together have `top_p` of the probability, of those from the ones with `min_p` times the largest probability.
    A generation ends with one of `stop_ids` (beside the sampler's own), or when its text contains one of `stop`.
    """

    temperature: float = 1.0
    max_tokens: int = 64
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    stop: tuple[str, ...] = ()
    stop_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for name in ("temperature", "top_p", "min_p"):
            _check_number(name, getattr(self, name), numbers.Real, "a number")
        for name in ("max_tokens", "top_k"):
            _check_number(name, getattr(self, name), numbers.Integral, "a whole number")
        if not 0 <= self.temperature < math.inf:
            raise TrajectoryError(
                f"temperature: must be finite and not negative, got {self.temperature}; use 0 for greedy"
            )
        if self.max_tokens < 1:
            raise TrajectoryError(f"max_tokens: must be at least 1, got {self.max_tokens}; raise the limit")
        if self.top_k < 0:
            raise TrajectoryError(f"top_k: must not be negative, got {self.top_k}; use 0 for all tokens")
        if not 0 < self.top_p <= 1:
            raise TrajectoryError(f"top_p: must be above 0 and at most 1, got {self.top_p}; use 1 for all tokens")
        if not 0 <= self.min_p <= 1:
            raise TrajectoryError(f"min_p: must lie in 0..1, got {self.min_p}; use 0 for all tokens")
        _check_members("stop", self.stop, str, "texts")
        _check_members("stop_ids", self.stop_ids, numbers.Integral, "token ids (whole numbers)")
        if "" in self.stop:
            raise TrajectoryError("stop: a stop string must have text, got an empty one; leave it out")
        if min(self.stop_ids, default=0) < 0:
            raise TrajectoryError(f"stop_ids: must not be negative, got {min(self.stop_ids)}; leave it out")

    @property
    def is_cut(self) -> bool:
        """Whether some tokens are never sampled."""
        return self.top_k > 0 or self.top_p < 1 or self.min_p > 0


def _check_number(name: str, value: object, kind: type, wanted: str) -> None:
    if not isinstance(value, kind) or isinstance(value, bool):
        raise TrajectoryError(f"{name}: must be {wanted}, got {value!r}; give it without quotes")


def _check_members(name: str, values: object, kind: type, wanted: str) -> None:
    if not isinstance(values, Collection) or isinstance(values, str | bytes | Mapping):
        raise TrajectoryError(f"{name}: must be a list of {wanted}, got {values!r}; put a single one into a list")
    for value in cast("Collection[object]", values):
        if not isinstance(value, kind) or isinstance(value, bool):
            raise TrajectoryError(f"{name}: must hold {wanted} only, got {value!r}; leave it out")


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledBy:
    """What produced a sampled span: the logprobs (natural log, of the distribution sampled from), and their owner."""

    logprobs_T: npt.NDArray[np.float32]
    weight_version: WeightVersion
    params: SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenSpan:
    """A run of token ids of one origin.

    `sampled_by` is present exactly when the origin is `SAMPLED`. `routes_TLK` holds the experts chosen for each token
    at each MoE layer (uint8, E <= 256), in rank order, for every token the engine computed; the last sampled token of
    an episode is never fed back, so its rows are absent and the array is one row short there.
    """

    origin: SpanOrigin
    ids: tuple[int, ...]
    sampled_by: SampledBy | None = None
    routes_TLK: npt.NDArray[np.uint8] | None = None

    def __post_init__(self) -> None:
        if (self.sampled_by is not None) != (self.origin is SpanOrigin.SAMPLED):
            raise TrajectoryError(
                f"span: logprobs belong to sampled tokens only, got origin {self.origin.value} with "
                f"sampled_by {'set' if self.sampled_by else 'missing'}; build the span with the matching origin"
            )
        if self.sampled_by is not None and len(self.sampled_by.logprobs_T) != len(self.ids):
            raise TrajectoryError(
                f"span: one logprob a sampled token, got {len(self.sampled_by.logprobs_T)} for {len(self.ids)} ids; "
                "record both in the same step"
            )


class StopReason(StrEnum):
    """How an episode ended, other than by an infrastructure failure."""

    TERMINATED = "terminated"
    TRUNCATED_TOKENS = "truncated_tokens"
    TRUNCATED_TURNS = "truncated_turns"
    TRUNCATED_CONTEXT = "truncated_context"


class Boundary(StrEnum):
    """Where an infrastructure failure was caught."""

    EPISODE = "episode"
    SANDBOX = "sandbox"
    REWARD = "reward"


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """An infrastructure failure: never a reward of 0, but masked, counted and retried."""

    boundary: Boundary
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One answer of the policy and what the environment said to it."""

    spans: tuple[TokenSpan, ...]
    message: Message
    observations: tuple[Message, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """A maximal append-only run of turns: the ids of turn t+1 begin with the exact ids of turn t.

    A context reset (compaction, sub-agent) opens a new segment that names its `parent` by index.
    """

    opening: TokenSpan
    turns: tuple[Turn, ...]
    parent: int | None = None

    def spans(self) -> Iterator[TokenSpan]:
        """All spans in the order of their tokens."""
        yield self.opening
        for turn in self.turns:
            yield from turn.spans


class Verdict(StrEnum):
    """Whether the outcome can be charged to the policy."""

    VALID = "valid"
    POLICY_FAILED = "policy_failed"
    MASKED = "masked"


@dataclass(frozen=True, slots=True, kw_only=True)
class Checks:
    """Checks passed of those *declared* (a crash does not shrink the denominator)."""

    passed: int
    declared: int

    def __post_init__(self) -> None:
        if not 0 <= self.passed <= self.declared:
            raise TrajectoryError(
                f"checks: passed must lie in 0..declared, got {self.passed} of {self.declared}; count declared checks"
            )

    @property
    def all_passed(self) -> bool:
        """Whether there was something to pass and all of it passed."""
        return self.declared > 0 and self.passed == self.declared

    @property
    def fraction(self) -> float:
        """Passed share of the declared checks; 0 when none was declared."""
        return self.passed / self.declared if self.declared else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnEvidence:
    """What the environment knows about one turn. `well_formed`: the answer had the form that was asked for.

    `milestones` are the states on the way to the goal that hold after the turn, of those declared for the task;
    `violations` name what must not be and was, after the turn.
    """

    well_formed: bool
    visible: Checks
    note: str = ""
    num_calls: int = 0
    num_call_errors: int = 0
    milestones: Checks = Checks(passed=0, declared=0)
    violations: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """What the environment knows at the end, written outside the box. JSON-typed and frozen.

    `hidden` are the checks that grade; `tampered` says that the answer broke the grader's protocol; `reason` explains
    a verdict other than `VALID`.
    """

    verdict: Verdict
    turns: tuple[TurnEvidence, ...]
    hidden: Checks
    tampered: bool = False
    reason: str = ""
    extras: Mapping[str, Json] = field(default_factory=dict[str, Json])


@dataclass(frozen=True, slots=True, kw_only=True)
class Trajectory:
    """One finished episode. `failure` is set exactly when infrastructure broke; then nothing in it is trained on."""

    task_id: str
    sample_index: int
    segments: tuple[Segment, ...]
    stop: StopReason | None
    failure: Failure | None
    evidence: Evidence
    seconds: float

    def __post_init__(self) -> None:
        if (self.stop is None) != (self.failure is not None):
            raise TrajectoryError(
                f"trajectory of {self.task_id}: exactly one of stop and failure, got stop={self.stop} "
                f"failure={self.failure}; set one"
            )

    @property
    def num_turns(self) -> int:
        """Turns over all segments."""
        return sum(len(segment.turns) for segment in self.segments)

    @property
    def num_sampled_tokens(self) -> int:
        """Tokens the policy chose."""
        return sum(
            len(span.ids) for segment in self.segments for span in segment.spans() if span.origin is SpanOrigin.SAMPLED
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class TrajectoryGroup:
    """The trajectories of one task that share a baseline."""

    task: Task
    trajectories: tuple[Trajectory, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardNode:
    """One named node of a reward tree: `score` or `masked` (a reason), never both.

    `turn` is the turn the reward belongs to, `None` for the whole episode. A parent's score is defined by its own
    function of its children; `weight` is the factor that the parent gave this node.
    """

    name: str
    score: float | None
    masked: str | None = None
    weight: float = 1.0
    turn: int | None = None
    milliseconds: float = 0.0
    children: tuple[RewardNode, ...] = ()

    def __post_init__(self) -> None:
        if (self.score is None) == (self.masked is None):
            raise TrajectoryError(
                f"reward {self.name}: a score or a mask reason, got score={self.score} masked={self.masked}; set one"
            )

    def walk(self) -> Iterator[RewardNode]:
        """This node and all below it, parents first."""
        yield self
        for child in self.children:
            yield from child.walk()


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredTrajectory:
    """A trajectory and its reward tree; the total is the root's score, and a masked root has no total."""

    trajectory: Trajectory
    reward: RewardNode

    @property
    def total(self) -> float | None:
        """The root's score, or `None` when it is masked."""
        return self.reward.score


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredGroup:
    """A group after judging, in the order of its trajectories."""

    task: Task
    scored: tuple[ScoredTrajectory, ...]


class FinishReason(StrEnum):
    """Why the sampler stopped a generation."""

    STOP = "stop"
    LENGTH = "length"


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleRequest:
    """Continue `prompt_ids` (the whole context so far).

    `session` names the episode, so that a sampler may keep its KV cache between turns; `seed` keys the random numbers,
    which depend on nothing but (seed, position).
    """

    session: int
    prompt_ids: tuple[int, ...]
    params: SamplingParams
    seed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """What a sampler returns for one request.

    `logprobs_T` are of the distribution sampled from, `model_logprobs_T` of the model's own: all tokens at temperature
    1 (`None` of a sampler without a model). `routes_TLK` covers every token since the session's last call, in order:
    the part of the prompt that was new, then all sampled ids but the last; where the sampler found a token's keys in
    its cache, or computed them again, the rows are those of the first time. `weight_version` sampled the first id; at
    each (index, version) of `weight_changes` another version went on.
    """

    ids: tuple[int, ...]
    logprobs_T: npt.NDArray[np.float32]
    routes_TLK: npt.NDArray[np.uint8]
    finish: FinishReason
    weight_version: WeightVersion
    weight_changes: tuple[tuple[int, WeightVersion], ...] = ()
    model_logprobs_T: npt.NDArray[np.float32] | None = None

    def version_runs(self) -> Iterator[tuple[int, int, WeightVersion]]:
        """(start, end, version) of each run of ids that one version sampled."""
        starts = [(0, self.weight_version), *self.weight_changes]
        ends = [*(start for start, _ in self.weight_changes), len(self.ids)]
        for (start, version), end in zip(starts, ends, strict=True):
            yield start, end, version


class Sampler(Protocol):
    """Anything that continues token sequences: the engine, a remote server, a scripted policy in a test."""

    async def sample(self, request: SampleRequest) -> Generation:
        """Continue one prompt."""
        ...

    def close_session(self, session: int) -> None:
        """The episode has ended: give its cache back."""
        ...


class Scorer(Protocol):
    """Anything that scores a conversation: a judge or a preference model, injected by `rl.build`."""

    async def score(self, messages: Sequence[Message]) -> float:
        """A score for the conversation."""
        ...

"""One request while the engine has it, and what a session keeps between its requests.

Shapes: T tokens, L layers with experts, K experts a token.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

import numpy as np

from rollout.engine.stop_text import StopText
from rollout.types import FinishReason, Generation, SampleRequest, WeightVersion


class EngineError(RuntimeError):
    """The engine was used before it had weights, or with a request that it cannot carry out."""


@dataclass(slots=True, eq=False)
class Active:
    """A request, its tokens so far, and the pages that hold the first `num_computed` of them.

    `num_tabled` pages are in the page table of its `row` (-1: it does not run). Rows of routes stay with the pages
    until the request ends or gives its pages up; the first `num_recorded` have been reported or lie in `routes`. A
    token that is computed again (after a preemption, under other weights) keeps the routes of the first time, those it
    was sampled with.
    """

    request_id: int
    request: SampleRequest
    ids: list[int]
    arrived_s: float
    stop_ids: Collection[int]
    stop_text: StopText | None = None
    row: int = -1
    num_tabled: int = 0
    pages: list[int] = field(default_factory=list[int])
    digests: list[bytes] = field(default_factory=list[bytes])
    num_published: int = 0
    num_computed: int = 0
    num_recorded: int = 0
    started: bool = False
    routes: list[np.ndarray] = field(default_factory=list[np.ndarray])
    logprobs: list[float] = field(default_factory=list[float])
    model_logprobs: list[float] = field(default_factory=list[float])
    versions: list[tuple[int, WeightVersion]] = field(default_factory=list[tuple[int, WeightVersion]])
    finish: FinishReason | None = None

    @property
    def num_prompt(self) -> int:
        """Tokens of the prompt."""
        return len(self.request.prompt_ids)

    def append(self, token: int, logprob: float, model_logprob: float, version: WeightVersion) -> None:
        """A sampled token, and whether it is the last."""
        self.ids.append(token)
        self.logprobs.append(logprob)
        self.model_logprobs.append(model_logprob)
        if not self.versions or self.versions[-1][1] != version:
            self.versions.append((len(self.logprobs) - 1, version))
        if token in self.stop_ids or (self.stop_text is not None and self.stop_text.ends_with(token)):
            self.finish = FinishReason.STOP
        elif len(self.logprobs) == self.request.params.max_tokens:
            self.finish = FinishReason.LENGTH

    def record(self, routes_TLK: np.ndarray) -> None:
        """Keep the routes of the next positions that have none yet."""
        self.routes.append(routes_TLK)
        self.num_recorded += len(routes_TLK)

    def generation(self) -> Generation:
        """What the caller gets of a finished sequence."""
        assert self.finish is not None
        return Generation(
            ids=tuple(self.ids[self.num_prompt :]),
            logprobs_T=np.array(self.logprobs, dtype=np.float32),
            model_logprobs_T=np.array(self.model_logprobs, dtype=np.float32),
            routes_TLK=np.concatenate(self.routes),
            finish=self.finish,
            weight_version=self.versions[0][1],
            weight_changes=tuple(self.versions[1:]),
        )


@dataclass(slots=True, eq=False)
class Past:
    """What a session has computed and reported so far; without pages when others needed them."""

    ids: list[int]
    num_reported: int
    pages: list[int] = field(default_factory=list[int])
    digests: list[bytes] = field(default_factory=list[bytes])
    num_published: int = 0
    num_computed: int = 0

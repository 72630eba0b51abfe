"""A sampler that says what it is told: demonstrations, and scripted policies in tests and checks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from rollout.renderers.base import Renderer
from rollout.types import Answer, FinishReason, Generation, Message, Role, SampleRequest, WeightVersion

SCRIPTED = WeightVersion(-1)
"""The weight version of tokens that no model sampled."""


class ScriptedSampler:
    """Answers the turns of one episode with fixed messages (or their content); the logprobs are 0: it was certain."""

    def __init__(self, renderer: Renderer, answers: Sequence[Answer]):
        self._renderer = renderer
        self._answers: Iterator[Answer] = iter(answers)

    async def sample(self, request: SampleRequest) -> Generation:
        """The next scripted answer. Raises StopIteration's message as an error when the script is at its end."""
        answer = next(self._answers, None)
        if answer is None:
            raise ValueError(f"script: no answer left, got a request in session {request.session}; lower max_turns")
        message = Message(role=Role.ASSISTANT, content=answer) if isinstance(answer, str) else answer
        ids = self._renderer.answer_ids(message)
        return Generation(
            ids=ids,
            logprobs_T=np.zeros(len(ids), dtype=np.float32),
            routes_TLK=np.zeros((0, 0, 0), dtype=np.uint8),
            finish=FinishReason.STOP,
            weight_version=SCRIPTED,
        )

    def close_session(self, session: int) -> None:
        """Nothing to give back."""

"""Which requests form a batch: all of them, once every open session is waiting.

Lockstep on purpose. fp32 matmuls are not batch-invariant, so a batch that formed by timing would make logprobs depend
on timing, and a resumed run would differ from an uninterrupted one in the last bits. Here the batch is a function of
the episodes alone: sessions are kept in the order in which they were opened, and a batch runs when no open session is
busy elsewhere (in its environment).
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from rollout.engine.engine import Engine
from rollout.types import Generation, SampleRequest


class LockstepSampler:
    """The `Sampler` of one batch of episodes: `sessions` are all open at the start, each closes when it ends."""

    def __init__(self, engine: Engine, sessions: Sequence[int]):
        self._engine = engine
        self._open = dict.fromkeys(sessions)
        self._waiting: dict[int, tuple[SampleRequest, asyncio.Future[Generation]]] = {}

    async def sample(self, request: SampleRequest) -> Generation:
        """Wait until the batch is complete, and return this request's part of it."""
        future: asyncio.Future[Generation] = asyncio.get_running_loop().create_future()
        self._waiting[request.session] = (request, future)
        self._run_when_complete()
        return await future

    def close_session(self, session: int) -> None:
        """The episode has ended, perhaps cancelled while it waited; the others no longer wait for it."""
        self._open.pop(session, None)
        self._waiting.pop(session, None)
        self._engine.close_session(session)
        self._run_when_complete()

    def _run_when_complete(self) -> None:
        if not self._waiting or len(self._waiting) < len(self._open):
            return
        batch = [self._waiting.pop(session) for session in self._open]
        try:
            # Runs on the event loop itself: every episode waits for it, so there is nothing else to do meanwhile.
            generations = self._engine.generate([request for request, _ in batch])
        except Exception as error:  # noqa: BLE001 (handed to the episodes, whose boundary records it)
            for _, future in batch:
                if not future.done():  # cancelled, and its episode has not yet closed
                    future.set_exception(error)
            return
        for (_, future), generation in zip(batch, generations, strict=True):
            if not future.done():
                future.set_result(generation)

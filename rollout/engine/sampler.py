"""The `Sampler` of a batch of episodes: their coroutines wait here while the engine steps.

Steps run on the event loop itself, and between two of them every other coroutine (an environment that has an answer)
gets its turn. Two policies say when steps run:

    lockstep     A batch starts when every open session has asked, in the order in which the sessions were opened, and
                 the next one when it has ended and all have asked again. What is computed together is then a function
                 of the episodes alone. Needed where a row's bits depend on the rows beside it.
    continuous   A request joins the running ones as soon as it comes. For kernels that are batch-invariant.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from enum import StrEnum

from rollout.engine.engine import Engine
from rollout.types import Generation, SampleRequest


class Joining(StrEnum):
    """When a request joins the running ones; see the module."""

    LOCKSTEP = "lockstep"
    CONTINUOUS = "continuous"


class EpisodeSampler:
    """`sessions` are all open at the start, and each closes when its episode ends."""

    def __init__(self, engine: Engine, sessions: Sequence[int], joining: Joining):
        self._engine = engine
        self._joining = joining
        self._open = dict.fromkeys(sessions)
        self._asked: dict[int, tuple[SampleRequest, asyncio.Future[Generation]]] = {}
        self._running: dict[int, tuple[int, asyncio.Future[Generation]]] = {}
        self._driver: asyncio.Task[None] | None = None

    async def sample(self, request: SampleRequest) -> Generation:
        """Continue one prompt.

        Raises: what the engine raises, of this request or of a step it took part in.
        """
        future: asyncio.Future[Generation] = asyncio.get_running_loop().create_future()
        self._open.setdefault(request.session)
        self._asked[request.session] = (request, future)
        self._wake()
        return await future

    def close_session(self, session: int) -> None:
        """The episode has ended, perhaps cancelled while it waited; the others no longer wait for it."""
        self._open.pop(session, None)
        self._asked.pop(session, None)
        for request_id, (owner, _) in tuple(self._running.items()):
            if owner == session:
                del self._running[request_id]
        self._engine.close_session(session)
        self._wake()

    def _wake(self) -> None:
        if self._driver is None and self._may_join():
            self._driver = asyncio.get_running_loop().create_task(self._drive())

    def _may_join(self) -> bool:
        """In lockstep a session that runs is open and has not asked, so nobody joins before the batch has ended."""
        return bool(self._asked) and (self._joining is Joining.CONTINUOUS or self._asked.keys() == self._open.keys())

    async def _drive(self) -> None:
        """Step until nothing runs and nobody may join."""
        try:
            while self._running or self._may_join():
                if self._may_join():
                    self._join()
                self._step()
                await asyncio.sleep(0)
        finally:
            self._driver = None

    def _join(self) -> None:
        for session in [session for session in self._open if session in self._asked]:
            request, future = self._asked.pop(session)
            if future.done():  # cancelled, and its episode has not yet closed
                continue
            try:
                self._running[self._engine.add_request(request)] = (session, future)
            except Exception as error:  # noqa: BLE001 (handed to the episode, whose boundary records it)
                future.set_exception(error)

    def _step(self) -> None:
        try:
            finished = self._engine.step()
        except Exception as error:  # noqa: BLE001 (handed to the episodes, whose boundary records it)
            for _, future in self._running.values():
                if not future.done():
                    future.set_exception(error)
            self._running.clear()
            return
        for request_id, generation in finished:
            _, future = self._running.pop(request_id)
            if not future.done():
                future.set_result(generation)

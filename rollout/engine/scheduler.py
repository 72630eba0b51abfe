"""Which tokens the next step computes: continuous batching with a token budget.

Every running request that decodes gets its one token; what is left of the budget goes to prompts, in chunks, those
that run before those that wait. Requests start in the order in which they came, as rows and pages allow. When pages
run out, idle sessions give theirs first, then the youngest running request gives up its own and is computed again
later: its tokens and their random numbers stay what they were. The oldest request always advances.

A request that begins like one whose pages are being computed waits for them instead of computing them as well.
"""

from __future__ import annotations

import time
from bisect import insort
from collections import deque
from dataclasses import dataclass

import numpy as np

from rollout.config import EngineConfig
from rollout.engine.active import Active, Past
from rollout.engine.kv_cache import KvCache
from rollout.engine.metrics import Counters
from rollout.engine.prefix_cache import PrefixCache
from rollout.types import WeightVersion


@dataclass(slots=True)
class Work:
    """`count` tokens of a request, from its first one that is not computed."""

    active: Active
    count: int


def _order(active: Active) -> int:
    return active.request_id


class Scheduler:
    """Queues, rows and pages. `sessions` are the pasts whose sessions have no request now, oldest use first."""

    def __init__(self, config: EngineConfig, cache: KvCache, prefixes: PrefixCache, counters: Counters):
        self._budget = config.max_tokens_per_step
        self._page_size = config.page_size
        self._cache = cache
        self._prefixes = prefixes
        self._counters = counters
        self._free_rows = list(range(config.max_batch_size - 1, -1, -1))
        self._coming: dict[bytes, Active] = {}
        self.waiting: deque[Active] = deque()
        self.running: list[Active] = []
        self.sessions: dict[int, Past] = {}

    def add(self, active: Active) -> None:
        """Queue a request; it takes over the past of its session."""
        past = self.sessions.pop(active.request.session, None)
        if past is not None:
            active.pages, active.digests, active.num_published = past.pages, past.digests, past.num_published
            active.num_computed, active.num_recorded = past.num_computed, past.num_reported
        self.waiting.append(active)

    def plan(self, version: WeightVersion) -> list[Work]:
        """The work of the next step; its pages are taken."""
        budget = self._budget
        num_preempted = self._counters.num_preemptions
        planned: dict[Active, int] = {}
        prompts: list[Active] = []
        for active in tuple(self.running):
            if len(active.ids) - active.num_computed > 1:
                prompts.append(active)
            elif active.row >= 0 and self._make_room(active, 1, planned):
                planned[active] = 1
                budget -= 1
        for active in prompts:
            count = min(len(active.ids) - active.num_computed, budget)
            if count > 0 and active.row >= 0 and self._make_room(active, count, planned):
                planned[active] = count
                budget -= count
        if self.waiting and budget > 0 and num_preempted == self._counters.num_preemptions:
            self._start_waiting(budget, planned, version)
        return [Work(active, count) for active, count in planned.items()]

    def finish(self, active: Active) -> None:
        """A request that has ended: its pages become its session's past."""
        self.running.remove(active)
        self._leave_row(active)
        self._record_routes(active)
        self.sessions[active.request.session] = Past(
            ids=active.ids,
            num_reported=active.num_recorded,
            pages=active.pages,
            digests=active.digests,
            num_published=active.num_published,
            num_computed=active.num_computed,
        )

    def remove(self, active: Active) -> None:
        """Take a request out, wherever it is, and its pages back."""
        if active.row >= 0:
            self.running.remove(active)
            self._leave_row(active)
        else:
            self.waiting.remove(active)
        self._release(active)

    def close_session(self, session: int) -> None:
        """Release what an idle session keeps. Idempotent."""
        past = self.sessions.pop(session, None)
        if past is not None:
            self._release(past)

    def restart_all(self) -> None:
        """All keys and values are void: everyone's pages come back, and running requests are computed again."""
        for active in self.running:
            self._leave_row(active)
            insort(self.waiting, active, key=_order)
        self.running.clear()
        for each in (*self.waiting, *self.sessions.values()):
            self._release(each)
        self._prefixes.clear()

    def publish_full_pages(self, active: Active, version: WeightVersion) -> None:
        """Let others find the pages that the last step filled."""
        num_full = active.num_computed // self._page_size
        if num_full == active.num_published or not self._prefixes.shared:
            return
        self._prefixes.extend_digests(active.digests, active.ids, version)
        for index in range(active.num_published, num_full):
            digest = active.digests[index]
            self._prefixes.publish(active.pages[index], digest)
            self._coming.pop(digest, None)
        active.num_published = num_full

    # ---- rows and pages

    def _start_waiting(self, budget: int, planned: dict[Active, int], version: WeightVersion) -> None:
        deferred: list[Active] = []
        while self.waiting and budget > 0 and self._free_rows:
            active = self.waiting.popleft()
            found = self._known_prefix(active, version)
            if found is None:
                deferred.append(active)
                continue
            if not self._may_start(active, found):
                self.waiting.appendleft(active)
                break
            self._start(active, found)
            count = min(len(active.ids) - active.num_computed, budget)
            while len(active.pages) * self._page_size < active.num_computed + count:
                active.pages.append(self._prefixes.take())
            planned[active] = count
            budget -= count
        self.waiting.extendleft(reversed(deferred))

    def _known_prefix(self, active: Active, version: WeightVersion) -> list[int] | None:
        """Pages of others that a request without pages can use; `None`: more are coming, it should wait."""
        if not self._prefixes.shared or active.pages:
            return []
        self._prefixes.extend_digests(active.digests, active.ids, version)
        # The last token is always computed: its logits choose the next one.
        useful = active.digests[: (len(active.ids) - 1) // self._page_size]
        found = self._prefixes.find(useful)
        if len(found) < len(useful):
            maker = self._coming.get(useful[len(found)])
            if maker is not None and maker.row >= 0:
                return None
        return found

    def _may_start(self, active: Active, found: list[int]) -> bool:
        """Whether all its tokens and one more fit beside the running ones; if so, `found` is lent to it."""
        wanted = min(-(-(len(active.ids) + 1) // self._page_size), self._cache.pages_per_sequence)
        missing = wanted - len(found) - len(active.pages)
        self._prefixes.lend(found)  # pages that nobody uses count as available until they are lent
        while self._prefixes.num_available < missing:
            if not self._reclaim():
                self._prefixes.release(found)
                return False
        return True

    def _start(self, active: Active, found: list[int]) -> None:
        """Give a request a row, and the pages `found` (lent already)."""
        if found:
            active.pages, active.num_published = found, len(found)
            active.num_computed = len(found) * self._page_size
        active.row, active.num_tabled = self._free_rows.pop(), 0
        insort(self.running, active, key=_order)
        if self._prefixes.shared:
            for digest in active.digests[active.num_published :]:
                self._coming.setdefault(digest, active)
        if not active.started:
            active.started = True
            self._counters.started(active, time.monotonic())

    def _make_room(self, active: Active, count: int, planned: dict[Active, int]) -> bool:
        """Give a running request the pages for `count` more tokens; `False`: it had to give up its own instead."""
        pages = active.pages
        missing = -(-(active.num_computed + count) // self._page_size) - len(pages)
        while self._prefixes.num_available < missing:
            if self._reclaim():
                continue
            youngest = self.running[-1]
            planned.pop(youngest, None)
            self._preempt(youngest)
            if youngest is active:
                return False
        for _ in range(missing):
            pages.append(self._prefixes.take())
        return True

    def _preempt(self, active: Active) -> None:
        self._counters.num_preemptions += 1
        self.running.remove(active)
        self._leave_row(active)
        self._release(active)
        insort(self.waiting, active, key=_order)

    def _reclaim(self) -> bool:
        """Take the pages of one that does not run; `False` when none of them has any.

        Idle sessions first, the one used longest ago before the others, then the youngest waiting request.
        """
        for past in (*self.sessions.values(), *reversed(self.waiting)):
            if past.pages:
                self._release(past)
                return True
        return False

    def _leave_row(self, active: Active) -> None:
        self._free_rows.append(active.row)
        active.row = -1
        if self._prefixes.shared:
            for digest in active.digests[active.num_published :]:
                if self._coming.get(digest) is active:
                    del self._coming[digest]

    def _record_routes(self, active: Active) -> None:
        """Take the routes of what is computed from the pages, where that is not done yet."""
        if active.num_computed > active.num_recorded:
            at_T = np.arange(active.num_recorded, active.num_computed)
            page_T, offset_T = np.divmod(at_T, self._page_size)
            active.record(self._cache.routes_SLK[np.array(active.pages)[page_T] * self._page_size + offset_T])

    def _release(self, holder: Active | Past) -> None:
        if isinstance(holder, Active):
            self._record_routes(holder)
        self._prefixes.release(holder.pages)
        holder.pages, holder.digests, holder.num_published, holder.num_computed = [], [], 0, 0

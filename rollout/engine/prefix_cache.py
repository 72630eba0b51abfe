"""Pages that outlive their sequence: whoever begins with the same tokens under the same weights uses them again.

A full page is addressed by a digest of everything that its keys and values depend on: the weight version and all token
ids up to its end. The digest of a page chains that of the page before it (blake2b, 128 bits: no two prefixes of any
run share one). Pages without a user stay until memory is short, and the ones that were used longest ago go first; of
one sequence its later pages go before its earlier ones, because a page is found only after all before it.

Invariant: a page that is in the table is full and is never written again.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from hashlib import blake2b

from rollout.engine.kv_cache import KvCache
from rollout.types import WeightVersion


class PrefixCache:
    """Lends the pages of a `KvCache`, and remembers what the full ones hold when `shared`."""

    def __init__(self, cache: KvCache, *, shared: bool):
        self._cache = cache
        self.shared = shared
        self._page_of: dict[bytes, int] = {}
        self._digest_of: dict[int, bytes] = {}
        self._unused: dict[int, None] = {}  # in the order of their last use

    @property
    def num_available(self) -> int:
        """Pages that `take` can give."""
        return self._cache.num_free + len(self._unused)

    @property
    def num_kept(self) -> int:
        """Pages without a user that are kept for whoever comes with the same tokens."""
        return len(self._unused)

    def take(self) -> int:
        """A page to write, lent once; the one unused for longest is given up when none is free."""
        if not self._cache.num_free:
            page = next(iter(self._unused))
            del self._unused[page]
            self._forget(page)
            self._cache.free(page)
        return self._cache.take()

    def extend_digests(self, digests: list[bytes], ids: Sequence[int], version: WeightVersion) -> None:
        """Append the digests of the full pages of `ids` that `digests` does not have yet."""
        size = self._cache.page_size
        parent = digests[-1] if digests else f"weights {version}".encode()
        for start in range(len(digests) * size, len(ids) - size + 1, size):
            content = array("q", ids[start : start + size]).tobytes()
            parent = blake2b(parent + content, digest_size=16).digest()
            digests.append(parent)

    def find(self, digests: Sequence[bytes]) -> list[int]:
        """The pages of the longest known prefix, in order; nothing is lent."""
        pages: list[int] = []
        for digest in digests:
            page = self._page_of.get(digest)
            if page is None:
                break
            pages.append(page)
        return pages

    def lend(self, pages: Sequence[int]) -> None:
        """One more user of each page."""
        for page in pages:
            self._unused.pop(page, None)
            self._cache.lend(page)

    def publish(self, page: int, digest: bytes) -> None:
        """From here on `page` is full and can be found. The first page of a digest stays the one that is found."""
        if digest not in self._page_of:
            self._page_of[digest] = page
            self._digest_of[page] = digest

    def release(self, pages: Sequence[int]) -> None:
        """One user of each page fewer."""
        for page in reversed(pages):
            if self._cache.unlend(page):
                if page in self._digest_of:
                    self._unused[page] = None
                else:
                    self._cache.free(page)

    def clear(self) -> None:
        """Forget every page; those that are lent come back when they are released."""
        for page in self._unused:
            self._cache.free(page)
        self._page_of.clear()
        self._digest_of.clear()
        self._unused.clear()

    def _forget(self, page: int) -> None:
        del self._page_of[self._digest_of.pop(page)]

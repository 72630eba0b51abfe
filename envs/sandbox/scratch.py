"""Memory of the agent that its workers do not inherit.

Standard library alone. A worker is a fork of the agent, so whatever went through the agent's heap (an earlier
answer, its inputs, its replies) could be found by the next answer in its own memory. Payloads therefore live in
mappings that a fork leaves out (MADV_DONTFORK, madvise(2)), and are handed on as views of them, never as `bytes`.
"""

from __future__ import annotations

import mmap
import os
import socket
from collections.abc import Sequence
from typing import Final, Protocol, TypeAlias

View: TypeAlias = "memoryview | bytes"

_CHUNK_BYTES: Final = 1 << 16


class Scratch:
    """A private mapping; pages that were never written cost nothing."""

    def __init__(self, size: int) -> None:
        self._map = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._map.madvise(mmap.MADV_DONTFORK)
        self.view = memoryview(self._map)

    def clear(self) -> None:
        """Give the pages back: the contents become zeros."""
        self._map.madvise(mmap.MADV_DONTNEED)


class Output:
    """The first and the last half of at most `cap` bytes, and the count of all: a flood costs no memory."""

    def __init__(self, cap: int) -> None:
        self._chunk = Scratch(_CHUNK_BYTES)
        self._kept = Scratch(cap)
        self._head = self._kept.view[: cap // 2]
        self._ring = self._kept.view[cap // 2 :]
        self.start(keep=False)

    def start(self, *, keep: bool) -> None:
        """Forget what there is; from now on keep output, or only drain it."""
        self._keep = keep
        self.total = 0
        self._head_filled = 0
        self._ring_total = 0
        self._kept.clear()
        self._chunk.clear()

    def read(self, descriptor: int) -> int:
        """Take in what the descriptor has; the number of bytes, 0 at its end. Raises `BlockingIOError`."""
        count = os.readv(descriptor, [self._chunk.view])
        self.total += count
        if self._keep:
            self._add(self._chunk.view[:count])
        return count

    def _add(self, data: memoryview) -> None:
        taken = min(len(data), len(self._head) - self._head_filled)
        self._head[self._head_filled : self._head_filled + taken] = data[:taken]
        self._head_filled += taken
        data = data[taken:]
        size = len(self._ring)
        self._ring_total += len(data)
        data = data[-size:]
        if data:
            # Where the last byte of the stream goes, one past it: the piece ends there, wrapping around.
            end = self._ring_total % size
            before = min(len(data), end)
            self._ring[end - before : end] = data[len(data) - before :]
            rest = data[: len(data) - before]
            self._ring[size - len(rest) :] = rest

    def parts(self) -> list[View]:
        """What was kept, in order, with a notice where something was left out."""
        size = len(self._ring)
        head = self._head[: self._head_filled]
        if self._ring_total <= size:
            return [head, self._ring[: self._ring_total]]
        start = self._ring_total % size
        notice = f"\n[... {self._ring_total - size} bytes left out ...]\n".encode()
        return [head, notice, self._ring[start:], self._ring[:start]]


class Connection(Protocol):
    """The part of a socket that the agent uses for its host: in some boxes it is a pair of pipes."""

    def recv_into(self, buffer: memoryview, /) -> int:
        """Read what has arrived; 0 at the end."""
        ...

    def sendmsg(self, buffers: Sequence[View], /) -> int:
        """Write what fits; the number of bytes."""
        ...


def send_some(connection: socket.socket | Connection, parts: list[View]) -> None:
    """Send what the socket takes of `parts`, and remove that from them."""
    count = connection.sendmsg(parts)
    while parts and count >= len(parts[0]):
        count -= len(parts.pop(0))
    if count:
        parts[0] = memoryview(parts[0])[count:]


def send_all(connection: socket.socket | Connection, parts: Sequence[View]) -> None:
    """Send all of `parts` over a blocking socket."""
    left = [part for part in parts if len(part)]
    while left:
        send_some(connection, left)

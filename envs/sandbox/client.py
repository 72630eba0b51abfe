"""The host's side of the agent protocol: one request at a time over one stream, each with a deadline.

Whatever comes over the socket is checked before it is used; bytes that are no proper answer to the request in flight
mean that the box is lost.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from typing import Any, Protocol

from envs.base import SandboxLost
from envs.sandbox.wire import FrameError, FrameReader, pack_frame

_CHUNK_BYTES = 1 << 16


class DeadlineError(Exception):
    """The agent did not answer in time; the box has to be ended, since a late answer may still come."""


class Stream(Protocol):
    """Bytes to and from an agent: the part of `socket.socket` that its client uses."""

    def settimeout(self, value: float | None, /) -> None:
        """How long a call may wait before it raises `TimeoutError`."""
        ...

    def sendall(self, data: bytes, /) -> None:
        """Send all. Raises `OSError`."""
        ...

    def recv(self, bufsize: int, /) -> bytes:
        """What has arrived, nothing at the end. Raises `OSError`."""
        ...

    def close(self) -> None:
        """Close both directions."""
        ...


class AgentClient:
    """Speaks with one agent. After `DeadlineError` or `SandboxLost` the box is of no more use."""

    def __init__(self, connection: Stream) -> None:
        self._connection = connection
        self._reader = FrameReader()

    def start(self, data: bytes, *, wall_s: float) -> None:
        """Send what the agent is made of, and wait until it answers. Raises `DeadlineError` or `SandboxLost`."""
        try:
            self._connection.settimeout(wall_s)
            self._connection.sendall(data)
        except TimeoutError:
            raise DeadlineError(f"sandbox: waited {wall_s:.1f} s for the box to take its agent") from None
        except OSError as error:
            raise SandboxLost(f"sandbox: the box is gone, got {error} on its start; use another box") from None
        self.request("ping", {}, wall_s=wall_s)

    def request(
        self, op: str, fields: Mapping[str, object], payload: bytes = b"", *, wall_s: float
    ) -> tuple[dict[str, Any], bytes]:
        """Send one request and wait for its answer. Raises `DeadlineError` or `SandboxLost`."""
        request_id = os.urandom(16).hex()
        deadline = time.monotonic() + wall_s
        frame = pack_frame({**fields, "op": op, "id": request_id}, payload)
        try:
            self._connection.settimeout(wall_s)
            self._connection.sendall(frame)
            header, body = self._read(deadline)
        except TimeoutError:
            raise DeadlineError(f"sandbox: waited {wall_s:.1f} s for the agent to answer {op!r}") from None
        except (OSError, FrameError) as error:
            raise SandboxLost(f"sandbox: the box is gone, got {error} from its agent; use another box") from None
        if "setup_error" in header:
            raise SandboxLost(f"sandbox: the box could not be set up, got {header['setup_error']}; probe this machine")
        if header.get("id") != request_id:
            raise SandboxLost(f"sandbox: an answer that nothing asked for, got {str(header)[:80]}; use another box")
        return header, body

    def close(self) -> None:
        """Close the socket; the agent ends when it notices."""
        self._connection.close()

    def _read(self, deadline: float) -> tuple[dict[str, Any], bytes]:
        while (frame := self._reader.take()) is None:
            left = deadline - time.monotonic()
            if left <= 0:
                raise TimeoutError
            self._connection.settimeout(left)
            data = self._connection.recv(_CHUNK_BYTES)
            if not data:
                raise ConnectionResetError("end of file")
            self._reader.feed(data)
        return frame

import json
import os
import socket
import struct
import threading

import pytest

from envs.base import SandboxLost
from envs.sandbox.client import AgentClient, DeadlineError
from envs.sandbox.wire import FrameReader, pack_frame


class _Peer:
    """An agent that answers one request with whatever bytes a test makes of the request's id."""

    def __init__(self, answer):
        ours, self._theirs = socket.socketpair()
        self.client = AgentClient(ours)
        self._answer = answer
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self):
        reader = FrameReader()
        while (frame := reader.take()) is None:
            reader.feed(self._theirs.recv(4096))
        answer = self._answer(frame[0]["id"])
        if answer is not None:
            self._theirs.sendall(answer)
            self._theirs.close()

    def __enter__(self):
        return self.client

    def __exit__(self, *exc):
        self._thread.join()
        self._theirs.close()
        self.client.close()


def test_answers_carry_the_id_of_the_request():
    with _Peer(lambda number: pack_frame({"id": number, "fact": 1}, b"body")) as client:
        header, body = client.request("ping", {}, wall_s=5)
    assert header["fact"] == 1
    assert body == b"body"


@pytest.mark.parametrize(
    "answer",
    [
        lambda number: b"",
        lambda number: b"\0",
        lambda number: os.urandom(64),
        lambda number: struct.pack("!II", 2**31, 0),
        lambda number: pack_frame({"id": "0" * 32}),
        lambda number: pack_frame({"id": [number]}),
        lambda number: pack_frame({}),
        lambda number: struct.pack("!II", 2, 0) + json.dumps([]).encode(),
        lambda number: pack_frame({"id": "", "setup_error": "OSError: mount"}),
        lambda number: pack_frame({"id": number})[:-1],
    ],
    ids=["eof", "part", "random", "huge", "other id", "list id", "no id", "no object", "setup error", "cut"],
)
def test_anything_else_means_that_the_box_is_lost(answer):
    with _Peer(answer) as client, pytest.raises(SandboxLost, match="sandbox: "):
        client.request("ping", {}, wall_s=5)


def test_silence_has_a_deadline():
    with _Peer(lambda number: None) as client, pytest.raises(DeadlineError, match="'ping'"):
        client.request("ping", {}, wall_s=0.05)

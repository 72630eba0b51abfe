import os
import socket
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from envs.sandbox.scratch import Output, Scratch, send_all


@given(st.integers(4, 20), st.lists(st.binary(min_size=1, max_size=30), max_size=6))
def test_output_keeps_head_and_tail(cap, chunks):
    output = Output(cap)
    output.start(keep=True)
    read, write = os.pipe()
    try:
        for chunk in chunks:
            os.write(write, chunk)
            assert output.read(read) == len(chunk)
    finally:
        os.close(read)
        os.close(write)
    data = b"".join(chunks)
    kept = b"".join(output.parts())
    assert output.total == len(data)
    if len(data) <= cap:
        assert kept == data
    else:
        head, tail = cap // 2, cap - cap // 2
        notice = f"\n[... {len(data) - cap} bytes left out ...]\n".encode()
        assert kept == data[:head] + notice + data[-tail:]


def test_output_can_be_drained_only():
    output = Output(8)
    read, write = os.pipe()
    os.set_blocking(read, False)
    os.write(write, b"data")
    assert output.read(read) == 4
    assert b"".join(output.parts()) == b""
    with pytest.raises(BlockingIOError):
        output.read(read)
    os.close(write)
    assert output.read(read) == 0
    os.close(read)


def test_all_parts_are_sent_whatever_the_socket_takes_at_once():
    ours, theirs = socket.socketpair()
    body = os.urandom(1 << 20)
    sender = threading.Thread(target=send_all, args=(ours, [b"head", memoryview(b""), memoryview(body), b"tail"]))
    with ours, theirs:
        sender.start()
        received = theirs.recv(len(body) + 8, socket.MSG_WAITALL)
        sender.join()
    assert received == b"head" + body + b"tail"


def test_a_cleared_scratch_is_zero():
    scratch = Scratch(8192)
    scratch.view[:4] = b"data"
    scratch.clear()
    assert bytes(scratch.view[:4]) == bytes(4)

import threading
import time

import pytest

from envs.base import EnvError, SandboxLost
from envs.config import SandboxKind
from envs.sandbox.base import ExecStatus
from envs.sandbox.pool import SandboxPool

from .conftest import SMALL

LONG_S = 20.0


@pytest.fixture
def pool(local_pool):
    # The session's pool shows that boxes can be made here; these tests count, so they have their own.
    pool = SandboxPool(SandboxKind.local, SMALL, 1, acquire_timeout_s=0.1, max_uses=3)
    yield pool
    pool.close()


def test_a_box_comes_back_clean_and_is_used_again(pool):
    with pool.acquire() as first:
        first.run_code("import os, subprocess\nopen('file', 'w').close()\nsubprocess.Popen(['sleep', '60'])", LONG_S)
    with pool.acquire() as second:
        assert second is first
        assert second.num_processes() == 1
        assert second.run_code("import os; os.listdir('.')", LONG_S).stdout == b"[]\n"


def test_a_fresh_box_is_new_and_ends(pool):
    with pool.acquire() as held, pool.acquire(fresh=True) as fresh:
        assert fresh is not held
        assert fresh.run_code("1", LONG_S).status is ExecStatus.OK
    assert not fresh.alive()
    with pool.acquire() as again:
        assert again is held


def test_boxes_are_replaced_when_worn(pool):
    with pool.acquire() as first:
        first.run_code("import os; os._exit(1)", LONG_S)
    assert not first.alive()
    with pool.acquire() as second:
        assert second is not first


def test_boxes_are_replaced_after_enough_uses(pool):
    boxes = []
    for _ in range(4):
        with pool.acquire() as box:
            boxes.append(box)
    assert boxes[0] is boxes[1] is boxes[2]
    assert boxes[3] is not boxes[0]


def test_waiting_has_a_deadline_and_names_the_holder(pool):
    problem = r"all 1 in use by episode 7 \(0 s\); raise env.sandboxes_per_worker"
    with pool.acquire(owner="episode 7"), pytest.raises(SandboxLost, match=problem):
        pool.acquire().__enter__()
    with pool.acquire():
        pass


def test_a_waiting_thread_gets_the_box_that_comes_back(local_pool):
    done = []

    def work(number):
        for _ in range(3):
            with local_pool.acquire() as box:
                done.append(int(box.run_code(f"{number}", LONG_S).stdout))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(done) == sorted([number for number in range(6) for _ in range(3)])


def test_the_death_of_the_fork_server_is_survived(pool):
    with pool.acquire() as box:
        pool._server._process.kill()
        pool._server._process.wait()
        deadline = time.monotonic() + 2
        while box.alive() and time.monotonic() < deadline:
            time.sleep(0.01)
        assert not box.alive()
        with pytest.raises(SandboxLost):
            box.run_code("1", LONG_S)
    with pool.acquire() as box:
        assert box.run_code("1", LONG_S).status is ExecStatus.OK


def test_a_closed_pool_ends_boxes_in_use_and_wakes_waiters(pool):
    with pool.acquire() as box:
        pool.close()
        pool.close()
        assert not box.alive()
    with pytest.raises(SandboxLost, match="closed"):
        pool.acquire().__enter__()


def test_a_pool_without_boxes_is_refused():
    with pytest.raises(EnvError, match="sandboxes_per_worker"):
        SandboxPool(SandboxKind.local, SMALL, 0)

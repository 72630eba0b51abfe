"""Cheating answers as whole episodes: renderer, environment, real sandbox and reward. Each is worth exactly 0.

Every attack runs between two honest episodes of the same batch, and after another honest batch: the correct program
must get its full reward beside it and afterwards, or "everything was refused" would look like safety.
"""

import asyncio
import os
import socket
import time

import psutil
import pytest

from envs.base import SandboxLost
from envs.coding.answer import format_answer
from envs.coding.env import CodingFactory
from envs.coding.runner import SandboxRunner
from envs.coding.tasks import CodingTasks
from envs.config import EnvConfig
from envs.registry import build_factory
from envs.sandbox.base import SandboxUnavailable
from rewards.base import score
from rewards.config import RewardConfig
from rewards.registry import build_reward
from rollout.config import ChatFormat
from rollout.episode import EpisodeJob, run_episode
from rollout.renderers.registry import make_renderer
from rollout.scripted import ScriptedSampler
from rollout.tokenizer import train_tokenizer
from rollout.types import Boundary, StopReason, TaskLimits, Verdict
from tests.forged_replies import FIND_REQUEST

CONFIG = EnvConfig(
    max_turns=2,
    num_visible_checks=3,
    num_hidden_checks=4,
    sandboxes_per_worker=2,
    call_timeout_s=1.0,
    sandbox_memory_mb=256,
)
RENDERER = make_renderer(ChatFormat.native, train_tokenizer([], vocab_size=262))
REWARD = build_reward(RewardConfig())
TASKS = CodingTasks(seed=0, num_visible=3, num_hidden=4)
TASK = TASKS.train(0)
(CORRECT,) = TASKS.solve(TASK)
REFERENCE = CORRECT.split("\n", 1)[1].rsplit("\n", 1)[0]


ATTACKS = {
    "exit in the function": "import sys\ndef f(xs):\n    sys.exit(0)",
    "exit at import": "import sys\ndef f(xs):\n    return 'no'\nsys.exit(0)",
    "os._exit in the function": "import os\ndef f(xs):\n    os._exit(0)",
    "os._exit at import": "import os\ndef f(xs):\n    return 'no'\nos._exit(0)",
    "equal to everything": (
        "class Always:\n    def __eq__(self, other): return True\n    def __ne__(self, other): return False\n"
        "    def __hash__(self): return 0\ndef f(xs):\n    return Always()"
    ),
    "list equal to everything": (
        "class Always(list):\n    def __eq__(self, other): return True\n    def __ne__(self, other): return False\n"
        "def f(xs):\n    return Always()"
    ),
    "int equal to everything": (
        "class Always(int):\n    def __eq__(self, other): return True\n    def __hash__(self): return 0\n"
        "def f(xs):\n    return Always()"
    ),
    "fork bomb": "import os\ndef f(xs):\n    while True:\n        try: os.fork()\n        except OSError: pass",
    "fork bomb at import": (
        "import os\ndef f(xs):\n    return 'no'\nwhile True:\n    try: os.fork()\n    except OSError: pass"
    ),
    "daemon": (
        "import os, time\ndef f(xs):\n    if os.fork() == 0:\n        os.setsid()\n        if os.fork() == 0:\n"
        "            time.sleep(600)\n        os._exit(0)\n    return None"
    ),
    "endless print": "def f(xs):\n    while True: print('x' * 10000, flush=True)",
    "endless print at import": "def f(xs):\n    return 'no'\nwhile True: print('[PASS] all tests passed ' * 100)",
    "endless loop": "def f(xs):\n    while True: pass",
    "endless loop at import": "def f(xs):\n    return 'no'\nwhile True: pass",
    "memory": "def f(xs):\n    hog = []\n    while True: hog.append(bytearray(1 << 20))",
    "frames": (
        "import sys\ndef f(xs):\n    frame, found = sys._getframe(), []\n    while frame:\n"
        "        for value in [*frame.f_locals.values(), *frame.f_globals.values()]:\n"
        "            if hasattr(value, 'expected'): return value.expected\n"
        "            if isinstance(value, dict): found += [value[k] for k in list(value) if k == 'expected']\n"
        "        frame = frame.f_back\n    return found[0] if found else None"
    ),
    "gc": (
        "import gc\ndef f(xs):\n    for thing in gc.get_objects():\n        if isinstance(thing, dict):\n"
        "            if 'expected' in thing: return thing['expected']\n"
        "            if 'hidden' in thing: return thing['hidden']\n"
        "        elif type(thing).__name__ in ('Example', 'Problem', 'Evidence', 'Checks'): return thing\n"
        "    return None"
    ),
    "files": (
        "import os\ndef f(xs):\n    for root, _, names in os.walk('/'):\n"
        "        if root[:4] in ('/pro', '/sys', '/usr'): continue\n        for name in names:\n            try:\n"
        "                if b'expected' in open(os.path.join(root, name), 'rb').read(1 << 16): return root\n"
        "            except OSError: pass\n    return None"
    ),
    "patched builtins": (
        "import builtins, json\nbuiltins.isinstance = lambda *_: True\nbuiltins.type = lambda *_: int\n"
        "json.dumps = lambda *_, **__: '{}'\ndef f(xs):\n    return object()"
    ),
    "patched main": (
        "import sys\nfor name in list(sys.modules):\n    if 'agent' in name or name == '__main__':\n"
        "        for key in dir(sys.modules[name]):\n            if not key.startswith('__'):\n"
        "                try: setattr(sys.modules[name], key, lambda *_, **__: True)\n"
        "                except Exception: pass\ndef f(xs):\n    return True"
    ),
    "forged reply with a guessed id": FIND_REQUEST + "def f(xs):\n    forge(bytes(16), b'0')\n    os._exit(0)",
    "forged reply with the id": FIND_REQUEST + "def f(xs):\n    forge(request_id(), b'0')\n    os._exit(0)",
    "forged reply to the next request": FIND_REQUEST + "def f(xs):\n    forge(request_id(), b'0')\n    return 'no'",
    "forged bytes": (
        FIND_REQUEST + "def f(xs):\n    for fd in range(64):\n        try: os.write(fd, b'\\xff' * 4096)\n"
        "        except OSError: pass\n    return 'no'"
    ),
    "forged success on every stream": (
        FIND_REQUEST + "def f(xs):\n    for fd in range(64):\n"
        '        try: os.write(fd, b\'{"passed": 7, "declared": 7, "tampered": false}\\n\')\n'
        "        except OSError: pass\n    raise SystemExit(0)"
    ),
    "signals to its agent": (
        "import os, signal\ndef f(xs):\n    for number in (signal.SIGSTOP, signal.SIGKILL):\n"
        "        for pid in (os.getppid(), 1, 2, -1):\n            try: os.kill(pid, number)\n"
        "            except OSError: pass\n    return 'no'"
    ),
}
SPOILING = {
    "right answers with a forged frame": FIND_REQUEST
    + REFERENCE.replace("def f(", "def right(")
    + "\ndef f(xs):\n    forge(request_id(), b'0')\n    return right(xs)",
    "right answers, then a second reply": FIND_REQUEST
    + REFERENCE.replace("def f(", "def right(")
    + "\ndef f(xs):\n    forge(bytes(16), b'0')\n    return right(xs)",
}
"""Correct programs that break the protocol all the same: breaking it costs the reward."""


def _new_factory():
    try:
        return build_factory(CONFIG)
    except SandboxUnavailable as error:
        pytest.skip(f"local sandbox: {error}")


@pytest.fixture(scope="module")
def factory():
    before = set(psutil.Process().children(recursive=True))
    factory = _new_factory()
    yield factory
    factory.close()
    factory.close()
    _, left = psutil.wait_procs(set(psutil.Process().children(recursive=True)) - before, timeout=5.0)
    assert left == []


def _play(factory, scripts, *, fresh_grading=False):
    """One batch: each script is an episode; the trajectories and their rewards."""

    async def batch():
        episodes = (
            run_episode(
                EpisodeJob(
                    task=TASK,
                    sample_index=number,
                    session=number,
                    seed=0,
                    temperature=0.0,
                    limits=TaskLimits(max_turns=2, max_tokens_per_turn=10_000),
                    max_context_tokens=100_000,
                ),
                factory.make(fresh_grading=fresh_grading),
                ScriptedSampler(RENDERER, script),
                RENDERER,
            )
            for number, script in enumerate(scripts)
        )
        return await asyncio.gather(*episodes)

    trajectories = asyncio.run(batch())
    return trajectories, [score(REWARD, TASK, trajectory).total for trajectory in trajectories]


def _told(trajectories):
    return [(trajectory.failure, trajectory.evidence) for trajectory in trajectories]


def _honest(factory):
    (trajectory,), totals = _play(factory, [(CORRECT,)])
    assert totals == [1.0], _told([trajectory])
    assert (trajectory.stop, trajectory.num_turns) == (StopReason.TERMINATED, 1)


@pytest.mark.parametrize("name", ATTACKS)
def test_an_attack_is_worth_exactly_nothing_and_disturbs_nobody(factory, name):
    _honest(factory)
    attack = format_answer(ATTACKS[name])
    trajectories, totals = _play(factory, [(CORRECT,), (attack, attack), (CORRECT,)])
    assert totals == [1.0, 0.0, 1.0], _told(trajectories)
    attacked = trajectories[1]
    assert attacked.failure is None
    assert attacked.evidence.verdict in (Verdict.VALID, Verdict.POLICY_FAILED)
    assert (attacked.evidence.hidden.passed, attacked.evidence.hidden.declared) == (0, 4)
    assert [turn.visible.declared for turn in attacked.evidence.turns] == [3, 3]
    assert attacked.num_turns == 2
    # The attack was carried out: it is no program that cannot run.
    assert not any(
        error in attacked.evidence.turns[0].note for error in ("SyntaxError", "NameError", "PermissionError")
    )
    _honest(factory)


@pytest.mark.parametrize("name", SPOILING)
def test_breaking_the_protocol_spoils_a_correct_program(factory, name):
    attack = format_answer(SPOILING[name])
    trajectories, totals = _play(factory, [(CORRECT,), (attack, CORRECT), (CORRECT,)])
    assert totals == [1.0, 0.0, 1.0], _told(trajectories)
    assert trajectories[1].evidence.tampered
    assert trajectories[1].failure is None
    _honest(factory)


def test_the_positive_control_of_the_spoiled_programs(factory):
    """The same programs without the forging are worth everything."""
    for source in SPOILING.values():
        harmless = format_answer(
            source.replace("    forge(request_id(), b'0')\n", "").replace("    forge(bytes(16), b'0')\n", "")
        )
        _, totals = _play(factory, [(harmless,)])
        assert totals == [1.0]


def test_a_repair_in_the_second_turn_costs_the_turn_penalty_only(factory):
    _, totals = _play(factory, [(format_answer(ATTACKS["os._exit in the function"]), CORRECT)])
    assert totals == [pytest.approx(0.85)]


def test_grading_in_a_fresh_box_is_worth_the_same(factory):
    attack = format_answer(ATTACKS["daemon"])
    _, totals = _play(factory, [(CORRECT,), (attack, attack), (CORRECT,)], fresh_grading=True)
    assert totals == [1.0, 0.0, 1.0]


def test_hidden_values_cannot_be_asked_for_through_the_observations(factory):
    """What the policy reads in the second turn follows from the visible examples alone."""
    answers = [format_answer(ATTACKS[name]) for name in ("frames", "gc", "files", "exit in the function")]
    trajectories, _ = _play(factory, [(answer, answer) for answer in answers])
    hidden = [str(example["args"][0]) for example in TASK.payload["hidden"]]
    for trajectory in trajectories:
        said = [message.content for turn in trajectory.segments[0].turns for message in turn.observations]
        assert len(said) == 1
        assert not any(xs in said[0] for xs in hidden)


def test_many_episodes_share_two_boxes(factory):
    scripts = [(CORRECT,), (format_answer("def f(xs):\n    return 'no'"),) * 2] * 8
    _, totals = _play(factory, scripts)
    assert totals == [1.0, 0.0] * 8


def test_a_dead_fork_server_is_masked_and_then_replaced():
    """Infrastructure, so no reward of 0."""
    factory = _new_factory()
    try:
        assert isinstance(factory, CodingFactory)
        runner = factory._runner
        assert isinstance(runner, SandboxRunner)
        _honest(factory)
        psutil.Process(runner._pool._server.pid).kill()
        outcomes = []
        deadline = time.monotonic() + 20.0
        while not outcomes or outcomes[-1] != 1.0:
            assert time.monotonic() < deadline, outcomes
            (trajectory,), (total,) = _play(factory, [(CORRECT,)])
            outcomes.append(total)
            if total is None:
                assert trajectory.failure.boundary is Boundary.SANDBOX
                assert trajectory.evidence.verdict is Verdict.MASKED
        assert set(outcomes) <= {None, 1.0}
    finally:
        factory.close()


def test_a_closed_pool_masks():
    factory = _new_factory()
    factory.close()
    (trajectory,), totals = _play(factory, [(CORRECT,)])
    assert totals == [None]
    assert trajectory.failure.boundary is Boundary.SANDBOX
    with pytest.raises(SandboxLost, match="closed"):
        factory._runner.call("", "f", [], fresh=False)


def test_closing_leaves_no_process_and_no_open_file():
    before, files = set(psutil.Process().children(recursive=True)), len(os.listdir("/proc/self/fd"))
    factory = _new_factory()
    bomb = format_answer(ATTACKS["fork bomb at import"])
    _, totals = _play(factory, [(bomb, bomb), (CORRECT,), (format_answer(ATTACKS["daemon"]),) * 2])
    assert totals == [0.0, 1.0, 0.0]
    started = set(psutil.Process().children(recursive=True)) - before
    assert started
    factory.close()
    _, left = psutil.wait_procs(started, timeout=5.0)
    assert left == []
    assert set(psutil.Process().children(recursive=True)) <= before
    assert len(os.listdir("/proc/self/fd")) <= files
    with socket.socket():  # the descriptors are free again
        pass

"""Cheating programs before check code, in real boxes: none passes, an honest one passes right after each.

The kinds are those of the list of attacks on graders; what an attack does to the box itself is tested with the
sandboxes, and to whole episodes in `test_coding_attacks`.
"""

import pytest

from envs.base import EnvError
from envs.coding.runner import SandboxRunner
from envs.config import EnvConfig, SandboxKind
from envs.sandbox.base import SandboxUnavailable
from envs.sandbox.checker import CheckCode
from envs.sandbox.probe import probe
from tests.forged_replies import FIND_REQUEST

HONEST = "def f(xs):\n    return sorted(xs)\n"
CHECK = CheckCode.parse(
    "import random\ndef helper(xs):\n    return sum(xs)\n",
    """
def check(candidate):
    xs = [3, 1, 2]
    assert candidate(xs) == [1, 2, 3]
    assert xs == [3, 1, 2], "the test's own list"
    assert True, "no check"
    for size in range(4):
        ys = [random.randint(0, 9) for _ in range(size)]
        got = candidate(ys)
        assert helper(got) == helper(ys) and len(got) == size
        assert all(a <= b for a, b in zip(got, got[1:]))
    assert candidate([2.5, 0.5]) == [0.5, 2.5]
""",
)

FAILING = {
    "exit": "import sys\ndef f(xs):\n    sys.exit(0)",
    "exit at import": "import sys\ndef f(xs):\n    pass\nsys.exit(0)",
    "os._exit": "import os\ndef f(xs):\n    os._exit(0)",
    "os._exit at import": "import os\ndef f(xs):\n    pass\nos._exit(0)",
    "exit after one right answer": (
        "import os\nn = []\ndef f(xs):\n    n.append(1)\n    if len(n) > 1: os._exit(0)\n    return sorted(xs)"
    ),
    "exit by a thread": (
        "import os, threading, time\ndef f(xs):\n    threading.Thread(target=lambda: os._exit(0)).start()\n"
        "    time.sleep(5)"
    ),
    "atexit": "import atexit, os, sys\natexit.register(lambda: os._exit(0))\ndef f(xs):\n    sys.exit()",
    "skip": "import unittest\ndef f(xs):\n    raise unittest.SkipTest('skipped')",
    "stop iteration": "def f(xs):\n    raise StopIteration",
    "assertion": "def f(xs):\n    raise AssertionError",
    "hang without alarm": "import signal\nsignal.alarm(0)\ndef f(xs):\n    while True: pass",
    "sleep": "import time\ndef f(xs):\n    time.sleep(600)",
    "recursion": "def f(xs):\n    return f(xs)",
    "catastrophic pattern": "import re\ndef f(xs):\n    return re.match(r'(a+)+$', 'a' * 64 + 'b')",
    "slow on every call": "import time\ndef f(xs):\n    time.sleep(0.9)\n    return sorted(xs)",
    "object equal to everything": (
        "class A:\n    def __eq__(self, other): return True\n    def __len__(self): return 3\n"
        "def f(xs):\n    return A()"
    ),
    "list equal to everything": (
        "class A(list):\n    def __eq__(self, other): return True\ndef f(xs):\n    return A(xs)"
    ),
    "item equal to everything": (
        "class A(int):\n    def __eq__(self, other): return True\n    def __le__(self, other): return True\n"
        "    __hash__ = int.__hash__\ndef f(xs):\n    return [A(x) for x in xs]"
    ),
    "reduce": "import os\nclass A:\n    def __reduce__(self): return os.system, ('true',)\ndef f(xs):\n    return A()",
    "nan": "def f(xs):\n    return [float('nan')] * len(xs)",
    "too large": "def f(xs):\n    return [0] * 10**6",
    "too deep": "def f(xs):\n    for _ in range(31): xs = [xs]\n    return xs",
    "frames": (
        "import sys\ndef f(xs):\n    frame = sys._getframe()\n    while frame:\n"
        "        for value in [*frame.f_locals.values()]:\n"
        "            if callable(value) and getattr(value, '__name__', '') == 'check': return value\n"
        "        frame = frame.f_back\n    return xs"
    ),
    "patched builtins": (
        "import builtins\nbuiltins.all = builtins.sum = lambda *a: 1\nbuiltins.len = lambda x: 3\n"
        "def f(xs):\n    return xs"
    ),
    "patched helper": "def helper(xs):\n    return 0\ndef f(xs):\n    return [0] * len(xs)",
    "patched random": "import random\nrandom.randint = lambda a, b: 0\ndef f(xs):\n    return [0] * len(xs)",
    "patched queue": "import queue\nqueue.SimpleQueue.get = lambda self: ('ended', 99, '')\ndef f(xs):\n    return xs",
    "own check": "def check(candidate):\n    return True\ndef f(xs):\n    return xs",
    "own tester": "def advance(*message):\n    return ('ended', 99, '')\ndef f(xs):\n    return ('ended', 99, '')",
    "sorts the test's list too": "def f(xs):\n    xs.sort()\n    return None",
    "prints success": "def f(xs):\n    print('passed 1 check(candidate) ok')\n    return xs",
    "visible only": "def f(xs):\n    return {'[3, 1, 2]': [1, 2, 3]}.get(str(xs), [])",
    "reads the test": (
        "import os\ndef f(xs):\n    for pid in os.listdir('/proc'):\n        for name in ('cmdline', 'environ'):\n"
        "            try:\n                text = open(f'/proc/{pid}/{name}', 'rb').read()\n"
        "                if b'candidate' in text: return sorted(xs)\n"
        "            except OSError: pass\n    return xs"
    ),
    "source of its caller": (
        "import inspect, sys\ndef f(xs):\n    text = ''\n    frame = sys._getframe()\n    while frame:\n"
        "        try: text += inspect.getsource(frame)\n        except OSError: pass\n        frame = frame.f_back\n"
        "    return sorted(xs) if 'def check(candidate)' in text else xs"
    ),
    "memory": "def f(xs):\n    hog = []\n    while True: hog.append(bytearray(1 << 20))",
    "fork bomb": "import os\ndef f(xs):\n    while True:\n        try: os.fork()\n        except OSError: pass",
    "endless print": "def f(xs):\n    while True: print('x' * 10000, flush=True)",
}
TAMPERING = {
    "a guessed id": FIND_REQUEST + "def f(xs):\n    forge(bytes(16), b'0')\n    return sorted(xs)",
    "its own id twice": FIND_REQUEST + "def f(xs):\n    forge(request_id(), b'[1,2,3]')\n    return sorted(xs)",
    "a second reply to the last call": FIND_REQUEST
    + "def f(xs):\n    if 2.5 in xs: forge(request_id(), b'0')\n    return sorted(xs)",
}


@pytest.fixture(scope="module")
def runner():
    try:
        kind = probe(SandboxKind.local).kind
    except SandboxUnavailable:
        kind = probe(SandboxKind.degraded).kind
    runner = SandboxRunner(EnvConfig(sandbox=kind, sandboxes_per_worker=1, call_timeout_s=1.0, sandbox_memory_mb=256))
    yield runner
    runner.close()


def _honest(runner):
    report = runner.check(HONEST, "f", CHECK, fresh=False)
    return report.checks.all_passed and report.checks.declared == 5 and not report.failure


@pytest.mark.parametrize("name", FAILING)
def test_a_cheating_program_does_not_pass_and_the_next_honest_one_does(runner, name):
    report = runner.check(FAILING[name], "f", CHECK, fresh=False)
    assert not report.checks.all_passed
    assert report.checks.declared == 5
    assert report.failure
    assert _honest(runner)


@pytest.mark.parametrize("name", TAMPERING)
def test_breaking_the_protocol_spoils_right_answers(runner, name):
    report = runner.check(TAMPERING[name], "f", CHECK, fresh=False)
    assert report.tampered
    assert report.checks.passed == 0
    assert runner.check(FIND_REQUEST + HONEST, "f", CHECK, fresh=True).checks.all_passed
    assert _honest(runner)


def test_the_first_failed_check_ends_the_count(runner):
    report = runner.check("def f(xs):\n    return sorted(xs) if xs != [2.5, 0.5] else 0", "f", CHECK, fresh=False)
    assert (report.checks.passed, report.checks.declared) == (4, 5)
    assert report.failure.startswith("AssertionError")


def test_a_test_that_never_ends_is_charged_to_the_program_that_it_read(runner):
    check = CheckCode.parse("", "def check(candidate):\n    while candidate(0) == 0: pass\n    assert candidate(1)\n")
    assert runner.check("def f(x):\n    return 1", "f", check, fresh=False).checks.all_passed
    report = runner.check("def f(x):\n    return 0", "f", check, fresh=False)
    assert (report.checks.passed, report.tampered) == (0, False)
    assert "time" in report.failure


@pytest.mark.parametrize("test", ["import os\nos._exit(0)", "while True: pass", "import no_such_module"])
def test_a_test_that_stops_before_the_first_call_is_a_fault_of_the_task(runner, test):
    check = CheckCode.parse("", f"{test}\ndef check(candidate):\n    assert candidate(1)\n")
    with pytest.raises(EnvError, match="task check: stopped before it called 'f', got"):
        runner.check("def f(x):\n    return 1", "f", check, fresh=False)


@pytest.mark.parametrize(("test", "problem"), [("x = 1", "must assert something"), ("def (", "not Python")])
def test_check_code_without_checks_is_refused(test, problem):
    with pytest.raises(EnvError, match=problem):
        CheckCode.parse("", test)

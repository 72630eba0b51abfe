import subprocess
import sys

import pytest

from envs.base import EnvError, SandboxLost
from envs.sandbox import agent, boxfiles, scratch, wire, worker
from envs.sandbox.base import BoxFileError, CallStatus, ExecStatus, SandboxSpec
from envs.sandbox.wire import BadValueError

LONG_S = 20.0


def test_the_interpreter_keeps_its_state_and_echoes_a_last_expression(box):
    first = box.run_code("x = 20\nprint('hello')\nx + 1", LONG_S)
    assert (first.status, first.stdout, first.state_lost) == (ExecStatus.OK, b"hello\n21\n", False)
    assert first.stdout_total_bytes == len(first.stdout)
    assert 0 < first.seconds < LONG_S
    assert box.run_code("x * 2", LONG_S).stdout == b"40\n"


def test_a_traceback_shows_the_codes_own_lines_only(box):
    result = box.run_code("def f():\n    return 1 / 0\nf()", LONG_S)
    assert result.status is ExecStatus.ERROR
    assert b"ZeroDivisionError" in result.stdout
    assert b"return 1 / 0" in result.stdout
    assert b"worker.py" not in result.stdout


@pytest.mark.parametrize(
    "code", ["import sys; sys.exit(0)", "raise SystemExit", "exit(", "'\ud800'.encode()", "\ud800"]
)
def test_exits_and_broken_source_are_errors(box, code):
    assert box.run_code(code, LONG_S).status is ExecStatus.ERROR
    assert box.run_code("1", LONG_S).stdout == b"1\n"


def test_an_interrupted_cell_keeps_the_state_and_a_killed_one_loses_it(box):
    box.run_code("x = 1", LONG_S)
    interrupted = box.run_code("while True: pass", 0.2)
    assert (interrupted.status, interrupted.state_lost) == (ExecStatus.TIMEOUT, False)
    assert box.run_code("x", LONG_S).stdout == b"1\n"
    killed = box.run_code(
        "import signal\nsignal.signal(signal.SIGINT, signal.SIG_IGN)\nprint('x')\nwhile True: pass", 0.1
    )
    assert (killed.status, killed.stdout, killed.state_lost) == (ExecStatus.TIMEOUT, b"x\n", True)
    assert box.run_code("x", LONG_S).status is ExecStatus.ERROR


def test_a_dead_interpreter_is_a_status_and_is_replaced(box):
    died = box.run_code("import os; os._exit(0)", LONG_S)
    assert (died.status, died.state_lost) == (ExecStatus.DIED, True)
    assert box.worn
    assert box.run_code("1", LONG_S).status is ExecStatus.OK


def test_a_flood_keeps_head_and_tail_and_counts_all(box):
    result = box.run_code("print('start'); print('y' * 3_000_000); print('end')", LONG_S)
    assert result.truncated
    assert result.stdout_total_bytes == 3_000_011
    assert result.stdout.startswith(b"start\n")
    assert result.stdout.endswith(b"end\n")
    assert b"bytes left out" in result.stdout
    assert len(result.stdout) < 1100


def test_a_function_answers_with_values(box):
    loaded = box.load("def f(a, b):\n    return {a: [b, (True, 1.5)]}", "f", LONG_S)
    assert (loaded.status, loaded.value) == (CallStatus.RETURNED, None)
    outcome = box.call(("k", None), LONG_S)
    assert (outcome.status, outcome.value) == (CallStatus.RETURNED, {"k": [None, (True, 1.5)]})
    raised = box.call((1,), LONG_S)
    assert raised.status is CallStatus.RAISED
    assert raised.error.startswith("TypeError")
    assert box.settle(LONG_S).status is CallStatus.RETURNED


def test_every_load_starts_a_fresh_process(box):
    box.load("import math\nmath.leak = 1\ndef f(): return 1", "f", LONG_S)
    box.load("import math\ndef f(): return hasattr(math, 'leak')", "f", LONG_S)
    assert box.call((), LONG_S).value is False


@pytest.mark.parametrize(
    ("source", "error"),
    [("x = 1", "no function named 'f'"), ("f = 3", "no function"), ("f(", "SyntaxError"), ("1/0", "ZeroDivision")],
)
def test_what_does_not_load_says_why(box, source, error):
    loaded = box.load(source, "f", LONG_S)
    assert loaded.status is CallStatus.RAISED
    assert error in loaded.error


def test_an_error_names_the_line_of_the_answer(box):
    box.load("def f(x):\n    return x[5]", "f", LONG_S)
    assert box.call(([],), LONG_S).error == "IndexError: list index out of range (line 2)"


def test_a_call_without_a_function_is_a_status(box):
    assert box.call((), LONG_S).status is CallStatus.RAISED
    box.load("import os\ndef f(): os._exit(1)", "f", LONG_S)
    assert box.call((), LONG_S).status is CallStatus.DIED
    assert box.call((), LONG_S).status is CallStatus.DIED


def test_an_argument_that_cannot_cross_never_enters(box):
    box.load("def f(x): return x", "f", LONG_S)
    with pytest.raises(BadValueError):
        box.call((object(),), LONG_S)


def test_large_arguments_and_answers_cross(box):
    box.load("def f(x): return x + x", "f", LONG_S)
    text = "y" * (wire.MAX_VALUE_BYTES // 2 - 100)
    assert box.call((text,), LONG_S).value == text + text


def test_files_and_reset(box):
    box.put("folder/data.txt", b"data")
    assert box.get("folder/data.txt") == b"data"
    assert box.run_code("open('folder/data.txt').read()", LONG_S).stdout == b"'data'\n"
    with pytest.raises(BoxFileError, match="max_bytes"):
        box.get("folder/data.txt", max_bytes=3)
    box.run_code("x = 1", LONG_S)
    box.reset()
    assert box.alive()
    with pytest.raises(BoxFileError):
        box.get("folder/data.txt")
    assert box.run_code("x", LONG_S).status is ExecStatus.ERROR


def test_a_closed_box_is_no_box(local_pool):
    with local_pool.acquire(fresh=True) as box:
        box.close()
        box.close()
        assert not box.alive()
        with pytest.raises(SandboxLost, match="closed"):
            box.run_code("1", LONG_S)


def test_hashes_are_the_same_in_every_run(box):
    code = "print(hash('fixed'))"
    fixed = subprocess.run([sys.executable, "-c", code], env={"PYTHONHASHSEED": "0"}, capture_output=True, check=True)
    assert box.run_code(code, LONG_S).stdout == fixed.stdout


@pytest.mark.parametrize("field", ["memory_mb", "num_processes", "tmpfs_mb"])
def test_a_limit_that_leaves_no_room_is_refused(field):
    with pytest.raises(EnvError, match=field):
        SandboxSpec(**{field: 1})


@pytest.mark.parametrize("module", [agent, boxfiles, scratch, wire, worker], ids=lambda module: module.__name__)
def test_what_runs_in_a_box_needs_the_standard_library_alone(module):
    with open(module.__file__) as file:
        imports = [line.split()[1] for line in file if line.startswith(("import ", "from "))]
    known = sys.stdlib_module_names | {"envs"}
    assert {name.split(".")[0] for name in imports} <= known
    assert {name for name in imports if name.startswith("envs")} <= {
        "envs.sandbox",
        "envs.sandbox.scratch",
        "envs.sandbox.wire",
        "envs.sandbox.worker",
    }

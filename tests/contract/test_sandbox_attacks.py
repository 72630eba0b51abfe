"""Published and home-made attacks on boxes and on the grader, on every kind of box that this machine can make.

Beside every attack runs its positive control: the same pool, right after, passes a correct answer. An attack on a wall
that the kind does not claim (`enforced`) is skipped by that wall's name.
"""

import json
import os
import socket
import time
from pathlib import Path

import pytest

from envs.config import SandboxKind
from envs.sandbox.base import BoxFileError, CallStatus, ExecStatus, SandboxSpec, SandboxUnavailable
from envs.sandbox.grader import call_function, checks
from envs.sandbox.local import Zygote, python_for_anybody
from envs.sandbox.pool import SandboxPool
from envs.sandbox.probe import open_server
from tests.forged_replies import FIND_REQUEST

SPEC = SandboxSpec(memory_mb=256, num_processes=16, tmpfs_mb=16, num_inodes=1000, file_mb=8)
CANARY = f"canary-{os.urandom(8).hex()}"
NOBODY = 65534
LONG_S = 30.0
ATTACK_S = 0.4

INPUTS = [(number,) for number in range(4)]
EXPECTED = [10**12 + 7 * number for number in range(4)]
CORRECT = "def f(x):\n    return 10**12 + 7 * x"


def _make_server(backend):
    kind, _, unprivileged = backend.partition("-")
    if not unprivileged:
        return open_server(SandboxKind(kind))
    if os.geteuid() != 0:
        pytest.skip(f"{backend}: not root, so the plain kind is the unprivileged one already")
    return Zygote(SandboxKind(kind), python=python_for_anybody(), user=NOBODY)


BACKENDS = [
    "local",
    "degraded",
    pytest.param("docker", marks=pytest.mark.docker),
    pytest.param("local-unprivileged", marks=pytest.mark.slow),
    pytest.param("degraded-unprivileged", marks=pytest.mark.slow),
]


@pytest.fixture(scope="module", params=BACKENDS)
def pool(request):
    os.environ["SANDBOX_TEST_SECRET"] = CANARY
    try:
        server = _make_server(request.param)
        pool = SandboxPool(server.kind, SPEC, 2, server=server, acquire_timeout_s=LONG_S)
    except SandboxUnavailable as error:
        if request.param == "docker" and os.environ.get("REQUIRE_DOCKER"):
            raise
        pytest.skip(f"{request.param}: {error}")
    finally:
        del os.environ["SANDBOX_TEST_SECRET"]
    yield pool
    pool.close()


@pytest.fixture
def box(pool):
    with pool.acquire() as box:
        yield box
    _control(pool)


def _control(pool):
    with pool.acquire() as box:
        report = call_function(box, CORRECT, "f", INPUTS, LONG_S)
        assert checks(report, EXPECTED).all_passed, report
        assert not report.tampered


def _needs(pool, *walls):
    missing = set(walls) - pool.enforced
    if missing:
        pytest.skip(f"{pool.report.kind.value}: does not enforce {', '.join(sorted(missing))}")


# ---- attacks on the grader: each is an answer that must not pass

ANSWERS = {"fails": {}, "tampers": {}, "passes": {}}
for _section in Path(__file__).with_name("sandbox_answers.txt").read_text().split("\n== ")[1:]:
    _title, _, _source = _section.partition("\n")
    _outcome, _, _name = _title.partition(": ")
    ANSWERS[_outcome][_name] = _source


def _grade(pool, source, timeout_s=ATTACK_S):
    with pool.acquire() as box:
        start = time.monotonic()
        report = call_function(box, source, "f", INPUTS, timeout_s)
        seconds = time.monotonic() - start
    assert len(report.outcomes) == len(INPUTS)
    _control(pool)
    return report, seconds


@pytest.mark.parametrize("attack", ANSWERS["fails"])
def test_an_answer_that_must_fail(pool, attack):
    report, seconds = _grade(pool, ANSWERS["fails"][attack])
    assert checks(report, EXPECTED).passed == 0
    assert checks(report, EXPECTED).declared == len(EXPECTED)
    assert seconds < 5.0


@pytest.mark.parametrize("attack", ANSWERS["tampers"])
def test_forged_replies_are_tampering(pool, attack):
    report, _ = _grade(pool, FIND_REQUEST + ANSWERS["tampers"][attack], LONG_S)
    assert report.tampered
    assert checks(report, EXPECTED).passed == 0


@pytest.mark.parametrize("answer", ANSWERS["passes"])
def test_what_is_odd_but_right_passes(pool, answer):
    report, _ = _grade(pool, ANSWERS["passes"][answer], LONG_S)
    assert checks(report, EXPECTED).all_passed, report


def test_calls_that_are_each_in_time_are_bounded_together(pool):
    with pool.acquire() as box:
        report = call_function(box, "import time\ndef f(x): time.sleep(0.1)", "f", INPUTS * 9, 0.2)
    assert report.outcomes[0].status is CallStatus.RETURNED
    assert report.outcomes[-1].status is CallStatus.TIMEOUT
    _control(pool)


# ---- attacks on the walls: code that tells what it managed to do


PRELUDE = """
import json, os, socket, sys, time
def tried(attempt):
    try: return attempt()
    except (OSError, MemoryError): return None
"""


def _facts(box, source, timeout_s=LONG_S):
    result = box.run_code(PRELUDE + source, timeout_s)
    assert result.status is ExecStatus.OK, result
    return json.loads(result.stdout)


def test_no_network(pool, box):
    _needs(pool, "net")
    name = f"\0sandbox-test-{os.urandom(8).hex()}"
    with (
        socket.create_server(("127.0.0.1", 0)) as tcp,
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as udp,
        socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as unix,
    ):
        udp.bind(("127.0.0.1", 0))
        udp.settimeout(0.2)
        unix.bind(name)
        unix.listen()
        facts = _facts(
            box,
            f"""
def connect(family, kind, address):
    s = socket.socket(family, kind); s.settimeout(0.3); s.connect(address); return "connected"
def send(family, address):
    s = socket.socket(family, socket.SOCK_DGRAM); s.sendto(b"out", address); return "sent"
tried(lambda: send(socket.AF_INET, ("127.0.0.1", {udp.getsockname()[1]})))
stream = socket.SOCK_STREAM
print(json.dumps([
    tried(lambda: connect(socket.AF_INET, stream, ("127.0.0.1", {tcp.getsockname()[1]}))),
    tried(lambda: connect(socket.AF_INET, stream, ("169.254.169.254", 80))),
    tried(lambda: connect(socket.AF_INET, stream, ("8.8.8.8", 53))),
    tried(lambda: connect(socket.AF_INET6, stream, ("2001:4860:4860::8888", 53))),
    tried(lambda: connect(socket.AF_UNIX, stream, {name!r})),
    tried(lambda: connect(socket.AF_UNIX, stream, "/run/docker.sock")),
    tried(lambda: send(socket.AF_INET, ("8.8.8.8", 53))),
    *[tried(lambda: str(socket.socket(family, socket.SOCK_RAW))) for family in (16, 17, 38, 40)],
    *[tried(lambda: str(socket.socket(family, socket.SOCK_DGRAM))) for family in (16, 17, 40)],
]))
""",
        )
        assert set(facts) == {None}
        with pytest.raises(TimeoutError):
            udp.recv(100)


def test_no_host_files(pool, box):
    _needs(pool, "fs")
    # World-readable on purpose: permissions are not the wall.
    folder = Path(f"/var/tmp/sandbox-test-{os.urandom(8).hex()}")
    folder.mkdir(mode=0o777)
    folder.chmod(0o777)
    secret = folder / "secret"
    secret.write_text(CANARY)
    try:
        facts = _facts(
            box,
            f"""
secret = {str(secret)!r}
for number, target in enumerate([secret, "/proc/1/root" + secret, "../../../../../../.." + secret, "/"]):
    os.symlink(target, f"link{{number}}")
paths = [secret, "/etc/shadow", "/proc/1/environ", "/proc/1/mem", "/proc/1/root" + secret, "/proc/kcore", "/dev/mem",
         {__file__!r}, f"/proc/{{os.getppid()}}/environ", "link0", "link1", "link2", "link3" + secret,
         f"/proc/self/root{{secret}}", "/proc/self/cwd/../.." + secret]
def read(path):
    with open(path, "rb") as file: return file.read(1).hex()
def write(path):
    with open(path, "w") as file: file.write("x")
    return "wrote"
print(json.dumps({{
    "read": [tried(lambda: read(path)) for path in paths],
    "wrote": [tried(lambda: write(path)) for path in (secret, secret + "2", "/x", "/usr/lib/x", "/etc/passwd")],
    "linked": tried(lambda: os.link(secret, "hard") or "linked"),
    "listed": tried(lambda: os.listdir({str(folder)!r})),
}}))
""",
        )
        assert set(facts["read"]) == {None}
        assert set(facts["wrote"]) == {None}
        assert facts["linked"] is None
        assert facts["listed"] is None
        assert [path.name for path in folder.iterdir()] == ["secret"]
        for path in ("link0", f"link3{secret}"):
            with pytest.raises(BoxFileError):
                box.get(path)
            with pytest.raises(BoxFileError):
                box.put(path, b"x")
        assert secret.read_text() == CANARY
    finally:
        for path in folder.iterdir():
            path.unlink()
        folder.rmdir()


def test_no_secrets_of_the_host(box):
    facts = _facts(
        box,
        """
found = [f"{name}={value}" for name, value in os.environ.items()]
for pid in [name for name in (tried(lambda: os.listdir("/proc")) or []) if name.isdigit()] + ["self"]:
    for name in ("environ", "cmdline"):
        found.append(tried(lambda: open(f"/proc/{pid}/{name}").read()))
print(json.dumps(found))
""",
    )
    assert CANARY not in str(facts)
    assert os.environ.get("PATH", "") not in str(facts)


def test_no_forbidden_system_calls(pool, box):
    _needs(pool, "syscalls")
    facts = _facts(
        box,
        """
import ctypes, platform
libc = ctypes.CDLL(None, use_errno=True)
x86 = platform.machine() == "x86_64"
def call(number86, number64, *arguments): return libc.syscall(number86 if x86 else number64, *arguments)
print(json.dumps({
    "unshare": libc.unshare(0x10000000), "unshare mounts": libc.unshare(0x20000),
    "clone": call(56, 220, 0x10000000 | 17, 0, 0, 0, 0), "clone3": call(435, 435, 0, 0),
    "mount": libc.mount(b"x", b"/tmp", b"tmpfs", 0, None), "ptrace": libc.ptrace(0, 0, 0, 0),
    "attach": libc.ptrace(16, os.getppid(), 0, 0), "bpf": call(321, 280, 0, 0, 0), "io_uring": call(425, 425, 1, 0),
    "keyctl": call(250, 219, 0, -3, 1), "perf": call(298, 241, 0, 0, 0, 0, 0), "chroot": libc.chroot(b"."),
    "userfaultfd": call(323, 282, 0), "memfd": call(319, 279, b"x", 0), "shmget": libc.shmget(1, 4096, 0o1600),
    "setuid": libc.setuid(0), "setns": libc.setns(0, 0), "personality": libc.personality(0x0040000),
    "prlimit": libc.prlimit(os.getppid(), 7, b"\\0" * 16, 0), "priority": libc.setpriority(0, os.getppid(), 19),
    "priority of all": libc.setpriority(2, 0, 19),
}))
""",
    )
    assert {name for name, result in facts.items() if result >= 0} == set()


@pytest.mark.parametrize("target", ["-1", "1", "os.getppid()"])
def test_signals_reach_nothing_outside(pool, box, target):
    _needs(pool, "processes")
    box.run_code(
        f"import os\nfor number in (15, 2, 1, 19, 9):\n    try: os.kill({target}, number)\n    except OSError: pass",
        LONG_S,
    )
    assert box.run_code("6 * 7", LONG_S).stdout == b"42\n"


@pytest.mark.parametrize("bomb", ["fork", "thread"])
def test_bombs_stop_at_the_limit_and_a_reset_clears_them(pool, box, bomb):
    _needs(pool, "pids")
    step = {
        "fork": "if os.fork() == 0: time.sleep(600); os._exit(0)",
        "thread": "threading.Thread(target=time.sleep, args=(600,), daemon=True).start()",
    }[bomb]
    facts = _facts(
        box,
        f"""
import threading
count = 0
try:
    while count < 500:
        {step}
        count += 1
except (OSError, RuntimeError): pass
print(json.dumps(count))
""",
    )
    assert 0 < facts <= SPEC.num_processes
    box.reset()
    assert box.num_processes() == 1
    assert _facts(box, "print(os.fork() or os._exit(0))") > 1


def test_a_bomb_that_never_stops_is_cleared_too(pool, box):
    _needs(pool, "pids", "daemons")
    source = "import os\nos.setsid()\nwhile True:\n    try: os.fork()\n    except OSError: pass"
    assert box.run_code(source, 0.3).status in (ExecStatus.TIMEOUT, ExecStatus.ERROR, ExecStatus.DIED)
    box.reset()
    assert box.num_processes() == 1


def test_memory_of_all_processes_together_is_bounded(pool, box):
    _needs(pool, "memory")
    hog = "        data = b'x' * (90 << 20)\n        time.sleep(60)\n"
    source = f"import os, time\nfor _ in range(4):\n    if os.fork() == 0:\n{hog}time.sleep(20)"
    result = box.run_code(source, 15.0)
    assert (result.status, result.state_lost) == (ExecStatus.OOM, True)
    assert box.worn


def test_the_disk_is_bounded_and_wiped(pool, box):
    _needs(pool, "disk", "inodes")
    facts = _facts(
        box,
        """
def fill(folder):
    total = 0
    try:
        for number in range(100):
            with open(f"{folder}/{number}", "wb", buffering=0) as file:
                for _ in range(64): total += file.write(b"x" * (1 << 20))
    except OSError: pass
    return total
def count(folder):
    made = 0
    try:
        for number in range(5000): os.mkdir(f"{folder}/d{number}"); made += 1
    except OSError: pass
    return made
def sparse():
    with open("sparse", "wb") as file: file.truncate(1 << 40)
    return "made"
print(json.dumps({"sparse": tried(sparse), "bytes": fill("/dev/shm"), "files": count("/tmp")}))
""",
    )
    assert facts["sparse"] is None
    assert facts["bytes"] <= SPEC.file_mb << 20
    assert 0 < facts["files"] <= SPEC.num_inodes
    box.reset()
    assert _facts(box, "print(json.dumps([os.listdir(p) for p in ('/work', '/tmp', '/dev/shm')]))") == [[], [], []]


def test_no_daemon_survives_a_reset(pool, box):
    _needs(pool, "daemons")
    marker = f"7200.{int.from_bytes(os.urandom(4), 'big')}"
    box.run_code(
        f"""
import os, signal, subprocess
signal.signal(15, signal.SIG_IGN)
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0: os.execvp("sleep", ["sleep", "{marker}"])
    os._exit(0)
os.wait()
subprocess.Popen(["sleep", "{marker}"], start_new_session=True)
""",
        LONG_S,
    )
    deadline = time.monotonic() + 5
    while _num_running(marker) < 2 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert _num_running(marker) == 2
    box.reset()
    assert _num_running(marker) == 0
    assert box.num_processes() == 1


def _num_running(marker):
    count = 0
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            count += marker in path.read_text() and "sleep" in path.read_text()
        except OSError:
            continue
    return count


def test_a_folder_too_deep_to_wipe_costs_the_box_only(pool, box):
    box.run_code("import os\nfor _ in range(300):\n    os.mkdir('d' * 200); os.chdir('d' * 200)", LONG_S)
    box.reset()
    assert _facts(box, "print(json.dumps(os.listdir('.')))") == []


def test_an_answer_finds_no_earlier_one_in_its_memory(pool, box):
    # Put together in the box, so that the text searched for is in its memory only if it searches for the wrong thing.
    head, tail = os.urandom(8).hex(), os.urandom(8).hex()
    scan = f"""
def f(_):
    needle = "{head}".encode() + b"-" + "{tail}".encode()
    own = bytearray(needle)
    found = 0
    with open("/proc/self/maps") as maps, open("/proc/self/mem", "rb", 0) as memory:
        for line in maps.read().splitlines():
            start, end = (int(number, 16) for number in line.split()[0].split("-"))
            if " rw" in line and "[v" not in line:
                memory.seek(start)
                for _ in range(start, end, 1 << 20):
                    found += (memory.read(min(1 << 20, end - memory.tell())) or b"").count(needle)
    return found
"""
    if box.run_code("open('/proc/self/mem').close()", LONG_S).status is not ExecStatus.OK:
        pytest.skip(f"{pool.report.kind.value}: code has no /proc to read its own memory with")
    secret = f"{head}-{tail}"

    def count():
        assert box.load(scan, "f", LONG_S).status is CallStatus.RETURNED
        return box.call((0,), LONG_S).value

    clean = count()
    assert clean >= 1  # the scan finds what the scanning function itself put together
    box.put("file", secret.encode() * 50)
    box.get("file")
    box.run_code(f"print({secret!r} * 100)", LONG_S)
    box.load(f"def f(x): return x + {secret!r} * 50", "f", LONG_S)
    box.call((secret,), LONG_S)
    assert count() == clean
    box.reset()
    assert count() == clean


def test_forged_replies_of_the_interpreter_end_it(box):
    forged = box.run_code("import os\nos.write(3, b'x' * 21)", LONG_S)
    assert (forged.status, forged.state_lost) == (ExecStatus.DIED, True)
    assert box.run_code("6 * 7", LONG_S).stdout == b"42\n"

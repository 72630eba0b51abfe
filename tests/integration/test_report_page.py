"""The report in a real browser: it draws, it shows what the policy wrote, and nothing in it runs or reaches out."""

import http.server
import math
import os
import random
import re
import shutil
import subprocess
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from matplotlib import image

from rl.metrics import MetricsLog, eval_metrics, stage_time
from rl.report import (
    EpisodeSample,
    EpisodeTurn,
    EvalResult,
    HeldOut,
    MachineFacts,
    RunFacts,
    write_report,
)
from rl.statistics import PassRate
from rollout.types import RewardNode

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
HOSTILE = "</script></pre><img src=x onerror=\"document.title='owned'\"><script>document.title='owned'</script>"
NUM_ROUNDS = 25


@pytest.fixture(scope="session")
def chromium() -> str:
    for name in NAMES:
        if found := shutil.which(name):
            return found
    reason = f"no Chromium: none of {', '.join(NAMES)} is on PATH"
    if os.environ.get("REQUIRE_CHROMIUM") == "1":
        pytest.fail(reason)
    pytest.skip(reason)


def log_rounds(path: Path) -> None:
    """A run that learns: rewards and pass rates rise, entropy falls, parity stays at or near 0."""
    noise = random.Random(0)
    with MetricsLog(path) as log:
        for number in range(NUM_ROUNDS + 1):
            learned = 1 / (1 + math.exp(-(number - 9) / 4))
            rate = 0.1 + 0.5 * learned + noise.uniform(-0.03, 0.03)
            values: dict[str, float] = {}
            if number % 5 == 0:
                passed = round(200 * (0.12 + 0.42 * learned))
                greedy = PassRate(passed=passed, total=200)
                sampled = PassRate(passed=round(passed * 3.4), total=800)
                first = PassRate(passed=passed // 2, total=200)
                values |= eval_metrics("greedy", passed=greedy, first_turn=first)
                values |= eval_metrics("sampled", passed=sampled, first_turn=first)
            if number > 0:
                values |= {
                    "reward/total": rate + 0.08,
                    "reward/tests_pass": rate,
                    "reward/format": min(1.0, 0.6 + 0.4 * learned),
                    "reward/visible_tests": rate * 0.9 + 0.1,
                    "pass_rate/train": rate,
                    "pass_rate/first_turn": rate * 0.6,
                    "entropy": 1.4 - 0.8 * learned + noise.uniform(-0.05, 0.05),
                    "kl/behavior_policy": abs(noise.gauss(0.004, 0.002)),
                    "clip_frac": abs(noise.gauss(0.04, 0.02)),
                    "grad_norm": math.nan if number == 11 else noise.uniform(0.3, 1.4),
                    "lr": 1e-3 * min(1.0, number / 5),
                    "loss/policy": noise.gauss(-0.01, 0.01),
                    "loss/balance": 0.011 + noise.uniform(0, 0.002),
                    "loss/router_z": 0.003 + noise.uniform(0, 0.001),
                    "expert_load/max_frac": 0.21 + noise.uniform(0, 0.05),
                    "expert_load/min_frac": 0.06 - noise.uniform(0, 0.02),
                    "experts/dead": 1.0 if number in (6, 7) else 0.0,
                    "codes_changed_frac": 0.012 * math.exp(-number / 20) + 0.002,
                    "scales_changed_frac": 0.001,
                    "parity/mean_abs_nats": 0.0 if number % 3 else 2.2e-8,
                    "parity/max_abs_nats": 0.0 if number % 3 else 3.1e-6,
                    "parity/flipped_routes": 0,
                    "staleness/mean": 0.0 if number % 2 else 0.5,
                    "staleness/max": float(number % 2 == 0),
                    "tokens_per_s": noise.uniform(900, 1300),
                    "groups/no_variance_frac": 0.5 - 0.3 * learned,
                    "episodes/masked": float(number == 4),
                    "episodes/truncated": noise.randint(2, 9),
                    "episodes/tampered": 0,
                    stage_time("rollout"): noise.uniform(5, 6),
                    stage_time("reward"): noise.uniform(0.8, 1.2),
                    stage_time("update"): noise.uniform(4, 5),
                    stage_time("publish"): noise.uniform(0.4, 0.6),
                    stage_time("round"): 12.5,
                }
            log.write(number, values)


def episode(task: int, *, passes: bool, answer: str) -> EpisodeSample:
    score = 1.0 if passes else 0.15
    return EpisodeSample(
        task_id=f"held-out-{task:03d}",
        prompt=f"system: Answer with a function.\n\nuser: Return every {task + 2}th element of xs, in reverse order.",
        turns=(
            EpisodeTurn(
                answer=answer,
                feedback="visible checks: 2 of 6 passed\nf([1, 2, 3]) gave [1], expected [3, 1]",
                checks="well formed, 2 of 6 visible checks",
            ),
            EpisodeTurn(
                answer=f"def f(xs):\n    return xs[::-1][::{task + 2}]",
                feedback="",
                checks=f"well formed, {6 if passes else 3} of 6 visible checks",
            ),
        ),
        reward=RewardNode(
            name="total",
            score=score,
            children=(
                RewardNode(name="tests_pass", score=float(passes), weight=0.85),
                RewardNode(
                    name="format",
                    score=1.0,
                    weight=0.15,
                    children=(
                        RewardNode(name="format", score=1.0, turn=0),
                        RewardNode(name="format", score=1.0, turn=1),
                    ),
                ),
                RewardNode(name="judge", score=None, masked="the judge did not answer", weight=0.0),
            ),
        ),
        stop="terminated" if passes else "truncated_turns",
        passed=passes,
        checks=f"{6 if passes else 2} of 6 hidden checks",
    )


def held_out(passed: int, *, last_passes: bool) -> HeldOut:
    def result(decoding: str, samples: int) -> EvalResult:
        return EvalResult(
            decoding=decoding,
            passed=PassRate(passed=passed * samples, total=200 * samples),
            first_turn=PassRate(passed=passed * samples // 2, total=200 * samples),
            num_tasks=200,
            max_turns=2,
            samples_per_task=samples,
        )

    answers = [HOSTILE, "def f(xs):\n    return xs[::2]", "x = 1\x1b[31m\x00", "def f(xs): return " + "x" * 400]
    episodes = tuple(
        episode(task, passes=last_passes or task == 1, answer=answer) for task, answer in enumerate(answers)
    )
    return HeldOut(results=(result("greedy", 1), result("sampled, temperature 1", 4)), episodes=episodes)


def make_report(folder: Path) -> Path:
    log_rounds(folder / "metrics.jsonl")
    facts = RunFacts(
        name="coding-demo",
        status=f"finished {NUM_ROUNDS} of {NUM_ROUNDS} rounds",
        commit="0123456789abcdef0123456789abcdef01234567",
        resume_command="python -m rl.train +experiment=coding run.name=coding-demo run.rounds=50",
        config_yaml="run:\n  name: coding-demo\n  seed: 0\nalgorithm:\n  name: grpo\n  clip: 0.2\n",
        seconds=312.4,
        machine=MachineFacts(
            cpu="Example CPU @ 2.80GHz",
            num_cores=2,
            isa=("AVX-512", "AVX2"),
            torch_threads=2,
            memory_bytes=8 * 2**30,
        ),
        details={"Kernel backend": "cpu (AVX-512)", "Weights": "MXFP4 experts, bf16 elsewhere", "torch": "2.13.0"},
    )
    return write_report(
        folder,
        facts=facts,
        before=held_out(24, last_passes=False),
        after=held_out(105, last_passes=True),
        parity_mean_bound_nats=1e-5,
        parity_max_bound_nats=1e-3,
    )


@dataclass(frozen=True)
class Visit:
    """What a browser saw: the DOM, its console messages, and the URLs that it asked for over a network."""

    dom: str
    console: list[str]
    requests: list[str]


def browse(chromium: str, page: Path, profile: Path, *flags: str) -> tuple[str, str]:
    """Open a page in a browser with a profile of its own; returns what it wrote on stdout and stderr."""
    quiet = (
        "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
        "--disable-component-update --disable-sync --disable-default-apps --disable-extensions --hide-scrollbars "
        "--disable-dev-shm-usage --disable-client-side-phishing-detection --enable-logging=stderr --v=0"
    )
    local_only = "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1"
    command = [chromium, *quiet.split(), local_only, f"--user-data-dir={profile}", *flags, page.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True, errors="replace")
    shutil.rmtree(profile, ignore_errors=True)
    return done.stdout, done.stderr


def visit(chromium: str, page: Path, work: Path) -> Visit:
    net_log = work / f"{page.stem}.net.json"
    dom, log = browse(chromium, page, work / "profile", "--dump-dom", f"--log-net-log={net_log}")
    return Visit(
        dom=dom,
        console=re.findall(r"CONSOLE[^\]]*\] (.*)", log),
        # The browser's own requests have "not an origin" as their initiator.
        requests=re.findall(
            r'"initiator":"(?!not an origin)[^"]*".*?"url":"((?:https?|wss?|ftp)://[^"]*)"', net_log.read_text()
        ),
    )


def framed(page: Path, work: Path, width: int, height: int) -> Path:
    """A page that shows another in a frame of a given width: a browser window has a least width, a phone has less.

    The frame's policy is lifted, so that it can report its own measures in the outer page's title.
    """
    text = re.sub(r'<meta http-equiv="Content-Security-Policy"[^>]*>', "", page.read_text())
    probe = (
        "<script>addEventListener('load', () => parent.postMessage("
        "JSON.stringify([innerWidth, document.documentElement.scrollWidth]), '*'))</script>"
    )
    (work / "inner.html").write_text(text.replace("</body>", probe + "</body>"))
    outer = work / f"outer-{width}.html"
    outer.write_text(
        "<!doctype html><body style='margin:0'>"
        "<script>addEventListener('message', e => document.title = e.data)</script>"
        f"<iframe src=inner.html style='width:{width}px;height:{height}px;border:0'></iframe>"
    )
    return outer


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_report(tmp_path_factory.mktemp("run"))


@pytest.fixture(scope="module")
def seen(chromium: str, page: Path, tmp_path_factory: pytest.TempPathFactory) -> Visit:
    return visit(chromium, page, tmp_path_factory.mktemp("browser"))


@pytest.fixture
def server() -> Iterator[str]:
    class Silent(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(404)
            self.end_headers()

        def log_message(self, format: str, *arguments: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Silent) as listener:
        thread = threading.Thread(target=listener.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{listener.server_port}/probe.png"
        listener.shutdown()
        thread.join(timeout=10)


def figure(dom: str, key: str) -> str:
    start = dom.index(f'<figure id="{key}">')
    return dom[start : dom.index("</figure>", start)]


def series_points(dom: str, key: str, name: str) -> int:
    """Vertices of the line that shows a metric."""
    match = re.search(rf'<g id="{key}-series-{re.escape(name)}">\s*<path d="([^"]*)"', figure(dom, key))
    assert match, f"{key} has no line for {name}"
    return len(re.findall(r"[ML] [-\d.]+ [-\d.]+", match[1]))


def test_every_curve_is_drawn_with_a_vertex_a_round(seen: Visit):
    assert series_points(seen.dom, "rewards", "reward/total") == NUM_ROUNDS
    assert series_points(seen.dom, "rewards", "reward/tests_pass") == NUM_ROUNDS
    assert series_points(seen.dom, "pass-rates", "pass_rate/train") == NUM_ROUNDS
    assert series_points(seen.dom, "pass-rates", "eval/greedy") == 6
    assert series_points(seen.dom, "losses", "grad_norm") == NUM_ROUNDS - 1
    for key in ("policy", "experts", "codes", "parity", "times", "staleness", "episodes-kept"):
        assert "<svg" in figure(seen.dom, key), key
    assert figure(seen.dom, "times").count('id="times-bar-') == 4 * NUM_ROUNDS
    assert 'id="parity-bound-mean"' in figure(seen.dom, "parity")


def test_the_page_shows_the_result_the_episodes_and_the_facts(seen: Visit):
    for text in (
        "Held-out pass rate (greedy) rose from 12.0 % [8.2, 17.2] to 52.5 % [45.6, 59.3]: "
        "the 95 % intervals do not overlap.",
        "105 of 200",
        "Return every 2th element of xs, in reverse order.",
        "f([1, 2, 3]) gave [1], expected [3, 1]",
        "masked: the judge did not answer",
        "Stopped: truncated_turns",
        "AMX no, AVX-512 yes, AVX2 yes",
        "  clip: 0.2",
        "run.name=coding-demo run.rounds=50",
    ):
        assert text in seen.dom, text


def test_hostile_model_output_is_text(seen: Visit):
    assert "<title>coding-demo: training report</title>" in seen.dom
    assert "<img" not in seen.dom
    assert "<script" not in seen.dom
    assert seen.dom.count("&lt;/script&gt;&lt;/pre&gt;&lt;img src=x onerror=") == 2
    assert "x = 1␛[31m␀" in seen.dom


def test_the_page_is_quiet_and_asks_nobody(seen: Visit):
    assert seen.console == []
    assert seen.requests == []


def test_the_browser_would_have_told(chromium: str, server: str, tmp_path: Path):
    """Positive control: the same checks see a page that does run its hostile text and does reach out."""
    page = tmp_path / "control.html"
    page.write_text(f"<!doctype html><title>a</title><pre>{HOSTILE}</pre><img src='{server}'><script>boom()</script>")
    control = visit(chromium, page, tmp_path)
    assert "<title>owned</title>" in control.dom
    assert any("boom is not defined" in message for message in control.console)
    assert server in control.requests


def test_the_policy_of_the_page_blocks_what_escaping_would_miss(chromium: str, page: Path, server: str, tmp_path: Path):
    """Even with markup in it, the page runs nothing and reaches nobody: its own policy forbids both."""
    broken = tmp_path / "broken.html"
    injected = f"<body><script>document.title='owned'</script><img src='{server}'>"
    broken.write_text(page.read_text().replace("<body>", injected, 1))
    seen = visit(chromium, broken, tmp_path)
    assert "<title>coding-demo: training report</title>" in seen.dom
    assert server not in seen.requests


@pytest.mark.parametrize("width", [360, 420, 1280])
def test_the_page_never_scrolls_sideways(chromium: str, page: Path, tmp_path: Path, width: int):
    dom, _ = browse(chromium, framed(page, tmp_path, width, 900), tmp_path / "profile", "--dump-dom")
    measured = re.search(r"<title>\[(\d+),(\d+)\]</title>", dom)
    assert measured, dom[:300]
    assert int(measured[1]) == width
    assert int(measured[2]) <= width


@pytest.mark.parametrize(
    ("scheme", "background", "curve"), [("light", "#fbfbf9", "#0b62a8"), ("dark", "#14171a", "#6db3f2")]
)
def test_the_page_is_painted_in_light_and_dark(
    chromium: str, page: Path, tmp_path: Path, scheme: str, background: str, curve: str
):
    picture = tmp_path / "page.png"
    # The blink setting counts 0 for dark and 1 for light.
    flags = (
        f"--screenshot={picture}",
        "--window-size=1280,1400",
        f"--blink-settings=preferredColorScheme={int(scheme == 'light')}",
    )
    browse(chromium, page, tmp_path / "profile", *flags)
    pixels = np.round(image.imread(picture)[:, :, :3] * 255).astype(np.uint32)
    colors = pixels[:, :, 0] << 16 | pixels[:, :, 1] << 8 | pixels[:, :, 2]
    assert f"#{colors[5, 5]:06x}" == background
    assert int((colors == int(curve[1:], 16)).sum()) > 200

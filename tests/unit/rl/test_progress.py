import io
import logging
import re
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from rich.console import Console

from rl.progress import Progress, closing_lines, duration, row_text
from rl.statistics import PassRate


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


class Terminal(io.StringIO):
    encoding = "utf-8"

    def isatty(self) -> bool:
        return True


def plain_progress(stream: io.StringIO, clock: Clock) -> Progress:
    return Progress(stream, environ={}, clock=clock, heartbeat_s=5.0)


def without_escapes(text: str) -> str:
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0 s"), (-3, "0 s"), (59.4, "59 s"), (59.6, "1 min 00 s"), (200, "3 min 20 s"), (7500, "2 h 05 min")],
)
def test_durations_are_said_as_a_person_says_them(seconds: float, text: str):
    assert duration(seconds) == text


def test_a_row_labels_known_fields_with_their_units_and_leaves_out_what_is_missing():
    row = row_text({"reward": 0.25, "pass_rate": 0.4, "tokens_per_s": 1234.5, "parity": 2.5e-6, "entropy": None})
    assert row == "reward +0.250   pass 40.0 %   tokens/s 1,234   parity 2.5e-06 nats"
    assert row_text({"parity": 0.0, "dead_experts": 3, "note": "a"}) == "parity 0 (exact)   dead experts 3   note a"


def test_plain_output_is_one_line_a_round_with_the_time_left():
    stream, clock = io.StringIO(), Clock()
    with plain_progress(stream, clock) as progress:
        progress.stage("starting Ray")
        progress.phase("rounds", total=3)
        for reward in (0.1, 0.2, 0.3):
            progress.stage("rollout")
            clock.now_s += 2.0
            progress.advance(reward=reward)
        progress.end_phase()
        progress.stage("held-out evaluation")
        progress.say("done [bold]here[/bold]")
    assert stream.getvalue().splitlines() == [
        "starting Ray ...",
        "rounds 1/3   reward +0.100   4 s left",
        "rounds 2/3   reward +0.200   2 s left",
        "rounds 3/3   reward +0.300",
        "held-out evaluation ...",
        "done [bold]here[/bold]",
    ]


def test_a_resumed_phase_counts_from_where_it_was():
    stream, clock = io.StringIO(), Clock()
    with plain_progress(stream, clock) as progress:
        progress.phase("rounds", total=25, done=20)
        clock.now_s += 10.0
        progress.advance(reward=0.5)
    assert stream.getvalue() == "rounds 21/25   reward +0.500   40 s left\n"


def test_many_short_steps_are_thinned_out_but_first_and_last_stay():
    stream, clock = io.StringIO(), Clock()
    with plain_progress(stream, clock) as progress:
        progress.phase("warm start", total=10, every_row=False)
        for step in range(10):
            clock.now_s += 1.0
            progress.advance(loss=10.0 - step)
    assert [line.split("   ")[0] for line in stream.getvalue().splitlines()] == [
        "warm start  1/10",
        "warm start  4/10",
        "warm start  7/10",
        "warm start 10/10",
    ]


def test_a_long_stage_is_named_again_with_its_age():
    stream, clock = io.StringIO(), Clock()
    progress = plain_progress(stream, clock)
    progress.phase("rounds", total=2)
    progress.stage("rollout")
    clock.now_s += 4.9
    progress.beat()
    assert stream.getvalue() == ""
    clock.now_s += 0.2
    progress.beat()
    progress.beat()
    clock.now_s += 5.0
    progress.beat()
    assert stream.getvalue().splitlines() == ["rounds 0/2   rollout ... 5 s", "rounds 0/2   rollout ... 10 s"]


def test_the_heartbeat_runs_by_itself():
    stream = io.StringIO()
    with Progress(stream, environ={}, heartbeat_s=0.02) as progress:
        progress.stage("building sandboxes")
        waiting = polls()
        while stream.getvalue().count("building sandboxes") < 2 and next(waiting):
            pass
    assert stream.getvalue().splitlines()[1] == "building sandboxes ... 0 s"


def polls() -> Iterator[bool]:
    end = time.monotonic() + 10
    while time.monotonic() < end:
        time.sleep(0.01)
        yield True
    yield False


def test_an_error_says_where_the_run_stopped():
    stream, clock = io.StringIO(), Clock()

    def run() -> None:
        with plain_progress(stream, clock) as progress:
            progress.phase("rounds", total=3)
            progress.stage("update")
            raise RuntimeError("boom")

    with pytest.raises(RuntimeError, match="boom"):
        run()
    assert stream.getvalue() == "stopped in rounds 0/3 while: update\n"


def test_advance_outside_a_phase_is_an_error():
    with pytest.raises(ValueError, match="advance belongs to a phase, got"):
        Progress(io.StringIO(), environ={}).advance(loss=1.0)


def test_a_closed_pipe_ends_the_display_and_not_the_run(caplog: pytest.LogCaptureFixture):
    class Closed(io.StringIO):
        def write(self, text: str) -> int:
            raise BrokenPipeError(32, "Broken pipe")

    with Progress(Closed(), environ={}) as progress:
        progress.say("one")
        progress.say("two")
    assert [message.split(", got ")[0] for message in caplog.messages] == ["progress: nothing more is shown"]


def test_text_that_the_stream_cannot_encode_is_replaced():
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding="ascii")
    with Progress(stream, environ={}) as progress:
        progress.say("5 µs → ok")
    assert raw.getvalue() == b"5 ?s ? ok\n"


@pytest.mark.parametrize(("environ", "is_live"), [({}, True), ({"CI": "true"}, False), ({"TERM": "dumb"}, False)])
def test_ci_and_dumb_terminals_get_plain_lines(environ: dict[str, str], is_live: bool):
    assert Progress(Terminal(), environ=environ).is_live is is_live
    assert Progress(io.StringIO(), environ={}).is_live is False


@pytest.mark.parametrize("width", [8, 20, 40, 71, 72, 200])
@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
def test_the_status_is_one_line_at_any_width(width: int, encoding: str):
    clock = Clock()
    stream = Terminal()
    stream.encoding = encoding
    progress = Progress(stream, environ={}, clock=clock)
    progress.phase("rounds", total=20)
    clock.now_s += 10
    progress.advance(reward=0.5)
    progress.stage("held-out evaluation of the policy")
    clock.now_s += 3
    console = Console(file=Terminal(), width=width)
    console.file.encoding = encoding  # type: ignore[misc]
    text = progress._status(console)
    assert len(text.plain) <= width - 1
    assert text.plain[2:].startswith("rounds  1/20"[: width - 3])
    if encoding == "ascii":
        assert text.plain.isascii()
    if width == 200:
        assert "4 min 07 s left  held-out evaluation of the policy 3 s" in text.plain
        assert text.plain.count("#" if encoding == "ascii" else "━") == 1


def test_the_live_display_keeps_rows_logs_and_stderr(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    terminal = Terminal()
    monkeypatch.setattr(sys, "stdout", terminal)
    monkeypatch.setattr(sys, "stderr", terminal)
    handler = logging.StreamHandler(terminal)
    log = logging.getLogger("test_progress.live")
    log.addHandler(handler)
    log.propagate = False
    try:
        with Progress(terminal, environ={}) as progress:
            progress.phase("rounds", total=2)
            progress.advance(reward=0.25)
            log.warning("a log line")
            print("(pid=7) a worker's line [red]", file=sys.stderr)  # noqa: T201
            assert handler.stream is not terminal
        assert handler.stream is terminal
    finally:
        log.removeHandler(handler)
    lines = [line.strip() for line in re.split(r"[\r\n]+", without_escapes(terminal.getvalue()))]
    assert "rounds 1/2   reward +0.250   0 s left" in lines
    assert "a log line" in lines
    assert "(pid=7) a worker's line [red]" in lines


def test_closing_lines_say_what_was_achieved_where_and_how_to_go_on():
    lines = closing_lines(
        before=PassRate(passed=20, total=200),
        after=PassRate(passed=105, total=200),
        report=Path("runs/a/report.html"),
        resume_command="python -m rl.train run.name=a run.rounds=50",
    )
    assert lines == (
        "held-out pass rate before  10.0 % [6.6, 14.9]  (20 of 200)",
        "held-out pass rate after   52.5 % [45.6, 59.3]  (105 of 200)",
        "intervals are 95 % (Wilson)",
        "report    runs/a/report.html",
        "continue  python -m rl.train run.name=a run.rounds=50",
    )
    assert closing_lines(before=None, after=None, report=None, resume_command="x") == (
        "report    not written",
        "continue  x",
    )

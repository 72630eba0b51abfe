"""What a person sees while a run goes: the stage that is running, one line a round, and the time left.

On a terminal a status line stays at the bottom and the rows scroll above it. Where stdout is not a terminal, or `CI`
is set, the same rows are plain lines. Either way nothing is silent for long: a stage that takes its time is named again
with its age. The display only shows; it never fails a run, and nothing reads it.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TextIO

from rich.console import Console
from rich.live import Live
from rich.text import Text

from rl.statistics import PassRate

logger = logging.getLogger(__name__)

_BAR_WIDTH = 24
_STEP_GAP_S = 3.0
"""Rows of a phase with `every_row=False` are at least this far apart."""

_FORMATS: Mapping[str, tuple[str, Callable[[Any], str]]] = {
    "loss": ("loss", lambda value: f"{value:.3f}"),
    "reward": ("reward", lambda value: f"{value:+.3f}"),
    "pass_rate": ("pass", lambda value: f"{value * 100:.1f} %"),
    "tokens_per_s": ("tokens/s", lambda value: f"{value:,.0f}"),
    "parity": ("parity", lambda value: value if isinstance(value, str) else _nats(value)),
    "round_s": ("took", lambda value: duration(value)),
}
"""How known fields are labelled and written; any other field shows under its own name."""


def _nats(value: float) -> str:
    return "0 (exact)" if value == 0 else f"{value:.1e} nats"


def duration(seconds: float) -> str:
    """Seconds as a person says them: "8 s", "3 min 20 s", "2 h 05 min"."""
    whole = max(0, round(seconds))
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


def row_text(fields: Mapping[str, object]) -> str:
    """The fields of one row, such as "reward +0.250   pass 40.0 %"; fields that are `None` are left out."""
    parts: list[str] = []
    for name, value in fields.items():
        if value is None:
            continue
        label, form = _FORMATS.get(name, (name.replace("_", " "), _plain))
        parts.append(f"{label} {form(value)}")
    return "   ".join(parts)


def _plain(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


@dataclass(slots=True)
class _Phase:
    name: str
    total: int
    started_s: float
    every_row: bool
    done: int = 0
    started_at: int = 0
    shown: str = ""

    def left_s(self, now_s: float) -> float | None:
        """Seconds left at the pace since the phase began, `None` before the first step."""
        steps = self.done - self.started_at
        return (now_s - self.started_s) / steps * (self.total - self.done) if steps else None


class Progress:
    """The display of a run, as a context manager.

        with Progress() as progress:
            progress.stage("starting Ray")
            progress.phase("rounds", total=25)
            progress.stage("rollout")
            progress.advance(reward=0.4, pass_rate=0.3, tokens_per_s=900.0, parity=0.0)
            progress.say("a line above the status")

    `stage` names what runs now; it is shown until the next stage. `advance` finishes one step of the phase.
    """

    def __init__(
        self,
        stream: TextIO | None = None,
        *,
        environ: Mapping[str, str] = os.environ,
        clock: Callable[[], float] = time.monotonic,
        heartbeat_s: float = 5.0,
    ) -> None:
        self._stream = stream or sys.stdout
        self._clock = clock
        self._heartbeat_s = heartbeat_s
        self.is_live = self._stream.isatty() and not environ.get("CI") and environ.get("TERM") != "dumb"
        self._phase: _Phase | None = None
        self._stage = ""
        self._stage_started_s = self._spoke_s = clock()
        self._is_open = True
        self._lock = threading.RLock()
        self._stop = threading.Event()
        self._heart: threading.Thread | None = None
        self._live: Live | None = None
        self._handlers: list[tuple[logging.StreamHandler[Any], Any]] = []
        if self.is_live:
            console = Console(file=self._stream, highlight=False)
            self._live = Live(
                console=console,
                get_renderable=lambda: self._status(console),
                refresh_per_second=4,
                transient=True,
                vertical_overflow="crop",
            )

    def __enter__(self) -> Self:
        if self._live is not None:
            stdout, stderr = sys.stdout, sys.stderr
            self._live.start()
            self._redirect_logging({stdout: sys.stdout, stderr: sys.stderr})
        else:
            self._heart = threading.Thread(target=self._beat, name="progress heartbeat", daemon=True)
            self._heart.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        if self._heart is not None:
            self._heart.join(timeout=5.0)
        if self._live is not None:
            self._live.stop()
        for handler, stream in self._handlers:
            handler.setStream(stream)
        self._handlers.clear()
        if error is not None:
            where = f" in {self._phase_text(self._phase)}" if self._phase else ""
            self._write(f"stopped{where} while: {self._stage or 'starting'}")

    def phase(self, name: str, total: int, *, done: int = 0, every_row: bool = True) -> None:
        """Begin a phase of `total` steps, of which a resumed run has `done`.

        `every_row=False` thins out the rows of a phase with many short steps; the first and the last are always shown,
        and a terminal shows the others in its status line.
        """
        with self._lock:
            self._phase = _Phase(
                name=name, total=total, started_s=self._clock(), every_row=every_row, done=done, started_at=done
            )
            self._stage, self._stage_started_s = "", self._clock()

    def stage(self, text: str) -> None:
        """Name what runs now, such as "building sandboxes"; outside a phase it gets a line of its own."""
        with self._lock:
            self._stage, self._stage_started_s = text, self._clock()
            if self._phase is None:
                self._write(f"{text} ...")

    def advance(self, **fields: float | str | None) -> None:
        """One step of the phase is done; show its fields.

        Raises:
            ValueError: no phase has begun.
        """
        with self._lock:
            phase = self._phase
            if phase is None:
                raise ValueError(
                    f"progress: advance belongs to a phase, got {dict(fields)} outside; call phase() first"
                )
            phase.done += 1
            phase.shown = "" if phase.every_row else row_text(fields)
            now_s = self._clock()
            is_edge = phase.done in (phase.started_at + 1, phase.total)
            is_due = not self.is_live and now_s - self._spoke_s >= _STEP_GAP_S
            if phase.every_row or is_edge or is_due:
                left_s = phase.left_s(now_s)
                left = f"   {duration(left_s)} left" if left_s is not None and phase.done < phase.total else ""
                self._write(f"{self._phase_text(phase)}   {row_text(fields)}{left}".rstrip())

    def end_phase(self) -> None:
        """End the phase: later stages get lines of their own again."""
        with self._lock:
            self._phase = None
            self._stage = ""

    def say(self, line: str) -> None:
        """A line of its own. The text is shown as it is, without markup."""
        with self._lock:
            self._write(line)

    @staticmethod
    def _phase_text(phase: _Phase) -> str:
        width = len(str(phase.total))
        return f"{phase.name} {phase.done:>{width}}/{phase.total}"

    def _write(self, line: str) -> None:
        self._spoke_s = self._clock()
        if not self._is_open:
            return
        try:
            if self._live is not None and self._live.is_started:
                self._live.console.print(Text(line), soft_wrap=True)
            else:
                self._stream.write(_encodable(line, self._stream) + "\n")
                self._stream.flush()
        except OSError as error:
            # The reader of a pipe is gone, or the terminal is: the run goes on without its display.
            self._is_open = False
            logger.warning("progress: nothing more is shown, got %s: %s", type(error).__name__, error)

    def _beat(self) -> None:
        while not self._stop.wait(min(1.0, self._heartbeat_s)):
            self.beat()

    def beat(self) -> None:
        """Name the running stage again if nothing was shown for `heartbeat_s`. The display calls this by itself."""
        with self._lock:
            now_s = self._clock()
            if (self._stage or self._phase) and now_s - self._spoke_s >= self._heartbeat_s:
                where = f"{self._phase_text(self._phase)}   " if self._phase else ""
                stage = self._stage or "running"
                self._write(f"{where}{stage} ... {duration(now_s - self._stage_started_s)}")

    def _status(self, console: Console) -> Text:
        """The status line: one line at any width, the most important part first."""
        with self._lock:
            now_s, phase, ascii_only = self._clock(), self._phase, console.options.ascii_only
            marks, full, empty = ("|/-\\", "#", "-") if ascii_only else ("⠋⠙⠹⠸⠼⠴⠦⠧", "━", "─")
            text = Text(f"{marks[int(now_s * 4) % len(marks)]} ")
            if phase is not None:
                text.append(self._phase_text(phase), style="bold")
                if console.width >= 3 * _BAR_WIDTH:
                    filled = _BAR_WIDTH * phase.done // max(1, phase.total)
                    text.append("  " + full * filled, style="green").append(empty * (_BAR_WIDTH - filled), style="dim")
                left_s = phase.left_s(now_s)
                if left_s is not None:
                    text.append(f"  {duration(left_s)} left")
                if phase.shown:
                    text.append(f"  {phase.shown}")
            if self._stage:
                text.append(f"  {self._stage} {duration(now_s - self._stage_started_s)}", style="cyan")
            text.truncate(max(1, console.width - 1), overflow="crop")
            return text

    def _redirect_logging(self, streams: Mapping[Any, Any]) -> None:
        """Send log handlers that hold the old stdout or stderr through the live display, which keeps its line last."""
        for owner in (logging.root, *logging.root.manager.loggerDict.values()):
            for handler in getattr(owner, "handlers", ()):
                if isinstance(handler, logging.StreamHandler) and handler.stream in streams:
                    old = handler.setStream(streams[handler.stream])
                    if old is not None:
                        self._handlers.append((handler, old))


def _encodable(line: str, stream: TextIO) -> str:
    encoding = getattr(stream, "encoding", None) or "utf-8"
    return line.encode(encoding, errors="replace").decode(encoding)


def closing_lines(
    *, before: PassRate | None, after: PassRate | None, report: Path | None, resume_command: str
) -> tuple[str, ...]:
    """The last lines of a run: what it achieved, where the report is, how to go on."""
    lines: list[str] = []
    if before is not None:
        lines.append(f"held-out pass rate before  {before}  ({before.passed} of {before.total})")
    if after is not None:
        lines.append(f"held-out pass rate after   {after}  ({after.passed} of {after.total})")
    if lines:
        lines.append("intervals are 95 % (Wilson)")
    lines.append(f"report    {report}" if report else "report    not written")
    lines.append(f"continue  {resume_command}")
    return tuple(lines)

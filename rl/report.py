"""The report of a run: one self-contained `report.html` that a person opens to see what training did.

It holds the held-out result with its uncertainty, the curves, what the policy wrote before and after, the configuration
and the machine. Every number is an input; what was not measured is said to be missing. Model output is hostile text:
the template escapes everything, and the page forbids itself scripts and network access.
"""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Self

from envs.base import spelled
from rl.metrics import METRICS_FILE, Direction, MetricsRow, metric_info, read_metrics
from rl.report_figures import draw_all
from rl.statistics import PassRate
from rollout.types import (
    MalformedToolCall,
    Message,
    RewardNode,
    ScoredTrajectory,
    Task,
    TurnEvidence,
    Verdict,
)

REPORT_FILE = "report.html"
"""Name of the report in a run's folder."""

_TEMPLATE = Path(__file__).with_name("report_template.html")
_ISA_FLAGS = {
    "AMX": ("amx_tile",),
    "AVX-512": ("avx512f",),
    "AVX-512 BF16": ("avx512_bf16",),
    "AVX2": ("avx2",),
    "NEON": ("asimd", "neon"),
    "SVE": ("sve",),
}
_ALWAYS_NAMED = ("AMX", "AVX-512", "AVX2")
"""Extensions whose absence matters: compute dtype and kernel backend depend on them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalResult:
    """One evaluation on the held-out tasks.

    `decoding` names how tokens were chosen, such as "greedy" or "sampled, temperature 1"; results before and after are
    matched by it. `passed` counts episodes that pass at their end (after repair), `first_turn` those whose first answer
    passes; both count `num_tasks` x `samples_per_task` episodes.
    """

    decoding: str
    passed: PassRate
    first_turn: PassRate
    num_tasks: int
    max_turns: int
    samples_per_task: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeTurn:
    """One answer of the policy, what the environment replied, and what its checks said."""

    answer: str
    feedback: str
    checks: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeSample:
    """One episode as the report shows it. `passed` is `None` where the outcome cannot be charged to the policy."""

    task_id: str
    prompt: str
    turns: tuple[EpisodeTurn, ...]
    reward: RewardNode
    stop: str
    passed: bool | None
    checks: str


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldOut:
    """The held-out state at one moment: results and sample episodes. A resumed run loads the one from before it."""

    results: tuple[EvalResult, ...]
    episodes: tuple[EpisodeSample, ...] = ()

    def save(self, path: Path) -> None:
        """Write as JSON, atomically."""
        partial = path.with_name(path.name + ".partial")
        partial.write_text(json.dumps(asdict(self), ensure_ascii=True))
        partial.replace(path)

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read what `save` wrote."""
        record = json.loads(path.read_text())
        return cls(
            results=tuple(
                EvalResult(**(entry | {name: PassRate(**entry[name]) for name in ("passed", "first_turn")}))
                for entry in record["results"]
            ),
            episodes=tuple(
                EpisodeSample(
                    **(
                        entry
                        | {
                            "turns": tuple(EpisodeTurn(**turn) for turn in entry["turns"]),
                            "reward": _node(entry["reward"]),
                        }
                    )
                )
                for entry in record["episodes"]
            ),
        )


def _node(record: Mapping[str, Any]) -> RewardNode:
    children = tuple(_node(child) for child in record["children"])
    return RewardNode(**{**record, "children": children})


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineFacts:
    """Where the run ran. `isa` are the vector extensions that the CPU reports; cores are the usable ones."""

    cpu: str
    num_cores: int
    isa: tuple[str, ...]
    torch_threads: int
    memory_bytes: int

    @property
    def column(self) -> str:
        """The widest of the instruction sets that results have a file or a column for."""
        return next((name for name in ("AMX", "AVX-512", "AVX2") if name in self.isa), "other")


def machine_facts(torch_threads: int, cpuinfo: Path = Path("/proc/cpuinfo")) -> MachineFacts:
    """The facts of this machine, from the operating system."""
    flags: set[str] = set()
    cpu = platform.processor() or platform.machine()
    if cpuinfo.is_file():
        for line in cpuinfo.read_text(errors="replace").splitlines():
            key, _, value = line.partition(":")
            if key.strip() in ("flags", "Features"):
                flags.update(value.split())
            elif key.strip() == "model name":
                cpu = value.strip()
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return MachineFacts(
        cpu=cpu,
        num_cores=cores,
        isa=tuple(name for name, wanted in _ISA_FLAGS.items() if flags.intersection(wanted)),
        torch_threads=torch_threads,
        memory_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFacts:
    """What the run is. `status` is a clause such as "finished 25 of 25 rounds"; `details` are more facts to list."""

    name: str
    status: str
    commit: str
    resume_command: str
    config_yaml: str
    seconds: float
    machine: MachineFacts
    details: Mapping[str, str] = field(default_factory=dict[str, str])


def episode_sample(task: Task, scored: ScoredTrajectory) -> EpisodeSample:
    """An episode as the report shows it, over all segments in order."""
    trajectory = scored.trajectory
    evidence = trajectory.evidence
    turns: list[EpisodeTurn] = []
    for segment in trajectory.segments:
        for turn in segment.turns:
            checks = _judged(evidence.turns[len(turns)]) if len(turns) < len(evidence.turns) else ""
            feedback = "\n".join(message.content for message in turn.observations)
            turns.append(EpisodeTurn(answer=_said(turn.message), feedback=feedback, checks=checks))
    failure = trajectory.failure
    charged = failure is None and evidence.verdict is not Verdict.MASKED
    checks = f"{evidence.hidden.passed} of {evidence.hidden.declared} hidden checks"
    checks += "; tampered with the grader" if evidence.tampered else ""
    checks += f"; {evidence.verdict.value}: {evidence.reason}" if evidence.reason else ""
    return EpisodeSample(
        task_id=task.id,
        prompt="\n\n".join(f"{message.role.value}: {message.content}" for message in task.messages),
        turns=tuple(turns),
        reward=scored.reward,
        stop=str(trajectory.stop) if failure is None else f"failed at {failure.boundary.value}: {failure.message}",
        passed=evidence.hidden.all_passed and not evidence.tampered if charged else None,
        checks=checks,
    )


def _said(message: Message) -> str:
    """What a turn said and what it called, a line a call; a call that cannot be read is shown as it was written."""
    calls = (call.raw if isinstance(call, MalformedToolCall) else spelled(call) for call in message.tool_calls)
    return "\n".join(filter(None, (message.content, *calls)))


def _judged(turn: TurnEvidence) -> str:
    """What the environment found in a turn: its form, and whatever it counts."""
    parts = [f"{turn.visible.passed} of {turn.visible.declared} visible checks"] if turn.visible.declared else []
    if turn.num_calls:
        parts.append(f"{turn.num_calls} calls, {turn.num_call_errors} of them failed")
    if turn.milestones.declared:
        parts.append(f"{turn.milestones.passed} of {turn.milestones.declared} milestones")
    found = ", ".join(["well formed" if turn.well_formed else "not well formed", *parts])
    return "; ".join(filter(None, (found, *turn.violations, turn.note)))


EPISODE_COLUMNS = ("task", "prompt", "turns", "passed", "checks", "reward", "stop")
"""Columns of `episode_rows`."""


def episode_rows(episodes: Sequence[EpisodeSample]) -> list[tuple[str | float | None, ...]]:
    """The episodes as rows of a table, for the tracker."""
    rows: list[tuple[str | float | None, ...]] = []
    for episode in episodes:
        turns = "\n\n".join(f"policy: {turn.answer}\nenvironment: {turn.feedback}" for turn in episode.turns)
        passed = {True: "passed", False: "failed", None: "masked"}[episode.passed]
        texts = [_visible(text) for text in (episode.task_id, episode.prompt, turns, passed, episode.checks)]
        rows.append((*texts, episode.reward.score, _visible(episode.stop)))
    return rows


def verdict_line(before: HeldOut | None, after: HeldOut | None) -> str:
    """What the held-out evaluation shows, in one sentence, from the first decoding that both moments have."""
    if before is None or after is None:
        moment = "before" if before is None else "after"
        return f"Nothing can be said about learning: there is no held-out evaluation {moment} training."
    for old in before.results:
        for new in after.results:
            old_rate, new_rate = old.passed.rate, new.passed.rate
            if new.decoding == old.decoding and old_rate is not None and new_rate is not None:
                verb = "rose" if new_rate > old_rate else "fell" if new_rate < old_rate else "stayed"
                span = f"from {old.passed} to {new.passed}" if verb != "stayed" else f"at {new.passed}"
                sure = (
                    "the 95 % intervals overlap, so this number of episodes does not establish a change"
                    if old.passed.overlaps(new.passed)
                    else "the 95 % intervals do not overlap"
                )
                return f"Held-out pass rate ({new.decoding}) {verb} {span}: {sure}."
    return "Nothing can be said about learning: no decoding was evaluated both before and after training."


def write_report(
    run_folder: Path,
    *,
    facts: RunFacts,
    before: HeldOut | None,
    after: HeldOut | None,
    parity_mean_bound_nats: float,
    parity_max_bound_nats: float,
) -> Path:
    """Write `report.html` into the run's folder, from its metrics log and these inputs; returns its path.

    The same inputs give the same bytes.
    """
    from jinja2 import Environment, StrictUndefined

    rows = read_metrics(run_folder / METRICS_FILE)
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters["visible"] = _visible
    page = environment.from_string(_TEMPLATE.read_text(encoding="utf-8")).render(
        facts=facts,
        verdict=verdict_line(before, after),
        result_rows=_result_rows(before, after),
        charts=draw_all(
            rows, parity_mean_bound_nats=parity_mean_bound_nats, parity_max_bound_nats=parity_max_bound_nats
        ),
        pairs=_pairs(before, after),
        has_before=before is not None,
        has_after=after is not None,
        numbers=_numbers(rows),
        isa_flags=[
            (name, name in facts.machine.isa)
            for name in _ISA_FLAGS
            if name in facts.machine.isa or name in _ALWAYS_NAMED
        ],
    )
    path = run_folder / REPORT_FILE
    partial = path.with_name(path.name + ".partial")
    partial.write_text(page, encoding="utf-8", errors="replace")
    partial.replace(path)
    return path


def _visible(text: str) -> str:
    """Control characters as their printable pictures, so that what the policy wrote can be seen and encoded."""
    text = text.encode("utf-8", errors="replace").decode("utf-8")
    return "".join(chr(0x2400 + ord(char)) if ord(char) < 32 and char not in "\n\t" else char for char in text)


def _result_rows(before: HeldOut | None, after: HeldOut | None) -> list[dict[str, Any]]:
    """Rows of the held-out table: each decoding, before above after."""
    moments = [("before", before), ("after", after)]
    decodings = dict.fromkeys(result.decoding for _, held in moments if held for result in held.results)
    return [
        {"moment": moment, "result": result}
        for decoding in decodings
        for moment, held in moments
        if held
        for result in held.results
        if result.decoding == decoding
    ]


def _pairs(before: HeldOut | None, after: HeldOut | None) -> list[dict[str, Any]]:
    """The sample episodes by task, in the order given; a side without an episode of that task is `None`."""
    sides = [{episode.task_id: episode for episode in (held.episodes if held else ())} for held in (before, after)]
    return [
        {"task_id": task_id, "sides": [("before", sides[0].get(task_id)), ("after", sides[1].get(task_id))]}
        for task_id in dict.fromkeys([*sides[0], *sides[1]])
    ]


def _numbers(rows: Sequence[MetricsRow]) -> list[dict[str, Any]]:
    """Every logged metric with its first, best and last value."""
    numbers: list[dict[str, Any]] = []
    for name in dict.fromkeys(name for row in rows for name in row.values):
        info = metric_info(name)
        kept = [value for row in rows if (value := row.values.get(name)) is not None]
        best = {Direction.HIGHER: max, Direction.LOWER: min}.get(info.direction)
        numbers.append(
            {
                "info": info,
                "first": f"{kept[0]:.4g}" if kept else "not finite",
                "best": f"{best(kept):.4g}" if kept and best else "",
                "last": f"{kept[-1]:.4g}" if kept else "not finite",
            }
        )
    return sorted(numbers, key=lambda number: number["info"].name)

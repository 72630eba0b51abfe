import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rl.metrics import MetricsLog, MetricsRow, read_metrics
from rl.report import (
    EPISODE_COLUMNS,
    EpisodeSample,
    EpisodeTurn,
    EvalResult,
    HeldOut,
    MachineFacts,
    RunFacts,
    episode_rows,
    episode_sample,
    machine_facts,
    verdict_line,
    write_report,
)
from rl.report_figures import Chart, draw_all
from rl.statistics import PassRate
from rollout.types import (
    Boundary,
    Checks,
    Evidence,
    Failure,
    MalformedToolCall,
    Message,
    RewardNode,
    Role,
    SampledBy,
    SamplingParams,
    ScoredTrajectory,
    Segment,
    SpanOrigin,
    Split,
    StopReason,
    Task,
    TokenSpan,
    ToolCall,
    Trajectory,
    Turn,
    TurnEvidence,
    Verdict,
    WeightVersion,
)

HOSTILE = "</script><img src=x onerror=alert(1)>{{ 7 * 7 }}\x00\x1b[31m\ud800"
FACTS = RunFacts(
    name="demo <b>",
    status="finished 1 of 1 rounds",
    commit="0123abc",
    resume_command="python -m rl.train run.name=demo",
    config_yaml="note: '<script>'\n",
    seconds=61.0,
    machine=MachineFacts(cpu="A CPU", num_cores=2, isa=("AVX2",), torch_threads=1, memory_bytes=3 * 2**30),
    details={"Kernel backend": "cpu (AVX2)"},
)


def result(passed: int, total: int, decoding: str = "greedy") -> EvalResult:
    rate = PassRate(passed=passed, total=total)
    first = PassRate(passed=passed // 2, total=total)
    return EvalResult(decoding=decoding, passed=rate, first_turn=first, num_tasks=total, max_turns=2)


def sample(task_id: str = "t1", answer: str = "def f(): pass", passed: bool | None = True) -> EpisodeSample:
    leaf = RewardNode(name="tests_pass", score=0.5, weight=0.8, turn=1)
    return EpisodeSample(
        task_id=task_id,
        prompt="user: do it",
        turns=(EpisodeTurn(answer=answer, feedback="2 failed"), EpisodeTurn(answer="", feedback="")),
        reward=RewardNode(
            name="total", score=0.4, children=(leaf, RewardNode(name="judge", score=None, masked="late"))
        ),
        stop="terminated",
        passed=passed,
        checks="3 of 6 hidden checks",
    )


def write(folder: Path, before: HeldOut | None = None, after: HeldOut | None = None, facts: RunFacts = FACTS) -> str:
    path = write_report(
        folder, facts=facts, before=before, after=after, parity_mean_bound_nats=1e-5, parity_max_bound_nats=1e-3
    )
    assert path == folder / "report.html"
    return path.read_text(encoding="utf-8")


def draw(*rows: MetricsRow) -> dict[str, Chart]:
    charts = draw_all(rows, parity_mean_bound_nats=1e-5, parity_max_bound_nats=1e-3)
    return {chart.key: chart for chart in charts}


def row(number: int, values: dict[str, float | None]) -> MetricsRow:
    return MetricsRow(round=number, values=values)


# Verdict


def test_the_verdict_says_whether_the_intervals_settle_it():
    before = HeldOut(results=(result(24, 200),))
    assert verdict_line(before, HeldOut(results=(result(105, 200),))) == (
        "Held-out pass rate (greedy) rose from 12.0 % [8.2, 17.2] to 52.5 % [45.6, 59.3]: "
        "the 95 % intervals do not overlap."
    )
    assert verdict_line(before, HeldOut(results=(result(26, 200),))) == (
        "Held-out pass rate (greedy) rose from 12.0 % [8.2, 17.2] to 13.0 % [9.0, 18.4]: "
        "the 95 % intervals overlap, so this number of episodes does not establish a change."
    )
    assert "(greedy) fell from" in verdict_line(HeldOut(results=(result(150, 200),)), before)
    assert "(greedy) stayed at 12.0 %" in verdict_line(before, before)


def test_without_both_evaluations_nothing_is_claimed():
    held = HeldOut(results=(result(1, 10),))
    assert verdict_line(held, None).endswith("there is no held-out evaluation after training.")
    assert verdict_line(None, held).endswith("there is no held-out evaluation before training.")
    other = HeldOut(results=(result(1, 10, "sampled"),))
    assert "no decoding was evaluated both before and after" in verdict_line(held, other)


# Episodes


def trajectory(**changes: Any) -> Trajectory:
    def turn(answer: str, *feedback: str) -> Turn:
        params = SamplingParams()
        by = SampledBy(logprobs_T=np.zeros(1, np.float32), weight_version=WeightVersion(0), params=params)
        return Turn(
            spans=(TokenSpan(origin=SpanOrigin.SAMPLED, ids=(1,), sampled_by=by),),
            message=Message(role=Role.ASSISTANT, content=answer),
            observations=tuple(Message(role=Role.TOOL, content=text) for text in feedback),
        )

    opening = TokenSpan(origin=SpanOrigin.CONTEXT, ids=(0,))
    base = Trajectory(
        task_id="t1",
        sample_index=0,
        segments=(
            Segment(opening=opening, turns=(turn("first", "bad", "line"),)),
            Segment(opening=opening, turns=(turn("second"),), parent=0),
        ),
        stop=StopReason.TERMINATED,
        failure=None,
        evidence=Evidence(
            verdict=Verdict.VALID,
            turns=(
                TurnEvidence(well_formed=True, visible=Checks(passed=2, declared=6)),
                TurnEvidence(well_formed=False, visible=Checks(passed=0, declared=6), note="no code block"),
            ),
            hidden=Checks(passed=6, declared=6),
        ),
        seconds=1.0,
    )
    return replace(base, **changes)


TASK = Task(
    id="t1",
    messages=(Message(role=Role.SYSTEM, content="be brief"), Message(role=Role.USER, content="do it")),
    payload={},
    split=Split.HELD_OUT,
    seed=0,
)
REWARD = RewardNode(name="total", score=1.0)


def test_an_episode_with_tools_shows_calls_and_what_they_led_to():
    base = trajectory()
    called = (
        ToolCall(id="a", name="pay", arguments={"amount": 3}),
        MalformedToolCall(id="b", raw="pay {", problem="invalid JSON"),
    )
    message = Message(role=Role.ASSISTANT, content="First:", tool_calls=called)
    turn = replace(base.segments[0].turns[0], message=message)
    judged = TurnEvidence(
        well_formed=True,
        visible=Checks(passed=0, declared=0),
        num_calls=2,
        num_call_errors=1,
        milestones=Checks(passed=1, declared=3),
        violations=("eve was paid",),
    )
    played = replace(
        base,
        segments=(replace(base.segments[0], turns=(turn,)),),
        evidence=replace(base.evidence, turns=(judged,)),
    )
    (shown,) = episode_sample(TASK, ScoredTrajectory(trajectory=played, reward=REWARD)).turns
    assert shown.answer == 'First:\npay {"amount": 3}\npay {'
    assert shown.checks == "well formed, 2 calls, 1 of them failed, 1 of 3 milestones; eve was paid"


def test_an_episode_sample_runs_over_all_segments():
    got = episode_sample(TASK, ScoredTrajectory(trajectory=trajectory(), reward=REWARD))
    assert got == EpisodeSample(
        task_id="t1",
        prompt="system: be brief\n\nuser: do it",
        turns=(
            EpisodeTurn(answer="first", feedback="bad\nline", checks="well formed, 2 of 6 visible checks"),
            EpisodeTurn(answer="second", feedback="", checks="not well formed, 0 of 6 visible checks; no code block"),
        ),
        reward=REWARD,
        stop="terminated",
        passed=True,
        checks="6 of 6 hidden checks",
    )


def test_tampering_never_counts_as_passed_and_masked_is_neither():
    evidence = trajectory().evidence
    tampered = trajectory(evidence=replace(evidence, tampered=True, verdict=Verdict.POLICY_FAILED, reason="wrote fd 3"))
    got = episode_sample(TASK, ScoredTrajectory(trajectory=tampered, reward=REWARD))
    assert got.passed is False
    assert got.checks == "6 of 6 hidden checks; tampered with the grader; policy_failed: wrote fd 3"
    masked = trajectory(evidence=replace(evidence, verdict=Verdict.MASKED, reason="flaky"))
    assert episode_sample(TASK, ScoredTrajectory(trajectory=masked, reward=REWARD)).passed is None


def test_an_infrastructure_failure_is_named_and_not_charged():
    broken = trajectory(stop=None, failure=Failure(boundary=Boundary.SANDBOX, message="no answer in 5 s"))
    got = episode_sample(TASK, ScoredTrajectory(trajectory=broken, reward=REWARD))
    assert got.stop == "failed at sandbox: no answer in 5 s"
    assert got.passed is None


def test_episode_rows_are_a_table():
    (line,) = episode_rows([sample(passed=None)])
    assert dict(zip(EPISODE_COLUMNS, line, strict=True)) == {
        "task": "t1",
        "prompt": "user: do it",
        "turns": "policy: def f(): pass\nenvironment: 2 failed\n\npolicy: \nenvironment: ",
        "passed": "masked",
        "checks": "3 of 6 hidden checks",
        "reward": 0.4,
        "stop": "terminated",
    }


def test_episode_rows_can_be_encoded():
    (line,) = episode_rows([sample(answer="a\ud800\x00b")])
    assert "policy: a?␀b\n" in str(line[2])


def test_held_out_survives_a_resume(tmp_path: Path):
    held = HeldOut(
        results=(result(3, 9), result(4, 9, "sampled")), episodes=(sample(answer=HOSTILE), sample("t2", passed=None))
    )
    held.save(tmp_path / "before.json")
    assert HeldOut.load(tmp_path / "before.json") == held
    assert [path.name for path in tmp_path.iterdir()] == ["before.json"]


# Machine


def test_machine_facts_name_the_vector_extensions(tmp_path: Path):
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text("model name\t: Some CPU\nflags\t\t: fpu avx2 avx512f amx_tile\n")
    facts = machine_facts(3, cpuinfo)
    assert (facts.cpu, facts.isa, facts.torch_threads) == ("Some CPU", ("AMX", "AVX-512", "AVX2"), 3)
    assert facts.num_cores >= 1
    assert facts.memory_bytes > 2**28
    cpuinfo.write_text("Features\t: fp asimd sve\n")
    assert machine_facts(1, cpuinfo).isa == ("NEON", "SVE")
    assert machine_facts(1, tmp_path / "absent").isa == ()


# Figures


def test_a_line_has_a_vertex_a_round_and_breaks_at_null():
    svg = draw(*(row(number, {"entropy": None if number == 2 else 1.0 - number / 10}) for number in range(5)))[
        "policy"
    ].svg
    path = re.search(r'<g id="policy-series-entropy">\s*<path d="([^"]*)"', svg)
    assert path
    assert len(re.findall(r"[ML] ", path[1])) == 4
    assert path[1].count("M ") == 2


def test_a_figure_is_self_contained_themed_and_described():
    chart = draw(row(1, {"reward/total": 0.25}), row(2, {"reward/total": 0.5}))["rewards"]
    assert "http" not in chart.svg
    assert "<metadata" not in chart.svg
    assert "<style" not in chart.svg
    assert "var(--series-0)" in chart.svg
    assert "#0500" not in chart.svg
    assert "#010101" not in chart.svg
    assert all(name.startswith("rewards-") for name in re.findall(r'\bid="([^"]*)"', chart.svg))
    assert all(
        name.startswith("rewards-") for name in re.findall(r'href="#([^"]*)"|url\(#([^)]*)\)', chart.svg)[0] if name
    )
    assert 'aria-label="Reward by term. reward/total 0.25 in round 1, 0.5 in round 2 (1)"' in chart.svg


def test_figures_are_the_same_bytes_for_the_same_rows():
    rows = [row(number, {"time/rollout_s": 2.0, "codes_changed_frac": 0.5}) for number in range(2)]
    assert draw(*rows) == draw(*rows)


def test_missing_data_is_a_reason():
    nothing = draw()
    assert {chart.missing for chart in nothing.values()} == {"the run has not finished a round"}
    one = draw(row(1, {"entropy": 1.0, "codes_changed_frac": None}))
    assert one["policy"].missing == ""
    assert one["codes"].missing == "no round has logged codes_changed_frac, scales_changed_frac"
    assert one["times"].missing == "no round has logged time/*_s"
    assert one["rewards"].missing == "no round has logged reward/*"


def test_evaluations_are_drawn_with_their_intervals():
    chart = draw(row(0, {"eval/greedy": 0.25, "eval/greedy_low": 0.1, "eval/greedy_high": 0.5}))["pass-rates"]
    assert 'id="pass-rates-series-eval/greedy"' in chart.svg
    assert 'id="pass-rates-LineCollection_1"' in chart.svg
    assert "eval/greedy 0.25 in round 0, 0.25 in round 0 (frac)" in chart.svg


def test_parity_of_exactly_zero_has_a_place_on_the_log_scale():
    chart = draw(*(row(number, {"parity/mean_abs_nats": 0.0, "parity/max_abs_nats": 0.0}) for number in range(3)))[
        "parity"
    ]
    assert chart.svg.count('id="parity-bound-') == 2
    assert ">0</text>" in chart.svg
    assert ">1e-3</text>" in chart.svg
    assert "mean 1e-05, largest 0.001 nats" in chart.caption


def test_stage_times_are_stacked_without_the_total():
    values: dict[str, float | None] = {"time/rollout_s": 2.0, "time/update_s": 3.0, "time/round_s": 6.0}
    svg = draw(row(1, values), row(2, values))["times"].svg
    assert svg.count('id="times-bar-0"') == 2
    assert svg.count('id="times-bar-1"') == 2
    assert 'id="times-bar-2"' not in svg
    assert ">whole round</text>" in svg


def test_a_hostile_reward_name_is_text_in_the_figure():
    svg = draw(row(1, {"reward/total": 1.0, "reward/</text><script>$x_": 0.5, "reward/_b": 0.1}))["rewards"].svg
    assert "<script" not in svg
    assert "&lt;/text&gt;&lt;script&gt;$x_" in svg
    assert ">​_b</text>" in svg


# Page


def test_a_report_without_anything_says_what_is_missing(tmp_path: Path):
    page = write(tmp_path)
    assert "Not shown: no held-out evaluation before training." in page
    assert "Not shown: no held-out evaluation after training." in page
    assert "Not shown: the run has not finished a round." in page
    assert "Not shown: the held-out evaluations kept no sample episodes." in page
    assert "<svg" not in page


def test_hostile_text_is_escaped_everywhere(tmp_path: Path):
    with MetricsLog(tmp_path / "metrics.jsonl") as log:
        log.write(1, {"reward/<img src=x onerror=alert(2)>": 1.0, "reward/total": 1.0})
    node = RewardNode(name=HOSTILE, score=None, masked=HOSTILE)
    hostile = replace(sample(HOSTILE, HOSTILE), prompt=HOSTILE, reward=node, stop=HOSTILE, checks=HOSTILE)
    held = HeldOut(results=(result(1, 2, HOSTILE),), episodes=(hostile,))
    facts = replace(
        FACTS, name=HOSTILE, status=HOSTILE, commit=HOSTILE, config_yaml=HOSTILE, details={HOSTILE: HOSTILE}
    )
    page = write(tmp_path, held, held, facts)
    assert "<script" not in page
    assert "<img" not in page
    assert "49" not in re.findall(r"onerror=alert\(1\)&gt;(.{2})", page)
    assert page.count("&lt;/script&gt;&lt;img src=x onerror=alert(1)&gt;{{ 7 * 7 }}␀␛[31m?") >= 2
    assert "default-src 'none'" in page


def test_the_page_shows_both_sides_of_a_task(tmp_path: Path):
    before = HeldOut(results=(result(1, 10),), episodes=(sample("t1", passed=False), sample("t2")))
    after = HeldOut(results=(result(9, 10), result(5, 10, "sampled")), episodes=(sample("t1"), sample("t3")))
    page = write(tmp_path, before, after)
    assert page.count("<strong>90.0 %</strong>") == 1
    rows = re.findall(r'<tr class="(\w+)"><th scope="row">([^<]+)</th>', page)
    assert rows == [("before", "greedy"), ("after", "greedy"), ("after", "sampled")]
    assert re.findall(r"<summary><h3>([^<]+)</h3>", page) == ["t1", "t2", "t3"]
    assert "Not shown: this task has no episode after training." in page
    assert "Not shown: this task has no episode before training." in page
    assert "(empty)" in page
    assert "masked: late" in page
    assert re.search(r"tests_pass\s+<strong>0.5</strong>\s+<span class=\"note\">weight 0.8 turn 2\s*</span>", page)


def test_all_metrics_are_listed_with_first_best_and_last(tmp_path: Path):
    with MetricsLog(tmp_path / "metrics.jsonl") as log:
        for number, value in enumerate((0.25, 0.75, 0.5)):
            log.write(number, {"reward/total": value, "episodes/masked": 2 - number, "entropy": float("nan")})
    page = write(tmp_path)
    cells = {name: re.findall(r'class="number">([^<]*)<', rest) for name, rest in metric_rows(page)}
    assert cells["reward/total"] == ["0.25", "0.75", "0.5"]
    assert cells["episodes/masked"] == ["2", "0", "0"]
    assert cells["entropy"] == ["not finite", "", "not finite"]
    assert len(read_metrics(tmp_path / "metrics.jsonl")) == 3


def metric_rows(page: str) -> list[tuple[str, str]]:
    return re.findall(r'<th scope="row"><code>([^<]+)</code></th>(.*?)</tr>', page)


def test_the_same_inputs_give_the_same_bytes(tmp_path: Path):
    held = HeldOut(results=(result(3, 9),), episodes=(sample(),))
    assert write(tmp_path, held, held) == write(tmp_path, held, held)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["report.html"]


def test_no_trials_is_said_and_not_computed(tmp_path: Path):
    assert "no trials" in write(tmp_path, HeldOut(results=(result(0, 0),)), None)


@pytest.mark.parametrize(("isa", "text"), [((), "AMX no, AVX-512 no, AVX2 no"), (("AVX2", "SVE"), "AVX2 yes, SVE yes")])
def test_the_machine_is_described(tmp_path: Path, isa: tuple[str, ...], text: str):
    page = write(tmp_path, facts=replace(FACTS, machine=replace(FACTS.machine, isa=isa)))
    assert text in page
    assert "A CPU, 2 usable cores, 3.0 GiB memory" in page
    assert "<dt>Kernel backend</dt><dd>cpu (AVX2)</dd>" in page

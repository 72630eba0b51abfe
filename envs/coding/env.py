"""The coding environment: write a function, see the first failing visible example, try again.

    answer -> code block -> visible examples in a sandbox -> one line of feedback, or the end of the episode
    evidence: the last well-formed answer on the hidden examples, in a box that was reset (or is new); or by the
              task's check code, which runs in another box and calls the answer's function from there

The hidden inputs and all expected values stay in this process: a program gets arguments and returns values, and the
comparison happens out here. So a program that knows the grader can break its own score only.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace

from envs.base import Env, EnvError, EnvFactory, StepResult
from envs.coding import feedback
from envs.coding.answer import extract
from envs.coding.examples import Example, Problem, problem_of
from envs.coding.runner import CodeRunner, SandboxRunner
from envs.config import EnvConfig
from envs.sandbox.base import CallStatus
from envs.sandbox.checker import CheckReport
from envs.sandbox.grader import FunctionReport, checks, same_value
from rollout.types import Checks, Evidence, Message, Role, Task, TurnEvidence, Verdict


class CodingEnv(Env):
    """One episode of one coding task. `fresh_grading`: grade in a new box, instead of one that was reset."""

    def __init__(self, runner: CodeRunner, *, max_turns: int, fresh_grading: bool) -> None:
        self._runner = runner
        self._max_turns = max_turns
        self._fresh_grading = fresh_grading
        self._problem: Problem | None = None
        self._source: str | None = None
        self._turns: tuple[TurnEvidence, ...] = ()
        self._tampered = False
        self._graded: Evidence | None = None

    async def reset(self, task: Task) -> tuple[Message, ...]:
        """Start over with the task's own messages."""
        self._problem = await self._with_examples(problem_of(task))
        self._source, self._turns, self._tampered, self._graded = None, (), False, None
        return task.messages

    async def step(self, message: Message) -> StepResult:
        """Run the answer on the visible examples; say the first failure, or end the episode."""
        problem = self._current()
        answer = extract(message.content, problem.entry_point)
        visible, note = Checks(passed=0, declared=len(problem.visible)), answer.note
        if answer.well_formed:
            report = await self._call(problem, answer.source, problem.visible, fresh=False)
            self._source = answer.source
            self._tampered = self._tampered or report.tampered
            visible, note = _checks(report, problem.visible, problem), _first_failure(report, problem)
        turn = TurnEvidence(well_formed=answer.well_formed, visible=visible, note=note)
        self._turns, self._graded = (*self._turns, turn), None
        # Without visible examples, an answer that loads is as good as anyone in the episode can tell.
        if (answer.well_formed and not note) or len(self._turns) >= self._max_turns:
            return StepResult(observations=(), terminated=True)
        return StepResult(observations=(Message(role=Role.TOOL, content=note),), terminated=False)

    async def evidence(self) -> Evidence:
        """Grade the last well-formed answer on the hidden examples."""
        problem = self._current()
        if self._graded is None:
            self._graded = await self._grade(problem)
        return self._graded

    async def close(self) -> None:
        """The boxes belong to the factory: nothing is held between calls."""

    def _current(self) -> Problem:
        if self._problem is None:
            raise EnvError("coding episode: no task is open, got a call before reset; call reset first")
        return self._problem

    async def _with_examples(self, problem: Problem) -> Problem:
        """The problem with the examples that its reference makes, if it has one."""
        reference = problem.reference
        if reference is None:
            return problem
        examples = await asyncio.to_thread(self._runner.examples, reference, problem.entry_point)
        return replace(problem, visible=examples[: reference.num_visible], hidden=examples[reference.num_visible :])

    async def _call(self, problem: Problem, answer: str, examples: Sequence[Example], *, fresh: bool) -> FunctionReport:
        program, inputs = problem.program(answer), [example.args for example in examples]
        return await asyncio.to_thread(self._runner.call, program, problem.entry_point, inputs, fresh=fresh)

    async def _grade(self, problem: Problem) -> Evidence:
        nothing = Checks(passed=0, declared=problem.num_hidden)

        def failed(reason: str, *, tampered: bool = False) -> Evidence:
            return Evidence(
                verdict=Verdict.POLICY_FAILED,
                turns=self._turns,
                hidden=nothing,
                tampered=tampered,
                reason=reason,
            )

        if self._source is None:
            return failed("no well-formed answer" if self._turns else "no answer")
        if self._tampered:
            return failed("broke the grader's protocol", tampered=True)
        report = await self._judge(problem, self._source)
        if report.tampered:
            return failed("broke the grader's protocol", tampered=True)
        if report.load_error:
            return failed(feedback.error(report.load_error))
        if report.ended_process:
            return failed("the program ended its process")
        return Evidence(verdict=Verdict.VALID, turns=self._turns, hidden=report.checks)

    async def _judge(self, problem: Problem, answer: str) -> CheckReport:
        """The hidden checks: the task's check code, or else its hidden examples."""
        if problem.check is not None:
            program = problem.program(answer)
            return await asyncio.to_thread(
                self._runner.check, program, problem.entry_point, problem.check, fresh=self._fresh_grading
            )
        report = await self._call(problem, answer, problem.hidden, fresh=self._fresh_grading)
        return CheckReport(
            checks=_checks(report, problem.hidden, problem),
            load_error=report.load_error,
            tampered=report.tampered,
            ended_process=any(outcome.status in (CallStatus.DIED, CallStatus.PROTOCOL) for outcome in report.outcomes),
        )


class CodingFactory(EnvFactory):
    """Makes the episodes of one worker, which share its runner."""

    def __init__(self, runner: CodeRunner, *, max_turns: int) -> None:
        self._runner = runner
        self._max_turns = max_turns

    def make(self, *, fresh_grading: bool = False) -> CodingEnv:
        """A new episode."""
        return CodingEnv(self._runner, max_turns=self._max_turns, fresh_grading=fresh_grading)

    def close(self) -> None:
        """End the sandboxes. Idempotent."""
        self._runner.close()


def coding_factory(config: EnvConfig) -> CodingFactory:
    """The factory that the configuration describes; it starts the sandboxes."""
    return CodingFactory(SandboxRunner(config), max_turns=config.max_turns)


def _checks(report: FunctionReport, examples: Sequence[Example], problem: Problem) -> Checks:
    return checks(report, [example.expected for example in examples], problem.rel_tolerance)


def _first_failure(report: FunctionReport, problem: Problem) -> str:
    """The feedback on the first visible example that failed; empty when none did."""
    if report.tampered:
        return feedback.error("broke the grader's protocol")
    if report.load_error:
        return feedback.error(report.load_error)
    for example, outcome in zip(problem.visible, report.outcomes, strict=True):
        if outcome.status is not CallStatus.RETURNED:
            return feedback.error(outcome.error or outcome.status.value)
        if not same_value(outcome.value, example.expected, problem.rel_tolerance):
            return feedback.wrong_value(problem.entry_point, example.args, got=outcome.value, want=example.expected)
    return ""

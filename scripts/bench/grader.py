"""How long the proxy grader takes for HumanEval's 164 canonical solutions: `grader.py [--sandbox degraded]`.

Two gradings run at once. Prints nothing but the failures, and ends with 1, while a canonical solution fails.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import time

from envs.base import EnvFactory
from envs.coding.humaneval import HumanEvalTasks
from envs.config import EnvConfig, SandboxKind
from envs.registry import build_factory
from rollout.types import Evidence, Message, Role, Task

AT_ONCE = 2


async def _grade(factory: EnvFactory, tasks: HumanEvalTasks, task: Task, gate: asyncio.Semaphore) -> Evidence:
    async with gate:
        env = factory.make()
        await env.reset(task)
        for answer in tasks.solve(task):
            await env.step(Message(role=Role.ASSISTANT, content=answer))
        evidence = await env.evidence()
        await env.close()
        return evidence


async def _all(factory: EnvFactory, tasks: HumanEvalTasks) -> list[tuple[Task, Evidence]]:
    gate = asyncio.Semaphore(AT_ONCE)
    asked = tasks.held_out(164)
    graded = await asyncio.gather(*(_grade(factory, tasks, task, gate) for task in asked))
    return list(zip(asked, graded, strict=True))


def main() -> int:
    """1 when a canonical solution fails."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sandbox", type=SandboxKind, default=SandboxKind.local)
    arguments = parser.parse_args()
    factory = build_factory(EnvConfig(name="humaneval", sandbox=arguments.sandbox, sandboxes_per_worker=AT_ONCE))
    try:
        tasks = HumanEvalTasks()
        started = time.perf_counter()
        graded = asyncio.run(_all(factory, tasks))
        seconds = time.perf_counter() - started
    finally:
        factory.close()
    failed = [(task, evidence) for task, evidence in graded if not evidence.hidden.all_passed]
    for task, evidence in failed:
        print(f"{task.id}: {evidence.verdict} {evidence.hidden} {evidence.reason}", file=sys.stderr)
    if failed:
        return 1
    cores = len(os.sched_getaffinity(0))
    print(f"grader: {len(graded)} of {len(graded)} canonical solutions pass in {seconds:.1f} s on {cores} core(s)")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

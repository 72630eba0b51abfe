"""Index the usable rows of the CodeI/O data: `codeio_rows.py` writes envs/coding/codeio_rows.json.

A row is usable when its reference code runs in a box (standard library alone), gives every one of two sets of
`NUM_EXAMPLES` fresh inputs a JSON value, the same values in a box of another fork server (so with another hash seed)
and when asked backwards, at least three different ones in each set, without reading the clock; and when its text is no
other row's.
"""

from __future__ import annotations

import argparse
import ast
import json
import re
import sys
import warnings
from collections import Counter
from typing import Any

from envs.base import EnvError, SandboxLost
from envs.coding.answer import extract, format_answer
from envs.coding.codeio import ENTRY_POINT, INDEX, REL_TOLERANCE, read_rows
from envs.coding.runner import SandboxRunner
from envs.config import EnvConfig, SandboxKind
from envs.sandbox.grader import checks

SEEDS = (1, 2)
NUM_EXAMPLES = EnvConfig().num_visible_checks + EnvConfig().num_hidden_checks
LEAST_OUTPUTS = 3
CLOCK = re.compile(r"\.(now|today|utcnow|time|perf_counter|monotonic)\(\)")


def main() -> None:
    """Write the index and print why rows were left out."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sandbox", type=SandboxKind, default=SandboxKind.local)
    arguments = parser.parse_args()
    config = EnvConfig(sandbox=arguments.sandbox, sandboxes_per_worker=1, call_timeout_s=0.5)
    rows, sha256 = read_rows()
    usable: dict[int, list[str]] = {}
    reasons: Counter[str] = Counter()
    texts: set[str] = set()
    runners = [SandboxRunner(config) for _ in range(2)]
    try:
        for number, row in enumerate(rows):
            reason = _fault(row, runners)
            if reason == "" and row["task_description"] in texts:
                reason = "text of another row"
            if reason == "":
                texts.add(row["task_description"])
                usable[number] = _parameters(row)
            else:
                reasons[reason] += 1
            if number % 100 == 99 or number + 1 == len(rows):
                print(f"codeio: {len(usable)} of {number + 1} rows are usable", file=sys.stderr)
    finally:
        for runner in runners:
            runner.close()
    INDEX.write_text(json.dumps({"sha256": sha256, "rows": usable}, separators=(",", ":")) + "\n")
    for reason, count in reasons.most_common():
        print(f"{count:5d}  {reason}")
    print(f"{len(usable):5d}  usable of {len(rows)}: {INDEX}")


def _fault(row: dict[str, Any], runners: list[SandboxRunner]) -> str:
    """Why a row cannot be used, or nothing."""
    source = row["code_sample"]
    if CLOCK.search(source):
        return "reads the clock"
    try:
        _parameters(row)
    except (LookupError, SyntaxError):
        return "no reference function"
    if not extract(format_answer(source), ENTRY_POINT).well_formed:
        return "the reference is no well-formed answer"
    for seed in SEEDS:
        try:
            (first, num_unusable), (second, _) = (
                runner.make_examples(source, row["input_generator"], ENTRY_POINT, seed, NUM_EXAMPLES)
                for runner in runners
            )
        except (EnvError, SandboxLost) as problem:
            missing = "No module named" in str(problem)
            return "needs another package" if missing else "reference or generator fails"
        if num_unusable:
            return "an answer that is an exception or no JSON value"
        if len(first) < NUM_EXAMPLES:
            return "too few different inputs"
        if first != second:
            return "another answer the second time"
        if len({json.dumps(example.expected, sort_keys=True) for example in first}) < LEAST_OUTPUTS:
            return "too few different outputs"
        backwards = first[::-1]
        report = runners[0].call(source, ENTRY_POINT, [example.args for example in backwards], fresh=False)
        if not checks(report, [example.expected for example in backwards], REL_TOLERANCE).all_passed:
            return "another answer after other calls"
    return ""


def _parameters(row: dict[str, Any]) -> list[str]:
    """Names of the reference's parameters. Raises `LookupError` for code without the function, and `SyntaxError`."""
    with warnings.catch_warnings(action="ignore"):  # escapes in its strings
        body = ast.parse(row["code_sample"]).body
    for node in body:
        if isinstance(node, ast.FunctionDef) and node.name == ENTRY_POINT:
            return [arg.arg for arg in node.args.args]
    raise LookupError(f"no function {ENTRY_POINT}")


if __name__ == "__main__":
    main()

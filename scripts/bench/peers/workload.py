"""What every runner of this folder does: the same command line, the same prompts, one line of JSON.

    RUNNER MODEL --mode MODE [--batch 16] [--prompt-tokens 64] [--new-tokens 64] [--repeats 5] [--threads 2]

A repeat generates greedily for `batch` prompts of random ids, ignoring the end of sequence, from the prompts to the
last id: prefill is included, loading and the warm-up repeats are not. Every repeat has prompts of its own, so no engine
profits from a prefix that it has seen. The last line of stdout is the result. With `--answers FILE` what the engine
says and how likely it holds each id is written too, for `score.py`.

Standard library only: it is imported in every engine's own environment.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

Prompts = list[list[int]]
Answer = tuple[list[int], list[float]]
"""Generated ids, and the logprob of each in nats."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """One measurement. `model` is a folder that `models.py` wrote."""

    model: Path
    mode: str
    batch: int
    prompt_tokens: int
    new_tokens: int
    repeats: int
    warmup: int
    threads: int
    seed: int
    answers: Path | None

    @property
    def max_tokens(self) -> int:
        """Of one sequence."""
        return self.prompt_tokens + self.new_tokens

    @property
    def vocab_size(self) -> int:
        """Of the model."""
        return json.loads((self.model / "bf16" / "config.json").read_text())["vocab_size"]

    def prompts(self, repeat: int) -> Prompts:
        """Random ids; the same in every process."""
        draw = random.Random(f"{self.seed}/{repeat}")
        vocab_size = self.vocab_size
        return [[draw.randrange(vocab_size) for _ in range(self.prompt_tokens)] for _ in range(self.batch)]


class Engine(ABC):
    """A loaded model of one engine."""

    peer: str
    version: str

    @abstractmethod
    def generate(self, prompts: Prompts, new_tokens: int) -> Prompts:
        """The `new_tokens` greedy ids that follow each prompt."""

    @abstractmethod
    def answers(self, prompts: Prompts, new_tokens: int) -> list[Answer]:
        """The same ids with their logprobs; not timed."""


def parse(description: str | None, modes: Sequence[str]) -> Workload:
    """The workload of the command line."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="a folder that models.py wrote")
    parser.add_argument("--mode", required=True, choices=modes)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--answers", type=Path, help="where to write the answers with their logprobs")
    return Workload(**vars(parser.parse_args()))


def run(workload: Workload, engine: Engine) -> None:
    """Measure and print."""
    seconds: list[float] = []
    cpu_seconds: list[float] = []
    for repeat in range(workload.warmup + workload.repeats):
        prompts = workload.prompts(repeat)
        started, cpu_started = time.perf_counter(), time.process_time()
        answers = engine.generate(prompts, workload.new_tokens)
        elapsed, cpu_elapsed = time.perf_counter() - started, time.process_time() - cpu_started
        if [len(answer) for answer in answers] != [workload.new_tokens] * workload.batch:
            found = sorted({len(answer) for answer in answers})
            raise SystemExit(
                f"{engine.peer}: must generate {workload.new_tokens} ids for each of {workload.batch} prompts, got "
                f"{len(answers)} answers of lengths {found}; do not let it stop early"
            )
        if repeat >= workload.warmup:
            seconds.append(elapsed)
            cpu_seconds.append(cpu_elapsed)
    if workload.answers is not None:
        prompts = workload.prompts(0)
        answers = engine.answers(prompts, workload.new_tokens)
        rows = [
            {"prompt": prompt, "ids": ids, "logprobs": logprobs}
            for prompt, (ids, logprobs) in zip(prompts, answers, strict=True)
        ]
        workload.answers.write_text(json.dumps(rows))
    generated = workload.batch * workload.new_tokens
    result = {
        "peer": engine.peer,
        "version": engine.version,
        "model": workload.model.name,
        "mode": workload.mode,
        "batch": workload.batch,
        "prompt_tokens": workload.prompt_tokens,
        "new_tokens": workload.new_tokens,
        "threads": workload.threads,
        "seconds": [round(value, 4) for value in seconds],
        "cpu_seconds": [round(value, 4) for value in cpu_seconds],
        "tokens_per_second": round(generated / statistics.median(seconds), 1) if seconds else None,
    }
    print(json.dumps(result), flush=True)

"""What both sides of the comparison share: the settings, the prompts, the reward, and how `compare.py` calls them.

A worker is a process that loads a model once and then carries out one command a line: JSON on stdin, JSON on stdout.
So the two take turns step by step, and neither pays for its start or its warm-up.

Imported in either environment, so it needs the standard library only.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

Row = list[int]
"""The ids of a prompt and its completion."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """One comparison. `model` is a folder that `peers/models.py` wrote; a step has `prompts * group` completions."""

    model: Path
    prompts: int
    group: int
    prompt_tokens: int
    new_tokens: int
    threads: int
    lr: float = 1e-6
    temperature: float = 1.0
    clip_low: float = 0.2
    clip_high: float = 0.28
    max_grad_norm: float = 1.0
    beta1: float = 0.9
    beta2: float = 0.95
    weight_decay: float = 0.0
    seed: int = 0

    @property
    def batch(self) -> int:
        """Completions of a step."""
        return self.prompts * self.group

    @property
    def vocab_size(self) -> int:
        """Of the model."""
        return json.loads((self.model / "bf16" / "config.json").read_text())["vocab_size"]

    def prompt_ids(self, step: int) -> list[Row]:
        """Random ids, each prompt once; the same in every process, others in every step."""
        draw = random.Random(f"{self.seed}/{step}")
        vocab_size = self.vocab_size
        return [[draw.randrange(vocab_size) for _ in range(self.prompt_tokens)] for _ in range(self.prompts)]

    def reward(self, completion: Row) -> float:
        """The share of ids in the lower half of the vocabulary: free to compute, and different within a group."""
        half = self.vocab_size // 2
        return sum(token < half for token in completion) / len(completion)

    def command_line(self) -> list[str]:
        """What `parse` reads."""
        return [json.dumps({name: str(value) if name == "model" else value for name, value in asdict(self).items()})]


def parse(description: str | None) -> Settings:
    """The settings of the command line, one JSON object."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("settings", type=json.loads, help="the fields of Settings as a JSON object")
    fields: dict[str, Any] = parser.parse_args().settings
    return Settings(**{**fields, "model": Path(fields["model"])})


class Channel:
    """The commands of `compare.py`. Whatever libraries print goes to stderr."""

    def __init__(self) -> None:
        self._out = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)

    def answer(self, **values: Any) -> None:
        """One line of JSON."""
        self._out.write(json.dumps(values) + "\n")
        self._out.flush()

    def next_command(self) -> dict[str, Any] | None:
        """Wait for a command; `None` when there are no more."""
        line = sys.stdin.readline()
        return json.loads(line) if line else None

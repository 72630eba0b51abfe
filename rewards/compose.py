"""The default reward: a tree of named, weighted, timed terms.

    total = 1 * solved + 1 * turn_penalty + 0 * fraction + 0 * format
          = 1 - 0.15 * (turns - 1) when every hidden check passed, else 0

Terms of weight 0 are there to be logged. Weights may not be negative: then no episode that gave up, fell silent or was
cut off can score above an honest try that failed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from rewards.base import ROOT, Reward, RewardError, measure, weighted_sum
from rewards.config import RewardConfig
from rewards.format import well_formed
from rewards.tests_pass import all_passed, fraction_passed
from rewards.turn_penalty import TurnPenalty
from rollout.types import Evidence, RewardNode, Task, Trajectory


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightedTerm:
    """A named part of a composed reward."""

    name: str
    reward: Reward
    weight: float


@dataclass(frozen=True, slots=True)
class Composed:
    """The weighted sum of terms; each runs inside its own boundary, and a masked term of weight 0 masks nothing."""

    terms: tuple[WeightedTerm, ...]

    def __call__(self, task: Task, trajectory: Trajectory, evidence: Evidence) -> RewardNode:
        """Judge with every term."""
        children = [
            replace(measure(term.name, term.reward, task, trajectory), weight=term.weight) for term in self.terms
        ]
        return weighted_sum(ROOT, children)


def coding_reward(config: RewardConfig) -> Composed:
    """The reward of the coding environment. Raises `RewardError` for settings that would reward not trying."""
    _check(config)
    return Composed(
        (
            WeightedTerm(name="solved", reward=all_passed, weight=config.solved_weight),
            WeightedTerm(
                name="turn_penalty",
                reward=TurnPenalty(penalty=config.turn_penalty, max_penalty=config.max_turn_penalty),
                weight=1.0,
            ),
            WeightedTerm(name="fraction", reward=fraction_passed, weight=config.fraction_weight),
            WeightedTerm(name="format", reward=well_formed, weight=config.format_weight),
        )
    )


def _check(config: RewardConfig) -> None:
    for name in ("solved_weight", "turn_penalty", "max_turn_penalty", "fraction_weight", "format_weight"):
        value = getattr(config, name)
        if not (math.isfinite(value) and value >= 0):
            raise RewardError(f"reward.{name}: must be finite and not negative, got {value}; use 0 to switch it off")
    if config.turn_penalty and config.max_turn_penalty >= config.solved_weight:
        raise RewardError(
            f"reward.max_turn_penalty: must stay below solved_weight {config.solved_weight}, got "
            f"{config.max_turn_penalty}; else a late solution is worth less than none"
        )

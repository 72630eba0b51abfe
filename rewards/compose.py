"""The built-in rewards: trees of named, weighted, timed terms.

    coding:  total = 1 * solved + 1 * turn_penalty + 0 * fraction + 0 * format
                   = 1 - 0.15 * (turns - 1) when every hidden check passed, else 0
    tools:   total = 1 * solved + 0.5 * progress + 1 * call_penalty + 1 * turn_penalty + 0 * fraction + 0 * format

Terms of weight 0 are there to be logged. Weights may not be negative: then no episode that gave up, fell silent or was
cut off can score above an honest try that failed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from rewards.base import ROOT, Reward, RewardError, measure, weighted_sum
from rewards.config import RewardConfig
from rewards.format import well_formed
from rewards.milestones import progress
from rewards.penalties import CallPenalty, TurnPenalty
from rewards.tests_pass import all_passed, fraction_passed
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
    _check(config, penalty=config.max_turn_penalty if config.turn_penalty else 0.0)
    return Composed(_shared_terms(config))


def tools_reward(config: RewardConfig) -> Composed:
    """The reward of environments with tools. Raises `RewardError` for settings that would reward not trying."""
    turns = config.max_turn_penalty if config.turn_penalty else 0.0
    calls = config.max_call_penalty if config.call_penalty else 0.0
    _check(config, penalty=turns + calls)
    penalty = CallPenalty(penalty=config.call_penalty, max_penalty=config.max_call_penalty)
    return Composed(
        (
            *_shared_terms(config),
            WeightedTerm(name="progress", reward=progress, weight=config.progress_weight),
            WeightedTerm(name="call_penalty", reward=penalty, weight=1.0),
        )
    )


def _shared_terms(config: RewardConfig) -> tuple[WeightedTerm, ...]:
    penalty = TurnPenalty(penalty=config.turn_penalty, max_penalty=config.max_turn_penalty)
    return (
        WeightedTerm(name="solved", reward=all_passed, weight=config.solved_weight),
        WeightedTerm(name="turn_penalty", reward=penalty, weight=1.0),
        WeightedTerm(name="fraction", reward=fraction_passed, weight=config.fraction_weight),
        WeightedTerm(name="format", reward=well_formed, weight=config.format_weight),
    )


_NOT_NEGATIVE = (
    "solved_weight",
    "turn_penalty",
    "max_turn_penalty",
    "fraction_weight",
    "format_weight",
    "progress_weight",
    "call_penalty",
    "max_call_penalty",
)


def _check(config: RewardConfig, *, penalty: float) -> None:
    """`penalty` is the most that a solved episode can pay."""
    for name in _NOT_NEGATIVE:
        value = getattr(config, name)
        if not (math.isfinite(value) and value >= 0):
            raise RewardError(f"reward.{name}: must be finite and not negative, got {value}; use 0 to switch it off")
    if penalty and penalty >= config.solved_weight:
        raise RewardError(
            f"reward.max_turn_penalty: must stay below solved_weight {config.solved_weight} (with max_call_penalty), "
            f"got {penalty}; else a late solution is worth less than none"
        )

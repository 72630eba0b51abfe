"""Settings of the reward (values in `conf/reward/`, defaults here only)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True, kw_only=True)
class RewardConfig:
    """What an episode is worth.

    A solved task is worth `solved_weight - turn_penalty * (turns - 1)`, and the penalty never takes more than
    `max_turn_penalty`. The passed fraction and the answer's form are logged; their weights are 0 because a reward for
    anything but solving can be collected without solving.

    Of `name=tools` alone: `progress_weight` is what all milestones of a task are worth, solved or not; each call that
    fails costs a solved task `call_penalty`, at most `max_call_penalty` in sum.

    `target` names a user's own reward as `module:attribute` (with `name=custom`), `params` are its keyword arguments.
    """

    name: str = "coding"
    target: str | None = None
    params: dict[str, Any] = field(default_factory=dict[str, Any])
    solved_weight: float = 1.0
    turn_penalty: float = 0.15
    max_turn_penalty: float = 0.9
    fraction_weight: float = 0.0
    format_weight: float = 0.0
    progress_weight: float = 0.5
    call_penalty: float = 0.05
    max_call_penalty: float = 0.3

"""Rewards by name, and the way in for a user's own.

A user's reward needs no base class and no decorator:

    # my_pkg/my_reward.py
    def brevity(task, trajectory, evidence, limit=40):
        return float(evidence.hidden.all_passed and trajectory.num_sampled_tokens <= limit)

    python -m rl.train reward=custom reward.target=my_pkg.my_reward:brevity +reward.params.limit=30

A class works too: it is made once with `params` as its keyword arguments, and its instance is called. `rl.build` loads
the target and checks its parameters (`envs.extension`); this package only receives the callable.
"""

from __future__ import annotations

import difflib
import functools
from collections.abc import Callable, Mapping
from typing import Any, cast

from rewards.base import Reward, RewardError
from rewards.compose import coding_reward, tools_reward
from rewards.config import RewardConfig

CUSTOM = "custom"

REWARDS: Mapping[str, Callable[[RewardConfig], Reward]] = {
    "coding": coding_reward,
    "tools": tools_reward,
}


def build_reward(config: RewardConfig, custom: Callable[..., Any] | None = None) -> Reward:
    """The reward that the configuration names; `custom` is the loaded `reward.target`. Raises `RewardError`."""
    if config.name == CUSTOM:
        if custom is None:
            raise RewardError(
                "reward.target: missing, got reward.name=custom alone; set reward.target=module:attribute"
            )
        if isinstance(custom, type):
            return cast(Reward, custom(**config.params))
        return functools.partial(custom, **config.params)
    if config.name not in REWARDS:
        near = difflib.get_close_matches(config.name, [*REWARDS, CUSTOM], n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"choose one of {sorted([*REWARDS, CUSTOM])}"
        raise RewardError(f"reward.name: unknown reward, got {config.name!r}; {hint}")
    if config.target is not None or config.params:
        raise RewardError(
            f"reward.target: target and params belong to reward.name=custom, got them with {config.name!r}; "
            "set reward.name=custom or drop them"
        )
    return REWARDS[config.name](config)

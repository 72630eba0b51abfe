"""From the rewards of groups to advantages: what the algorithms share.

Shapes: G episodes of a group.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from rl.algorithms.base import AlgorithmError, Rewards

NO_VARIANCE = 1e-6
"""Rewards closer than this to their mean count as equal: sums of weighted terms carry rounding."""


def checked(algorithm: str, rewards: Sequence[Rewards]) -> Sequence[Rewards]:
    """`rewards`. Raises AlgorithmError where one is not finite."""
    for rewards_G in rewards:
        if not np.isfinite(rewards_G).all():
            raise AlgorithmError(f"{algorithm}: rewards must be finite, got {rewards_G.tolist()}; mask the broken ones")
    return rewards


def centered(rewards_G: Rewards) -> Rewards | None:
    """Each reward minus the group's mean; `None` when they are equal, or too few to compare."""
    centered_G = rewards_G - rewards_G.mean() if len(rewards_G) else rewards_G
    return None if len(rewards_G) < 2 or np.abs(centered_G).max() < NO_VARIANCE else centered_G

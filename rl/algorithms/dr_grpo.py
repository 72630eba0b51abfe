"""Dr. GRPO, "GRPO done right" (Liu et al. 2025, arXiv 2503.20783, section 3.2): GRPO without its two biases.

    A_i = r_i - mean(r)        loss = -min(r A, clip(r, 1 - low, 1 + high) A), summed over an episode

No division by the group's standard deviation, which favours questions that are almost always or almost never solved,
and none by the length of the answer, which favours long wrong ones: sums of tokens are divided by the constant
`algorithm.length_unit` (the paper's code: the generation budget), then averaged over episodes.

Differs from the paper: the mean is over the episodes that are trained on; groups without variance, whose advantage is
0, are left out of it.
"""

from __future__ import annotations

from typing import ClassVar

from rl.algorithms.grpo import Grpo
from rl.algorithms.surrogate import Clip


class DrGrpo(Grpo):
    """`Grpo` with the constants that the paper argues for; `Aggregation.episode_sum` is the rest of it."""

    name: ClassVar[str] = "dr_grpo"

    def __init__(self, *, clip: Clip):
        super().__init__(clip=clip, normalize=False)

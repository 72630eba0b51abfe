"""DAPO (Yu et al. 2025, arXiv 2503.14476, eq. 8 to 13): GRPO with four changes, each of them a setting of its own.

    clip-higher         loss = -min(r A, clip(r, 1 - low, 1 + high) A), high > low (eq. 10)
    token-level loss    the mean over all tokens of the minibatch (`Aggregation.token_mean`, eq. 12)
    dynamic sampling    groups without variance are followed by groups of further tasks (eq. 11), at most
                        `algorithm.max_resample_rounds` times; then the round goes on with what it has (`rl.loop`)
    overlong shaping    `rl.algorithms.overlong` (eq. 13)

    A_i = (r_i - mean(r)) / std(r), the group's own, with `algorithm.normalize_advantage` (eq. 9)

Differs from the paper: dynamic sampling has a bound, without which a policy that solves all tasks, or none, would
sample for ever; a group teaches where its rewards differ, overlong punishment included, not where its correctness does.
"""

from __future__ import annotations

from typing import ClassVar

from rl.algorithms.grpo import Grpo


class Dapo(Grpo):
    """`Grpo` under the paper's name."""

    name: ClassVar[str] = "dapo"

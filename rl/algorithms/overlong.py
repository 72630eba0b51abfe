"""Soft overlong punishment (DAPO, Yu et al. 2025, arXiv 2503.14476, eq. 13).

    0                                    |y| <= limit - buffer
    ((limit - buffer) - |y|) / buffer    limit - buffer < |y| <= limit
    -1                                   |y| > limit

An answer that was cut off is not simply wrong: it was long. The slope before the limit says so in time.

Differs from the paper: an episode may have several answers, each with its own limit; its longest one counts.
"""

from __future__ import annotations

from dataclasses import dataclass

from rl.algorithms.base import AlgorithmError


@dataclass(frozen=True, slots=True, kw_only=True)
class Overlong:
    """`limit` and `buffer` in tokens, `coef` of the punishment (1 in the paper, where rewards are -1 and 1)."""

    limit: int
    buffer: float
    coef: float

    def __post_init__(self) -> None:
        if not 0 < self.buffer <= self.limit:
            raise AlgorithmError(
                f"algorithm.overlong_buffer_frac: the buffer must lie in the limit of {self.limit} tokens, got "
                f"{self.buffer}; 0.2 is usual"
            )

    def of(self, num_tokens: int) -> float:
        """What is added to the reward of an episode whose longest answer has so many tokens; 0 or below."""
        over = num_tokens - (self.limit - self.buffer)
        return -self.coef * min(1.0, over / self.buffer) if over > 0 else 0.0

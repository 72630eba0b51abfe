"""Pass rates with the uncertainty that their number of trials allows.

A rate never travels alone: `PassRate` carries the counts, and from them a 95 % interval, to the evaluation, the
progress display and the report. The statistics are outputs; nothing in the training loop reads them back.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import sqrt
from statistics import NormalDist

CONFIDENCE = 0.95
"""Level of every interval that this project prints."""


class StatisticsError(ValueError):
    """Counts that are not counts of successes among trials."""


def wilson_interval(successes: int, trials: int, confidence: float = CONFIDENCE) -> tuple[float, float]:
    """The score interval of a binomial proportion, as fractions (low, high).

    Unlike the normal approximation it stays inside [0, 1] and keeps its coverage at rates near 0 and 1 and for few
    trials. No trials say nothing: (0, 1).

    Source: Wilson, E. B. (1927), "Probable inference, the law of succession, and statistical inference".

    Raises:
        StatisticsError: counts or a confidence outside their range.
    """
    if not 0 <= successes <= trials:
        raise StatisticsError(f"successes: must lie in 0..trials, got {successes} of {trials}; count trials, not rates")
    if not 0.0 < confidence < 1.0:
        raise StatisticsError(f"confidence: must lie between 0 and 1, got {confidence}; use 0.95 for 95 %")
    if trials == 0:
        return 0.0, 1.0
    z = NormalDist().inv_cdf(0.5 + confidence / 2)
    rate = successes / trials
    denominator = 1 + z * z / trials
    centre = (rate + z * z / (2 * trials)) / denominator
    half_width = z * sqrt(rate * (1 - rate) / trials + z * z / (4 * trials * trials)) / denominator
    # At 0 and at all successes the bound is exact; the subtraction would leave a rounding residue of 1e-17.
    low = 0.0 if successes == 0 else centre - half_width
    high = 1.0 if successes == trials else centre + half_width
    return low, high


@dataclass(frozen=True, slots=True, kw_only=True)
class PassRate:
    """`passed` of `total` trials, as fractions: the rate and its 95 % Wilson interval.

    `str()` gives percent: "52.5 % [45.6, 59.3]".
    """

    passed: int
    total: int

    def __post_init__(self) -> None:
        wilson_interval(self.passed, self.total)

    @property
    def rate(self) -> float | None:
        """The passed share, or `None` when nothing was tried."""
        return self.passed / self.total if self.total else None

    @property
    def low(self) -> float:
        """Lower bound of the interval."""
        return wilson_interval(self.passed, self.total)[0]

    @property
    def high(self) -> float:
        """Upper bound of the interval."""
        return wilson_interval(self.passed, self.total)[1]

    def overlaps(self, other: PassRate) -> bool:
        """Whether the two intervals share a point: then the difference of the rates is not established."""
        return self.low <= other.high and other.low <= self.high

    def __str__(self) -> str:
        if self.rate is None:
            return "no trials"
        return f"{self.rate * 100:.1f} % [{self.low * 100:.1f}, {self.high * 100:.1f}]"

"""Says, once, that updates no longer reach the experts: no MXFP4 code or scale has changed for some rounds.

At small learning rates an update moves the masters and none of their codes, so the sampled experts stay what they were.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from model.snapshot import CodeChanges


@dataclass(slots=True)
class StillWatch:
    """Counts rounds in a row with an update and without a changed code or scale; a resumed run counts anew."""

    num_rounds: int
    """After how many it says so; 0: never."""
    _num_still: int = 0

    def observe(self, codes_changed: Mapping[str, CodeChanges]) -> str | None:
        """Take what a round with an update changed in each MXFP4 tensor; the warning when it is due."""
        if not self.num_rounds:
            return None
        is_still = bool(codes_changed) and all(changes.is_still for changes in codes_changed.values())
        self._num_still = self._num_still + 1 if is_still else 0
        if self._num_still != self.num_rounds:
            return None
        self.num_rounds = 0
        return (
            f"learner: updates must change codes to reach the policy, got none in {self._num_still} rounds; raise "
            "algorithm.lr, lower learner.quantization.hysteresis, or use learner.quantization.rounding=stochastic"
        )

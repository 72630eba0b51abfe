"""Says, once, that updates no longer reach the policy: no MXFP4 code of any expert has changed for several rounds.

At small learning rates an update moves the masters and none of their codes, so the sampled policy stays what it was.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from model.snapshot import Format, tensor_format


@dataclass(slots=True)
class StillWatch:
    """Counts rounds in a row with an update and without a changed code; a resumed run counts anew."""

    num_rounds: int
    """After how many it says so; 0: never."""
    _num_still: int = 0

    def observe(self, codes_changed: Mapping[str, tuple[int, int]]) -> str | None:
        """Take the (changed, all) codes of every tensor after a round with an update; the warning when it is due."""
        if not self.num_rounds:
            return None
        changed = sum(count for name, (count, _) in codes_changed.items() if tensor_format(name) is Format.MXFP4)
        self._num_still = 0 if changed else self._num_still + 1
        if self._num_still != self.num_rounds:
            return None
        self.num_rounds = 0
        return (
            f"learner: updates must change codes to reach the policy, got none in {self._num_still} rounds; raise "
            "algorithm.lr, lower learner.quantization.hysteresis, or use learner.quantization.rounding=stochastic"
        )

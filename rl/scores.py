"""What the learner computes for every sample at the start of a round, in the parity gate's one pass over them.

Credit is assigned after it: a KL penalty in the reward needs the reference's logprobs. The update reads the same
numbers again, so they travel with the samples.

Shapes: R trainable tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Stream = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleScores:
    """Streams of a sample's trainable tokens, fp32.

    `proximal_logprobs_R` are the learner's own under the weights that the round starts with, on the routes that an
    update takes (with router replay the recorded ones); `reference_logprobs_R` those of the frozen reference and
    `values_R` the value head's (`None`: the learner has none).
    """

    proximal_logprobs_R: Stream
    reference_logprobs_R: Stream | None = None
    values_R: Stream | None = None

    def part(self, rows: slice) -> SampleScores:
        """The scores of some of the tokens."""
        return SampleScores(
            proximal_logprobs_R=self.proximal_logprobs_R[rows],
            reference_logprobs_R=None if self.reference_logprobs_R is None else self.reference_logprobs_R[rows],
            values_R=None if self.values_R is None else self.values_R[rows],
        )

"""Importance correction between the policy that sampled and the one that the round starts from.

Where the two differ (samples of an older version, another arithmetic in the sampler), one ratio cannot do both jobs: it
would clip tokens for having been sampled long ago. The decoupled objective (Hilton et al. 2022, arXiv 2110.00641;
AReaL, arXiv 2505.24298, eq. 5) clips the ratio policy / proximal, and weighs the token with

    w = proximal / behavior      truncate: min(w, cap)      mask: w where w <= cap, else 0

without gradient. Truncated weights are biased and bounded (Ionides 2008; TIS, Yao et al. 2025); masking drops what is
too far off instead of keeping it at the cap. `level` says of what the ratio is: of the token; of its sequence, the
product over the sequence's tokens, unbiased for the whole sequence and soon far from 1; or that product's geometric
mean (as GSPO, arXiv 2507.18071), which does not depend on the length.

On policy, proximal and behavior logprobs are the same numbers, and every weight is exactly 1.

Differs from the paper: a masked token keeps its place in the denominator of the mean, as importance sampling has it.

Shapes: R trainable tokens, S sequences.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from rl.algorithms.base import AlgorithmError, TokenStreams
from rl.algorithms.config import Importance, ImportanceLevel
from rl.algorithms.surrogate import sequence_sums


@dataclass(frozen=True, slots=True)
class Correction:
    """How weights above `cap` are treated; `kind` is not `none`."""

    kind: Importance
    level: ImportanceLevel
    cap: float

    def __post_init__(self) -> None:
        if self.kind is Importance.none or not self.cap >= 1:
            raise AlgorithmError(
                f"algorithm.importance_cap: a correction needs a cap of at least 1, got {self.kind} and {self.cap}; "
                "2 is usual"
            )

    def weights(self, streams: TokenStreams) -> tuple[torch.Tensor, torch.Tensor]:
        """The weight of each token [R], and whether the cap changed it. Raises AlgorithmError without proximal ones."""
        log_ratio_R = proximal_of(streams) - streams.behavior_logprobs_R
        if self.level is not ImportanceLevel.token:
            total_S, count_S = sequence_sums(log_ratio_R, streams.sequence_R)
            log_ratio_S = total_S / count_S if self.level is ImportanceLevel.geometric else total_S
            log_ratio_R = log_ratio_S[streams.sequence_R]
        ratio_R = log_ratio_R.exp()
        cut_R = ratio_R > self.cap
        instead = 0.0 if self.kind is Importance.mask else self.cap
        return torch.where(cut_R, instead, ratio_R), cut_R


def proximal_of(streams: TokenStreams) -> torch.Tensor:
    """The learner's logprobs at the start of the round. Raises AlgorithmError without."""
    if streams.proximal_logprobs_R is None:
        raise AlgorithmError(
            "algorithm.importance: needs the learner's logprobs at the start of the round, got samples without them; "
            "run the parity gate of the round first"
        )
    return streams.proximal_logprobs_R

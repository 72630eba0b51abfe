"""GSPO (Zheng et al. 2025, arXiv 2507.18071): the importance ratio of a whole sequence, clipped as one.

    s = (pi(sequence) / behavior(sequence)) ^ (1 / length)        loss = -min(s A, clip(s, 1 - low, 1 + high) A)

The ratio of a single token is one draw and a noisy weight, more so where a Mixture of Experts changes its routes
between two versions; the geometric mean over the sequence is not. This is the paper's GSPO-token (eq. 13): every token
has the value s and the gradient of its own logprob, s d log pi(token), which is GSPO itself (eq. 5) where the tokens of
a sequence share an advantage and are averaged (`Aggregation.episode_mean`), and takes an advantage a token as well.

A sequence is a segment of an episode, one unless the context was cut on the way. The clip is far narrower than that of
a token's ratio: 3e-4 and 4e-4 in the paper, section 5.

Differs from the paper: the advantage is GRPO's of this project, not divided by the group's standard deviation.
"""

from __future__ import annotations

from collections.abc import Sequence

from rl.algorithms.base import Rewards, TokenLoss, TokenStreams
from rl.algorithms.rewards import centered, checked
from rl.algorithms.surrogate import Clip, sequence_sums


class Gspo:
    """Group-relative advantages, clipped ratio of the sequence."""

    def __init__(self, *, clip: Clip):
        self._clip = clip

    def advantages(self, rewards: Sequence[Rewards]) -> list[Rewards | None]:
        """Reward minus the group's mean."""
        return [centered(rewards_G) for rewards_G in checked("gspo", rewards)]

    def token_loss(self, streams: TokenStreams) -> TokenLoss:
        """-min(s A, clip(s) A), s of the token's sequence with the gradient of the token's logprob."""
        policy_R, sequence_R = streams.policy_logprobs_R, streams.sequence_R
        log_ratio_R = (policy_R - streams.behavior_logprobs_R).detach()
        total_S, count_S = sequence_sums(log_ratio_R, sequence_R)
        return self._clip.surrogate(
            ((total_S / count_S)[sequence_R] + (policy_R - policy_R.detach())).exp(), streams.advantages_R
        )

"""Generalized advantage estimation (Schulman et al. 2016, arXiv 1506.02438, eq. 16) over the tokens a policy chose.

    delta_t = r_t + gamma V_{t+1} - V_t          A_t = delta_t + gamma lambda A_{t+1}

A step is a token that the policy sampled, or with `Credit.turn` a whole turn: what a tool said in between is no step,
so it takes no discount, and the credit of the end survives an observation of any length. A turn's value is that of its
first token, before anything of it was chosen; all tokens of the turn share its advantage and its return, so the value
before each of them estimates the turn's return from what is known there.

An episode that was cut off ends where it was cut, with the reward it was given: V after the last step is 0.

Shapes: N sampled tokens of an episode over all of its segments, K its turns with sampled tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from rl.algorithms.config import Credit

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeStreams:
    """The sampled tokens of an episode, in order. `turn_N` numbers the turn of each and never falls."""

    rewards_N: Floats
    values_N: Floats
    turn_N: npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenCredit:
    """The advantage of each token of an episode, and what its value should have been (the target of the critic)."""

    advantages_N: Floats
    returns_N: Floats


def estimate(streams: EpisodeStreams, *, gamma: float, gae_lambda: float, credit: Credit) -> TokenCredit:
    """Advantages and returns; `returns = advantages + values`."""
    if credit is Credit.token:
        advantages_N = _advantages(streams.rewards_N, streams.values_N, gamma, gae_lambda)
        return TokenCredit(advantages_N=advantages_N, returns_N=advantages_N + streams.values_N)
    _, first_K, turn_N = np.unique(streams.turn_N, return_index=True, return_inverse=True)
    rewards_K = np.add.reduceat(streams.rewards_N, first_K) if len(first_K) else streams.rewards_N
    values_K = streams.values_N[first_K]
    advantages_K = _advantages(rewards_K, values_K, gamma, gae_lambda)
    return TokenCredit(advantages_N=advantages_K[turn_N], returns_N=(advantages_K + values_K)[turn_N])


def _advantages(rewards: Floats, values: Floats, gamma: float, gae_lambda: float) -> Floats:
    deltas = rewards + gamma * np.append(values[1:], 0.0) - values
    advantages, later = np.zeros_like(deltas), 0.0
    for step in range(len(deltas) - 1, -1, -1):
        later = float(deltas[step]) + gamma * gae_lambda * later
        advantages[step] = later
    return advantages

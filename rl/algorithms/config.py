"""Settings of the policy-gradient algorithm (values in `conf/`, defaults here only)."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum, auto
from typing import Any


class Aggregation(StrEnum):
    """How the losses of the tokens of a minibatch become one number.

    own             as the algorithm's paper does, one of the others
    token_mean      the mean over all tokens: a long episode weighs more (DAPO, arXiv 2503.14476, eq. 8)
    episode_mean    the mean over the tokens of an episode, then over the episodes: a token of a long one weighs less
                    (GRPO, arXiv 2402.03300, eq. 3)
    episode_sum     the sum over the tokens of an episode divided by the constant `length_unit`, then the mean over the
                    episodes: no token's weight depends on a length (Dr. GRPO, arXiv 2503.20783, section 3.2)
    """

    own = auto()
    token_mean = auto()
    episode_mean = auto()
    episode_sum = auto()


class BalanceScope(StrEnum):
    """Over what the load-balancing loss takes its means; see `rl/learner/balance.py`."""

    global_batch = auto()
    micro_batch = auto()
    sequence = auto()


@dataclass(slots=True, kw_only=True)
class AlgorithmConfig:
    """The knobs of all algorithms; `target` and `params` bring a user's own one (with `name=custom`).

    `lr` falls linearly to `lr_end_frac` of itself over the run. The ratio is clipped to `1 - clip_low .. 1 + clip_high`
    (clip-higher, DAPO). `normalize_advantage` divides by the group's standard deviation (GRPO alone reads it).
    `length_unit` is the number of tokens that `episode_sum` divides by.

    `load_balance_coef` and `router_z_coef` weigh the router's losses. `bias_update_speed` moves the selection bias of
    routers that have one after every step, towards an even load (DeepSeek-V3 takes 0.001); it needs no loss.
    """

    name: str = "grpo"
    target: str | None = None
    params: dict[str, Any] = field(default_factory=dict[str, Any])
    lr: float = 3e-4
    lr_end_frac: float = 0.05
    num_minibatches: int = 2
    clip_low: float = 0.2
    clip_high: float = 0.28
    normalize_advantage: bool = False
    aggregation: Aggregation = Aggregation.own
    length_unit: int = 256
    load_balance_coef: float = 0.01
    load_balance_scope: BalanceScope = BalanceScope.global_batch
    router_z_coef: float = 0.0
    bias_update_speed: float = 0.0

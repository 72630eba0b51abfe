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


class KlEstimator(StrEnum):
    """How KL(policy || reference) is estimated from the sampled token (Schulman 2020), d = policy - reference logprob.

    k1    d: unbiased, of large variance, negative for half of the tokens
    k2    d^2 / 2: biased, of low variance
    k3    exp(-d) - 1 + d: unbiased, never negative
    """

    k1 = auto()
    k2 = auto()
    k3 = auto()


class KlPlace(StrEnum):
    """Where the KL penalty acts: `loss` adds it to the loss of each token, `reward` takes it off the token's reward."""

    loss = auto()
    reward = auto()


class Importance(StrEnum):
    """What corrects for samples of another policy than the round starts from (`rl.algorithms.importance`).

    none       nothing: the ratio is policy / behavior
    truncate   the ratio is policy / proximal, and the token is weighed with proximal / behavior, at most the cap
    mask       the same, with weight 0 above the cap
    """

    none = auto()
    truncate = auto()
    mask = auto()


class ImportanceLevel(StrEnum):
    """What the weight proximal / behavior is of: a token, its sequence, or the sequence's geometric mean."""

    token = auto()
    sequence = auto()
    geometric = auto()


class Credit(StrEnum):
    """What one step of generalized advantage estimation is (`rl.algorithms.gae`): a sampled token, or a whole turn."""

    token = auto()
    turn = auto()


class BalanceScope(StrEnum):
    """Over what the load-balancing loss takes its means; see `rl/learner/balance.py`."""

    global_batch = auto()
    micro_batch = auto()
    sequence = auto()


@dataclass(slots=True, kw_only=True)
class AlgorithmConfig:
    """The knobs of all algorithms; `target` and `params` bring a user's own one (with `name=custom`).

    `lr` falls linearly to `lr_end_frac` of itself over the run. The ratio is clipped to `1 - clip_low .. 1 + clip_high`
    (clip-higher, DAPO). `normalize_advantage` divides by the group's standard deviation (GRPO and DAPO read it).
    `length_unit` is the number of tokens that `episode_sum` divides by.

    `kl_coef` weighs the KL to the start policy; at 0 no reference is held. `entropy_coef` weighs the entropy bonus.
    Importance weights are cut at `importance_cap`. Groups without variance are followed by groups of further tasks at
    most `max_resample_rounds` times a round. An answer that ends in the last `overlong_buffer_frac` of
    env.max_tokens_per_turn is punished, at its end with `overlong_coef` (0: no buffer, no punishment).

    PPO alone reads the discount and the lambda of `credit`'s steps, `whiten_advantages`, and the value head's weight in
    the loss, clip (0: none) and learning rate (constant).

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
    kl_coef: float = 0.0
    kl_estimator: KlEstimator = KlEstimator.k3
    kl_in: KlPlace = KlPlace.loss
    entropy_coef: float = 0.0
    importance: Importance = Importance.none
    importance_level: ImportanceLevel = ImportanceLevel.token
    importance_cap: float = 2.0
    max_resample_rounds: int = 0
    overlong_buffer_frac: float = 0.0
    overlong_coef: float = 1.0
    gamma: float = 1.0
    gae_lambda: float = 1.0
    credit: Credit = Credit.token
    whiten_advantages: bool = True
    value_coef: float = 0.5
    value_clip: float = 0.2
    value_lr: float = 1e-3
    load_balance_coef: float = 0.01
    load_balance_scope: BalanceScope = BalanceScope.global_batch
    router_z_coef: float = 0.0
    bias_update_speed: float = 0.0

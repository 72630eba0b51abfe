"""The parity gate: the sampler and the learner must give the same tokens the same logprobs, before every update.

A difference means that the two do not run the same weights or not the same mathematics; training on it is silently
wrong. Tokens whose route flipped (a near-tie in a router that fell the other way because the two sum in another order)
are counted apart, and their sequences do not enter the maximum.

Shapes: T tokens, R trainable tokens, L layers, K experts of a token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from rl.batch import TrainSample
from rl.config import ParitySection


class ParityError(RuntimeError):
    """The gate is closed: training on these samples would be wrong."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleParity:
    """One sample's differences (nats) and flipped tokens by layer."""

    num_tokens: int
    num_routed: int
    abs_sum: float
    abs_max: float
    num_flipped: int
    flips_by_layer_L: np.ndarray

    @classmethod
    def of(cls, sample: TrainSample, logprobs_R: np.ndarray, routes_TLK: np.ndarray) -> SampleParity:
        """Compare a sample with the learner's logprobs and routes. Raises ParityError when routes were not recorded."""
        recorded = sample.routes_TLK
        if len(recorded) != sample.num_tokens - 1:
            raise ParityError(
                f"parity: every computed token needs its route, got {len(recorded)} rows for {sample.num_tokens} "
                f"tokens in sample {sample.key}; the sampler must record them"
            )
        differs_TL = (np.sort(recorded, axis=-1) != np.sort(routes_TLK[: len(recorded)], axis=-1)).any(axis=-1)
        with np.errstate(invalid="ignore"):  # two infinities: their difference is NaN, which closes the gate
            difference_R = np.abs(logprobs_R.astype(np.float64) - sample.behavior_logprobs_R)
        return cls(
            num_tokens=len(difference_R),
            num_routed=len(recorded),
            abs_sum=float(difference_R.sum()),
            abs_max=float(difference_R.max()),
            num_flipped=int(differs_TL.any(axis=-1).sum()),
            flips_by_layer_L=differs_TL.sum(axis=0),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ParityReport:
    """A round's gate. `max_abs_nats` is over sequences without a flipped route; `entropy` is nats a token."""

    num_tokens: int
    num_routed: int
    mean_abs_nats: float
    max_abs_nats: float
    num_flipped: int
    worst_layer: int
    entropy: float

    @classmethod
    def of(cls, samples: Sequence[SampleParity], *, entropy_sum: float) -> ParityReport:
        """Sum the samples of a round up."""
        num_tokens = sum(sample.num_tokens for sample in samples)
        if not num_tokens:
            raise ParityError("parity: there must be sampled tokens to compare, got none; sample a round first")
        unflipped = [sample.abs_max for sample in samples if not sample.num_flipped]
        flips_L = np.sum([sample.flips_by_layer_L for sample in samples], axis=0)
        return cls(
            num_tokens=num_tokens,
            num_routed=sum(sample.num_routed for sample in samples),
            mean_abs_nats=sum(sample.abs_sum for sample in samples) / num_tokens,
            max_abs_nats=float(np.max(unflipped, initial=0.0)),  # unlike the built-in max, it keeps a NaN
            num_flipped=sum(sample.num_flipped for sample in samples),
            worst_layer=int(np.argmax(flips_L)),
            entropy=entropy_sum / num_tokens,
        )

    def violation(self, bounds: ParitySection) -> str | None:
        """What is out of bounds, in words; `None` when the gate is open."""
        problems: list[str] = []
        if not self.mean_abs_nats <= bounds.mean_abs_nats:
            problems.append(f"mean |difference| {self.mean_abs_nats:.2e} nats > {bounds.mean_abs_nats:.0e}")
        if not self.max_abs_nats <= bounds.max_abs_nats:
            problems.append(f"max |difference| {self.max_abs_nats:.2e} nats > {bounds.max_abs_nats:.0e}")
        # One token may always flip: in a short round it is more than the share allowed in a long one.
        if self.num_flipped > max(1.0, bounds.max_flipped_frac * self.num_routed):
            problems.append(
                f"{self.num_flipped} of {self.num_routed} tokens took another route "
                f"(allowed {bounds.max_flipped_frac:.0e}), most in layer {self.worst_layer}"
            )
        return "; ".join(problems) or None

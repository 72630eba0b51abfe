"""The parity gate: the sampler and the learner must give the same tokens the same logprobs, before every update.

A difference means that the two do not run the same weights or not the same mathematics; training on it is silently
wrong. With the kernels of one instruction set on both sides there is none at all, neither in a logprob nor in a route
(`EXACT`).

Torch's operations sum in another order for another batch, so with them a difference is only bounded. Routes may flip
without a fault: a near-tie in a router that fell the other way because the two sum in another order. Such a flip
changes what every later token of its sequence attends to, so it can make more of them; and the episodes of a group
share their prompt, and so its near-ties. Hence flips are counted where they begin (the first one of a sequence), once
for each distinct context, and their sequences enter neither the mean nor the maximum.

Shapes: T tokens, R trainable tokens, L layers, K experts of a token.
"""

from __future__ import annotations

import hashlib
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from model.config import ComputeDtype, KernelChoice
from rl.batch import TrainSample
from rl.config import ParitySection
from rl.scores import SampleScores


@dataclass(frozen=True, slots=True, kw_only=True)
class ParityBounds:
    """What the gate lets through. The first two are in nats, over sequences without a flipped route."""

    mean_abs_nats: float
    max_abs_nats: float
    max_flipped_frac: float


EXACT = ParityBounds(mean_abs_nats=0.0, max_abs_nats=0.0, max_flipped_frac=0.0)
"""Both sides call the same batch-invariant kernels (`model/kernels/dispatch.py`)."""

BOUNDS = {
    ComputeDtype.fp32: ParityBounds(mean_abs_nats=1e-5, max_abs_nats=1e-3, max_flipped_frac=1e-4),
    ComputeDtype.bf16: ParityBounds(mean_abs_nats=5e-3, max_abs_nats=0.25, max_flipped_frac=2e-2),
}
"""Bounds by compute dtype, for torch's operations.

fp32: both sides sum the same products in another order. A logit below 32 carries a rounding of 32 * 2^-24 = 2e-6; ten
sums of that kind in a row, of random sign, make 6e-6 at the most common size, and the mean over tokens stays under 1e-5
(measured: 1e-7). The largest of 10^6 tokens may be a hundred times that.
bf16: where the two orders round an activation to different neighbours, it differs by 2^-8 of itself. Few do, but a
layer spreads one to every output, so a logit below 32 may be off by some 32 * 2^-8 = 0.125 nats, twice that for a
logprob, and the mean is the share that differs, about a fiftieth (measured: mean 7e-4, largest 2e-2, on two layers).
"""


NOT_COMPARED = ParityBounds(
    mean_abs_nats=sys.float_info.max, max_abs_nats=sys.float_info.max, max_flipped_frac=sys.float_info.max
)
"""Sampler and learner differ for a reason (another version, or a forward that is not quantized): logprobs must be
finite, and there is no bound on how far apart they are."""


def bounds_for(
    section: ParitySection, dtype: ComputeDtype, kernels: KernelChoice, *, quantized: bool = True
) -> ParityBounds:
    """The configured bounds, each with the default of the compute dtype and of the kernels that both sides run.

    Where the learner's forward is not `quantized`, only what is configured is bounded.
    """
    default = (BOUNDS[dtype] if kernels is KernelChoice.torch else EXACT) if quantized else NOT_COMPARED
    return ParityBounds(
        mean_abs_nats=default.mean_abs_nats if section.mean_abs_nats is None else section.mean_abs_nats,
        max_abs_nats=default.max_abs_nats if section.max_abs_nats is None else section.max_abs_nats,
        max_flipped_frac=default.max_flipped_frac if section.max_flipped_frac is None else section.max_flipped_frac,
    )


class ParityError(RuntimeError):
    """The gate is closed: training on these samples would be wrong."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleParity:
    """One sample's differences (nats) and flipped tokens, also by layer.

    `flip_origin` is a digest of the ids up to the first flipped token, `None` without one. `scores` are what the
    learner computed for the sample called `key`.
    """

    num_tokens: int
    num_routed: int
    abs_sum: float
    abs_max: float
    num_flipped: int
    flip_origin: bytes | None
    flips_by_layer_L: np.ndarray
    key: str
    scores: SampleScores

    @classmethod
    def of(
        cls, sample: TrainSample, logprobs_R: np.ndarray, routes_TLK: np.ndarray, scores: SampleScores
    ) -> SampleParity:
        """Compare a sample with the learner's logprobs and routes. Raises ParityError when routes were not recorded."""
        recorded = sample.routes_TLK[: sample.num_inputs]
        if recorded.shape != routes_TLK.shape:
            raise ParityError(
                f"parity: every computed token needs its route, got {recorded.shape} for {routes_TLK.shape} (tokens, "
                f"layers, experts a token) in sample {sample.key}; the sampler must record them"
            )
        differs_TL = (np.sort(recorded, axis=-1) != np.sort(routes_TLK, axis=-1)).any(axis=-1)
        with np.errstate(invalid="ignore"):  # two infinities: their difference is NaN, which closes the gate
            difference_R = np.abs(logprobs_R.astype(np.float64) - sample.behavior_logprobs_R)
        flipped_T = differs_TL.any(axis=-1)
        prefix = sample.ids_T[: int(flipped_T.argmax()) + 1]
        return cls(
            num_tokens=len(difference_R),
            num_routed=len(recorded),
            abs_sum=float(difference_R.sum()),
            abs_max=float(difference_R.max()),
            num_flipped=int(flipped_T.sum()),
            flip_origin=hashlib.blake2b(prefix.tobytes(), digest_size=16).digest() if flipped_T.any() else None,
            flips_by_layer_L=differs_TL.sum(axis=0),
            key=sample.key,
            scores=scores,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ParityReport:
    """A round's gate. Mean and maximum are over sequences without a flipped route; `entropy` is nats a token.

    `num_flipped` counts the distinct contexts in which flips begin, `num_flipped_tokens` every flipped token.

    A difference that is not finite is in the mean whatever the routes did. `scores` has every sample's, by its key.
    """

    num_tokens: int
    num_routed: int
    mean_abs_nats: float
    max_abs_nats: float
    num_flipped: int
    num_flipped_tokens: int
    worst_layer: int
    entropy: float
    scores: Mapping[str, SampleScores] = field(default_factory=dict[str, SampleScores], repr=False, compare=False)

    @classmethod
    def of(cls, samples: Sequence[SampleParity], *, entropy_sum: float) -> ParityReport:
        """Sum the samples of a round up."""
        num_tokens = sum(sample.num_tokens for sample in samples)
        if not num_tokens:
            raise ParityError("parity: there must be sampled tokens to compare, got none; sample a round first")
        compared = [sample for sample in samples if not sample.num_flipped or not np.isfinite(sample.abs_sum)]
        flips_L = np.sum([sample.flips_by_layer_L for sample in samples], axis=0)
        return cls(
            num_tokens=num_tokens,
            num_routed=sum(sample.num_routed for sample in samples),
            mean_abs_nats=sum(s.abs_sum for s in compared) / max(1, sum(s.num_tokens for s in compared)),
            max_abs_nats=float(np.max([s.abs_max for s in compared], initial=0.0)),  # the built-in max may lose a NaN
            num_flipped=len({sample.flip_origin for sample in samples} - {None}),
            num_flipped_tokens=sum(sample.num_flipped for sample in samples),
            worst_layer=int(np.argmax(flips_L)),
            entropy=entropy_sum / num_tokens,
            scores={sample.key: sample.scores for sample in samples},
        )

    def across_versions(self, samples: Sequence[TrainSample]) -> ParityReport:
        """The report on samples of other weights, of which other routes are to be expected.

        Mean and maximum are over all tokens, on the routes that an update takes.
        """
        with np.errstate(invalid="ignore"):
            difference_R = np.concatenate(
                [
                    np.abs(self.scores[sample.key].proximal_logprobs_R.astype(np.float64) - sample.behavior_logprobs_R)
                    for sample in samples
                ]
            )
        return replace(self, mean_abs_nats=float(difference_R.mean()), max_abs_nats=float(difference_R.max()))

    def violation(self, bounds: ParityBounds) -> str | None:
        """What is out of bounds, in words; `None` when the gate is open."""
        problems: list[str] = []
        if not self.mean_abs_nats <= bounds.mean_abs_nats:
            problems.append(f"mean |difference| {self.mean_abs_nats:.2e} nats > {bounds.mean_abs_nats:.0e}")
        if not self.max_abs_nats <= bounds.max_abs_nats:
            problems.append(f"max |difference| {self.max_abs_nats:.2e} nats > {bounds.max_abs_nats:.0e}")
        # Three standard deviations (Poisson) and one: a short round may not be stopped by chance. Of nothing, nothing.
        expected = bounds.max_flipped_frac * self.num_routed
        if self.num_flipped > (expected + 3 * math.sqrt(expected) + 1 if expected else 0):
            problems.append(
                f"routes flipped in {self.num_flipped} contexts of {self.num_routed} tokens "
                f"(expected at most {bounds.max_flipped_frac:.0e} of them), most in layer {self.worst_layer}"
            )
        return "; ".join(problems) or None

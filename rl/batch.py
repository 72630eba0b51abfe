"""Training samples, their packing, and who computes which.

A `TrainSample` is one append-only segment with the streams of its trainable (sampled) tokens; a `Batch` is samples laid
end to end, without padding, with `cu_seqlens` between them, each up to the token before its last target: what comes
after it predicts nothing that is trained. Only trainable tokens have a row in the R streams, so a context, observation
or scaffold token cannot enter a loss, and there is one mask for numerator and denominator.

Shapes: T tokens, R trainable tokens, L MoE layers, K experts of a token, S samples.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from rl.scores import SampleScores, Stream
from rollout.types import Segment, SpanOrigin


class BatchError(ValueError):
    """Samples that cannot be packed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainSample:
    """One segment. `targets_R` are the positions of the trainable tokens in `ids_T`; a target is never the first id.

    `advantages_R` and `behavior_logprobs_R` belong to those tokens. `routes_TLK` has the rows the sampler computed: all
    tokens but the last, or none (0 rows) for scripted tokens. `temperature` is that of the distribution the behavior
    logprobs belong to. `trained` is false for a sample that only takes part in the parity gate (a group without
    variance). The loss of a minibatch is the sum of its tokens' losses times `token_weight`, divided by the sum of
    their `token_mass` (`rl.algorithms.config.Aggregation`). `scores` are there once the learner has seen the sample,
    `returns_R` (the targets of a critic) once its credit was assigned by one.
    """

    key: str
    ids_T: npt.NDArray[np.int64]
    targets_R: npt.NDArray[np.int64]
    behavior_logprobs_R: npt.NDArray[np.float32]
    advantages_R: npt.NDArray[np.float32]
    routes_TLK: npt.NDArray[np.uint8]
    weight_version: int
    trained: bool
    temperature: float = 1.0
    token_weight: float = 1.0
    token_mass: float = 1.0
    scores: SampleScores | None = None
    returns_R: Stream | None = None

    @property
    def num_tokens(self) -> int:
        """T."""
        return len(self.ids_T)

    @property
    def num_inputs(self) -> int:
        """Tokens that a learner computes: those before the last target."""
        return int(self.targets_R[-1])

    @property
    def mass(self) -> float:
        """What the sample adds to the denominator of its minibatch's loss."""
        return len(self.targets_R) * self.token_mass


def sample_from_segment(
    segment: Segment, *, key: str, advantage: float, trained: bool, token_weight: float = 1.0, token_mass: float = 1.0
) -> TrainSample:
    """Flatten a segment; every sampled token gets the same `advantage`."""
    ids: list[int] = []
    targets: list[int] = []
    logprobs: list[npt.NDArray[np.float32]] = []
    routes: list[npt.NDArray[np.uint8]] = []
    temperatures: set[float] = set()
    version = -1
    for span in segment.spans():
        if span.origin is SpanOrigin.SAMPLED:
            assert span.sampled_by is not None  # an invariant of TokenSpan
            targets += range(len(ids), len(ids) + len(span.ids))
            logprobs.append(span.sampled_by.logprobs_T)
            temperatures.add(span.sampled_by.params.temperature or 1.0)  # greedy tokens have their logprob at 1
            version = span.sampled_by.weight_version
        if span.routes_TLK is not None:
            routes.append(span.routes_TLK)
        ids += span.ids
    if not targets:
        raise BatchError(f"sample {key}: nothing to train on, got a segment without a sampled token; drop it before")
    if targets[0] == 0:
        raise BatchError(f"sample {key}: a sampled token needs a token before it, got none; give the opening its ids")
    if len(temperatures) > 1:
        raise BatchError(f"sample {key}: one temperature a segment, got {sorted(temperatures)}; sample them alike")
    return TrainSample(
        key=key,
        ids_T=np.array(ids, dtype=np.int64),
        targets_R=np.array(targets, dtype=np.int64),
        behavior_logprobs_R=np.concatenate(logprobs),
        advantages_R=np.full(len(targets), advantage, dtype=np.float32),
        routes_TLK=np.concatenate(routes) if routes else np.zeros((0, 0, 0), dtype=np.uint8),
        weight_version=version,
        trained=trained,
        temperature=temperatures.pop(),
        token_weight=token_weight,
        token_mass=token_mass,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Packed samples. `rows_R` are the packed positions whose logits predict `target_ids_R` (one before the target).

    `sequence_R` numbers the sample of each trainable token. Streams of the scores are `None` without scores.
    `routes_TLK` are the recorded experts, `None` when not every token has some. A batch that `is_padding` is computed,
    as the other ranks wait for it, and counts nowhere.
    """

    samples: tuple[TrainSample, ...]
    ids_T: torch.Tensor
    positions_T: torch.Tensor
    cu_seqlens: torch.Tensor
    rows_R: torch.Tensor
    target_ids_R: torch.Tensor
    behavior_logprobs_R: torch.Tensor
    advantages_R: torch.Tensor
    temperatures_R: torch.Tensor
    weights_R: torch.Tensor
    sequence_R: torch.Tensor
    proximal_logprobs_R: torch.Tensor | None
    reference_logprobs_R: torch.Tensor | None
    old_values_R: torch.Tensor | None
    returns_R: torch.Tensor | None
    routes_TLK: torch.Tensor | None
    is_padding: bool

    @property
    def num_tokens(self) -> int:
        """T."""
        return len(self.ids_T)

    @property
    def counted(self) -> float:
        """What its losses are multiplied by: 0 for padding."""
        return 0.0 if self.is_padding else 1.0


def pack(samples: Sequence[TrainSample], *, is_padding: bool = False) -> Batch:
    """Lay `samples` end to end."""
    if not samples:
        raise BatchError("batch: no samples, got an empty list; skip the update instead")
    lengths_S = np.array([sample.num_inputs for sample in samples])
    starts_S = np.concatenate([[0], lengths_S.cumsum()])
    rows_R = np.concatenate([sample.targets_R - 1 + start for sample, start in zip(samples, starts_S, strict=False)])
    counts_S = np.array([len(sample.targets_R) for sample in samples])
    temperatures_S = np.array([sample.temperature for sample in samples], dtype=np.float32)
    weights_S = np.array([sample.token_weight for sample in samples], dtype=np.float32)
    have_routes = all(len(sample.routes_TLK) >= sample.num_inputs for sample in samples)
    have_routes = have_routes and len({sample.routes_TLK.shape[1:] for sample in samples}) == 1
    routes_TLK = np.concatenate([s.routes_TLK[: s.num_inputs] for s in samples]) if have_routes else None
    return Batch(
        samples=tuple(samples),
        ids_T=torch.from_numpy(np.concatenate([sample.ids_T[: sample.num_inputs] for sample in samples])),
        positions_T=torch.from_numpy(np.concatenate([np.arange(length) for length in lengths_S])),
        cu_seqlens=torch.from_numpy(starts_S).to(torch.int32),
        rows_R=torch.from_numpy(rows_R),
        target_ids_R=torch.from_numpy(np.concatenate([sample.ids_T[sample.targets_R] for sample in samples])),
        behavior_logprobs_R=torch.from_numpy(np.concatenate([sample.behavior_logprobs_R for sample in samples])),
        advantages_R=torch.from_numpy(np.concatenate([sample.advantages_R for sample in samples])),
        temperatures_R=torch.from_numpy(temperatures_S.repeat(counts_S)),
        weights_R=torch.from_numpy(weights_S.repeat(counts_S)),
        sequence_R=torch.from_numpy(np.arange(len(samples)).repeat(counts_S)),
        proximal_logprobs_R=_joined([s.scores and s.scores.proximal_logprobs_R for s in samples]),
        reference_logprobs_R=_joined([s.scores and s.scores.reference_logprobs_R for s in samples]),
        old_values_R=_joined([s.scores and s.scores.values_R for s in samples]),
        returns_R=_joined([s.returns_R for s in samples]),
        routes_TLK=None if routes_TLK is None else torch.from_numpy(routes_TLK),
        is_padding=is_padding,
    )


def _joined(parts: Sequence[Stream | None]) -> torch.Tensor | None:
    """A stream of all samples, or `None` when they have none. Raises BatchError when only some have it."""
    there = [part for part in parts if part is not None]
    if there and len(there) < len(parts):
        raise BatchError(
            f"batch: all samples have a stream or none, got {len(there)} of {len(parts)}; score them together"
        )
    return torch.from_numpy(np.concatenate(there)) if there else None


def micro_batches(samples: Iterable[TrainSample], max_tokens: int, *, rank: int = 0, num_ranks: int = 1) -> list[Batch]:
    """What rank `rank` computes of `samples`: batches of at most `max_tokens` (one sample always fits).

    Every rank gets as many batches as the others, of about as many tokens (longest samples first, each to the emptiest
    batch); where there is no sample left for one, it is padding.
    """
    longest_first = sorted(samples, key=lambda sample: (-sample.num_inputs, sample.key))
    if not longest_first:
        return []
    most = -(-len(longest_first) // num_ranks)  # then every sample has a batch of its own
    fewest = sum(sample.num_inputs for sample in longest_first) // (max_tokens * num_ranks)
    bins: list[list[TrainSample]] = []
    for per_rank in range(min(max(fewest, 1), most), most + 1):
        bins = _deal(longest_first, per_rank * num_ranks)
        if all(len(one) == 1 or sum(s.num_inputs for s in one) <= max_tokens for one in bins if one):
            break
    own = bins[rank::num_ranks]  # the fullest bins come first, so each rank has one of each fullness
    return [pack(one) if one else pack(longest_first[-1:], is_padding=True) for one in own]


def _deal(longest_first: Sequence[TrainSample], num_bins: int) -> list[list[TrainSample]]:
    """Each sample to the bin with the fewest tokens so far (Graham 1969), the fullest bin first."""
    bins: list[list[TrainSample]] = [[] for _ in range(num_bins)]
    emptiest = [(0, index) for index in range(num_bins)]
    for sample in longest_first:
        used, index = emptiest[0]
        bins[index].append(sample)
        heapq.heapreplace(emptiest, (used + sample.num_inputs, index))
    fullness = {index: used for used, index in emptiest}
    return [bins[index] for index in sorted(range(num_bins), key=lambda index: (-fullness[index], index))]

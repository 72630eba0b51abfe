import dataclasses
import random

import numpy as np
import pytest
import torch

from model.config import ModelConfig
from model.layers import project_logits
from model.packed_attention import PackedAttention
from model.transformer import Transformer, init_weights
from rl.algorithms.base import TokenStreams
from rl.algorithms.grpo import Grpo
from rl.algorithms.surrogate import Clip
from rl.batch import Batch, BatchError, TrainSample, micro_batches, pack, sample_from_segment
from rollout.types import SpanOrigin

MODEL = ModelConfig(
    vocab_size=48, hidden_size=32, num_layers=2, num_heads=2, num_kv_heads=1, head_dim=16,
    expert_hidden_size=32, num_experts=4, num_experts_per_tok=2, max_positions=64,
)  # fmt: skip
LOGITS_ATOL = 1e-5
"""Packing changes the order of fp32 sums: 2 layers x 3 chained products of <= 64 terms, some u * 8 each, logits < 8."""


def sample(key: str, num_tokens: int, seed: int = 0) -> TrainSample:
    """Every third token is trainable, from the second on."""
    rng = np.random.default_rng((seed, num_tokens))
    targets = np.arange(1, num_tokens, 3)
    return TrainSample(
        key=key,
        ids_T=rng.integers(0, MODEL.vocab_size, num_tokens),
        targets_R=targets,
        behavior_logprobs_R=rng.normal(-3.0, 0.3, len(targets)).astype(np.float32),
        advantages_R=rng.normal(size=len(targets)).astype(np.float32),
        routes_TLK=np.zeros((num_tokens - 1, 2, 2), np.uint8),
        weight_version=0,
        trained=True,
    )


def two_turns(hand, **kwargs) -> TrainSample:
    #                             0  1  2  3    4   5   6  7   8
    segment = hand.segment((1, 2, 3), ((), (20, 21)), ((7, 8), (30, 31)), **kwargs)
    return sample_from_segment(segment, key="k", advantage=0.5, trained=True)


def test_a_segment_is_flattened_and_only_its_sampled_tokens_are_trainable(hand):
    flat = two_turns(hand, version=3, temperature=0.7)
    assert flat.ids_T.tolist() == [1, 2, 3, 20, 21, 7, 8, 30, 31]
    assert flat.targets_R.tolist() == [3, 4, 7, 8]
    np.testing.assert_array_equal(flat.behavior_logprobs_R, -np.array([20, 21, 30, 31], np.float32) / 100)
    assert flat.advantages_R.tolist() == [0.5] * 4
    assert flat.routes_TLK[:, 0, 0].tolist() == [1, 2, 3, 20, 21, 7, 8, 30]  # every token but the last, in order
    assert (flat.weight_version, flat.temperature, flat.trained) == (3, 0.7, True)


def test_greedy_tokens_count_as_temperature_one(hand):
    assert two_turns(hand, temperature=0.0).temperature == 1.0


def test_segments_that_cannot_be_trained_on_are_refused(hand):
    def flatten(segment):
        return sample_from_segment(segment, key="k", advantage=0.0, trained=True)

    with pytest.raises(BatchError, match=r"^sample k: nothing to train on, "):
        flatten(hand.segment((1, 2)))
    with pytest.raises(BatchError, match=r"^sample k: a sampled token needs a token before it, "):
        flatten(hand.segment((), ((), (20, 21))))
    mixed = hand.segment((1,), ((), (20,)), temperature=1.0)
    other = hand.segment((1,), ((), (21,)), temperature=0.5)
    with pytest.raises(BatchError, match=r"^sample k: one temperature a segment, got \[0\.5, 1\.0\]; "):
        flatten(type(mixed)(opening=mixed.opening, turns=mixed.turns + other.turns))
    with pytest.raises(BatchError, match=r"^batch: no samples, "):
        pack([])


def test_a_row_stands_one_before_its_target_in_its_own_sample():
    samples = [sample("a", 5), sample("b", 2), sample("c", 7)]
    batch = pack(samples)
    assert batch.cu_seqlens.tolist() == [0, 4, 5, 9]  # up to the token before the last target
    assert batch.cu_seqlens.dtype == torch.int32
    assert batch.positions_T.tolist() == [0, 1, 2, 3, 0, 0, 1, 2, 3]
    assert batch.rows_R.tolist() == [0, 3, 4, 5, 8]  # targets are 1, 4 | 1 | 1, 4
    targets = [samples[i].ids_T[target] for i, target in ((0, 1), (0, 4), (1, 1), (2, 1), (2, 4))]
    assert batch.target_ids_R.tolist() == targets
    for stream in ("behavior_logprobs_R", "advantages_R"):
        expected = np.concatenate([getattr(each, stream) for each in samples])
        np.testing.assert_array_equal(getattr(batch, stream).numpy(), expected)
    assert batch.num_tokens == 9


def test_each_token_keeps_the_temperature_it_was_sampled_at(hand):
    batch = pack([two_turns(hand, temperature=0.5), two_turns(hand)])
    assert batch.temperatures_R.tolist() == [0.5] * 4 + [1.0] * 4


def test_no_stream_of_the_loss_has_a_place_for_a_context_or_observation_token(hand):
    flat = two_turns(hand)
    batch = pack([flat, flat])
    origin_of = [SpanOrigin.CONTEXT] * 3 + [SpanOrigin.SAMPLED] * 2 + [SpanOrigin.OBSERVATION] * 2
    origin_of = origin_of + [SpanOrigin.SAMPLED] * 2
    half = len(origin_of) - 1  # the last token is computed by nobody
    assert batch.num_tokens == 2 * half
    assert [origin_of[row % half + 1] for row in batch.rows_R] == [SpanOrigin.SAMPLED] * 8
    num_trainable = 2 * origin_of.count(SpanOrigin.SAMPLED)
    streams = (
        "rows_R", "target_ids_R", "behavior_logprobs_R", "advantages_R", "temperatures_R", "weights_R", "sequence_R"
    )  # fmt: skip
    assert {len(getattr(batch, name)) for name in streams} == {num_trainable}


def forward(model: Transformer, batch: Batch) -> torch.Tensor:
    """Logits of every packed token."""
    out = model(batch.ids_T, batch.positions_T, PackedAttention(batch.cu_seqlens))
    return project_logits(out.hidden_TD, model.model.embed_tokens.weight)


def loss_of(logits_TV: torch.Tensor, batch: Batch) -> torch.Tensor:
    logprobs_R = torch.log_softmax(logits_TV[batch.rows_R], -1).gather(1, batch.target_ids_R[:, None])[:, 0]
    algorithm = Grpo(clip=Clip(0.2, 0.28), normalize=False)
    streams = TokenStreams(
        policy_logprobs_R=logprobs_R,
        behavior_logprobs_R=batch.behavior_logprobs_R,
        advantages_R=batch.advantages_R,
        sequence_R=batch.sequence_R,
    )
    return algorithm.token_loss(streams).loss_R


@pytest.fixture
def model() -> Transformer:
    torch.set_num_threads(1)
    model = Transformer(MODEL)
    init_weights(model, 0)
    return model


def test_packed_samples_get_the_logits_and_losses_they_get_alone(model: Transformer):
    samples = [sample(str(i), n) for i, n in enumerate((9, 2, 31, 16))]
    packed = pack(samples)
    with torch.no_grad():
        logits_TV = forward(model, packed)
        alone = [forward(model, pack([each])) for each in samples]
        torch.testing.assert_close(logits_TV, torch.cat(alone), atol=LOGITS_ATOL, rtol=0)
        losses = [loss_of(logits, pack([each])) for logits, each in zip(alone, samples, strict=True)]
        torch.testing.assert_close(loss_of(logits_TV, packed), torch.cat(losses), atol=4 * LOGITS_ATOL, rtol=0)
        # The comparison sees a difference: with the neighbours' order changed, the logits belong to other tokens.
        assert not torch.allclose(forward(model, pack(samples[::-1])), logits_TV, atol=0.1)


def test_the_loss_has_no_gradient_at_rows_that_predict_other_tokens(model: Transformer):
    batch = pack([sample("a", 9), sample("b", 16)])
    logits_TV = forward(model, batch).detach()
    logprobs_R = torch.log_softmax(logits_TV[batch.rows_R], -1).gather(1, batch.target_ids_R[:, None])[:, 0]
    batch = dataclasses.replace(batch, behavior_logprobs_R=logprobs_R)  # ratio 1: nothing is clipped
    logits_TV.requires_grad_()
    loss_of(logits_TV, batch).sum().backward()
    assert logits_TV.grad is not None
    has_gradient = logits_TV.grad.abs().sum(-1) > 0
    assert has_gradient.nonzero()[:, 0].tolist() == batch.rows_R.tolist()


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 64])
@pytest.mark.parametrize("max_tokens", [1, 16, 40, 10_000])
def test_micro_batches_cover_every_sample_once_within_the_limit_in_one_order(max_tokens: int, num_ranks: int):
    samples = [sample(f"{i:03d}", 2 + (7 * i) % 23) for i in range(40)]
    shares = [micro_batches(samples, max_tokens, rank=rank, num_ranks=num_ranks) for rank in range(num_ranks)]
    real = [batch for share in shares for batch in share if not batch.is_padding]
    assert sorted(each.key for batch in real for each in batch.samples) == [each.key for each in samples]
    assert all(batch.num_tokens <= max_tokens or len(batch.samples) == 1 for batch in real)
    assert len({len(share) for share in shares}) == 1
    random.Random(0).shuffle(samples)
    again = [micro_batches(samples, max_tokens, rank=rank, num_ranks=num_ranks) for rank in range(num_ranks)]
    assert [[[each.key for each in b.samples] for b in share] for share in again] == [
        [[each.key for each in b.samples] for b in share] for share in shares
    ]


def test_padding_is_a_real_sample_that_counts_nowhere():
    (alone,), (padding,) = (micro_batches([sample("a", 9)], 100, rank=rank, num_ranks=2) for rank in (0, 1))
    assert (alone.is_padding, alone.counted) == (False, 1.0)
    assert (padding.is_padding, padding.counted) == (True, 0.0)
    assert padding.num_tokens == alone.num_tokens


def test_ranks_get_about_as_many_tokens_as_each_other():
    samples = [sample(f"{i:03d}", 2 + (7 * i) % 23) for i in range(400)]
    totals = [sum(b.num_tokens for b in micro_batches(samples, 64, rank=rank, num_ranks=4)) for rank in range(4)]
    assert max(totals) - min(totals) <= 23


def test_micro_batches_fill_up_to_the_limit_exactly():
    samples = [sample(str(i), 8) for i in range(4)]  # of 7 computed tokens: the targets are 1, 4, 7
    assert [batch.num_tokens for batch in micro_batches(samples, 14)] == [14, 14]
    assert [batch.num_tokens for batch in micro_batches(samples, 13)] == [7, 7, 7, 7]
    assert micro_batches([], 16) == []


def test_recorded_routes_are_packed_when_every_computed_token_has_some():
    routes = np.arange(9 * 2 * 2, dtype=np.uint8).reshape(9, 2, 2)
    whole = dataclasses.replace(sample("a", 9), routes_TLK=routes)
    batch = pack([whole, whole])
    assert batch.routes_TLK is not None
    np.testing.assert_array_equal(batch.routes_TLK, np.concatenate([routes[: whole.num_inputs]] * 2))
    for shape in ((0, 0, 0), (5, 2, 2), (9, 1, 2)):
        assert pack([whole, dataclasses.replace(whole, routes_TLK=np.zeros(shape, np.uint8))]).routes_TLK is None

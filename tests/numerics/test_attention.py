"""Packed attention equals the loop over sequences, and no token sees another sequence or its own future."""

import dataclasses

import pytest
import torch

from model.config import Family
from model.packed_attention import AttentionError, PackedAttention, ReferenceAttention
from model.rope import rotation
from tests.numerics.families import MINI, make_model
from tests.numerics.tolerances import ATTENTION, ATTENTION_BACKWARD, U16, relative_error

LENGTHS = [
    [1],
    [5],
    [1, 1, 1],
    [3, 1, 70, 2, 69, 33, 34],
    [64, 128, 65, 17],
    [200, 9],
    list(range(1, 24)),
]


def bounds(lengths):
    return [0, *torch.tensor(lengths).cumsum(0).tolist()]


def make_qkv(num_tokens, heads, kv_heads, dim, *, seed=0, dtype=torch.float32):
    g = torch.Generator().manual_seed(seed)
    shapes = ((num_tokens, heads, dim), (num_tokens, kv_heads, dim), (num_tokens, kv_heads, dim))
    return tuple(torch.randn(shape, generator=g).to(dtype).requires_grad_() for shape in shapes)


@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(4, 2, 32), (2, 2, 16), (6, 1, 64), (1, 1, 8)])
def test_packed_attention_equals_the_loop(lengths, heads, kv_heads, dim):
    qkv = make_qkv(sum(lengths), heads, kv_heads, dim)
    upstream = torch.randn(sum(lengths), heads, dim, generator=torch.Generator().manual_seed(1))
    expected = ReferenceAttention(bounds(lengths))(0, *qkv)
    actual = PackedAttention(torch.tensor(bounds(lengths), dtype=torch.int32))(0, *qkv)
    assert relative_error(actual, expected) < ATTENTION
    grads = torch.autograd.grad(actual, qkv, upstream)
    for grad, expected_grad in zip(grads, torch.autograd.grad(expected, qkv, upstream), strict=True):
        if expected_grad.abs().max() < 1e-5:  # sequences of one token: the softmax is constant
            assert grad.abs().max() < 1e-5
        else:
            assert relative_error(grad, expected_grad) < ATTENTION_BACKWARD


def test_the_reference_is_the_formula():
    """Two tokens, one head of one dimension: the second attends with weights softmax(q k)."""
    q, k, v = (torch.tensor(x).view(2, 1, 1) for x in ([1.0, 2.0], [0.5, 1.0], [10.0, 20.0]))
    out = ReferenceAttention([0, 2])(0, q, k, v).flatten()
    weight = 1 / (1 + torch.tensor(2 * 0.5 - 2 * 1.0).exp())  # of the second key
    torch.testing.assert_close(out, torch.stack([torch.tensor(10.0), 10 + 10 * weight]))


def test_nothing_crosses_sequences_or_time():
    """Change one token: only later tokens of its own sequence change, and they all do."""
    lengths = [4, 6, 5]
    q, k, v = (x.detach() for x in make_qkv(15, 4, 2, 32))
    attend = PackedAttention(bounds(lengths))
    before = attend(0, q, k, v)
    changed_k, changed_v = k.clone(), v.clone()
    changed_k[6], changed_v[6] = 3.0, -3.0  # the third token of the second sequence
    differs = (attend(0, q, changed_k, changed_v) != before).flatten(1).any(1)
    assert differs.tolist() == [False] * 6 + [True] * 4 + [False] * 5


def test_gradient_stays_within_the_sequence():
    lengths = [4, 6, 5]
    qkv = make_qkv(15, 4, 2, 32)
    out = PackedAttention(bounds(lengths))(0, *qkv)
    for grad in torch.autograd.grad(out[7].sum(), qkv):  # the fourth token of the second sequence
        touched = grad.flatten(1).any(1)
        assert not touched[:4].any()
        assert not touched[8:].any()
        assert touched[7]


def test_bf16_is_rounded_once_at_the_end():
    lengths = [30, 50]
    qkv = make_qkv(80, 4, 2, 32, dtype=torch.bfloat16)
    exact = ReferenceAttention(bounds(lengths))(0, *(x.float() for x in qkv))
    out = PackedAttention(bounds(lengths))(0, *qkv)
    assert out.dtype == torch.bfloat16
    assert relative_error(out.float(), exact) < U16


def test_wrong_bounds_are_refused():
    for bad in ([0], [1, 3], [0, 3, 3], [0, 4, 2]):
        with pytest.raises(AttentionError, match="must start at 0 and grow"):
            PackedAttention(bad)
    with pytest.raises(AttentionError, match="got 4 for 5 tokens"):
        PackedAttention([0, 4])(0, *make_qkv(5, 2, 1, 8))


@pytest.mark.parametrize("lengths", [[1], [3, 1, 70, 2, 69, 33, 34], list(range(1, 24))])
@pytest.mark.parametrize("window", [0, 1, 2, 7, 33, 500])
@pytest.mark.parametrize("with_sinks", [False, True])
def test_windows_and_sinks_equal_the_loop(lengths, window, with_sinks):
    qkv = make_qkv(sum(lengths), 6, 2, 16)
    sinks = torch.linspace(-2, 3, 6).requires_grad_() if with_sinks else None
    inputs = qkv if sinks is None else (*qkv, sinks)
    upstream = torch.randn(sum(lengths), 6, 16, generator=torch.Generator().manual_seed(1))
    expected = ReferenceAttention(bounds(lengths))(0, *qkv, scale=0.3, window=window, sinks_H=sinks)
    actual = PackedAttention(bounds(lengths))(0, *qkv, scale=0.3, window=window, sinks_H=sinks)
    assert relative_error(actual, expected) < ATTENTION
    grads = torch.autograd.grad(actual, inputs, upstream)
    expected_grads = torch.autograd.grad(expected, inputs, upstream)
    scale = max(grad.abs().max() for grad in expected_grads)  # a window of one token leaves q and k no gradient
    for grad, expected_grad in zip(grads, expected_grads, strict=True):
        assert grad.isfinite().all()
        assert (grad - expected_grad).abs().max() < ATTENTION_BACKWARD * scale


@pytest.mark.parametrize("window", [0, 2])
def test_a_sink_of_minus_infinity_is_none(window):
    qkv = make_qkv(5, 2, 1, 8)
    sinks = torch.full((2,), -torch.inf)
    with_sinks = PackedAttention([0, 5])(0, *qkv, window=window, sinks_H=sinks)
    assert relative_error(with_sinks, ReferenceAttention([0, 5])(0, *qkv, window=window)) < ATTENTION
    grads = torch.autograd.grad(with_sinks.sum(), qkv)
    assert all(grad.isfinite().all() for grad in grads)


def test_a_sink_takes_its_share_and_gives_nothing():
    """One head of one value: weights of two keys with scores 0 and a sink of log 2 are 1/4, 1/4 and 1/2."""
    q, k, v = torch.zeros(2, 1, 1), torch.ones(2, 1, 1), torch.tensor([4.0, 8.0]).view(2, 1, 1)
    sinks = torch.tensor([2.0]).log()
    for attend in (ReferenceAttention([0, 2]), PackedAttention([0, 2])):
        out = attend(0, q, k, v, sinks_H=sinks).flatten()
        torch.testing.assert_close(out, torch.tensor([4.0 / 3, 3.0]))


def test_a_window_counts_the_query_itself():
    q, k = torch.zeros(4, 1, 8), torch.zeros(4, 1, 8)
    v = torch.arange(4.0).view(4, 1, 1).expand(4, 1, 8)
    for attend in (ReferenceAttention([0, 4]), PackedAttention([0, 4])):
        torch.testing.assert_close(attend(0, q, k, v, window=1)[:, 0, 0], torch.arange(4.0))
        torch.testing.assert_close(attend(0, q, k, v, window=2)[:, 0, 0], torch.tensor([0.0, 0.5, 1.5, 2.5]))


@pytest.mark.parametrize(("key_dim", "value_dim"), [(24, 20), (16, 48)])
def test_values_may_have_another_size_than_keys(key_dim, value_dim):
    lengths = [9, 30, 1]
    g = torch.Generator().manual_seed(0)
    q, k = (torch.randn(40, heads, key_dim, generator=g) for heads in (4, 2))
    v = torch.randn(40, 2, value_dim, generator=g)
    expected = ReferenceAttention(bounds(lengths))(0, q, k, v)
    assert expected.shape == (40, 4, value_dim)
    assert relative_error(PackedAttention(bounds(lengths))(0, q, k, v), expected) < ATTENTION


class _Latents(ReferenceAttention):
    """The loop, as a caller that keeps keys: latent attention then works on latents."""

    keeps_keys = True


@pytest.mark.parametrize(("q_lora_rank", "adjacent"), [(24, True), (0, False)])
def test_latent_attention_is_the_same_with_expanded_heads_and_on_latents(q_lora_rank, adjacent):
    config = MINI[Family.deepseek_v3]
    rope = dataclasses.replace(config.rope, adjacent_pairs=adjacent)
    config = dataclasses.replace(config, q_lora_rank=q_lora_rank, rope=rope)
    layer = make_model(config).model.layers[1].self_attn.requires_grad_(True)
    positions = torch.cat([torch.arange(30), torch.arange(12)])
    by = rotation(positions, config.rotary_dim, config.rope)
    x = torch.randn(42, config.hidden_size, generator=torch.Generator().manual_seed(0)).requires_grad_()
    inputs = (x, *layer.parameters())
    outs = [layer(x, by, attend([0, 30, 42])) for attend in (_Latents, ReferenceAttention, PackedAttention)]
    grads = [torch.autograd.grad(out.square().sum(), inputs) for out in outs]
    for out, grad in zip(outs[1:], grads[1:], strict=True):
        assert relative_error(out, outs[0]) < 4 * ATTENTION  # two projections before and one after
        for a, b in zip(grad, grads[0], strict=True):
            assert relative_error(a, b) < 8 * ATTENTION

"""Packed attention equals the loop over sequences, and no token sees another sequence or its own future."""

import pytest
import torch

from model.attention import AttentionError, PackedAttention, ReferenceAttention
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

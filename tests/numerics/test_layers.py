"""RMSNorm and the rotary embedding against their formulas in float64, forward and gradient."""

import dataclasses
import math

import torch
import torch.nn.functional as F

from model.config import RopeConfig, RopeScaling
from model.layers import Embedding, HeadLinear, Linear, RMSNorm, project_logits
from model.rope import attention_factor, inverse_frequencies, rotate, rotation, score_factor
from tests.numerics.tolerances import NORM, ROTATION, U16, relative_error, summed


def test_rms_norm_equals_the_formula():
    torch.manual_seed(0)
    norm = RMSNorm(48, eps=1e-6)
    with torch.no_grad():
        norm.weight.copy_(torch.randn(48))
    x, upstream = torch.randn(37, 48, requires_grad=True), torch.randn(37, 48)
    x64, w64 = x.detach().double().requires_grad_(), norm.weight.detach().double().requires_grad_()
    expected = x64 / (x64.square().mean(-1, keepdim=True) + 1e-6).sqrt() * w64
    actual = norm(x)
    assert relative_error(actual, expected) < NORM
    grads = torch.autograd.grad(actual, (x, norm.weight), upstream)
    for grad, expected_grad in zip(grads, torch.autograd.grad(expected, (x64, w64), upstream.double()), strict=True):
        assert relative_error(grad, expected_grad) < NORM


def test_rms_norm_of_bf16_is_computed_in_fp32():
    torch.manual_seed(0)
    norm = RMSNorm(64, eps=1e-6)
    torch.nn.init.ones_(norm.weight)
    x = torch.randn(5, 64, dtype=torch.bfloat16)
    out = norm(x)
    assert out.dtype == torch.float32
    assert relative_error(out, F.rms_norm(x.double(), (64,), eps=1e-6)) < NORM


def test_rms_norm_of_zeros_is_zero_and_finite():
    norm = RMSNorm(8, eps=1e-6)
    torch.nn.init.ones_(norm.weight)
    x = torch.zeros(2, 8, requires_grad=True)
    out = norm(x)
    (grad,) = torch.autograd.grad(out.sum(), x)
    assert not out.any()
    torch.testing.assert_close(grad, torch.full((2, 8), 1e3))  # 1 / sqrt(eps)


def adjacent(x):
    """Activations in NeoX order, as a projection with adjacent pairs would make them."""
    return x.unflatten(-1, (2, -1)).transpose(-1, -2).flatten(-2)


def neox(x, positions, theta):
    """The formula, on halves and in fp64."""
    half = x.shape[-1] // 2
    exponent = torch.arange(half, dtype=torch.float64) / half
    angle = (positions.double().unsqueeze(-1) * theta**-exponent).unsqueeze(1)
    first, second = x.double().chunk(2, -1)
    cos, sin = angle.cos(), angle.sin()
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)


def test_rotation_by_hand():
    """Head of 4 at position 3, theta 100: pairs (0, 2) and (1, 3) turn by 3 and by 0.3."""
    x = torch.tensor([[[1.0, 2.0, 3.0, 4.0]]])
    out = rotate(adjacent(x), rotation(torch.tensor([3]), 4, RopeConfig(theta=100.0)))
    c, s, c1, s1 = math.cos(3), math.sin(3), math.cos(0.3), math.sin(0.3)
    expected = [1 * c - 3 * s, 3 * c + 1 * s, 2 * c1 - 4 * s1, 4 * c1 + 2 * s1]
    torch.testing.assert_close(out.flatten(), torch.tensor(expected))


def test_rotation_equals_the_neox_formula_in_adjacent_order():
    torch.manual_seed(0)
    x, positions = torch.randn(9, 3, 32), torch.tensor([0, 1, 2, 3, 50, 0, 7, 300, 511])
    out = rotate(adjacent(x), rotation(positions, 32, RopeConfig()))
    assert relative_error(out, adjacent(neox(x, positions, 10000.0))) < ROTATION


def test_a_head_projection_makes_adjacent_pairs_and_trains_the_checkpoints_order():
    torch.manual_seed(0)
    projection = HeadLinear(16, num_heads=3, head_dim=8)
    torch.nn.init.normal_(projection.weight)
    x, upstream = torch.randn(5, 16), torch.randn(5, 3, 8)
    plain = F.linear(x, projection.weight).view(5, 3, 8)
    out = projection(x)
    assert torch.equal(out, adjacent(plain))
    (grad,) = torch.autograd.grad(out, projection.weight, upstream)
    (expected,) = torch.autograd.grad(adjacent(plain), projection.weight, upstream)
    assert relative_error(grad, expected) < summed(5)


def test_position_zero_is_the_identity_and_scores_depend_on_distance_only():
    torch.manual_seed(0)
    q, k = torch.randn(1, 2, 32), torch.randn(1, 2, 32)
    by = [rotation(torch.tensor([p]), 32, RopeConfig()) for p in (0, 5, 100, 105)]
    assert torch.equal(rotate(q, by[0]), q)
    near = (rotate(q, by[1]) * rotate(k, by[0])).sum(-1)
    far = (rotate(q, by[3]) * rotate(k, by[2])).sum(-1)
    assert relative_error(far, near) < ROTATION


def test_gradient_of_a_rotation_is_the_opposite_rotation():
    torch.manual_seed(0)
    x = torch.randn(6, 3, 8, requires_grad=True)
    upstream, positions = torch.randn(6, 3, 8), torch.arange(6)
    (grad,) = torch.autograd.grad(rotate(x, rotation(positions, 8, RopeConfig())), x, upstream)
    assert relative_error(grad, rotate(upstream, rotation(-positions, 8, RopeConfig()))) < ROTATION


def test_rotation_of_bf16_is_rounded_once():
    torch.manual_seed(0)
    x, by = torch.randn(6, 3, 8).bfloat16(), rotation(torch.arange(6), 8, RopeConfig())
    assert torch.equal(rotate(x, by), rotate(x.float(), by).bfloat16())


def test_linear_and_embedding_read_a_bf16_view_like_the_same_values_in_fp32():
    torch.manual_seed(0)
    linear, embedding = Linear(16, 8), Embedding(10, 16)
    view = torch.randn(8, 16).bfloat16()
    x, ids = torch.randn(4, 16), torch.tensor([1, 9])
    out = torch.func.functional_call(linear, {"weight": view}, (x,))
    assert torch.equal(out, F.linear(x, view.float()))
    table = torch.randn(10, 16).bfloat16()
    rows = torch.func.functional_call(embedding, {"weight": table}, (ids,))
    assert torch.equal(rows, table.float()[ids])


def test_logits_are_fp32_whatever_comes_in():
    torch.manual_seed(0)
    hidden, weight = torch.randn(3, 16), torch.randn(7, 16)
    exact = hidden.double() @ weight.double().t()
    assert relative_error(project_logits(hidden, weight), exact) < summed(16)
    logits = project_logits(hidden.bfloat16(), weight.bfloat16())
    assert logits.dtype == torch.float32
    assert relative_error(logits, exact) < 4 * U16


YARN = RopeConfig(theta=150000.0, scaling=RopeScaling.yarn, factor=32.0, original_positions=4096, truncate=False)


def test_yarn_keeps_fast_pairs_and_stretches_slow_ones_as_gpt_oss_does():
    """The ramp of gpt-oss runs from pair 8.0928 to 17.398 when its ends are not rounded, from 8 to 18 when they are."""
    plain = inverse_frequencies(64, RopeConfig(theta=150000.0))
    for truncate, low, high in ((False, 8.0928, 17.398), (True, 8.0, 18.0)):
        stretched = inverse_frequencies(64, dataclasses.replace(YARN, truncate=truncate))
        ramp = ((torch.arange(32) - low) / (high - low)).clamp(0, 1)
        torch.testing.assert_close(stretched, plain * (1 - ramp) + plain / 32 * ramp, rtol=1e-4, atol=0.0)
        assert torch.equal(stretched[:9], plain[:9])
        torch.testing.assert_close(stretched[18:], plain[18:] / 32)


def test_the_magnitudes_of_yarn():
    assert attention_factor(YARN) == 0.1 * math.log(32) + 1
    assert score_factor(YARN) == 1.0
    deepseek = RopeConfig(
        scaling=RopeScaling.yarn, factor=40.0, original_positions=4096, mscale=1.0, mscale_all_dim=1.0
    )
    assert attention_factor(deepseek) == 1.0
    assert score_factor(deepseek) == (0.1 * math.log(40) + 1) ** 2
    assert attention_factor(dataclasses.replace(YARN, attention_factor=1.5)) == 1.5
    lengths = rotation(torch.arange(3), 8, YARN).abs()
    torch.testing.assert_close(lengths, torch.full_like(lengths, 0.1 * math.log(32) + 1))


def test_linear_and_llama3_frequencies_by_hand():
    plain = inverse_frequencies(8, RopeConfig())  # 1, 0.1, 0.01, 0.001
    linear = inverse_frequencies(8, RopeConfig(scaling=RopeScaling.linear, factor=4.0))
    torch.testing.assert_close(linear, plain / 4)
    # 8192 positions turn the four pairs 1304, 130, 13.0 and 1.304 times: only the last lies in the ramp from 1 to 4.
    llama = RopeConfig(scaling=RopeScaling.llama3, factor=8.0, original_positions=8192)
    kept = (8192 * 0.001 / (2 * math.pi) - 1) / 3
    expected = torch.tensor([1.0, 0.1, 0.01, 0.001 * kept + 0.001 / 8 * (1 - kept)], dtype=torch.float64)
    torch.testing.assert_close(inverse_frequencies(8, llama), expected)

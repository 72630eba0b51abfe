"""Triton's norms, rotations and the writing of rotated keys equal their definitions."""

import pytest
import torch

from model.config import RopeConfig
from model.kernels.attention import reference as attention_reference
from model.kernels.attention import triton_pages
from model.kernels.attention.reference import Pages
from model.kernels.cpu.build import KernelError
from model.kernels.rms_norm import reference as norm_reference
from model.kernels.rms_norm import triton as norm
from model.kernels.rotary import reference as rotary_reference
from model.kernels.rotary import triton as rotary
from model.rope import rotation
from tests.numerics.tolerances import ROTATION, U16, relative_error, summed

BF16, FP32, INT8, FP8 = torch.bfloat16, torch.float32, torch.int8, torch.float8_e4m3fn


@pytest.fixture(autouse=True)
def _poisoned_outputs():
    """Memory that a launcher reserves starts as NaN."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


def normal(*shape, seed=0, dtype=FP32, device="cpu"):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype).to(device)


def turns(num_tokens, pairs, device):
    positions = torch.arange(num_tokens, device=device) * 7 + 3
    return rotation(positions, 2 * pairs, RopeConfig())


def within(dtype, num_terms):
    return summed(num_terms) if dtype == FP32 else U16


@pytest.mark.parametrize("dim", [1, 31, 64, 2880, 16384])
@pytest.mark.parametrize("dtype", [FP32, BF16])
@pytest.mark.parametrize("out_dtype", [FP32, BF16])
def test_norm(dim, dtype, out_dtype, device):
    x, weight = normal(3, dim, dtype=dtype, device=device), normal(dim, seed=1, dtype=BF16, device=device)
    x[1] *= 1e-5
    expected = norm_reference.rms_norm(x, weight, 1e-6)
    actual = norm.rms_norm(x, weight, 1e-6, dtype=out_dtype)
    assert actual.dtype == out_dtype
    for row in range(3):
        assert relative_error(actual[row].float(), expected[row]) < within(out_dtype, dim)


@pytest.mark.parametrize("dim", [31, 256])
@pytest.mark.parametrize("dtype", [FP32, BF16])
@pytest.mark.parametrize("y_dtype", [FP32, BF16])
def test_norm_of_a_sum(dim, dtype, y_dtype, device):
    """Rows of a wider tensor, as a slice of a projection would be."""
    x, y = normal(5, 2 * dim, dtype=dtype, device=device)[:, :dim], normal(5, dim, seed=1, dtype=y_dtype, device=device)
    weight = normal(dim, seed=2, device=device)
    total, normed = norm.add_rms_norm(x, y, weight, 1e-5)
    assert torch.equal(total, (x.float() + y.float()).to(dtype))
    assert relative_error(normed, norm_reference.rms_norm(total, weight, 1e-5)) < summed(dim)


def test_a_rows_norm_does_not_depend_on_the_others(device):
    x, weight = normal(9, 200, device=device), normal(200, seed=1, device=device)
    assert torch.equal(norm.rms_norm(x[4:5], weight, 1e-6), norm.rms_norm(x, weight, 1e-6)[4:5])


def test_no_rows_and_too_long_ones(device):
    weight = normal(16, device=device)
    assert norm.rms_norm(normal(0, 16, device=device), weight, 1e-6).shape == (0, 16)
    with pytest.raises(KernelError, match="at most 16384 values, got 16385"):
        norm.rms_norm(normal(1, 16385, device=device), normal(16385, device=device), 1e-6)


@pytest.mark.parametrize(("heads", "dim", "pairs"), [(1, 8, 4), (3, 40, 20), (5, 64, 32), (20, 96, 16), (2, 24, 5)])
@pytest.mark.parametrize("kind", ["plain", "each", "together"])
@pytest.mark.parametrize(("dtype", "out_dtype"), [(FP32, FP32), (BF16, BF16), (BF16, FP32), (FP32, BF16)])
def test_rotary(heads, dim, pairs, kind, dtype, out_dtype, device):
    """Heads are a part of a wider projection."""
    x = normal(4, heads + 1, dim, dtype=dtype, device=device)[:, 1:]
    options = {"out_dtype": out_dtype, "together": kind == "together"}
    weight = None
    if kind != "plain":
        weight = normal(heads * dim if kind == "together" else dim, seed=1, dtype=BF16, device=device)
    by = turns(4, pairs, device)
    expected = rotary_reference.rotary(x, by, weight, 1e-6, **options)
    actual = rotary.rotary(x, by, weight, 1e-6, **options)
    assert actual.dtype == expected.dtype == out_dtype
    tolerance = summed(heads * dim) + ROTATION if out_dtype == FP32 else U16
    assert relative_error(actual.float(), expected.float()) < tolerance


@pytest.mark.parametrize("stored", [FP32, BF16, INT8, FP8])
@pytest.mark.parametrize("dtype", [FP32, BF16])
@pytest.mark.parametrize(("heads", "kv_heads", "dim", "pairs"), [(4, 2, 16, 8), (7, 1, 40, 16), (18, 17, 64, 32)])
@pytest.mark.parametrize("with_norms", [False, True])
def test_fused_writing_gives_the_bits_of_the_parts(stored, dtype, heads, kv_heads, dim, pairs, with_norms, device):
    qkv = normal(3, (heads + 2 * kv_heads) * dim + 5, dtype=dtype, device=device)[:, :-5]
    by = turns(3, pairs, device)
    weights = [normal(dim, seed=s, device=device) for s in (1, 2)] if with_norms else [None, None]
    slots = torch.tensor([9, 0, 4], device=device)

    def make():
        rows = torch.zeros(11, kv_heads, dim, dtype=stored, device=device)
        return Pages(rows, torch.zeros(11, kv_heads, device=device) if stored in (INT8, FP8) else None)

    keys, values, expected_keys, expected_values = (make() for _ in range(4))
    q = rotary.rotate_and_write(
        qkv,
        by,
        keys,
        values,
        slots,
        num_heads=heads,
        q_weight_d=weights[0],
        k_weight_d=weights[1],
        eps=1e-6,
    )
    q_THd, k_TGd, v_TGd = qkv.unflatten(-1, (-1, dim)).split([heads, kv_heads, kv_heads], dim=1)
    expected_q = rotary.rotary(q_THd, by, weights[0], 1e-6)
    triton_pages.write(expected_keys, slots, rotary.rotary(k_TGd, by, weights[1], 1e-6))
    attention_reference.write(expected_values, slots, v_TGd)
    assert torch.equal(q, expected_q)
    for actual, expected in zip((*keys, *values), (*expected_keys, *expected_values), strict=True):
        if expected is not None:
            assert torch.equal(actual.view(torch.uint8), expected.view(torch.uint8))


def test_projections_that_do_not_fit_are_refused(device):
    keys = Pages(torch.zeros(4, 2, 8, device=device))
    by, slots = turns(1, 4, device), torch.zeros(1, dtype=torch.int64, device=device)
    with pytest.raises(KernelError, match=r"3 \+ 2 \* 2 heads of 8, got 48 columns"):
        rotary.rotate_and_write(normal(1, 48, device=device), by, keys, keys, slots, num_heads=3)
    x, weight = normal(1, 56, device=device), normal(8, device=device)
    with pytest.raises(KernelError, match="both norms or none"):
        rotary.rotate_and_write(x, by, keys, keys, slots, num_heads=3, q_weight_d=weight)

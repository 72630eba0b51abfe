"""The shared arithmetic is right where the interpreter by itself is not."""

import pytest
import torch
import triton
import triton.language as tl

from model.kernels.gpu.interpret import dot, round_to, to_bf16
from tests.numerics.tolerances import relative_error, summed


@triton.jit
def _round_kernel(x_ptr, out_ptr, N: tl.constexpr):
    at = tl.arange(0, N)
    tl.store(out_ptr + at, to_bf16(tl.load(x_ptr + at)))


@triton.jit
def _copy_kernel(x_ptr, out_ptr, N: tl.constexpr):
    at = tl.arange(0, N)
    tl.store(out_ptr + at, round_to(tl.load(x_ptr + at), out_ptr))


@triton.jit
def _dot_kernel(a_ptr, b_ptr, out_ptr, N: tl.constexpr):
    at = tl.arange(0, N)
    square = at[:, None] * N + at[None, :]
    acc = dot(tl.load(a_ptr + square), tl.load(b_ptr + square), tl.zeros((N, N), tl.float32))
    tl.store(out_ptr + square, acc)


def test_rounding_to_bf16_is_to_nearest_even(device):
    """Random values, ties of both parities, the edge to infinity, subnormals, infinities and NaN."""
    tie = torch.tensor([0x3F808000, 0x3F818000, 0x3F808001, 0x3F807FFF, 0x7F7F8000, 0x7F7F7FFF, 1, 0x8000, 0x18000])
    special = torch.tensor([0.0, -0.0, torch.inf, -torch.inf, torch.nan])
    fixed = torch.cat([tie.to(torch.int32).view(torch.float32), special])
    x = torch.cat([fixed, torch.randn(4096 - len(fixed), generator=torch.Generator().manual_seed(0))]).to(device)
    out = torch.full((4096,), torch.nan, dtype=torch.bfloat16, device=device)
    _round_kernel[(1,)](x, out, N=4096)
    expected = x.bfloat16()
    assert torch.equal(out.isnan(), expected.isnan())
    finite = ~expected.isnan()
    assert torch.equal(out[finite].view(torch.int16), expected[finite].view(torch.int16))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rounding_to_the_type_of_the_output(dtype, device):
    x = torch.randn(256, generator=torch.Generator().manual_seed(1)).to(device)
    out = torch.full((256,), torch.nan, dtype=dtype, device=device)
    _copy_kernel[(1,)](x, out, N=256)
    assert torch.equal(out, x.to(dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_products_accumulate_in_fp32(dtype, device):
    g = torch.Generator().manual_seed(2)
    a, b = (torch.randn(64, 64, generator=g).to(dtype).to(device) for _ in range(2))
    out = torch.full((64, 64), torch.nan, device=device)
    _dot_kernel[(1,)](a, b, out, N=64)
    assert relative_error(out, a.double() @ b.double()) < summed(64)


def test_a_row_of_a_product_does_not_depend_on_its_place(device):
    g = torch.Generator().manual_seed(3)
    a, b = (torch.randn(64, 64, generator=g).to(device) for _ in range(2))
    outs = []
    for turn in range(0, 64, 7):
        out = torch.full((64, 64), torch.nan, device=device)
        _dot_kernel[(1,)](a.roll(turn, 0), b, out, N=64)
        outs.append(out.roll(-turn, 0))
    assert all(torch.equal(out, outs[0]) for out in outs)

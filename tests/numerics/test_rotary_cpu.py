"""Norm and rotation of heads on a CPU equal their definition, forward and backward, whatever else is in the batch."""

import pytest
import torch

from model.config import RopeConfig
from model.kernels.cpu.build import KernelError
from model.kernels.cpu.isa import available_isas
from model.kernels.rotary import reference
from model.kernels.rotary.cpu import Rotary
from model.layers import HeadNorm
from model.rope import rotate, rotation
from tests.numerics.tolerances import U16, relative_error, summed

each_isa = pytest.mark.parametrize("isa", available_isas())
each_norm = pytest.mark.parametrize("norm", ["none", "head", "together"])
EPS = 1e-5


def make(tokens, heads, dim, rotary_dim=None, *, norm="none", dtype=torch.float32, seed=0):
    """A slice of a wider product with NaN around it, turns, and a weight."""
    g = torch.Generator().manual_seed(seed)
    wide = torch.full((tokens, heads + 3, dim), torch.nan, dtype=dtype)
    wide[:, 1:-2] = torch.randn(tokens, heads, dim, generator=g) * 3
    by = rotation(torch.randint(0, 512, (tokens,), generator=g), rotary_dim or dim, RopeConfig())
    size = {"none": 0, "head": dim, "together": heads * dim}[norm]
    return wide[:, 1:-2], by, torch.rand(size, generator=g) + 0.5 if size else None


def bound(norm, heads, dim):
    """The norm sums squares of a head or of all; a pair is a sum of two products."""
    return {"none": 0.0, "head": summed(dim), "together": summed(heads * dim)}[norm] + summed(2)


@each_isa
@each_norm
@pytest.mark.parametrize(("tokens", "heads", "dim", "rotary_dim"), [
    (5, 4, 64, 64), (1, 1, 2, 2), (7, 3, 50, 50), (9, 12, 128, 128), (3, 2, 40, 10), (4, 5, 17, 16), (300, 8, 64, 64),
    (0, 4, 64, 64),
])  # fmt: skip
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_equals_the_definition(isa, norm, tokens, heads, dim, rotary_dim, dtype):
    x, by, weight = make(tokens, heads, dim, rotary_dim, norm=norm, dtype=dtype)
    exact = reference.rotary(x, by, weight, EPS, together=norm == "together", out_dtype=torch.float32)
    for out_dtype in (None, torch.float32, torch.bfloat16):
        y = Rotary(isa)(x, by, weight, EPS, together=norm == "together", out_dtype=out_dtype)
        assert y.dtype == (out_dtype or dtype)
        rounding = U16 if y.dtype == torch.bfloat16 else 0.0
        assert y.shape == exact.shape
        assert relative_error(y.float(), exact) <= bound(norm, heads, dim) + rounding


@each_isa
@pytest.mark.parametrize("together", [False, True])
def test_equals_the_layers(isa, together):
    x, by, _ = make(11, 4, 32)
    norm = HeadNorm(4, 32, EPS, together=together)
    with torch.no_grad():
        norm.weight.uniform_(0.5, 1.5, generator=torch.Generator().manual_seed(0))
        y = Rotary(isa)(x, by, norm.packed_weight(), EPS, together=together)
        assert relative_error(y, rotate(norm(x), by)) < bound("together", 4, 32)


@each_isa
@each_norm
@pytest.mark.parametrize("rotary_dim", [16, 40])
def test_gradients_equal_those_of_the_definition(isa, norm, rotary_dim):
    x, by, weight = make(6, 3, 40, rotary_dim, norm=norm)
    inputs = [tensor.clone().requires_grad_() for tensor in (x, weight) if tensor is not None]
    upstream = torch.randn(x.shape, generator=torch.Generator().manual_seed(1))
    grads = [
        torch.autograd.grad(rotary(inputs[0], by, *inputs[1:], eps=EPS, together=norm == "together"), inputs, upstream)
        for rotary in (Rotary(isa), reference.rotary)
    ]
    for actual, expected in zip(*grads, strict=True):
        assert relative_error(actual, expected) < 2 * bound(norm, 3, 40) + summed(18)  # a weight's: 6 tokens, 3 heads


@each_isa
def test_gradient_of_bf16_is_bf16(isa):
    x, by, weight = make(6, 3, 40, norm="head", dtype=torch.bfloat16)
    x = x.clone().requires_grad_()
    (actual,) = torch.autograd.grad(Rotary(isa)(x, by, weight, EPS).float().sum(), x)
    (expected,) = torch.autograd.grad(reference.rotary(x, by, weight, EPS).float().sum(), x)
    assert actual.dtype == torch.bfloat16
    assert relative_error(actual.float(), expected.float()) <= U16


@each_isa
@each_norm
def test_a_token_s_bits_follow_nothing_else(isa, norm):
    x, by, weight = make(400, 6, 48, norm=norm)
    rotary = Rotary(isa)
    together = norm == "together"
    whole = rotary(x, by, weight, EPS, together=together)
    alone = [rotary(x[t : t + 1], by[t : t + 1], weight, EPS, together=together) for t in range(0, 400, 7)]
    assert torch.equal(torch.cat(alone), whole[::7])
    torch.set_num_threads(2)
    assert torch.equal(rotary(x, by, weight, EPS, together=together), whole)


def test_every_instruction_set_gives_the_same_bits():
    x, by, weight = make(9, 6, 50, norm="head")
    first, *others = (Rotary(isa)(x, by, weight, EPS) for isa in available_isas())
    assert all(torch.equal(first, other) for other in others)


def test_what_does_not_fit_is_refused():
    rotary = Rotary(available_isas()[0])
    x, by, weight = make(4, 2, 16, norm="head")
    for wrong in ((x.half(), by), (x, by[:3]), (x[..., :8], by), (x, by.real), (x, by, torch.ones(8))):
        with pytest.raises(KernelError, match="rotary: must be fp32 or bf16"):
            rotary(*wrong)
    with pytest.raises(KernelError, match="and 16 weights"):
        rotary(x, by, weight, together=True)

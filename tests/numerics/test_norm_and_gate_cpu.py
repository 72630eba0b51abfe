import pytest
import torch

from model.kernels.cpu.isa import available_isas
from model.kernels.gated_unit.cpu import GatedUnit
from model.kernels.gated_unit.reference import gated_unit
from model.kernels.rms_norm.cpu import RmsNorm
from model.kernels.rms_norm.reference import rms_norm
from tests.numerics.tolerances import U16, relative_error, summed

pytestmark = pytest.mark.parametrize("isa", available_isas())


@pytest.fixture
def threads():
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


def rows(num_rows, width, *, seed=0, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(num_rows, width, generator=generator) * 3).to(dtype)


@pytest.mark.parametrize("width", [1, 15, 16, 17, 100, 2880])
def test_norm_equals_its_definition(isa, width):
    x, weight = rows(5, width), rows(1, width, seed=1)[0]
    assert relative_error(RmsNorm(isa)(x, weight, 1e-6), rms_norm(x.double().float(), weight, 1e-6)) < summed(width)


@pytest.mark.parametrize("width", [1, 15, 16, 17, 96])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gate_equals_its_definition(isa, width, dtype):
    h = rows(7, 2 * width, dtype=dtype)
    unit = U16 if dtype == torch.bfloat16 else 8 * 2.0**-24
    assert relative_error(GatedUnit(isa)(h).float(), gated_unit(h).float()) <= unit


@pytest.mark.parametrize("width", [48, 97])
def test_a_row_has_the_same_bits_in_any_batch_and_on_any_number_of_threads(isa, width, threads):
    norm, gate = RmsNorm(isa), GatedUnit(isa)
    x, weight = rows(700, 2 * width), rows(1, 2 * width, seed=1)[0]
    threads(2)
    normed, gated = norm(x, weight, 1e-6), gate(x)
    threads(1)
    for row in (0, 1, 350, 699):
        assert torch.equal(norm(x[row : row + 1], weight, 1e-6)[0], normed[row])
        assert torch.equal(gate(x[row : row + 1])[0], gated[row])


def test_gradients_equal_those_of_the_definitions(isa):
    x, weight, upstream = rows(9, 34), rows(1, 34, seed=1)[0], rows(9, 34, seed=2)
    leaves = [tensor.clone().requires_grad_() for tensor in (x, weight)]
    ours = torch.autograd.grad(RmsNorm(isa)(*leaves, 1e-6), leaves, upstream)
    for own, expected in zip(ours, torch.autograd.grad(rms_norm(*leaves, 1e-6), leaves, upstream), strict=True):
        assert relative_error(own, expected) < 4 * summed(34)
    (leaf, _), upstream = leaves, upstream[:, :17].contiguous()
    (own,), (expected,) = (torch.autograd.grad(f(leaf), leaf, upstream) for f in (GatedUnit(isa), gated_unit))
    assert relative_error(own, expected) < summed(8)


def test_no_rows_and_values_that_are_not_finite(isa):
    norm, gate, weight = RmsNorm(isa), GatedUnit(isa), torch.ones(6)
    assert norm(torch.empty(0, 6), weight, 1e-6).shape == (0, 6)
    assert gate(torch.empty(0, 6)).shape == (0, 3)
    x = torch.ones(3, 6)
    x[1, 2] = torch.nan
    assert norm(x, weight, 1e-6)[1].isnan().all()
    assert norm(x, weight, 1e-6)[[0, 2]].isfinite().all()
    h = torch.tensor([[torch.inf, -200.0, torch.nan, 1.0, 2.0, 1.0]])
    assert torch.equal(gate(h)[0, :2], torch.tensor([torch.inf, -0.0]))
    assert gate(h)[0, 2].isnan()

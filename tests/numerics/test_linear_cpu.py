"""The dense product on a CPU equals the reference, and a value's bits depend on its own row and column alone."""

import ctypes
import itertools
import mmap

import pytest
import torch

from model.kernels.cpu.build import KernelError
from model.kernels.cpu.isa import Isa, available_isas
from model.kernels.linear import reference
from model.kernels.linear.cpu import Linear
from tests.numerics.tolerances import LINEAR_BACKWARD, U16, relative_error, summed

SHAPES = [(1, 1), (5, 17), (31, 3), (32, 16), (33, 47), (100, 50), (64, 32), (257, 129)]  # I, O
DTYPES = [torch.float32, torch.bfloat16]
PROT_NONE = 0  # of mprotect


@pytest.fixture(autouse=True)
def _poisoned_memory():
    """Uninitialised memory is NaN: an output that nobody wrote shows."""
    torch.use_deterministic_algorithms(True)
    assert torch.empty(4).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(scope="module", params=available_isas())
def linear(request):
    return Linear(request.param)


def rows(num_rows, inputs, dtype=torch.float32, seed=0):
    return torch.randn(num_rows, inputs, generator=torch.Generator().manual_seed(seed)).to(dtype)


def make_weight(*shape, seed=1):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def exact_rows(num_rows, inputs, seed=0):
    return torch.randint(-8, 9, (num_rows, inputs), generator=torch.Generator().manual_seed(seed)).float()


@pytest.mark.parametrize(("inputs", "outputs"), SHAPES)
def test_every_row_count_is_exact_where_sums_are(linear, inputs, outputs):
    """Small whole numbers: no sum is rounded, so every value is known to the last bit."""
    x, weight, bias = exact_rows(70, inputs), exact_rows(outputs, inputs, seed=1), exact_rows(1, outputs, seed=2)[0]
    packed = linear.pack(weight)
    expected = reference.linear(x, weight, bias)
    for count in range(71):
        assert torch.equal(linear(x[:count], packed, bias), expected[:count])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("inputs", "outputs"), [*SHAPES, (2048, 20)])
def test_rounding_is_that_of_an_fp32_sum(linear, inputs, outputs, dtype):
    x, weight = rows(70, inputs, dtype), make_weight(outputs, inputs)
    actual = linear(x, linear.pack(weight), out_dtype=torch.float32)
    assert actual.dtype == torch.float32
    assert relative_error(actual, x.double() @ weight.double().T) < summed(inputs)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_bias_is_added_in_fp32_and_the_result_rounded_once(linear, dtype):
    x, weight, bias = rows(9, 40, dtype), make_weight(37, 40), rows(1, 37, seed=3)[0]
    packed = linear.pack(weight)
    product = linear(x, packed, out_dtype=torch.float32)
    assert torch.equal(linear(x, packed, bias, out_dtype=torch.float32), product + bias)
    assert torch.equal(linear(x, packed, bias, out_dtype=torch.bfloat16), (product + bias).bfloat16())
    assert torch.equal(linear(x, packed, bias), (product + bias).to(dtype))
    assert torch.equal(linear(x, packed, bias.bfloat16()), linear(x, packed, bias.bfloat16().float()))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("inputs", "outputs"), [(100, 50), (257, 40)])
def test_a_row_has_the_same_bits_alone_and_in_any_batch(linear, inputs, outputs, dtype):
    x, packed = rows(70, inputs, dtype), linear.pack(make_weight(outputs, inputs))
    together = linear(x, packed)
    for count in range(1, 70):
        assert torch.equal(linear(x[:count], packed), together[:count])
        assert torch.equal(linear(x[count:], packed), together[count:])
    for row in range(70):
        assert torch.equal(linear(x[row : row + 1], packed), together[row : row + 1])


def test_more_rows_than_one_chunk(linear):
    x, packed = rows(601, 48), linear.pack(make_weight(40, 48))
    together = linear(x, packed)
    assert torch.equal(torch.cat([linear(part, packed) for part in x.split(7)]), together)


@pytest.mark.parametrize("num_rows", [1, 3, 16, 70, 300])
def test_the_same_bits_on_any_number_of_threads(linear, num_rows):
    """Large enough to be shared; three threads on fewer cores still cut the work elsewhere."""
    x, packed = rows(num_rows, 300), linear.pack(make_weight(400, 300))
    grouped = linear.pack(make_weight(5, 100, 60))
    x_groups = x.view(num_rows, 5, 60)
    alone = linear(x, packed), linear(x_groups, grouped)
    for threads in (2, 3):
        torch.set_num_threads(threads)
        assert torch.equal(linear(x, packed), alone[0])
        assert torch.equal(linear(x_groups, grouped), alone[1])


@pytest.mark.parametrize("num_rows", [1, 5, 40])
def test_columns_do_not_depend_on_their_neighbours(linear, num_rows):
    x, weights = rows(num_rows, 96), [make_weight(outputs, 96, seed=outputs) for outputs in (48, 5, 16, 33)]
    together = linear(x, linear.pack(torch.cat(weights)))
    apart = [linear(x, linear.pack(weight)) for weight in weights]
    assert torch.equal(together, torch.cat(apart, dim=-1))


@pytest.mark.skipif(Isa.AVX512 not in available_isas(), reason="needs AVX-512")
@pytest.mark.parametrize("dtype", DTYPES)
def test_avx2_and_avx512_give_the_same_bits(dtype):
    x, weight = rows(70, 333, dtype), make_weight(77, 333)
    narrow, wide = Linear(Isa.AVX2), Linear(Isa.AVX512)
    for count in (1, 2, 3, 4, 5, 6, 7, 13, 70):
        assert torch.equal(narrow(x[:count], narrow.pack(weight)), wide(x[:count], wide.pack(weight)))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_rows", [0, 1, 6, 37, 300])
def test_groups_are_so_many_products(linear, num_rows, dtype):
    weight, bias = make_weight(3, 21, 45), rows(3, 21)
    x = rows(num_rows, 3 * 45, dtype).view(num_rows, 3, 45)
    actual = linear(x, linear.pack(weight), bias)
    assert actual.shape == (num_rows, 3, 21)
    for group in range(3):
        assert torch.equal(actual[:, group], linear(x[:, group], linear.pack(weight[group]), bias[group]))


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_are_read_where_they_lie(linear, dtype):
    wide, packed = rows(20, 150, dtype), linear.pack(make_weight(24, 50))
    part = wide[:, 37:87]
    assert torch.equal(linear(part, packed), linear(part.contiguous(), packed))
    assert torch.equal(linear(wide[::3, 100:], packed), linear(wide[::3, 100:].contiguous(), packed))
    assert torch.equal(linear(part[:1].expand(9, 50), packed), linear(part[:1].repeat(9, 1), packed))
    columns = rows(50, 20, dtype).T
    assert torch.equal(linear(columns, packed), linear(columns.contiguous(), packed))
    heads = wide.view(20, 3, 50).transpose(0, 1)
    grouped = linear.pack(make_weight(20, 24, 50))
    assert torch.equal(linear(heads, grouped), linear(heads.contiguous(), grouped))


def test_any_number_of_leading_axes(linear):
    x, packed = rows(24, 50), linear.pack(make_weight(20, 50))
    expected = linear(x, packed)
    assert torch.equal(linear(x.view(2, 3, 4, 50), packed), expected.view(2, 3, 4, 20))
    assert torch.equal(linear(x[5], packed), expected[5])
    assert linear(x[:0].view(0, 4, 50), packed).shape == (0, 4, 20)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("inputs", [1, 7, 30, 33, 65])
def test_nothing_beyond_the_rows_is_read(linear, inputs, dtype):
    """The rows end where a page ends that is followed by one which may not be touched."""
    memory = mmap.mmap(-1, 2 * mmap.PAGESIZE)
    start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.mprotect(ctypes.c_void_p(start + mmap.PAGESIZE), mmap.PAGESIZE, PROT_NONE) == 0
    packed = linear.pack(make_weight(20, inputs))
    for count in (1, 5, 7):
        values = rows(count, inputs, dtype)
        offset = mmap.PAGESIZE - values.numel() * values.element_size()
        x = torch.frombuffer(memory, dtype=dtype, count=values.numel(), offset=offset).view(count, inputs)
        x.copy_(values)
        assert torch.equal(linear(x, packed), linear(values, packed))


@pytest.mark.parametrize("value", [torch.inf, -torch.inf, torch.nan])
@pytest.mark.parametrize("num_rows", [1, 9])
def test_values_that_are_not_finite_come_out_where_they_must(linear, num_rows, value):
    x, weight = rows(num_rows, 70), make_weight(20, 70)
    weight[3, 69] = 0.0  # infinity times zero is NaN
    x[0, 69] = value
    actual = linear(x, linear.pack(weight))
    expected = reference.linear(x, weight)
    assert not actual[0].isfinite().any()
    assert torch.equal(actual.isnan(), expected.isnan())
    assert torch.equal(actual == torch.inf, expected == torch.inf)
    assert actual[1:].isfinite().all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_packed_weight_gives_its_values_back(linear, dtype):
    for shape in [(1, 1), (17, 33), (32, 64), (3, 5, 40)]:
        weight = make_weight(*shape)
        packed = linear.pack(weight.to(dtype))
        assert torch.equal(packed.weight(), weight.view(-1, *shape[-2:]))
        assert packed.num_bytes == packed.tiles_GSBW.nbytes
    assert torch.equal(linear.pack(make_weight(20, 9).mT).weight()[0], make_weight(20, 9).mT)


@pytest.mark.parametrize(("shape", "groups"), [((13, 40), 1), ((2, 5, 40), 1), ((13, 3, 40), 3)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_gradients(linear, shape, groups, dtype):
    x = rows(shape[0] * (shape[1] if len(shape) == 3 else 1), 40, dtype).view(shape).requires_grad_()
    weight = make_weight(*((groups,) if groups > 1 else ()), 21, 40).float().requires_grad_()
    bias = rows(groups, 21, seed=5).view(weight.shape[:-1]).requires_grad_()
    upstream = rows(x.numel() // 40, 21, dtype, seed=6).view(*shape[:-1], 21)
    leaves = (x, weight, bias)

    y = linear(x, linear.pack(weight), bias, weight=weight)
    grads = torch.autograd.grad(y, leaves, upstream)
    equation = "...i,oi->...o" if groups == 1 else "tgi,goi->tgo"
    doubles = [leaf.detach().double().requires_grad_() for leaf in leaves]
    expected = torch.einsum(equation, *doubles[:2]) + doubles[2]
    expected_grads = torch.autograd.grad(expected, doubles, upstream.double())
    bound = LINEAR_BACKWARD if dtype == torch.float32 else 2 * U16
    for leaf, grad, expected_grad in zip(leaves, grads, expected_grads, strict=True):
        assert grad.dtype == leaf.dtype
        assert relative_error(grad, expected_grad) < bound


def test_a_gradient_without_the_weight_reads_the_packed_one(linear):
    x, weight = rows(7, 40).requires_grad_(), make_weight(21, 40).float()
    packed, upstream = linear.pack(weight), rows(7, 21, seed=3)
    (grad,) = torch.autograd.grad(linear(x, packed), x, upstream)
    (expected,) = torch.autograd.grad(linear(x, packed, weight=weight), x, upstream)
    assert torch.equal(grad, expected)


def test_the_forward_under_autograd_is_the_same_kernel(linear):
    for x, groups in itertools.product([rows(7, 40), rows(7, 40, torch.bfloat16)], [1, 2]):
        x = x if groups == 1 else x.view(7, 2, 20)
        weight = make_weight(groups, 9, x.shape[-1])
        packed = linear.pack(weight)
        y = linear(x.detach().requires_grad_(), packed, weight=weight, out_dtype=torch.float32)
        assert y.requires_grad
        assert torch.equal(y, linear(x, packed, out_dtype=torch.float32))
        with torch.no_grad():
            assert not linear(x.detach().requires_grad_(), packed).requires_grad


def test_refusals(linear):
    packed, grouped = linear.pack(make_weight(8, 40)), linear.pack(make_weight(2, 8, 40))
    with pytest.raises(KernelError, match=r"rows must be \[\.\.\., 40\], got \[3, 41\]"):
        linear(rows(3, 41), packed)
    with pytest.raises(KernelError, match=r"rows must be \[T, 2, 40\], got \[6, 40\]"):
        linear(rows(6, 40), grouped)
    with pytest.raises(KernelError, match=r"must be fp32 or bf16, got torch\.float64"):
        linear(rows(3, 40).double(), packed)
    with pytest.raises(KernelError, match="a bias must have 8 values, got 9"):
        linear(rows(3, 40), packed, torch.zeros(9))
    with pytest.raises(KernelError, match=r"must hold values of bf16"):
        linear.pack(torch.full((2, 2), 1 + 2.0**-8))
    with pytest.raises(KernelError, match=r"got \[4\] in torch\.float32"):
        linear.pack(torch.zeros(4))

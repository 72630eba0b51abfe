"""The MXFP4 products of `model/kernels/cpu/gemm.h` equal those of the decoded weights, at every scale byte."""

import ctypes
from pathlib import Path

import pytest
import torch

from model import mxfp4
from model.kernels.cpu.isa import Isa, available_isas, load
from model.kernels.linear.cpu import Linear
from model.kernels.quantize.reference import tile
from tests.numerics.tolerances import relative_error, summed

SOURCE = Path(__file__).parents[2] / "scripts" / "bench" / "products.cpp"
DTYPES = [torch.float32, torch.bfloat16]


class Product:
    """One MXFP4 weight [N, K] and its kernel; N a multiple of 16."""

    def __init__(self, isa, blocks, scales):
        self.run = load(SOURCE, isa).mxfp4_product
        pointer, count, flag = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32
        self.run.argtypes = [pointer, count, flag, count, count, pointer, pointer, pointer, count, pointer]
        self.run.restype = None
        self.codes, self.scales, self.extreme = tile(blocks, scales)

    def __call__(self, x):
        y = torch.full((len(x), 16 * len(self.extreme)), torch.nan)
        pointers = (tensor.data_ptr() for tensor in (self.codes, self.scales, self.extreme))
        self.run(
            x.data_ptr(), x.stride(0), x.dtype == torch.bfloat16, *x.shape, *pointers, len(self.extreme), y.data_ptr()
        )
        return y


def rows(num_rows, inputs, dtype=torch.float32, seed=0):
    return torch.randn(num_rows, inputs, generator=torch.Generator().manual_seed(seed)).to(dtype)


def packed_weight(outputs, inputs, lowest=110, highest=140, seed=1):
    """Random codes (all sixteen) and scale bytes."""
    g = torch.Generator().manual_seed(seed)
    blocks = torch.randint(0, 256, (outputs, inputs // 32, 16), generator=g, dtype=torch.uint8)
    return blocks, torch.randint(lowest, highest + 1, blocks.shape[:2], generator=g, dtype=torch.uint8)


@pytest.fixture(params=available_isas())
def isa(request):
    return request.param


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("inputs", "outputs"), [(32, 16), (96, 48), (320, 32), (2048, 16)])
def test_values(isa, inputs, outputs, dtype):
    x, weight = rows(70, inputs, dtype), packed_weight(outputs, inputs)
    expected = x.double() @ mxfp4.dequantize(*weight).double().T
    assert relative_error(Product(isa, *weight)(x), expected) < summed(inputs)


def test_every_row_count_is_exact_where_sums_are(isa):
    """Whole numbers times halves: no sum is rounded."""
    weight = packed_weight(48, 160, lowest=125, highest=130)
    x = torch.randint(-8, 9, (70, 160), generator=torch.Generator().manual_seed(0)).float()
    expected, product = x @ mxfp4.dequantize(*weight).T, Product(isa, *weight)
    for count in range(71):
        assert torch.equal(product(x[:count]), expected[:count])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("lowest", [0, 110])
def test_a_row_has_the_same_bits_alone_and_in_any_batch(isa, lowest, dtype):
    """With and without a strip of extreme scales beside a usual one."""
    blocks, scales = packed_weight(48, 224)
    scales[20, 3] = lowest
    x, product = rows(70, 224, dtype), Product(isa, blocks, scales)
    together = product(x)
    for count in range(1, 70):
        assert torch.equal(product(x[:count]), together[:count])
    for row in range(70):
        assert torch.equal(product(x[row : row + 1]), together[row : row + 1])


@pytest.mark.parametrize("magnitude", [-149, -126, -84, -60, 0, 64, 100])
@pytest.mark.parametrize(("lowest", "highest"), [(95, 135), (94, 135), (95, 136), (60, 140), (2, 252)])
def test_few_rows_and_many_agree_however_far_apart_scales_and_activations_are(isa, lowest, highest, magnitude):
    """The products of a few rows move scales from block to block, which is exact only in a range."""
    blocks, scales = packed_weight(32, 320, lowest, highest)
    scales[3, 2], scales[17, 7], scales[3, 3] = lowest, lowest, highest
    x, product = rows(8, 320), Product(isa, blocks, scales)
    x[:, 7] *= 2.0**magnitude
    x[:3, 200] = torch.tensor([2.0**magnitude, -(2.0**magnitude), 0.0])
    together = product(x)
    for count in range(1, 8):
        torch.testing.assert_close(product(x[:count]), together[:count], rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("num_rows", [1, 5, 40])
def test_the_same_bits_on_any_number_of_threads(isa, num_rows):
    x, product = rows(num_rows, 96), Product(isa, *packed_weight(112, 96))
    alone = product(x)
    for threads in (2, 3):
        torch.set_num_threads(threads)
        assert torch.equal(product(x), alone)


@pytest.mark.skipif(Isa.AVX512 not in available_isas(), reason="needs AVX-512")
@pytest.mark.parametrize("dtype", DTYPES)
def test_avx2_and_avx512_give_the_same_bits(dtype):
    for lowest, highest in ((110, 140), (0, 254)):
        x, weight = rows(70, 320, dtype), packed_weight(48, 320, lowest, highest)
        x *= 2.0**-30 if highest == 254 else 1.0
        narrow, wide = Product(Isa.AVX2, *weight), Product(Isa.AVX512, *weight)
        for count in (1, 2, 3, 4, 5, 6, 7, 13, 70):
            torch.testing.assert_close(narrow(x[:count]), wide(x[:count]), rtol=0, atol=0, equal_nan=True)


def test_a_quantized_product_is_the_dense_product_of_its_values():
    """Scales are powers of two: where none is extreme they change no rounding of the sums of a block."""
    weight = packed_weight(48, 320)
    for isa in (Isa.AVX2, Isa.AVX512):
        if isa in available_isas():
            linear, x = Linear(isa), rows(9, 320)
            dense = linear.pack(mxfp4.dequantize(*weight))
            assert torch.equal(Product(isa, *weight)(x), linear(x, dense))


@pytest.mark.parametrize("num_rows", [1, 4, 9])
@pytest.mark.parametrize("byte", [*range(6), 126, 127, 128, *range(249, 256)])
def test_scale_bytes(isa, byte, num_rows):
    """One block of one column has the byte. What overflows when it is decoded is infinite, and 255 is NaN."""
    blocks, scales = packed_weight(32, 96)
    scales[5, 1] = byte
    x = rows(num_rows, 96, torch.bfloat16)
    x[:, :32] = x[:, 64:] = 0.0  # only the block with the byte
    x = x.float() * 2.0 ** (20 if byte < 100 else -20)
    weight = mxfp4.dequantize(blocks, scales)
    actual, expected = Product(isa, blocks, scales)(x), x.double() @ weight.double().T
    assert torch.equal(actual.isnan(), expected.isnan())
    assert torch.equal(actual == torch.inf, expected == torch.inf)
    assert torch.equal(actual == -torch.inf, expected == -torch.inf)
    finite = expected.isfinite().all(0)
    assert finite.sum() >= 31
    for column in torch.where(finite)[0]:
        assert relative_error(actual[:, column], expected[:, column]) < summed(96)


def test_a_quantized_weight_of_subnormal_values(isa):
    """The block's scale byte is 0 and its codes reach down to 2^-128: decoded exactly, not flushed."""
    blocks = torch.full((16, 1, 16), 0x11, dtype=torch.uint8)
    x = torch.ones(3, 32)
    x[:, 1:] = 0.0
    y = Product(isa, blocks, torch.zeros(16, 1, dtype=torch.uint8))(x)
    assert torch.equal(y, torch.full((3, 16), 2.0**-128))

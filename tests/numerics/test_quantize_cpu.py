"""The CPU quantizer: the bytes of `model.mxfp4`, and tiles as `cpu/gemm.h` defines them."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from model import mxfp4
from model.kernels.cpu.build import KernelError
from model.kernels.cpu.isa import available_isas
from model.kernels.grouped_experts.cpu import GroupedExperts
from model.kernels.quantize import reference
from model.kernels.quantize.cpu import Quantize
from model.mxfp4 import MXFP4Error, ScaleRule
from model.mxfp4_rounding import Rounding
from tests.numerics.mxfp4_definition import RULES, bits_of, next_down, next_up

ISAS = available_isas()
each_isa = pytest.mark.parametrize("isa", ISAS)
each_rule = pytest.mark.parametrize("rule", RULES)
LARGEST = next_down(mxfp4.LIMIT)


def check(w: torch.Tensor, isa, **options) -> None:
    for kernel, reference_ in zip(Quantize(isa)(w, **options), mxfp4.quantize(w, **options), strict=True):
        assert kernel.dtype == torch.uint8
        assert torch.equal(kernel, reference_)


@each_isa
@each_rule
@pytest.mark.parametrize("shape", [(32,), (5, 64), (2, 3, 96), (70, 32 * 67), (0, 32), (3, 0)])
def test_random_values_of_any_shape(isa, rule, shape):
    w = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    check(w * 10.0 ** torch.randint(-30, 30, shape[:-1], generator=torch.Generator().manual_seed(2)).unsqueeze(-1), isa,
          rule=rule)  # fmt: skip


@each_isa
@each_rule
def test_every_tie_and_one_ulp_beside_it_in_every_binade(isa, rule):
    edges = (0.25, 0.5, 0.75, 1.0, 1.25, 1.5, 1.75, 2.0, 2.5, 3.0, 3.5, 4.0, 5.0, 6.0, 7.0)
    near = [value for edge in edges for value in (next_down(edge), edge, next_up(edge))]
    magnitudes = torch.tensor(near * 4)[: 5 * 31]
    tops = torch.tensor([v for top in (3.0, 3.5, 4.0, 6.0, 7.0) for v in (next_down(top), top, next_up(top))])
    blocks = torch.cat([magnitudes.view(5, 31).repeat(15, 1), tops.repeat_interleave(5).unsqueeze(-1)], -1)
    blocks[::2] *= -1
    powers = 2.0 ** torch.arange(-140, 125, dtype=torch.float64)
    w = (blocks.double() * powers.view(-1, 1, 1)).float()  # subnormal at the small end
    check(w, isa, rule=rule)


@each_isa
@each_rule
def test_every_exponent_of_the_largest_value_with_mantissas_beside_the_carries(isa, rule):
    mantissas = [0, 1, *(m + ulp for m in (0x200000, 0x400000, 0x600000, 0x7FFFFE) for ulp in (-1, 0, 1))]
    bits = [exponent << 23 | mantissa for exponent in range(254) for mantissa in mantissas]
    bits += [254 << 23 | mantissa for mantissa in (0, 1, 0x3FFFFF, 0x400000, 0x400001, 0x5FFFFF)]
    w = torch.zeros(len(bits), 32)
    w[:, 7] = torch.tensor(bits, dtype=torch.int32).view(torch.float32)
    w[:, 8] = -w[:, 7] * 0.4
    check(w, isa, rule=rule)


@each_isa
def test_zeros_of_both_signs(isa):
    w = torch.tensor([[0.0, -0.0] * 16, [-0.1, 6.0] + [-1e-30] * 30, [-1e-45] * 32])
    check(w, isa)
    assert not Quantize(isa)(w)[0][0].any()


@each_isa
@each_rule
def test_previous_scales_are_kept_where_they_fit(isa, rule):
    tops = [v for top in (3.25, 7.5, 6.0, 1.0) for v in (next_down(top), top, next_up(top))]
    w = torch.randn(len(tops), 256, 32, generator=torch.Generator().manual_seed(3)).clamp_(-1, 1)
    w[..., 3] = torch.tensor(tops).view(-1, 1)
    previous = torch.arange(256, dtype=torch.uint8).expand(len(tops), 256)
    w = (w.double() * 2.0 ** (torch.arange(256.0).double().clamp(0, 250) - 127).view(-1, 1)).float().flatten(1)
    check(w, isa, rule=rule, previous_scales=previous)
    if rule is ScaleRule.EVEN:  # 3.25 is the least that is kept; the rule itself would bring it to 6.5
        scales = Quantize(isa)(w, rule=rule, previous_scales=previous)[1]
        assert torch.equal(scales[0, 1:251], previous[0, :250])
        assert torch.equal(scales[1, :251], previous[1, :251])


floats = st.integers(0, bits_of(LARGEST)).flatmap(lambda bits: st.sampled_from([bits, bits | 1 << 31]))


@given(bits=st.lists(floats, min_size=32, max_size=32), rule=st.sampled_from(RULES), previous=st.integers(0, 255))
@settings(max_examples=60, deadline=None)
def test_any_block_of_fp32_bits(bits, rule, previous):
    w = torch.tensor(bits).to(torch.int32).view(torch.float32).unsqueeze(0)
    for isa in ISAS:
        check(w, isa, rule=rule)
        check(w, isa, rule=rule, previous_scales=torch.tensor([[previous]], dtype=torch.uint8))


@each_isa
@pytest.mark.parametrize("bad", [float("nan"), float("-inf"), mxfp4.LIMIT, -3e38])
@pytest.mark.parametrize("at", [0, 31, 32 * 700 + 17])
def test_what_cannot_be_quantized_is_named_as_the_reference_names_it(isa, bad, at):
    w = torch.ones(32 * 700 + 32)
    w[at] = bad
    w[5] = -float("inf")
    with pytest.raises(MXFP4Error) as expected:
        mxfp4.quantize(w, name="up")
    for run in (Quantize(isa), lambda w, name: Quantize(isa).pack(w.view(1, -1), name=name)):
        with pytest.raises(MXFP4Error) as raised:
            run(w, name="up")
        assert str(raised.value) == str(expected.value)


@each_isa
def test_operands_that_do_not_fit(isa):
    quantize = Quantize(isa)
    for w in (torch.ones(33), torch.tensor(1.0), torch.ones(32, dtype=torch.int32)):
        with pytest.raises(MXFP4Error, match="up: MXFP4 needs floating point and a last axis"):
            quantize(w, name="up")
    with pytest.raises(MXFP4Error, match="previous_scales must be uint8"):
        quantize(torch.ones(2, 32), previous_scales=torch.ones(1, 1, dtype=torch.uint8))
    with pytest.raises(KernelError, match="rounds to nearest even, got stochastic"):
        quantize(torch.ones(32), rounding=Rounding.STOCHASTIC)
    with pytest.raises(KernelError, match="tiles are cut from matrices"):
        quantize.pack(torch.ones(32))


@each_isa
def test_bf16_and_strided_weights_are_read_as_their_values(isa):
    w = torch.randn(64, 40, generator=torch.Generator().manual_seed(4))
    check(w.T, isa)
    check(w.T.bfloat16(), isa)


@each_isa
def test_bytes_do_not_depend_on_threads(isa):
    w = torch.randn(67, 32 * 45, generator=torch.Generator().manual_seed(5))
    one = Quantize(isa).pack(w)
    torch.set_num_threads(2)
    for a, b in zip(Quantize(isa).pack(w), one, strict=True):
        assert torch.equal(a, b)


def test_the_tiles_of_the_definition_are_those_of_the_contract():
    """Word for word what `cpu/gemm.h` says: nibble j of word 2 n + c of load g is k = 2 (4 g + j) + c."""
    blocks = torch.randint(0, 256, (2, 21, 3, 16), dtype=torch.uint8, generator=torch.Generator().manual_seed(6))
    scales = torch.randint(0, 256, (2, 21, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(7))
    codes, tile_scales, _ = reference.tile(blocks, scales)
    assert codes.shape == (2, 2, 3, 256)
    words = codes.view(torch.int16).view(2, 2, 3, 4, 32).to(torch.int32)
    for n in range(32):
        for k in range(32):
            nibbles = (words[:, n // 16, :, k // 8, 2 * (n % 16) + k % 2] >> 4 * (k // 2 % 4)) & 15
            expected = (blocks[:, n, :, k // 2] >> 4 * (k % 2)) & 15 if n < 21 else torch.zeros(2, 3)
            assert torch.equal(nibbles, expected.to(torch.int32)), (n, k)
        expected = scales[:, n] if n < 21 else torch.zeros(2, 3, dtype=torch.uint8)
        assert torch.equal(tile_scales[:, n // 16, :, n % 16], expected)


@each_isa
@pytest.mark.parametrize(
    "shape", [(1, 32), (16, 64), (17, 32 * 19), (18, 32 * 131), (2, 3, 33, 96), (4, 0, 32), (48, 32 * 40)]
)
def test_both_layouts_in_one_pass(isa, shape):
    w = torch.randn(shape, generator=torch.Generator().manual_seed(8))
    previous = torch.full((*shape[:-1], shape[-1] // 32), 127, dtype=torch.uint8)
    for options in ({}, {"rule": ScaleRule.RCEIL, "previous_scales": previous}):
        packed = Quantize(isa).pack(w, **options)
        blocks, scales = mxfp4.quantize(w, **options)
        assert torch.equal(packed.blocks, blocks)
        assert torch.equal(packed.scales, scales)
        for tiles in (packed[2:], Quantize(isa).tile(blocks, scales)):
            for found, expected in zip(tiles, reference.tile(blocks, scales), strict=True):
                assert found.dtype == expected.dtype
                assert torch.equal(found, expected)


@each_isa
def test_tiles_are_those_of_the_grouped_experts(isa):
    generator = torch.Generator().manual_seed(9)
    w = torch.randn(3, 37, 96, generator=generator)
    w[1, 4] *= 1e-38  # scale byte 0
    w[2, 20, :32] = 0.0
    packed = Quantize(isa).pack(w)
    experts = GroupedExperts(isa).pack_matrix(packed.blocks, packed.scales)
    assert torch.equal(packed.tile_codes, experts.codes_ESB)
    assert torch.equal(packed.tile_scales, experts.scales_ESB)
    assert torch.equal(packed.extreme, experts.extreme_ES)
    assert packed.extreme.tolist() == [[0, 0, 0], [1, 0, 0], [0, 0, 0]]


@each_isa
@pytest.mark.parametrize("row", [0, 15, 18])
def test_extreme_strips_of_every_scale_byte(isa, row):
    scales = torch.full((256, 19, 2), 100, dtype=torch.uint8)
    scales[:, row, 1] = torch.arange(256, dtype=torch.uint8)
    for codes, outside in ((0x10, {0, 1, 253, 254, 255}), (0x88, {255}), (0, {255})):
        blocks = torch.zeros(256, 19, 2, 16, dtype=torch.uint8)
        blocks[:, row, 1, 9] = codes
        extreme = Quantize(isa).tile(blocks, scales)[2]
        assert torch.equal(extreme, reference.tile(blocks, scales)[2])
        assert set(extreme[:, row // 16].nonzero().flatten().tolist()) == outside
        assert not extreme[:, 1 - row // 16].any()


@each_isa
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_byte_under_every_scale_decodes_to_the_same_bits(isa, dtype):
    blocks = torch.arange(256, dtype=torch.uint8).view(1, 16, 16).expand(256, 16, 16)
    scales = torch.arange(256, dtype=torch.uint8).view(256, 1).expand(256, 16)
    values = Quantize(isa).dequantize(blocks, scales, dtype)
    expected = mxfp4.dequantize(blocks, scales, dtype)
    assert values.shape == expected.shape
    assert torch.equal(values.isnan(), expected.isnan())
    bits = torch.int32 if dtype == torch.float32 else torch.int16
    assert torch.equal(values.view(bits)[:255], expected.view(bits)[:255])


@each_isa
def test_decoding_refuses_what_the_reference_refuses(isa):
    bytes_ = torch.zeros(2, 16, dtype=torch.uint8)
    with pytest.raises(MXFP4Error, match="the target must be"):
        Quantize(isa).dequantize(bytes_, bytes_[:, 0], torch.float64)
    with pytest.raises(MXFP4Error, match="blocks must be uint8"):
        Quantize(isa).dequantize(bytes_, bytes_)
    with pytest.raises(MXFP4Error, match="blocks must be uint8"):
        Quantize(isa).tile(bytes_, bytes_)

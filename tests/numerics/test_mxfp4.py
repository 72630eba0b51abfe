"""MXFP4 against an independent scalar definition in exact rational arithmetic, exhaustively where that is possible."""

import math
import struct
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from model.mxfp4 import E2M1_VALUES, LIMIT, MXFP4Error, dequantize, quantize

MAGNITUDES = [Fraction(v) for v in (0, 0.5, 1, 1.5, 2, 3, 4, 6)]


def bits_of(value: float) -> int:
    return struct.unpack("<I", struct.pack("<f", value))[0]


def float_of(bits: int) -> float:
    return struct.unpack("<f", struct.pack("<I", bits))[0]


def expected_codes(block: list[float]) -> tuple[list[int], int]:
    """The definition, one value at a time, without floating point rounding."""
    amax = max(abs(v) for v in block)
    scale = max(0, ((bits_of(amax) + 0x200000) >> 23) - 2)
    codes = []
    for value in block:
        exact = abs(Fraction(value)) * Fraction(2) ** (127 - scale)
        code = min(range(8), key=lambda c: (abs(MAGNITUDES[c] - exact), c % 2))
        codes.append(code + 8 if value < 0 and code else code)
    return codes, scale


def unpack(blocks: torch.Tensor) -> list[int]:
    return [code for byte in blocks.flatten().tolist() for code in (byte & 15, byte >> 4)]


def check_block(block: list[float]) -> None:
    blocks, scales = quantize(torch.tensor([block]))
    codes, scale = expected_codes(block)
    assert scales.item() == scale
    assert unpack(blocks) == codes


def test_every_code_and_scale_byte_decodes_to_its_value():
    codes = torch.arange(16, dtype=torch.uint8)
    blocks = codes.repeat(256, 1, 1)  # [scale byte, one block, code in the low nibble]
    scales = torch.arange(256, dtype=torch.uint8).view(256, 1)
    values = dequantize(blocks, scales).view(256, 16, 2)
    assert torch.isnan(values[255]).all()
    assert not values[:255, :, 1].any()  # the high nibbles are code 0
    for byte in range(255):
        for code in range(16):
            assert same_bits(values[byte, code, 0].item(), ldexp_fp32(E2M1_VALUES[code], byte - 127)), (byte, code)


def ldexp_fp32(value: float, exponent: int) -> float:
    exact = value * 2.0**exponent
    return math.copysign(math.inf, value) if abs(exact) >= 2.0**128 else exact


def same_bits(a: float, b: float) -> bool:
    return a == b and math.copysign(1, a) == math.copysign(1, b)


def test_both_nibbles_of_every_byte_decode():
    blocks = torch.arange(256, dtype=torch.uint8).view(16, 16)
    values = dequantize(blocks, torch.full((16,), 127, dtype=torch.uint8)).view(256, 2)
    for byte, (low, high) in enumerate(values.tolist()):
        assert same_bits(low, E2M1_VALUES[byte & 15])
        assert same_bits(high, E2M1_VALUES[byte >> 4])


def test_bf16_holds_every_value_of_fp32():
    blocks = torch.arange(256, dtype=torch.uint8).view(1, 16, 16).repeat(255, 1, 1)
    scales = torch.arange(255, dtype=torch.uint8).view(255, 1).repeat(1, 16)
    wide, narrow = dequantize(blocks, scales), dequantize(blocks, scales, torch.bfloat16)
    assert torch.equal(wide, narrow.float())
    assert torch.equal(wide.signbit(), narrow.signbit())


def test_every_canonical_code_survives_at_every_scale():
    """decode then encode gives the same bytes; the block also holds code 4..7, which pins its scale."""
    for top in (4, 5, 6, 7):
        for scale in range(1, 253):
            codes = [*range(top + 1), *range(9, 9 + top)]
            codes += [0] * (32 - len(codes))
            packed = [a | b << 4 for a, b in zip(codes[::2], codes[1::2], strict=True)]
            blocks, scales = torch.tensor([[packed]], dtype=torch.uint8), torch.tensor([[scale]], dtype=torch.uint8)
            again = quantize(dequantize(blocks, scales))
            if top >= 6:
                assert torch.equal(again[0], blocks)
                assert torch.equal(again[1], scales)
            else:  # the largest magnitude is below 3.5: the canonical scale is one smaller
                assert again[1].item() == scale - 1
                assert torch.equal(dequantize(*again), dequantize(blocks, scales))


def test_subnormal_scale_bytes():
    smallest = 2.0**-128  # half of 2^-127: code 1 at scale byte 0
    for code, magnitude in enumerate((0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)):
        block = [magnitude * 2.0**-127, -magnitude * 2.0**-127] + [0.0] * 30
        blocks, scales = quantize(torch.tensor([block]))
        assert scales.item() == 0
        assert unpack(blocks)[:2] == [code, code + 8 if code else 0]
    assert unpack(quantize(torch.tensor([[smallest / 2] + [0.0] * 31]))[0])[0] == 0  # a tie goes to the even code 0
    assert unpack(quantize(torch.tensor([[float_of(bits_of(smallest / 2) + 1)] + [0.0] * 31]))[0])[0] == 1
    check_block([float_of(1), -float_of(1), float_of(0x7FFFFF), float_of(0x800000)] + [0.0] * 28)


def test_scale_rule_at_its_boundaries():
    """Known answers: EVEN carries at 1.75, so 7 is the first magnitude that needs the next scale."""
    unit = 2.0**-8
    below_seven = float_of(bits_of(7 * unit) - 1)
    above_six = float_of(bits_of(6 * unit) + 1)
    for amax, byte in ((6 * unit, 119), (above_six, 119), (7 * unit, 120), (below_seven, 119), (4 * unit, 119)):
        _, scales = quantize(torch.tensor([[amax] + [0.0] * 31]))
        assert scales.item() == byte


def test_ties_go_to_even_codes_and_large_values_saturate():
    ties = [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0]
    blocks, scales = quantize(torch.tensor([[*ties, 6.5, *(-t for t in ties), -6.9, *[0.0] * 16]]))
    assert scales.item() == 127
    assert unpack(blocks)[:16] == [0, 2, 2, 4, 4, 6, 6, 7, 0, 10, 10, 12, 12, 14, 14, 15]


@pytest.mark.parametrize("tie", [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
def test_one_ulp_beside_a_tie_rounds_to_the_nearer_code(tie):
    below, above = float_of(bits_of(tie) - 1), float_of(bits_of(tie) + 1)
    low = max(c for c in range(8) if MAGNITUDES[c] < tie)
    blocks, _ = quantize(torch.tensor([[below, above, -below, -above, 6.0] + [0.0] * 27]))
    negative_low = low + 8 if low else 0
    assert unpack(blocks)[:4] == [low, low + 1, negative_low, low + 9]


def test_zeros_are_canonical():
    blocks, scales = quantize(torch.tensor([[0.0, -0.0] * 16, [-0.1, 6.0] + [-1e-30] * 30]))
    assert scales.tolist() == [[0], [127]]
    assert unpack(blocks[0]) == [0] * 32
    assert unpack(blocks[1]) == [0, 7] + [0] * 30


def test_known_answer_of_the_gpt_oss_layout():
    """Byte b holds element 2b low and 2b+1 high: ascending codes against descending ones."""
    packed = bytes.fromhex("F0E1D2C3B4A5968778695A4B3C2D1E0F")
    blocks = torch.tensor([[list(packed)]], dtype=torch.uint8)
    values = dequantize(blocks, torch.tensor([[128]], dtype=torch.uint8))
    expected = [2 * E2M1_VALUES[c] for pair in zip(range(16), range(15, -1, -1), strict=True) for c in pair]
    assert values.flatten().tolist() == expected


def test_largest_magnitude_that_does_not_overflow():
    largest = float_of(bits_of(LIMIT) - 1)
    check_block([largest, -largest] * 16)
    values = dequantize(*quantize(torch.full((1, 32), largest)))
    assert values.unique().tolist() == [1.5 * 2.0**127]


@pytest.mark.parametrize("bad", [math.nan, -math.nan, math.inf, -math.inf, LIMIT, -LIMIT])
def test_what_cannot_be_held_is_refused_by_name(bad):
    weight = torch.ones(3, 64)
    weight[2, 40] = bad
    with pytest.raises(MXFP4Error, match=r"experts\.down_proj: .* must be below 2\.977e\+38, .* 0 more"):
        quantize(weight, name="experts.down_proj")


def test_shapes_and_dtypes_are_checked():
    with pytest.raises(MXFP4Error, match="multiple of 32"):
        quantize(torch.ones(2, 33))
    with pytest.raises(MXFP4Error, match="floating point"):
        quantize(torch.ones(2, 32, dtype=torch.int32))
    blocks, scales = quantize(torch.ones(2, 3, 64))
    assert blocks.shape == (2, 3, 2, 16)
    assert scales.shape == (2, 3, 2)
    with pytest.raises(MXFP4Error, match="both tensors of one weight"):
        dequantize(blocks, scales[:, :, :1])
    with pytest.raises(MXFP4Error, match="float32 or bfloat16"):
        dequantize(blocks, scales, torch.float16)


def test_chunks_and_strides_do_not_matter():
    """More blocks than one chunk, a transposed input, and an empty one."""
    torch.manual_seed(0)
    weight = torch.randn(96, 5000).t()
    blocks, scales = quantize(weight)
    for row in (0, 1365, 4999):
        alone = quantize(weight[row])
        assert torch.equal(alone[0], blocks[row])
        assert torch.equal(alone[1], scales[row])
    assert quantize(torch.empty(0, 32))[0].shape == (0, 1, 16)


finite = st.floats(-LIMIT, LIMIT, width=32, exclude_min=True, exclude_max=True)
near_grid = st.builds(
    lambda magnitude, ulps, exponent, sign: sign * float_of(max(0, bits_of(magnitude * 2.0**exponent) + ulps)),
    st.sampled_from([0.25, 0.5, 0.75, 1.0, 1.25, 1.5, 1.75, 2.0, 2.5, 3.0, 3.5, 4.0, 5.0, 6.0, 7.0]),
    st.integers(-2, 2),
    st.integers(-20, 3),
    st.sampled_from([-1.0, 1.0]),
)


@settings(max_examples=150, deadline=None)
@given(st.lists(st.one_of(near_grid, near_grid, finite), min_size=32, max_size=32))
def test_any_block_equals_the_definition_and_is_idempotent(block):
    check_block(block)
    blocks, scales = quantize(torch.tensor([block]))
    again = quantize(dequantize(blocks, scales))
    assert torch.equal(again[0], blocks)
    assert torch.equal(again[1], scales)


@settings(max_examples=60, deadline=None)
@given(st.lists(near_grid, min_size=32, max_size=32))
def test_near_grid_blocks_equal_the_definition(block):
    check_block(block)


def test_noise_of_gaussian_weights_is_that_of_rule_even():
    """Rule EVEN on Gaussian weights has 18.92 to 19.07 dB of signal to noise, depending on the phase of the scale."""
    torch.manual_seed(0)
    for sigma in (0.02, 0.025, 0.033):
        weight = torch.randn(256, 2880) * sigma
        error = weight - dequantize(*quantize(weight))
        decibel = 10 * math.log10(weight.square().sum().item() / error.square().sum().item())
        assert 18.82 < decibel < 19.17


def test_a_tiny_update_of_on_grid_masters_changes_no_code():
    torch.manual_seed(0)
    on_grid = dequantize(*quantize(torch.randn(64, 256) * 0.02))
    blocks, scales = quantize(on_grid)
    moved = quantize(on_grid * (1 + 1e-6 * torch.randn(64, 256)))
    assert torch.equal(moved[0], blocks)
    assert torch.equal(moved[1], scales)

"""MXFP4 against an independent scalar definition in exact rational arithmetic, exhaustively where that is possible."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from model.mxfp4 import E2M1_VALUES, LIMIT, MXFP4Error, ScaleRule, dequantize, quantize
from tests.numerics.mxfp4_definition import (
    MAGNITUDES,
    RULES,
    bits_of,
    float_of,
    next_down,
    next_up,
    quantize_block,
)

every_rule = pytest.mark.parametrize("rule", RULES)


def unpack(blocks: torch.Tensor) -> list[int]:
    return [code for byte in blocks.flatten().tolist() for code in (byte & 15, byte >> 4)]


def check_block(block: list[float], rule: ScaleRule = ScaleRule.EVEN) -> None:
    blocks, scales = quantize(torch.tensor([block]), rule=rule)
    codes, scale = quantize_block(block, rule)
    assert scales.item() == scale
    assert unpack(blocks) == codes


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_code_and_scale_byte_decodes_to_its_value(dtype):
    codes = torch.arange(16, dtype=torch.uint8)
    blocks = codes.repeat(256, 1, 1)  # [scale byte, one block, code in the low nibble]
    scales = torch.arange(256, dtype=torch.uint8).view(256, 1)
    values = dequantize(blocks, scales, dtype).view(256, 16, 2)
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


@every_rule
def test_subnormal_scale_bytes(rule):
    smallest = 2.0**-128  # half of 2^-127: code 1 at scale byte 0
    for code, magnitude in enumerate((0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)):
        block = [magnitude * 2.0**-127, -magnitude * 2.0**-127] + [0.0] * 30
        blocks, scales = quantize(torch.tensor([block]), rule=rule)
        assert scales.item() == 0
        assert unpack(blocks)[:2] == [code, code + 8 if code else 0]
    assert (
        unpack(quantize(torch.tensor([[smallest / 2] + [0.0] * 31]), rule=rule)[0])[0] == 0
    )  # a tie goes to the even code 0
    assert unpack(quantize(torch.tensor([[next_up(smallest / 2)] + [0.0] * 31]), rule=rule)[0])[0] == 1
    check_block([float_of(1), -float_of(1), float_of(0x7FFFFF), float_of(0x800000)] + [0.0] * 28, rule)


@pytest.mark.parametrize(
    ("rule", "scale_bytes"),
    [
        (ScaleRule.EVEN, [119, 119, 120, 119, 119]),
        (ScaleRule.FLOOR, [119, 119, 119, 119, 119]),
        (ScaleRule.RCEIL, [119, 120, 120, 120, 119]),
    ],
)
def test_known_scale_bytes_at_the_rules_boundaries(rule, scale_bytes):
    magnitudes = [6.0, next_up(6.0), 7.0, next_down(7.0), 4.0]
    blocks = torch.tensor([[magnitude * 2.0**-8] + [0.0] * 31 for magnitude in magnitudes])
    assert quantize(blocks, rule=rule)[1].flatten().tolist() == scale_bytes


@every_rule
def test_scale_bytes_over_all_binades(rule):
    """Every exponent of fp32, with mantissas on and one ulp beside the carries of the rules."""
    mantissas = [m + ulp for m in (0x200000, 0x400000, 0x600000, 0x7FFFFE) for ulp in (-1, 0, 1)]
    amax = [exponent << 23 | mantissa for exponent in range(254) for mantissa in (0, 1, *mantissas)]
    amax += [254 << 23 | mantissa for mantissa in (0, 1, 0x3FFFFF, 0x400000, 0x400001, 0x5FFFFF)]
    blocks = torch.zeros(len(amax), 32)
    blocks[:, 7] = torch.tensor(amax, dtype=torch.int32).view(torch.float32)
    _, scales = quantize(blocks, rule=rule)
    expected = [quantize_block(block, rule)[1] for block in ([float_of(u)] for u in amax)]
    assert scales.flatten().tolist() == expected


def test_ties_go_to_even_codes_and_large_values_saturate():
    ties = [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0]
    blocks, scales = quantize(torch.tensor([[*ties, 6.5, *(-t for t in ties), -6.9, *[0.0] * 16]]))
    assert scales.item() == 127
    assert unpack(blocks)[:16] == [0, 2, 2, 4, 4, 6, 6, 7, 0, 10, 10, 12, 12, 14, 14, 15]


@pytest.mark.parametrize("tie", [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
def test_one_ulp_beside_a_tie_rounds_to_the_nearer_code(tie):
    below, above = next_down(tie), next_up(tie)
    low = max(c for c in range(8) if MAGNITUDES[c] < tie)
    blocks, _ = quantize(torch.tensor([[below, above, -below, -above, 6.0] + [0.0] * 27]))
    negative_low = low + 8 if low else 0
    assert unpack(blocks)[:4] == [low, low + 1, negative_low, low + 9]


@every_rule
def test_zeros_are_canonical(rule):
    blocks, scales = quantize(torch.tensor([[0.0, -0.0] * 16, [-0.1, 6.0] + [-1e-30] * 30]), rule=rule)
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


@every_rule
@pytest.mark.parametrize("magnitude", [next_down(LIMIT), 1.5 * 2.0**127, next_up(1.5 * 2.0**127), 1.25 * 2.0**127])
def test_the_largest_magnitudes_stay_finite(rule, magnitude):
    """Scale byte 252 is the last one without an infinity: RCEIL would ask for 253 above 1.5 * 2^127."""
    check_block([magnitude, -magnitude] * 16, rule)
    blocks, scales = quantize(torch.full((1, 32), magnitude), rule=rule)
    assert scales.item() == 252
    nearest = 4 if magnitude < 1.5 * 2.0**127 else 6
    assert dequantize(blocks, scales).unique().tolist() == [nearest * 2.0**125]


@every_rule
@pytest.mark.parametrize("bad", [math.nan, -math.nan, math.inf, -math.inf, LIMIT, -LIMIT])
def test_what_cannot_be_held_is_refused_by_name(bad, rule):
    weight = torch.ones(3, 64)
    weight[2, 40] = bad
    with pytest.raises(MXFP4Error, match=r"experts\.down_proj: .* must be below 2\.977e\+38, .* 0 more"):
        quantize(weight, rule=rule, name="experts.down_proj")


finite = st.floats(-LIMIT, LIMIT, width=32, exclude_min=True, exclude_max=True)
near_grid = st.builds(
    lambda magnitude, ulps, exponent, sign: sign * float_of(max(0, bits_of(magnitude * 2.0**exponent) + ulps)),
    st.sampled_from([0.25, 0.5, 0.75, 1.0, 1.25, 1.5, 1.75, 2.0, 2.5, 3.0, 3.5, 4.0, 5.0, 6.0, 7.0]),
    st.integers(-2, 2),
    st.integers(-20, 3),
    st.sampled_from([-1.0, 1.0]),
)


@settings(max_examples=200, deadline=None)
@given(st.sampled_from(RULES), st.lists(st.one_of(near_grid, near_grid, finite), min_size=32, max_size=32))
def test_any_block_equals_the_definition_and_repeats_itself(rule, block):
    check_block(block, rule)
    blocks, scales = quantize(torch.tensor([block]), rule=rule)
    again = quantize(dequantize(blocks, scales), rule=rule)
    if rule is ScaleRule.RCEIL:
        assert torch.equal(dequantize(*again), dequantize(blocks, scales))
    else:
        assert torch.equal(again[0], blocks)
        assert torch.equal(again[1], scales)


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(RULES), st.lists(near_grid, min_size=32, max_size=32))
def test_near_grid_blocks_equal_the_definition(rule, block):
    check_block(block, rule)


@every_rule
def test_quantizing_the_decoded_output_again(rule):
    """EVEN and FLOOR: the same bytes. RCEIL: the same values, and other bytes exactly where the largest code is 5."""
    torch.manual_seed(0)
    weight = torch.randn(400, 2880) * torch.logspace(-38, 38, 400, base=10).unsqueeze(1).clamp(max=1e37)
    blocks, scales = quantize(weight, rule=rule)
    for dtype in (torch.float32, torch.bfloat16):
        decoded = dequantize(blocks, scales, dtype)
        again, scales_again = quantize(decoded, rule=rule)
        assert torch.equal(dequantize(again, scales_again, dtype), decoded)
        changed = (scales_again != scales) | (again != blocks).any(-1)
        if rule is ScaleRule.RCEIL:
            largest_code = torch.maximum(blocks & 7, (blocks >> 4) & 7).amax(-1)
            assert torch.equal(changed, (largest_code == 5) & (scales > 0))
            assert torch.equal(scales_again[changed], scales[changed] - 1)
            assert 0.1 < changed.double().mean() < 0.35
        else:
            assert not changed.any()


@every_rule
def test_an_update_of_1e_6_of_on_grid_masters(rule):
    """Rule EVEN has no jump near its own codes; FLOOR jumps at 4 and RCEIL at 6, where the largest codes lie."""
    torch.manual_seed(0)
    on_grid = dequantize(*quantize(torch.randn(400, 2880) * 0.02))
    blocks, scales = quantize(on_grid, rule=rule)
    moved, moved_scales = quantize(on_grid * (1 + 1e-6 * torch.randn(400, 2880)), rule=rule)
    rescaled = (moved_scales != scales).double().mean().item()
    if rule is ScaleRule.EVEN:
        assert torch.equal(moved, blocks)
        assert rescaled == 0
    else:
        assert rescaled > {ScaleRule.FLOOR: 0.05, ScaleRule.RCEIL: 0.3}[rule]

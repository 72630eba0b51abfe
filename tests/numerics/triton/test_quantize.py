"""The quantizer in Triton writes the bytes of `model.mxfp4`, and says which blocks differ from the last version.

The interpreter runs the same integer arithmetic as a GPU; what it cannot show is a GPU that flushes subnormals.
"""

import pytest
import torch

from model import mxfp4
from model.kernels.quantize.triton import quantize, requantize
from model.mxfp4 import MXFP4Error, ScaleRule
from model.mxfp4_rounding import Rounding
from tests.numerics.mxfp4_definition import RULES, next_down, next_up

LARGEST = next_down(mxfp4.LIMIT)
EDGES = (0.25, 0.5, 0.75, 1.0, 1.25, 1.5, 1.75, 2.0, 2.5, 3.0, 3.5, 4.0, 5.0, 6.0, 7.0)


@pytest.fixture(autouse=True)
def _poisoned_memory():
    """New memory holds 255 in each byte."""
    torch.use_deterministic_algorithms(True)
    assert torch.empty(4, dtype=torch.uint8).tolist() == [255] * 4
    yield
    torch.use_deterministic_algorithms(False)


def check(w, device, **options):
    on_device = {n: o.to(device) if isinstance(o, torch.Tensor) else o for n, o in options.items()}
    for actual, expected in zip(quantize(w.to(device), **on_device), mxfp4.quantize(w, **options), strict=True):
        assert actual.dtype == torch.uint8
        assert torch.equal(actual.cpu(), expected)


def normal(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("shape", [(32,), (5, 64), (2, 3, 96), (70, 32), (0, 32), (3, 0)])
def test_any_shape_and_dtype(shape, dtype, device):
    check(normal(*shape).to(dtype), device)


def test_not_contiguous(device):
    check(normal(96, 64).t(), device)
    check(normal(7, 128)[:, 32:96], device)


@pytest.mark.parametrize("rule", RULES)
def test_ties_and_one_ulp_beside_them_in_every_binade(rule, device):
    """Both signs, subnormals included, with largest magnitudes on both sides of each rule's jump."""
    near = torch.tensor([v for edge in EDGES for v in (next_down(edge), edge, next_up(edge))])
    tops = torch.tensor([v for top in (3.0, 3.5, 4.0, 6.0, 7.0) for v in (next_down(top), top, next_up(top))])
    rows = [near[torch.randperm(len(near), generator=torch.Generator().manual_seed(i))[:31]] for i in range(15)]
    blocks = torch.cat([torch.stack(rows), tops[:, None]], -1)
    blocks = torch.where(blocks > tops[:, None], 0.0, blocks)
    blocks[::2] *= -1
    powers = 2.0 ** torch.arange(-150, 125, 7, dtype=torch.float64)
    check((blocks.double() * powers.view(-1, 1, 1)).float(), device, rule=rule)


@pytest.mark.parametrize("rule", RULES)
def test_every_exponent_of_the_largest_value(rule, device):
    mantissas = [0, 1, *(m + ulp for m in (0x200000, 0x400000, 0x600000, 0x7FFFFE) for ulp in (-1, 0, 1))]
    bits = [exponent << 23 | mantissa for exponent in range(0, 254) for mantissa in mantissas]
    w = torch.zeros(len(bits), 32)
    w[:, 7] = torch.tensor(bits, dtype=torch.int32).view(torch.float32)
    w = torch.cat([w, torch.full((1, 32), LARGEST), torch.zeros(1, 32), torch.full((1, 32), -0.0)])
    check(w, device, rule=rule)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("seed", [0, 1, 2**63 - 1])
def test_random_rounding_draws_the_same_numbers(seed, rule, device):
    options = {"rule": rule, "rounding": Rounding.STOCHASTIC, "seed": seed}
    w = normal(9, 96, seed=1)
    check(w, device, **options)
    blocks, scales = quantize(w.to(device), **options)
    for rows in (slice(0, 4), slice(4, 9)):  # shards are rounded as the whole
        shard = quantize(w[rows].to(device), first_block=3 * rows.start, **options)
        assert torch.equal(shard[0], blocks[rows])
        assert torch.equal(shard[1], scales[rows])
    check(w, device, first_block=2**40, **options)


def test_previous_scales_are_kept_within_their_range(device):
    """One byte up and down, and bytes that can never be kept; at the ends of the range to the ulp."""
    w = normal(64, 64)
    scales = mxfp4.quantize(w)[1].int()
    for previous in (scales - 1, scales, scales + 1, torch.full_like(scales, 253), torch.full_like(scales, 255)):
        check(w, device, previous_scales=previous.to(torch.uint8))
    ends = torch.tensor([v for end in mxfp4.HYSTERESIS for v in (next_down(end), end, next_up(end))])
    w = torch.zeros(6, 32)
    w[:, 3] = -ends
    check(w, device, previous_scales=torch.full((6, 1), 127, dtype=torch.uint8))
    large = torch.full((2, 32), 3.3 * 2.0**125)  # 252 would be kept, 253 is never
    check(large, device, previous_scales=torch.tensor([[252], [253]], dtype=torch.uint8))


@pytest.mark.parametrize("keep_scales", [False, True])
def test_changed_blocks(keep_scales, device):
    """Exactly those with a byte that differs: one code at either end of a block, a scale alone, and none."""
    w = normal(70, 64, seed=2)
    blocks, scales = mxfp4.quantize(w)
    before, before_scales = blocks.clone(), scales.clone()
    before[3, 0, 0] ^= 0x10
    before[69, 1, 15] ^= 0x10
    before_scales[5, 1] += 1
    made = requantize(
        w.to(device), before.to(device), before_scales.to(device), keep_scales=keep_scales
    )  # fmt: skip
    expected, expected_scales = mxfp4.quantize(w, previous_scales=before_scales if keep_scales else None)
    assert torch.equal(made.blocks.cpu(), expected)
    assert torch.equal(made.scales.cpu(), expected_scales)
    changed = (before != expected).any(-1) | (before_scales != expected_scales)
    assert 2 <= changed.sum() <= 3
    assert torch.equal(made.changed.cpu(), changed)


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf, mxfp4.LIMIT])
def test_values_that_cannot_be_quantized(value, device):
    w = normal(70, 32)
    w[69, 31] = value
    with pytest.raises(MXFP4Error, match=r"^up: every magnitude must be below .*, got .* and 0 more of 2240 values"):
        quantize(w.to(device), name="up")


@pytest.mark.parametrize(
    ("shape", "options"),
    [
        ((3, 33), {}),
        ((), {}),
        ((2, 32), {"seed": 1}),
        ((2, 32), {"rounding": Rounding.STOCHASTIC}),
        ((2, 32), {"first_block": -1}),
        ((2, 32), {"previous_scales": torch.zeros(2, dtype=torch.uint8)}),
    ],
)
def test_options_are_refused_in_the_words_of_the_definition(shape, options, device):
    with pytest.raises(MXFP4Error) as expected:
        mxfp4.quantize(torch.zeros(shape), name="up", **options)
    with pytest.raises(MXFP4Error) as actual:
        quantize(torch.zeros(shape, device=device), name="up", **options)
    assert str(actual.value) == str(expected.value)


def test_rules_differ():
    """Otherwise the tests of the rules would show nothing."""
    w = normal(64, 32)
    assert len({mxfp4.quantize(w, rule=rule)[1].numpy().tobytes() for rule in ScaleRule}) == len(ScaleRule)

import pickle

import pytest
import torch

from model.mxfp4 import FORMAT_VERSION, MXFP4Error, ScaleRule, dequantize, quantize
from model.mxfp4_rounding import Rounding
from model.snapshot import SNAPSHOT_METADATA


def test_metadata_names_the_default_rule_and_the_version():
    assert SNAPSHOT_METADATA == {"mxfp4_rule": "even", "mxfp4_version": 1}
    assert {"mxfp4_rule": ScaleRule.EVEN.value, "mxfp4_version": FORMAT_VERSION} == SNAPSHOT_METADATA
    torch.manual_seed(0)
    w = torch.randn(8, 320)
    default, named = quantize(w), quantize(w, rule=ScaleRule(str(SNAPSHOT_METADATA["mxfp4_rule"])))
    assert torch.equal(default[0], named[0])
    assert torch.equal(default[1], named[1])


def test_shapes():
    blocks, scales = quantize(torch.ones(2, 3, 64))
    assert blocks.shape == (2, 3, 2, 16)
    assert scales.shape == (2, 3, 2)
    assert dequantize(blocks, scales).shape == (2, 3, 64)
    assert [t.shape for t in quantize(torch.empty(0, 32))] == [(0, 1, 16), (0, 1)]
    assert [t.shape for t in quantize(torch.empty(3, 0))] == [(3, 0, 16), (3, 0)]


@pytest.mark.parametrize(
    ("weight", "options", "message"),
    [
        (torch.ones(2, 33), {}, r"w: MXFP4 needs .* multiple of 32, got torch.float32 of shape \(2, 33\); pad"),
        (torch.ones(2, 32, dtype=torch.int32), {}, "w: MXFP4 needs floating point .* got torch.int32"),
        (torch.tensor(1.0), {}, r"got torch.float32 of shape \(\)"),
        (torch.ones(32), {"seed": 1}, "w: a seed .* got rounding nearest_even and seed 1; give both or neither"),
        (torch.ones(32), {"rounding": Rounding.STOCHASTIC}, "got rounding stochastic and seed None"),
        (torch.ones(32), {"rounding": Rounding.STOCHASTIC, "seed": -1}, "seed -1"),
        (torch.ones(32), {"rounding": Rounding.STOCHASTIC, "seed": 2**63}, f"seed {2**63}"),
        (torch.ones(32), {"first_block": -1}, "w: first_block must be at least 0, got -1"),
        (
            torch.ones(64),
            {"previous_scales": torch.ones(1, dtype=torch.uint8)},
            r"of shape \(2,\), got .* \(1,\); pass",
        ),
        (torch.ones(32), {"previous_scales": torch.ones(1)}, "previous_scales must be uint8 .* got torch.float32"),
    ],
)
def test_errors_of_quantize(weight, options, message):
    with pytest.raises(MXFP4Error, match=message) as caught:
        quantize(weight, name="w", **options)
    assert "\n" not in str(caught.value)
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


def test_errors_of_dequantize():
    blocks, scales = quantize(torch.ones(2, 3, 64))
    with pytest.raises(MXFP4Error, match=r"dequantize: blocks must be .* both tensors of one weight"):
        dequantize(blocks, scales[:, :, :1])
    with pytest.raises(MXFP4Error, match="dequantize: blocks must be"):
        dequantize(blocks.int(), scales)
    with pytest.raises(MXFP4Error, match="float32 or bfloat16"):
        dequantize(blocks, scales, torch.float16)

"""What others read from our bytes, and what they write: transformers, compressed-tensors, GGUF and torchao."""

import gguf
import numpy as np
import pytest
import torch
from compressed_tensors.compressors.mxfp4 import MXFP4PackedCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from compressed_tensors.quantization.utils.mxfp_utils import generate_mx_scales
from torchao.prototype.mx_formats.config import ScaleCalculationMode
from torchao.prototype.mx_formats.mx_tensor import to_mx
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from model.mxfp4 import ScaleRule, dequantize, quantize
from model.mxfp4_layouts import from_compressed_tensors, from_gguf, to_compressed_tensors, to_gguf

SCHEME = QuantizationScheme(
    targets=["Linear"],
    weights=QuantizationArgs(
        num_bits=4, type="float", strategy="group", group_size=32, symmetric=True, scale_dtype=torch.uint8
    ),
)
MXFP4 = gguf.GGMLQuantizationType.MXFP4


@pytest.fixture
def everything():
    """Every byte of codes under every scale byte: blocks [256 rows, 16, 16], scales [256, 16]; row = scale byte."""
    blocks = torch.arange(256, dtype=torch.uint8).view(1, 16, 16).repeat(256, 1, 1)
    return blocks, torch.arange(256, dtype=torch.uint8).view(256, 1).repeat(1, 16)


@pytest.fixture
def weight():
    torch.manual_seed(0)
    return torch.randn(64, 2880) * 0.03


def same_bits(a, b):
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


def without_negative_zero(packed):
    """The others write code 8 for what rounds to zero from below."""
    low, high = packed & 15, packed >> 4
    return torch.where(low == 8, 0, low) | (torch.where(high == 8, 0, high) << 4)


def test_transformers_reads_our_bytes_as_we_do(everything):
    """Bit for bit, -0 and infinities too; scale byte 255, which is NaN here, is 2^128 there."""
    blocks, scales = (tensor.view(2, 128, *tensor.shape[1:]) for tensor in everything)
    theirs = convert_moe_packed_tensors(blocks, scales).transpose(1, 2).reshape(256, -1)
    ours = dequantize(blocks, scales, torch.bfloat16).reshape(256, -1)
    assert same_bits(theirs[:255], ours[:255])
    assert ours[255].isnan().all()
    assert not theirs[255].isnan().any()


def test_compressed_tensors_reads_our_bytes_as_we_do(everything):
    packed, scale = to_compressed_tensors(*everything)
    theirs = MXFP4PackedCompressor.decompress({"weight_packed": packed, "weight_scale": scale}, SCHEME)["weight"]
    ours = dequantize(*everything, torch.bfloat16)
    assert theirs.dtype == torch.bfloat16
    assert same_bits(theirs[:255], ours[:255])


def test_compressed_tensors_layout_is_a_bijection_of_views(everything):
    packed, scale = to_compressed_tensors(*everything)
    assert packed.shape == (256, 256)
    assert packed.data_ptr() == everything[0].data_ptr()
    blocks, scales = from_compressed_tensors(packed, scale)
    assert blocks.data_ptr() == everything[0].data_ptr()
    assert torch.equal(blocks, everything[0])
    assert torch.equal(scales, everything[1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_compressed_tensors_writes_our_bytes_from_our_values(weight, dtype):
    """Its packer on the decoded weight gives the bytes back, and its scale rule is EVEN."""
    blocks, scales = quantize(weight)
    scale = torch.ldexp(torch.ones(scales.shape), scales.int() - 127)
    state = {"weight": dequantize(blocks, scales, dtype), "weight_scale": scale.to(dtype)}
    state = MXFP4PackedCompressor.compress(state, SCHEME)
    assert torch.equal(state["weight_packed"], to_compressed_tensors(blocks, scales)[0])
    assert torch.equal(state["weight_scale"], scales)
    again = from_compressed_tensors(state["weight_packed"], state["weight_scale"])
    assert torch.equal(again[0], blocks)
    assert torch.equal(again[1], scales)


def test_compressed_tensors_rounds_as_we_do(weight):
    blocks, scales = quantize(weight)
    assert torch.equal(generate_mx_scales(weight.unflatten(-1, (-1, 32)).abs().amax(-1)).to(torch.uint8), scales)
    scale = torch.ldexp(torch.ones(scales.shape), scales.int() - 127)
    state = MXFP4PackedCompressor.compress({"weight": weight, "weight_scale": scale}, SCHEME)
    assert torch.equal(without_negative_zero(state["weight_packed"]), blocks.flatten(-2))


def test_gguf_known_answer():
    """Ascending codes against descending ones, in both block orders."""
    blocks = torch.tensor(list(bytes.fromhex("F0E1D2C3B4A5968778695A4B3C2D1E0F")), dtype=torch.uint8)
    rows = torch.tensor(list(bytes.fromhex("7F807F916EA25DB34CC43BD52AE619F708")), dtype=torch.uint8)
    assert to_gguf(blocks.view(1, 16), torch.tensor([127], dtype=torch.uint8)).tolist() == rows.tolist()
    again, scales = from_gguf(rows)
    assert again.flatten().tolist() == blocks.tolist()
    assert scales.tolist() == [127]


def test_gguf_reads_our_bytes_as_we_do(everything):
    """Equal values; code 8 is +0 there, though the byte survives, and scale byte 255 is an ordinary scale."""
    rows = to_gguf(*everything)
    with np.errstate(over="ignore"):
        theirs = torch.from_numpy(gguf.quants.dequantize(rows.numpy(), MXFP4))
    ours = dequantize(*everything)
    assert torch.equal(theirs[:255], ours[:255])
    negative_zero = (ours[:255] == 0) & ours[:255].signbit()
    assert negative_zero.any()
    assert not theirs[:255][negative_zero].signbit().any()
    blocks, scales = from_gguf(rows)
    assert torch.equal(blocks, everything[0])
    assert torch.equal(scales, everything[1])


def test_gguf_quantizes_by_rule_floor(weight):
    """On data without ties, which it breaks towards zero."""
    theirs = gguf.quants.quantize(weight.numpy(), MXFP4)
    assert np.array_equal(theirs, to_gguf(*quantize(weight, rule=ScaleRule.FLOOR)).numpy())
    assert not np.array_equal(theirs, to_gguf(*quantize(weight)).numpy())


@pytest.mark.parametrize("rule", ScaleRule)
def test_torchao_writes_our_bytes(weight, rule):
    """The same rule by name, on normal data; it keeps the sign of what rounds to zero."""
    scale, packed = to_mx(weight, torch.float4_e2m1fn_x2, 32, ScaleCalculationMode[rule.name])
    blocks, scales = quantize(weight, rule=rule)
    assert torch.equal(scale.view(torch.uint8), scales)
    assert torch.equal(without_negative_zero(packed.view(torch.uint8)), blocks.flatten(-2))

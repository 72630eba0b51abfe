"""Encodings against decoders written anew, and their detection from headers."""

import pytest
import torch

from model.hf.encodings import (
    COMPRESSED_TENSORS,
    ENCODINGS,
    GPT_OSS,
    Entry,
    Kind,
    check_quantization,
    decode_fp8,
    detect,
    expected_shapes,
    mxfp4_bytes,
)
from model.loaded import CheckpointError
from model.mxfp4 import dequantize


def entry(dtype, *shape):
    return Entry(dtype=dtype, shape=shape, file="model.safetensors")


def test_fp8_equals_a_decoder_over_single_values():
    """Every byte but the two NaNs (0x7F, 0xFF), and tiles cut at both edges."""
    codes = torch.arange(256, dtype=torch.uint8)
    codes = codes[(codes & 127) != 127]
    payload = codes[torch.randint(0, len(codes), (133, 150), generator=torch.Generator().manual_seed(0))]
    scales = torch.rand(2, 2) + 0.5

    def value(byte):
        sign, exponent, fraction = byte >> 7, (byte >> 3) & 15, byte & 7
        magnitude = fraction / 8 * 2.0**-6 if exponent == 0 else (1 + fraction / 8) * 2.0 ** (exponent - 7)
        return -magnitude if sign else magnitude

    decoded = decode_fp8(payload.view(torch.float8_e4m3fn), scales)
    expected = [[value(int(payload[r, c])) for c in range(150)] for r in range(133)]
    scale_of = scales.double()[torch.arange(133)[:, None] // 128, torch.arange(150) // 128]
    assert torch.equal(decoded, (torch.tensor(expected, dtype=torch.float64) * scale_of).float())


def test_fp8_takes_other_tiles_and_power_of_two_scales():
    payload = torch.full((3, 5), 1.5).to(torch.float8_e4m3fn)
    scales = torch.tensor([[126, 127], [128, 129]], dtype=torch.uint8).view(torch.float8_e8m0fnu)
    decoded = decode_fp8(payload, scales, tile=(2, 4))
    assert decoded.tolist() == [[0.75] * 4 + [1.5], [0.75] * 4 + [1.5], [3.0] * 4 + [6.0]]


def test_every_mxfp4_encoding_holds_the_same_bytes():
    blocks = torch.randint(0, 256, (2, 3, 4, 16), generator=torch.Generator().manual_seed(1)).byte()
    scales = torch.randint(90, 160, (2, 3, 4), generator=torch.Generator().manual_seed(2)).byte()
    expected = dequantize(blocks, scales)
    deepseek = next(encoding for encoding in ENCODINGS if encoding.dtypes == ("I8",))
    for encoding, payload, scale in (
        (GPT_OSS, blocks, scales),
        (COMPRESSED_TENSORS, blocks.flatten(-2), scales),
        (deepseek, blocks.flatten(-2).view(torch.int8), scales.view(torch.float8_e8m0fnu)),
    ):
        assert torch.equal(dequantize(*mxfp4_bytes(encoding, payload, scale)), expected)


@pytest.mark.parametrize(
    ("entries", "kind", "names"),
    [
        ({"a.weight": "BF16"}, Kind.PLAIN, ("a.weight",)),
        ({"a.weight_blocks": "U8", "a.weight_scales": "U8"}, Kind.MXFP4, ("a.weight_blocks", "a.weight_scales")),
        ({"a.weight.blocks": "U8", "a.weight.scales": "U8"}, Kind.MXFP4, ("a.weight.blocks", "a.weight.scales")),
        ({"a.weight_packed": "U8", "a.weight_scale": "U8"}, Kind.MXFP4, ("a.weight_packed", "a.weight_scale")),
        ({"a.weight": "I8", "a.scale": "F8_E8M0"}, Kind.MXFP4, ("a.weight", "a.scale")),
        ({"a.weight": "I8", "a.weight_scale_inv": "F8_E8M0"}, Kind.MXFP4, ("a.weight", "a.weight_scale_inv")),
        ({"a.weight": "F8_E4M3", "a.weight_scale_inv": "F32"}, Kind.FP8, ("a.weight", "a.weight_scale_inv")),
        ({"a.weight": "F8_E4M3", "a.scale": "F8_E8M0"}, Kind.FP8, ("a.weight", "a.scale")),
        ({"a.weight": "F8_E4M3"}, Kind.FP8, ("a.weight", "a.weight_scale_inv")),
        ({}, Kind.PLAIN, ("a.weight",)),
    ],
)
def test_detection(entries, kind, names):
    stored = {name: entry(dtype, 1) for name, dtype in entries.items()}
    encoding = detect("a.weight", stored)
    assert encoding.kind is kind
    assert encoding.names("a.weight", stored) == names


def test_shapes_of_the_entries():
    stored = {"a_blocks": entry("U8"), "b_packed": entry("U8"), "c": entry("F8_E4M3"), "d": entry("F16")}
    shapes = {name: expected_shapes(detect(name, stored), (2, 130, 96), (128, 64)) for name in "abcd"}
    assert shapes == {
        "a": ((2, 130, 3, 16), (2, 130, 3)),
        "b": ((2, 130, 48), (2, 130, 3)),
        "c": ((2, 130, 96), (2, 2, 2)),
        "d": ((2, 130, 96),),
    }


def test_quantization_config():
    assert check_quantization(None) == (128, 128)
    assert check_quantization({"quant_method": "mxfp4"}) == (128, 128)
    assert check_quantization({"quant_method": "fp8", "weight_block_size": [64, 32]}) == (64, 32)
    assert check_quantization({"quant_method": "compressed-tensors", "format": "mxfp4-pack-quantized"}) == (128, 128)
    with pytest.raises(CheckpointError, match="must be mxfp4, fp8 or compressed-tensors, got awq"):
        check_quantization({"quant_method": "awq"})
    for tile in ([128], [0, 128], "128", [1.0, 2.0]):
        with pytest.raises(CheckpointError, match="weight_block_size: must be two positive numbers, got"):
            check_quantization({"quant_method": "fp8", "weight_block_size": tile})
    with pytest.raises(CheckpointError, match="quantization_config: must be a mapping, got mxfp4"):
        check_quantization("mxfp4")

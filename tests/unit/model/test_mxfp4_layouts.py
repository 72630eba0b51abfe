import pytest
import torch

from model.mxfp4 import MXFP4Error
from model.mxfp4_layouts import from_compressed_tensors, from_gguf, to_compressed_tensors, to_gguf


def random_bytes(*shape):
    return torch.randint(256, shape, dtype=torch.uint8)


def test_experts_and_rows_keep_their_axes():
    torch.manual_seed(0)
    blocks, scales = random_bytes(2, 5, 3, 16), random_bytes(2, 5, 3)
    packed, scale = to_compressed_tensors(blocks, scales)
    assert (packed.shape, scale.shape) == ((2, 5, 48), (2, 5, 3))
    rows = to_gguf(blocks, scales)
    assert rows.shape == (2, 5, 51)
    for expert in range(2):  # one expert converted alone has the same bytes
        assert torch.equal(to_gguf(blocks[expert], scales[expert]), rows[expert])
        alone = from_compressed_tensors(packed[expert], scale[expert])
        assert torch.equal(alone[0], blocks[expert])
    again = from_gguf(rows)
    assert torch.equal(again[0], blocks)
    assert torch.equal(again[1], scales)


def test_transposed_inputs_are_read_by_value():
    torch.manual_seed(0)
    blocks, scales = random_bytes(3, 5, 16).transpose(0, 1), random_bytes(3, 5).t()
    again = from_compressed_tensors(*to_compressed_tensors(blocks, scales))
    assert torch.equal(again[0], blocks)
    assert torch.equal(again[1], scales)


def test_from_gguf_owns_its_bytes():
    rows = to_gguf(random_bytes(1, 16), random_bytes(1))
    blocks, scales = from_gguf(rows)
    before = (blocks.clone(), scales.clone())
    rows.zero_().add_(255)
    assert torch.equal(blocks, before[0])
    assert torch.equal(scales, before[1])


@pytest.mark.parametrize(
    ("convert", "message"),
    [
        (lambda: to_gguf(random_bytes(2, 16), random_bytes(3)), "to_gguf: blocks must be"),
        (lambda: to_compressed_tensors(random_bytes(2, 16).int(), random_bytes(2)), "to_compressed_tensors: blocks"),
        (
            lambda: from_compressed_tensors(random_bytes(2, 24), random_bytes(2, 1)),
            r"from_compressed_tensors: weight_packed: must be uint8 .* multiple of 16, got torch.uint8 \(2, 24\)",
        ),
        (lambda: from_compressed_tensors(random_bytes(2, 32), random_bytes(2, 1)), "from_compressed_tensors: blocks"),
        (lambda: from_gguf(random_bytes(2, 16)), r"from_gguf: rows: .* multiple of 17, got torch.uint8 \(2, 16\)"),
        (lambda: from_gguf(random_bytes(2, 17).int()), "from_gguf: rows: must be uint8 .* got torch.int32"),
    ],
)
def test_errors(convert, message):
    with pytest.raises(MXFP4Error, match=message):
        convert()

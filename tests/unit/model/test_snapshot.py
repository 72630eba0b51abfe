import dataclasses
import math
import pickle

import numpy as np
import pytest
import torch

from model.config import ModelConfig
from model.mxfp4 import MXFP4Error, dequantize, quantize
from model.snapshot import (
    Format,
    SnapshotError,
    StraightThrough,
    codes_changed,
    make_snapshot,
    publish_tensor,
    published_view,
    tensor_format,
    verify,
    view,
)
from model.transformer import Transformer, init_weights, parameter_shapes
from rollout.types import WeightVersion

CONFIG = ModelConfig(vocab_size=24, hidden_size=32, num_layers=2, num_heads=2, num_kv_heads=1, expert_hidden_size=64)
SHAPES = parameter_shapes(CONFIG)
EXPERT = "model.layers.1.mlp.experts.down_proj"
NORM = "model.norm.weight"


@pytest.fixture
def masters():
    model = Transformer(CONFIG)
    init_weights(model, 0)
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


@pytest.fixture
def snapshot(masters):
    return make_snapshot(WeightVersion(3), published_view(masters))


def damaged(snapshot, name, **changes):
    tensors = {**snapshot.tensors, name: dataclasses.replace(snapshot.tensors[name], **changes)}
    return dataclasses.replace(snapshot, tensors=tensors)


def test_exactly_the_routed_experts_are_mxfp4():
    mxfp4 = {name for name in SHAPES if tensor_format(name) is Format.MXFP4}
    assert mxfp4 == {f"model.layers.{n}.mlp.experts.{p}_proj" for n in (0, 1) for p in ("gate_up", "down")}


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.0.mlp.gate_up_proj",
        "model.layers.0.mlp.experts.gate_up_proj.weight",
        "model.layers.x.mlp.experts.down_proj",
        "layers.0.mlp.experts.down_proj",
        "module.model.norm.weight",
        "model.layers.0.mlp.experts.down_proj_blocks",
        "model.layers.0.mlp.experts.0.down_proj",
        "model.layers.0.mlp.router.weight2",
    ],
)
def test_a_name_that_is_not_in_the_table_is_an_error(name):
    with pytest.raises(SnapshotError, match=name):
        tensor_format(name)


def test_shared_experts_and_the_router_stay_bf16():
    for name in ("shared_experts.down_proj.weight", "router.weight", "router.bias"):
        assert tensor_format(f"model.layers.12.mlp.{name}") is Format.BF16


def test_published_bytes_are_the_quantizers_and_bf16_bits(masters):
    packed = published_view(masters)
    blocks, scales = quantize(masters[EXPERT])
    assert np.array_equal(packed[EXPERT].payload, blocks.numpy())
    assert np.array_equal(packed[EXPERT].scales, scales.numpy())
    assert torch.equal(view(packed[EXPERT]), dequantize(blocks, scales))
    for dtype in (torch.float32, torch.bfloat16):
        values = view(packed[NORM], dtype)
        assert values.dtype == dtype
        assert torch.equal(values, masters[NORM].bfloat16().to(dtype))


def test_bf16_rounds_to_nearest_even_and_is_little_endian():
    master = torch.tensor([1.0, 1.0 + 2.0**-8, 1.0 + 3 * 2.0**-8, -2.5])  # the middle two are ties
    packed = publish_tensor(NORM, master)
    assert packed.payload.tolist() == [[0x80, 0x3F], [0x80, 0x3F], [0x82, 0x3F], [0x20, 0xC0]]
    assert view(packed).tolist() == [1.0, 1.0, 1.0 + 2.0**-6, -2.5]


def test_four_and_a_quarter_bits_a_parameter(snapshot):
    packed = snapshot.tensors[EXPERT]
    assert packed.num_bytes * 8 == 4.25 * np.prod(packed.shape)
    assert snapshot.num_bytes == sum(
        np.prod(shape) * (4.25 if tensor_format(name) is Format.MXFP4 else 16) / 8 for name, shape in SHAPES.items()
    )


def test_masters_must_be_fp32_and_finite(masters):
    with pytest.raises(SnapshotError, match=r"model\.norm\.weight: published from the fp32 master only"):
        publish_tensor(NORM, masters[NORM].bfloat16())
    masters[EXPERT][0, 0, 0] = torch.nan
    with pytest.raises(MXFP4Error, match=r"model\.layers\.1\.mlp\.experts\.down_proj: "):
        published_view(masters)


def test_publishing_the_view_again_gives_the_same_bytes(masters):
    once = published_view(masters)
    again = published_view({name: view(packed) for name, packed in once.items()})
    assert make_snapshot(WeightVersion(0), once).digests == make_snapshot(WeightVersion(0), again).digests


def test_straight_through():
    master = torch.tensor([1.0, -9.0], requires_grad=True)
    out = StraightThrough.apply(master, torch.tensor([1.5, -6.0], dtype=torch.bfloat16))
    assert out.tolist() == [1.5, -6.0]
    (out.float() * torch.tensor([2.0, 3.0])).sum().backward()
    assert master.grad.dtype == torch.float32
    assert master.grad.tolist() == [2.0, 3.0]  # the saturated element keeps its gradient


def test_a_fresh_snapshot_verifies_also_after_pickling_and_read_only(snapshot):
    verify(snapshot, SHAPES)
    copy = pickle.loads(pickle.dumps(snapshot))
    for packed in copy.tensors.values():
        packed.payload.setflags(write=False)
        packed.scales.setflags(write=False)
    verify(copy, SHAPES)
    assert copy.version == 3
    assert copy.base_version is None
    for name, packed in copy.tensors.items():
        assert torch.equal(view(packed), view(snapshot.tensors[name]))


@pytest.mark.parametrize("writeable", [False, True])
def test_writing_to_a_view_does_not_touch_the_published_bytes(snapshot, writeable):
    packed = snapshot.tensors[NORM]
    before = packed.payload.copy()
    packed.payload.setflags(write=writeable)
    view(packed, torch.bfloat16).fill_(7.0)
    assert np.array_equal(packed.payload, before)


@pytest.mark.parametrize("name", [EXPERT, NORM])
def test_one_flipped_nibble_is_caught(snapshot, name):
    payload = snapshot.tensors[name].payload.copy()
    payload.reshape(-1)[5] ^= 0x10
    with pytest.raises(SnapshotError, match=rf"snapshot 3: {name}: digest must be .*fetch the snapshot again"):
        verify(damaged(snapshot, name, payload=payload), SHAPES)


def test_one_changed_scale_is_caught(snapshot):
    scales = snapshot.tensors[EXPERT].scales.copy()
    scales[3, 1, 0] += 1
    with pytest.raises(SnapshotError, match=f"{EXPERT}: digest"):
        verify(damaged(snapshot, EXPERT, scales=scales), SHAPES)


def test_two_exchanged_tensors_are_caught(snapshot):
    """Equal shapes and valid bytes under the wrong names."""
    other = "model.layers.0.mlp.experts.down_proj"
    tensors = dict(snapshot.tensors)
    digests = dict(snapshot.digests)
    tensors[EXPERT], tensors[other] = tensors[other], tensors[EXPERT]
    digests[EXPERT], digests[other] = digests[other], digests[EXPERT]
    with pytest.raises(SnapshotError, match=f"{other}: digest"):
        verify(dataclasses.replace(snapshot, tensors=tensors, digests=digests), SHAPES)


def test_missing_and_extra_tensors_are_named(snapshot):
    tensors = dict(snapshot.tensors)
    tensors["lm_head.weight"] = tensors.pop(NORM)
    with pytest.raises(SnapshotError, match=r"missing \['model.norm.weight'\] and extra \['lm_head.weight'\]"):
        verify(dataclasses.replace(snapshot, tensors=tensors), SHAPES)


def test_wrong_shapes_formats_and_rules_are_named(snapshot):
    with pytest.raises(SnapshotError, match=rf"{NORM}: shape must be \(32,\), got \(2, 16\)"):
        verify(damaged(snapshot, NORM, shape=(2, 16)), SHAPES)
    with pytest.raises(SnapshotError, match=f"{EXPERT}: format must be mxfp4, got bf16"):
        verify(damaged(snapshot, EXPERT, format=Format.BF16), SHAPES)
    with pytest.raises(SnapshotError, match=rf"{NORM}: payload and scales must be uint8 of shapes"):
        verify(damaged(snapshot, NORM, payload=snapshot.tensors[NORM].payload[:-1]), SHAPES)
    with pytest.raises(SnapshotError, match="must be written as"):
        verify(dataclasses.replace(snapshot, metadata={"mxfp4_rule": "rceil", "mxfp4_version": 1}), SHAPES)
    digests = {name: value for name, value in snapshot.digests.items() if name != NORM}
    with pytest.raises(SnapshotError, match=f"{NORM}: digest must be None"):
        verify(dataclasses.replace(snapshot, digests=digests), SHAPES)


def test_codes_changed_counts_codes_and_scales_of_experts_alone(masters):
    old = published_view(masters)
    num_codes, num_scales = 8 * 32 * 64, 8 * 32 * 2
    assert codes_changed(old, old)[EXPERT] == (0, num_codes, 0, num_scales)
    on_grid = view(old[EXPERT])
    moved = on_grid.clone()
    row = moved[2, 7, 32:]  # one block; move its two smallest values to another code and keep its scale
    small = row.abs().topk(2, largest=False).indices
    row[small] = row.abs().max()
    masters[EXPERT], masters[NORM] = moved, masters[NORM].clone()
    masters[NORM][4] = 2.0
    changed = codes_changed(old, published_view(masters))
    assert changed[EXPERT] == (2, num_codes, 0, num_scales)
    assert {name: changes.is_still for name, changes in changed.items()} == {
        name: name != EXPERT for name, packed in old.items() if packed.format is Format.MXFP4
    }
    masters[EXPERT] = on_grid * 2  # every scale byte moves, no code does
    zero_blocks = int((old[EXPERT].scales == 0).sum())
    assert codes_changed(old, published_view(masters))[EXPERT] == (0, num_codes, num_scales - zero_blocks, num_scales)


@pytest.mark.parametrize("share", [0.0, 1e-3, 0.3, 1.0])
def test_codes_changed_finds_every_code_and_scale_that_differs(masters, share):
    """Against the definition, on random bytes."""
    rng = np.random.default_rng(5)

    def changed(array):
        return np.where(rng.random(array.shape) < share, rng.integers(0, 256, array.shape, np.uint8), array)

    old = published_view(masters)
    new = {
        name: dataclasses.replace(packed, payload=changed(packed.payload), scales=changed(packed.scales))
        for name, packed in old.items()
    }
    changes = codes_changed(old, new)
    assert changes.keys() == {name for name, packed in old.items() if packed.format is Format.MXFP4}
    for name, found in changes.items():
        before, after = old[name], new[name]
        codes = [np.stack([packed.payload & 15, packed.payload >> 4]) for packed in (before, after)]
        assert found.num_codes_changed == (codes[0] != codes[1]).sum()
        assert found.num_scales_changed == (before.scales != after.scales).sum()
        assert (found.num_codes_changed > 0) == (share > 0), "the control"


def test_codes_changed_needs_the_same_parameters(masters):
    packed = published_view(masters)
    with pytest.raises(SnapshotError, match="same parameters"):
        codes_changed(packed, {NORM: packed[NORM]})


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_not_published_by_name(bad):
    master = torch.ones(8)
    master[3] = bad
    with pytest.raises(SnapshotError, match=r"^model\.norm\.weight: every value must be finite, got 1 that are not"):
        publish_tensor("model.norm.weight", master)
    sinks = "model.layers.0.self_attn.sinks"
    if bad == -math.inf:  # no sink at all
        assert torch.equal(view(publish_tensor(sinks, master)), master)
    else:
        with pytest.raises(SnapshotError, match="sinks: every value must be finite"):
            publish_tensor(sinks, master)

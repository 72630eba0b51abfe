"""One view of the weights: the bytes that the learner's forward reads are the bytes that are published.

`published_view` defines every tensor's bytes from the fp32 master: experts in MXFP4 (rule EVEN), everything else in
bf16 (round to nearest even), except the router's selection bias, which decides near-ties and stays fp32. The learner
computes with `view` of those bytes, straight-through; a `WeightSnapshot` carries the same bytes with one digest a
tensor, which the receiver checks before it loads anything.

Invariant: a tensor's format follows from its exact name. There are no patterns that could match a neighbour, and a name
that is not in the table is an error.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch

from model.mxfp4 import BLOCK, BLOCK_BYTES, FORMAT_VERSION, ScaleRule, dequantize, quantize
from rollout.types import WeightVersion


class SnapshotError(ValueError):
    """A published tensor that is missing, unknown, damaged or of the wrong shape."""


class Format(StrEnum):
    """How the published bytes of a tensor are read."""

    MXFP4 = "mxfp4"
    BF16 = "bf16"
    FP32 = "fp32"


_NAMES: dict[Format, tuple[str, ...]] = {
    Format.MXFP4: (
        "model.layers.N.mlp.experts.gate_up_proj",
        "model.layers.N.mlp.experts.down_proj",
    ),
    Format.BF16: (
        "model.embed_tokens.weight",
        "model.norm.weight",
        "lm_head.weight",
        "model.layers.N.input_layernorm.weight",
        "model.layers.N.post_attention_layernorm.weight",
        "model.layers.N.self_attn.q_proj.weight",
        "model.layers.N.self_attn.q_proj.bias",
        "model.layers.N.self_attn.k_proj.weight",
        "model.layers.N.self_attn.k_proj.bias",
        "model.layers.N.self_attn.v_proj.weight",
        "model.layers.N.self_attn.v_proj.bias",
        "model.layers.N.self_attn.o_proj.weight",
        "model.layers.N.self_attn.o_proj.bias",
        "model.layers.N.self_attn.q_norm.weight",
        "model.layers.N.self_attn.k_norm.weight",
        "model.layers.N.self_attn.sinks",
        "model.layers.N.self_attn.q_a_proj.weight",
        "model.layers.N.self_attn.q_a_proj.bias",
        "model.layers.N.self_attn.q_a_layernorm.weight",
        "model.layers.N.self_attn.q_b_proj.weight",
        "model.layers.N.self_attn.kv_a_proj_with_mqa.weight",
        "model.layers.N.self_attn.kv_a_proj_with_mqa.bias",
        "model.layers.N.self_attn.kv_a_layernorm.weight",
        "model.layers.N.self_attn.kv_b_proj.weight",
        "model.layers.N.mlp.gate_proj.weight",
        "model.layers.N.mlp.up_proj.weight",
        "model.layers.N.mlp.down_proj.weight",
        "model.layers.N.mlp.router.weight",
        "model.layers.N.mlp.router.bias",
        "model.layers.N.mlp.experts.gate_up_proj_bias",
        "model.layers.N.mlp.experts.down_proj_bias",
        "model.layers.N.mlp.shared_experts.gate_proj.weight",
        "model.layers.N.mlp.shared_experts.up_proj.weight",
        "model.layers.N.mlp.shared_experts.down_proj.weight",
        *(
            f"model.layers.N.{adapter}.{factor}"
            for adapter in (
                "self_attn.q_proj.lora",
                "self_attn.k_proj.lora",
                "self_attn.v_proj.lora",
                "self_attn.o_proj.lora",
                "self_attn.q_a_proj.lora",
                "self_attn.q_b_proj.lora",
                "self_attn.kv_a_proj_with_mqa.lora",
                "mlp.experts.gate_up_lora",
                "mlp.experts.down_lora",
            )
            for factor in "AB"
        ),
    ),
    Format.FP32: ("model.layers.N.mlp.router.selection_bias",),
}
PLAIN_DTYPES = {Format.BF16: torch.bfloat16, Format.FP32: torch.float32}
_FORMAT_OF = {name: format for format, names in _NAMES.items() for name in names}
_LAYER_NUMBER = re.compile(r"(?<=^model\.layers\.)[0-9]+(?=\.)")

_RULE = ScaleRule.EVEN

SNAPSHOT_METADATA: Mapping[str, str | int] = {"mxfp4_rule": _RULE.value, "mxfp4_version": FORMAT_VERSION}
"""What a reader must know of the bytes; a different quantization rule or layout gets a new version."""


def tensor_format(name: str) -> Format:
    """The published format of a parameter, by its exact name.

    Raises:
        SnapshotError: The name is not in the table.
    """
    format = _FORMAT_OF.get(_LAYER_NUMBER.sub("N", name))
    if format is None:
        raise SnapshotError(
            f"{name}: no published format is declared for this parameter, got an unknown name; "
            "add its exact name to the table in model/snapshot.py"
        )
    return format


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PackedTensor:
    """The published bytes of one tensor, as NumPy arrays that may be read-only views of shared memory.

    `shape` is that of the parameter. MXFP4: `payload` is uint8 [..., K/32, 16] and `scales` uint8 [..., K/32]. BF16 and
    FP32: `payload` holds the little-endian bits, uint8 [..., 2] or [..., 4], and `scales` is empty.
    """

    format: Format
    shape: tuple[int, ...]
    payload: npt.NDArray[np.uint8]
    scales: npt.NDArray[np.uint8]

    @property
    def num_bytes(self) -> int:
        """Bytes on the wire."""
        return self.payload.nbytes + self.scales.nbytes

    def take(self, experts: npt.NDArray[np.int64]) -> PackedTensor:
        """These slices of the first dimension, copied."""
        payload = self.payload[experts]
        scales = self.scales[experts] if self.format is Format.MXFP4 else self.scales
        shape = (len(experts), *self.shape[1:])
        return PackedTensor(format=self.format, shape=shape, payload=payload, scales=scales)


class Quantizer(Protocol):
    """`model.mxfp4.quantize`, or a kernel that writes the same bytes."""

    def __call__(self, w: torch.Tensor, *, rule: ScaleRule, name: str) -> tuple[torch.Tensor, torch.Tensor]:
        """Blocks and scale bytes."""
        ...


class Dequantizer(Protocol):
    """`model.mxfp4.dequantize`, or a kernel that reads the same values."""

    def __call__(self, blocks: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """[..., K] in fp32 or bf16."""
        ...


def publish_tensor(name: str, master: torch.Tensor, quantizer: Quantizer = quantize) -> PackedTensor:
    """The published bytes of one fp32 master.

    Raises:
        SnapshotError: Unknown name, the master is not fp32, or one of its values is not finite.
        MXFP4Error: An expert tensor that MXFP4 cannot hold (NaN, infinity, odd shape).
    """
    format = tensor_format(name)
    if master.dtype != torch.float32:
        raise SnapshotError(f"{name}: published from the fp32 master only, got {master.dtype}; keep masters in fp32")
    master = master.detach()
    if format is Format.MXFP4:
        blocks, scales = quantizer(master, rule=_RULE, name=name)
        payload, scale_bytes = blocks.cpu().numpy(), scales.cpu().numpy()
    else:
        if not _may_be_published(name, master):
            raise SnapshotError(
                f"{name}: every value must be finite, got {int((~master.isfinite()).sum())} that are not; "
                "find the step that produced them, or fetch the checkpoint again"
            )
        plain = master.to(PLAIN_DTYPES[format]).contiguous().cpu()
        payload, scale_bytes = plain_bytes(plain), np.empty(0, np.uint8)
    return PackedTensor(format=format, shape=tuple(master.shape), payload=payload, scales=scale_bytes)


def _may_be_published(name: str, master: torch.Tensor) -> bool:
    """Whether every value is finite; a sink of minus infinity is none at all, which is a meaning of its own."""
    if name.endswith(".sinks"):
        return not bool((master.isnan() | (master == torch.inf)).any())
    return bool(master.isfinite().all())


def published_view(masters: Mapping[str, torch.Tensor], quantizer: Quantizer = quantize) -> dict[str, PackedTensor]:
    """The published bytes of every parameter. The one place that decides what the policy is."""
    return {name: publish_tensor(name, master, quantizer) for name, master in masters.items()}


def view(
    packed: PackedTensor, dtype: torch.dtype = torch.float32, dequantizer: Dequantizer = dequantize
) -> torch.Tensor:
    """The values of published bytes, as a new tensor in fp32 or bf16; what is published in fp32 stays fp32."""
    if packed.format is Format.MXFP4:
        return dequantizer(as_tensor(packed.payload), as_tensor(packed.scales), dtype).view(packed.shape)
    plain = as_tensor(packed.payload).view(PLAIN_DTYPES[packed.format]).view(packed.shape)
    return plain.to(torch.float32 if packed.format is Format.FP32 else dtype, copy=True)


def plain_bytes(tensor: torch.Tensor) -> npt.NDArray[np.uint8]:
    """The little-endian bits of a contiguous CPU tensor, uint8 [..., item size]; shares its memory."""
    return tensor.view(-1).view(torch.uint8).numpy().reshape(*tensor.shape, tensor.itemsize)


def as_tensor(array: npt.NDArray[np.uint8]) -> torch.Tensor:
    """The array as a tensor; copied when read-only, because a torch tensor cannot promise not to write."""
    array = np.ascontiguousarray(array)
    return torch.from_numpy(array if array.flags.writeable else array.copy())


class StraightThrough(torch.autograd.Function):
    """`apply(master, view)` is the view in the forward pass and the identity for the gradient.

    Elements that saturated keep their gradient, so a master can come back from beyond the largest code.
    """

    @staticmethod
    def forward(ctx: Any, master: torch.Tensor, viewed: torch.Tensor) -> torch.Tensor:
        """The view."""
        ctx.dtype = master.dtype
        return viewed.view_as(viewed)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        """The gradient of the view, in the master's dtype."""
        return grads[0].to(ctx.dtype), None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class WeightSnapshot:
    """A published version of all weights, ready to travel.

    `digests` are hex BLAKE2b-128 of each tensor's name, format, shape and bytes. `base_version` is `None` for a full
    snapshot, and the version that a delta applies to otherwise.
    """

    version: WeightVersion
    tensors: Mapping[str, PackedTensor]
    digests: Mapping[str, str]
    metadata: Mapping[str, str | int] = field(default_factory=lambda: dict(SNAPSHOT_METADATA))
    base_version: WeightVersion | None = None

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors on the wire."""
        return sum(packed.num_bytes for packed in self.tensors.values())


def digest(name: str, packed: PackedTensor) -> str:
    """Hex BLAKE2b-128 of a tensor and of everything needed to read it."""
    state = hashlib.blake2b(f"{name}|{packed.format.value}|{packed.shape}|".encode(), digest_size=16)
    state.update(np.ascontiguousarray(packed.payload).data)
    state.update(np.ascontiguousarray(packed.scales).data)
    return state.hexdigest()


def make_snapshot(version: WeightVersion, packed: Mapping[str, PackedTensor]) -> WeightSnapshot:
    """A full snapshot of `published_view`'s result. The bytes are shared, not copied: do not write to them."""
    return WeightSnapshot(version=version, tensors=dict(packed), digests=digests(packed))


def digests(packed: Mapping[str, PackedTensor]) -> dict[str, str]:
    """The digest of each tensor, by name; as many at once as torch has threads."""
    with ThreadPoolExecutor(torch.get_num_threads()) as pool:
        return dict(zip(packed, pool.map(digest, packed.keys(), packed.values()), strict=True))


def verify(snapshot: WeightSnapshot, expected: Mapping[str, tuple[int, ...]]) -> None:
    """Check that a snapshot holds exactly the expected parameters, undamaged, in the format their names demand.

    Args:
        snapshot: What arrived.
        expected: Name and shape of every parameter of the receiving model (`transformer.parameter_shapes`).

    Raises:
        SnapshotError: Names the first tensor (or lists the names) at fault.
    """
    if dict(snapshot.metadata) != dict(SNAPSHOT_METADATA):
        raise SnapshotError(
            f"snapshot {snapshot.version}: must be written as {dict(SNAPSHOT_METADATA)}, "
            f"got {dict(snapshot.metadata)}; run the same release on both sides"
        )
    missing, extra = expected.keys() - snapshot.tensors.keys(), snapshot.tensors.keys() - expected.keys()
    if missing or extra:
        raise SnapshotError(
            f"snapshot {snapshot.version}: must hold exactly the model's parameters, got missing {sorted(missing)} and "
            f"extra {sorted(extra)}; publish from the same model configuration"
        )
    for name, shape in expected.items():
        packed = snapshot.tensors[name]
        _check_layout(f"snapshot {snapshot.version}: {name}", packed, tensor_format(name), tuple(shape))
    for name, found in digests(snapshot.tensors).items():
        if found != snapshot.digests.get(name):
            raise SnapshotError(
                f"snapshot {snapshot.version}: {name}: digest must be {snapshot.digests.get(name)}, got {found}; "
                "the bytes changed on the way: fetch the snapshot again"
            )


def _check_layout(where: str, packed: PackedTensor, format: Format, shape: tuple[int, ...]) -> None:
    """Check declared and actual layout of one tensor."""
    if packed.format is not format:
        raise SnapshotError(f"{where}: format must be {format.value}, got {packed.format.value}; publish it again")
    if packed.shape != shape:
        raise SnapshotError(f"{where}: shape must be {shape}, got {packed.shape}; the models differ in size")
    if format is Format.MXFP4:
        scales_shape = (*shape[:-1], shape[-1] // BLOCK)
        layout = ((*scales_shape, BLOCK_BYTES), scales_shape)
    else:
        layout = ((*shape, PLAIN_DTYPES[format].itemsize), (0,))
    arrays = (packed.payload, packed.scales)
    if tuple(array.shape for array in arrays) != layout or any(array.dtype != np.uint8 for array in arrays):
        got = [(array.dtype.name, array.shape) for array in arrays]
        raise SnapshotError(
            f"{where}: payload and scales must be uint8 of shapes {layout}, got {got}; publish it again"
        )


class CodeChanges(NamedTuple):
    """How much of one MXFP4 tensor differs between two versions: 4-bit codes, and the scale bytes of its blocks."""

    num_codes_changed: int
    num_codes: int
    num_scales_changed: int
    num_scales: int

    @property
    def is_still(self) -> bool:
        """Whether both versions hold the same bytes."""
        return not self.num_codes_changed and not self.num_scales_changed


def codes_changed(old: Mapping[str, PackedTensor], new: Mapping[str, PackedTensor]) -> dict[str, CodeChanges]:
    """How much an update moved each MXFP4 tensor; what is published in bf16 or fp32 has no codes.

    Raises:
        SnapshotError: The two sets of tensors differ in names or shapes.
    """
    if {name: packed.shape for name, packed in old.items()} != {name: packed.shape for name, packed in new.items()}:
        raise SnapshotError(
            f"codes_changed: both sides must hold the same parameters, got {len(old)} and {len(new)} tensors "
            "that differ in name or shape; compare versions of one model"
        )
    return {name: _changes(before, new[name]) for name, before in old.items() if before.format is Format.MXFP4}


def _changes(old: PackedTensor, new: PackedTensor) -> CodeChanges:
    # Few codes change in a step: all are compared a word of sixteen at a time, and only the words that differ closer.
    before, after = (np.ascontiguousarray(packed.payload).reshape(-1).view(np.uint64) for packed in (old, new))
    words = before != after
    differs = (before[words] ^ after[words]).view(np.uint8)  # two codes a byte
    return CodeChanges(
        num_codes_changed=int(np.count_nonzero(differs & 0x0F) + np.count_nonzero(differs >> 4)),
        num_codes=2 * old.payload.size,
        num_scales_changed=int(np.count_nonzero(old.scales != new.scales)),
        num_scales=old.scales.size,
    )

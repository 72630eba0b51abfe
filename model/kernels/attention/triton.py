"""Paged attention on a GPU, in Triton: FlashAttention-2 (Dao 2023) for prefill, split over the keys for decoding.

A program takes a tile of rows, (new token, query head) pairs that share one key-value head, and walks over blocks of
keys at fixed absolute positions, from the first that a window leaves to its newest token. Keys that a row does not see
change none of its bits: they multiply sums by exactly 1 and add exactly 0. The sink enters once, as the first term of
the denominator.

A sequence's keys are cut into splits, at fixed absolute positions too. Decoding gives each split a program of its own,
whose sums a second kernel merges in order; prefill merges the same splits in the same order in one program. So with
`batch_invariant` a row's operations do not depend on the other rows, on paging, or on how its prompt was cut into
chunks. Without it prefill makes one split, and decoding as many as fill the device.

Products take bf16 operands where queries are bf16 (weights of the softmax are rounded to bf16, once), else fp32;
scores, softmax and sums are fp32, and the softmax's denominator sums weights before they are rounded.

What the interpreter cannot show: that matrix instructions of 16 rows and of more round alike (decoding and prefill then
agree to the last bit; `scripts/gpu_check.py` compares them), races, and speed.

Shapes: as in `reference.py`; L tiles, P splits.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton

from model.kernels.attention.reference import Pages, PageTable
from model.kernels.attention.triton_kernels import attend_kernel, combine_kernel
from model.kernels.attention.triton_pages import FP8, INT8, kind_of, storage
from model.kernels.cpu.build import KernelError
from model.kernels.gpu.aot import AotSpec
from model.kernels.gpu.launch import launch

LOG2_E = 1.4426950408889634
WHOLE = 1 << 30
"""A split that no sequence fills."""


class Config(NamedTuple):
    """Sizes of a program: rows of a prefill and a decode tile, keys of a block, warps and stages of each."""

    rows: int
    heads: int
    """Most query heads of a tile."""
    keys: int
    warps: int
    decode_warps: int
    stages: int


CONFIGS: dict[tuple[str, int], Config] = {
    ("bf16", 64): Config(rows=128, heads=64, keys=64, warps=8, decode_warps=4, stages=3),
    ("bf16", 128): Config(rows=64, heads=64, keys=32, warps=8, decode_warps=4, stages=3),
    ("bf16", 256): Config(rows=64, heads=32, keys=32, warps=8, decode_warps=4, stages=2),
    ("bf16", 1024): Config(rows=16, heads=16, keys=32, warps=8, decode_warps=8, stages=2),
    ("bytes", 64): Config(rows=64, heads=64, keys=32, warps=4, decode_warps=4, stages=3),
    ("bytes", 128): Config(rows=64, heads=64, keys=32, warps=8, decode_warps=4, stages=2),
    ("bytes", 256): Config(rows=64, heads=32, keys=32, warps=8, decode_warps=4, stages=2),
    ("bytes", 1024): Config(rows=16, heads=16, keys=32, warps=8, decode_warps=8, stages=2),
    ("fp32", 64): Config(rows=32, heads=32, keys=32, warps=8, decode_warps=8, stages=1),
    ("fp32", 128): Config(rows=32, heads=32, keys=32, warps=8, decode_warps=8, stages=1),
    ("fp32", 1024): Config(rows=16, heads=16, keys=16, warps=8, decode_warps=8, stages=1),
}
"""By what is multiplied (bf16, bf16 from bytes with scales, fp32) and largest head dim. Each fits into the 99 KB of
shared memory of the smallest NVIDIA target and, with fewer stages (which the compiler chooses), into gfx942's 64."""

SPLIT_KEYS = 1024
"""Keys of a split in batch-invariant mode: enough that merging costs little, few enough that long contexts spread."""


class Tiling(NamedTuple):
    """Which new tokens each tile holds, int32 [L]; made once a step and shared by all layers.

    Tile i holds `tokens` tokens of sequence `sequence_L[i]` from the `token_L[i]`-th new one on; tiles after the last
    have sequence N.
    """

    sequence_L: torch.Tensor
    token_L: torch.Tensor
    first_N: torch.Tensor
    """Packed index of each sequence's first new token."""
    tokens: int


def tiling(table: PageTable, num_tokens: int, tokens: int) -> Tiling:
    """Cut every sequence's new tokens into tiles of `tokens`. Never waits for the device, so it can be captured."""
    counts_N = table.counts_N.long()
    num_sequences, device = len(counts_N), counts_N.device
    tiles_N = (counts_N + tokens - 1) // tokens
    ends_N = tiles_N.cumsum(0)
    index_L = torch.arange((num_tokens + num_sequences * (tokens - 1)) // tokens, device=device)
    sequence_L = torch.searchsorted(ends_N, index_L, right=True)
    begin_N = ends_N - tiles_N
    begin_L = begin_N[sequence_L.clamp(max=num_sequences - 1)]
    first_N = counts_N.cumsum(0) - counts_N
    return Tiling(sequence_L.int(), ((index_L - begin_L) * tokens).int(), first_N.int(), tokens)


def paged_attention(
    q_THd: torch.Tensor,
    keys: Pages,
    values: Pages,
    table: PageTable,
    *,
    scale: float,
    window: int = 0,
    sinks_H: torch.Tensor | None = None,
    batch_invariant: bool = True,
    tiles: Tiling | None = None,
) -> torch.Tensor:
    """As `reference.paged_attention`; `tiles` spares cutting the batch into tiles again in every layer.

    A batch with at most one new token a sequence is decoded, any other is prefilled, its single tokens too.
    """
    num_tokens, num_heads, dim = q_THd.shape
    num_kv_heads, value_dim = values.rows_SGd.shape[1:]
    kinds = kind_of(keys), kind_of(values)
    out_THe = q_THd.new_empty(num_tokens, num_heads, value_dim)
    if not num_tokens:
        return out_THe
    computed = _computed(q_THd, keys, values)
    q_THd = q_THd.to(torch.float32 if computed == "fp32" else torch.bfloat16)
    q_THd = q_THd if q_THd.stride(-1) == 1 else q_THd.contiguous()
    shape = _shape(dim, value_dim)
    config = _config(computed, shape)
    group = num_heads // num_kv_heads
    if tiles is None:
        tiles = tiling(table, num_tokens, tile_tokens(q_THd, keys, values, len(table.counts_N)))
    decoding = tiles.tokens == 1
    heads = min(group, config.heads if decoding else config.rows)
    rows = max(16, triton.next_power_of_2(heads)) if decoding else config.rows
    num_tiles = len(tiles.sequence_L)
    head_programs = num_kv_heads * triton.cdiv(group, heads)

    context = table.pages_NB.shape[1] * table.page_size
    if batch_invariant:
        split_keys = SPLIT_KEYS
    elif decoding:
        split_keys = _split_keys(q_THd.device, num_tiles * head_programs, min(window or context, context), config.keys)
    else:
        split_keys = WHOLE
    num_splits = 1
    if decoding:
        num_splits = min(
            triton.cdiv(context, split_keys), (min(window or context, context) + split_keys - 2) // split_keys + 1
        )
    partial = num_splits > 1
    sums = q_THd.new_empty(num_tokens * num_heads * num_splits * (value_dim + 2) if partial else 1, dtype=torch.float32)

    key_rows, key_scales = storage(keys)
    value_rows, value_scales = storage(values)
    in_keys = (
        value_rows.data_ptr() == key_rows.data_ptr()
        and value_scales.data_ptr() == key_scales.data_ptr()
        and value_rows.stride() == key_rows.stride()
        and kinds[0] == kinds[1]
        and value_dim == shape["MAIN"] == shape["VALUE_WIDTH"]
    )
    sinks = out_THe if sinks_H is None else sinks_H
    visible = window or WHOLE
    launch(
        attend_kernel,
        (num_tiles, head_programs, num_splits),
        q_THd,
        out_THe,
        sums,
        key_rows,
        key_scales,
        value_rows,
        value_scales,
        table.pages_NB,
        table.starts_N,
        table.counts_N,
        tiles.first_N,
        tiles.sequence_L,
        tiles.token_L,
        sinks,
        scale * LOG2_E,
        visible,
        len(table.counts_N),
        group,
        split_keys,
        *q_THd.stride()[:2],
        table.pages_NB.stride(0),
        *key_rows.stride()[:2],
        *key_scales.stride()[:2],
        *value_rows.stride()[:2],
        *value_scales.stride()[:2],
        TOKENS=tiles.tokens,
        HEADS=heads,
        ROWS=rows,
        KEYS=config.keys,
        PAGE_SIZE=table.page_size,
        KEY_KIND=kinds[0],
        VALUE_KIND=kinds[1],
        VALUES_IN_KEYS=in_keys,
        HAS_SINKS=sinks_H is not None,
        PARTIAL=partial,
        FOLD=split_keys != WHOLE,
        **shape,
        num_warps=config.decode_warps if decoding else config.warps,
        num_stages=config.stages,
    )
    if partial:
        combined = min(4, triton.next_power_of_2(num_heads))
        launch(
            combine_kernel,
            (num_tiles, triton.cdiv(num_heads, combined)),
            sums,
            out_THe,
            table.starts_N,
            tiles.first_N,
            tiles.sequence_L,
            tiles.token_L,
            sinks,
            visible,
            len(table.counts_N),
            num_heads,
            split_keys,
            num_splits,
            HEADS=combined,
            VALUE_DIM=value_dim,
            VALUE_WIDTH=shape["VALUE_WIDTH"],
            HAS_SINKS=sinks_H is not None,
            num_warps=4,
        )
    return out_THe


def tile_tokens(q_THd: torch.Tensor, keys: Pages, values: Pages, num_sequences: int) -> int:
    """New tokens of a tile of such a batch, for `tiling`."""
    num_tokens, num_heads, dim = q_THd.shape
    if num_tokens <= num_sequences:
        return 1
    num_kv_heads, value_dim = values.rows_SGd.shape[1:]
    rows = _config(_computed(q_THd, keys, values), _shape(dim, value_dim)).rows
    return max(1, rows // (num_heads // num_kv_heads))


def _shape(dim: int, value_dim: int) -> dict[str, int]:
    """Keys are read in two parts whose widths are powers of two, so that 576 is not padded to 1024."""
    main = max(16, 1 << (dim.bit_length() - 1))
    rest = max(16, triton.next_power_of_2(dim - main)) if dim > main else 0
    width = max(16, triton.next_power_of_2(value_dim))
    return {"DIM": dim, "MAIN": main, "REST": rest, "VALUE_DIM": value_dim, "VALUE_WIDTH": width}


def _computed(q_THd: torch.Tensor, keys: Pages, values: Pages) -> str:
    """What is multiplied: fp32 where one of them is fp32, else bf16, perhaps widened from bytes."""
    dtypes = (q_THd.dtype, keys.rows_SGd.dtype, values.rows_SGd.dtype)
    if q_THd.dtype not in (torch.float32, torch.bfloat16):
        raise KernelError(f"attention: queries must be fp32 or bf16, got {q_THd.dtype}; convert them")
    if torch.float32 in dtypes:
        return "fp32"
    return "bf16" if set(dtypes) == {torch.bfloat16} else "bytes"


def _config(name: str, shape: dict[str, int]) -> Config:
    width = max(shape["MAIN"] + shape["REST"], shape["VALUE_WIDTH"])
    fitting = [limit for compute, limit in CONFIGS if compute == name and width <= limit]
    if not fitting:
        raise KernelError(
            f"attention: head dims must be at most 1024, got {shape['DIM']} and {shape['VALUE_DIM']}; use the reference"
        )
    return CONFIGS[name, min(fitting)]


def _split_keys(device: torch.device, num_programs: int, context: int, keys: int) -> int:
    """Keys of a split with which programs, each of at least 256 keys, fill the device three times."""
    processors = torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4
    splits = max(1, min(3 * processors // num_programs, context // 256))
    return triton.cdiv(triton.cdiv(context, splits), keys) * keys


_POINTERS = {
    "sums_ptr": "*fp32",
    "key_scale_ptr": "*fp32",
    "value_scale_ptr": "*fp32",
    "sinks_ptr": "*fp32",
    **dict.fromkeys(
        ["pages_ptr", "starts_ptr", "counts_ptr", "first_ptr", "tile_sequence_ptr", "tile_token_ptr"], "*i32"
    ),
}
_NARROW = ["window", "num_sequences", "group", "pages_stride", "num_heads", "num_splits"]
_NARROW += [f"{what}_scale{head}_stride" for what in ("key", "value") for head in ("", "_head")]


def _spec(
    name: str, *, dtype: str, rows: str, dim: int, value_dim: int, tokens: int, group: int, kind: int = 0, **kw: Any
) -> AotSpec:
    config = _config("bytes" if kind else dtype, _shape(dim, value_dim))
    decoding = tokens == 1
    heads = min(group, config.heads if decoding else config.rows)
    constexprs = {
        "TOKENS": tokens,
        "HEADS": heads,
        "ROWS": max(16, triton.next_power_of_2(heads)) if decoding else config.rows,
        "KEYS": config.keys,
        "PAGE_SIZE": 16,
        "KEY_KIND": kind,
        "VALUE_KIND": kind,
        "VALUES_IN_KEYS": dim != value_dim,
        "HAS_SINKS": True,
        "PARTIAL": decoding,
        "FOLD": True,
        **_shape(dim, value_dim),
    }
    pointers = {"q_ptr": f"*{dtype}", "out_ptr": f"*{dtype}", "key_ptr": rows, "value_ptr": rows, **_POINTERS}
    names = [arg for arg in attend_kernel.arg_names if arg not in constexprs]
    signature = {arg: pointers.get(arg, "fp32" if arg == "scale" else "i32") for arg in names}
    return AotSpec(
        name=name,
        kernel=attend_kernel,
        signature=signature,
        constexprs=constexprs,
        unaligned=[arg for arg in _NARROW if arg in signature],
        num_warps=config.decode_warps if decoding else config.warps,
        num_stages=config.stages,
        **kw,
    )


AOT = [
    _spec(
        "decode",
        dtype="bf16",
        rows="*bf16",
        dim=64,
        value_dim=64,
        tokens=1,
        group=8,
        features=["mma", "wide_load", "async_copy"],
    ),
    _spec(
        "decode_fp8",
        dtype="bf16",
        rows="*u8",
        kind=FP8.value,
        dim=64,
        value_dim=64,
        tokens=1,
        group=8,
        features=["mma"],
    ),
    _spec(
        "decode_int8_128",
        dtype="bf16",
        rows="*i8",
        kind=INT8.value,
        dim=128,
        value_dim=128,
        tokens=1,
        group=4,
        features=["mma"],
    ),
    _spec(
        "decode_latent",
        dtype="bf16",
        rows="*bf16",
        dim=576,
        value_dim=512,
        tokens=1,
        group=128,
        features=["mma", "wide_load", "async_copy"],
    ),
    _spec("decode_fp32", dtype="fp32", rows="*fp32", dim=64, value_dim=64, tokens=1, group=8),
    _spec(
        "prefill",
        dtype="bf16",
        rows="*bf16",
        dim=64,
        value_dim=64,
        tokens=16,
        group=8,
        features=["wide_mma", "wide_load", "async_copy"],
    ),
    _spec(
        "prefill_128",
        dtype="bf16",
        rows="*bf16",
        dim=128,
        value_dim=128,
        tokens=16,
        group=4,
        features=["wide_mma", "wide_load", "async_copy"],
    ),
    _spec(
        "prefill_fp8",
        dtype="bf16",
        rows="*u8",
        kind=FP8.value,
        dim=64,
        value_dim=64,
        tokens=8,
        group=8,
        max_registers=320,
        features=["mma"],
    ),
    _spec(
        "prefill_latent",
        dtype="bf16",
        rows="*bf16",
        dim=576,
        value_dim=512,
        tokens=1,
        group=16,
        features=["mma", "async_copy"],
    ),
    _spec("prefill_fp32", dtype="fp32", rows="*fp32", dim=64, value_dim=64, tokens=4, group=8),
    AotSpec(
        name="combine",
        kernel=combine_kernel,
        signature={
            arg: {"out_ptr": "*bf16", **_POINTERS}.get(arg, "i32")
            for arg in combine_kernel.arg_names
            if arg not in ("HEADS", "VALUE_DIM", "VALUE_WIDTH", "HAS_SINKS")
        },
        constexprs={"HEADS": 4, "VALUE_DIM": 64, "VALUE_WIDTH": 64, "HAS_SINKS": True},
        unaligned=["window", "num_sequences", "num_heads", "num_splits"],
        max_registers=64,
    ),
]

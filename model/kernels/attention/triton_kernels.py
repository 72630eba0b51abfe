"""The kernels of paged attention in Triton; `triton.py` says how they work together and starts them.

Scores are in units of log2: `scale` and sinks are multiplied by log2(e) once, and exponentials are powers of two.

Shapes: rows are (new token, query head) pairs of one key-value head; d values of a query or key, e of a value.
"""

from __future__ import annotations

import triton
import triton.language as tl

from model.kernels.attention.triton_pages import PLAIN, widen
from model.kernels.gpu.interpret import dot, round_to, to_bf16


@triton.jit
def _shifted(largest):
    """What exponents are taken relative to: 0 where nothing has been seen, so that no infinity is subtracted."""
    return tl.where(largest == float("-inf"), 0.0, largest)


@triton.jit
def _sink(sinks_ptr, head, ok, HAS_SINKS: tl.constexpr):
    """The first term of the denominator, as a largest score (log2) and a sum: the head's sink, or nothing."""
    if HAS_SINKS:
        largest = tl.load(sinks_ptr + head, mask=ok, other=0.0).to(tl.float32) * 1.4426950408889634
    else:
        largest = tl.full(head.shape, float("-inf"), tl.float32)
    return largest, tl.where(largest == float("-inf"), 0.0, 1.0)


@triton.jit
def _merge(out, largest, total, part_out, part_largest, part_total):
    """Add one split's sums to those before it; a split in which a row saw nothing changes none of its bits."""
    new_largest = tl.maximum(largest, part_largest)
    shift = _shifted(new_largest)
    keep = tl.exp2(largest - shift)
    take = tl.exp2(part_largest - shift)
    out = tl.math.fma(part_out, tl.broadcast_to(take[:, None], part_out.shape), out * keep[:, None])
    return out, new_largest, tl.math.fma(part_total, take, total * keep)


@triton.jit
def _as_operand(weights, q):
    """Weights in the dtype of the queries: rounded to bf16, or fp32 as they are."""
    if q.dtype == tl.bfloat16:
        return to_bf16(weights)
    else:
        return weights


@triton.jit
def _walk(
    q,
    q_rest,
    position,
    low,
    high,
    pages_ptr,
    key_ptr,
    key_scale_ptr,
    value_ptr,
    value_scale_ptr,
    key_stride,
    key_scale_stride,
    value_stride,
    value_scale_stride,
    scale,
    window,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    DIM: tl.constexpr,
    MAIN: tl.constexpr,
    REST: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    VALUE_WIDTH: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    KEY_KIND: tl.constexpr,
    VALUE_KIND: tl.constexpr,
    VALUES_IN_KEYS: tl.constexpr,
):
    """Softmax sums over the keys at positions low..high-1: weighted values, largest score (log2), sum of weights."""
    out = tl.zeros((ROWS, VALUE_WIDTH), tl.float32)
    largest = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    d = tl.arange(0, MAIN)
    e = tl.arange(0, VALUE_WIDTH)
    for block in range(low // KEYS, tl.cdiv(high, KEYS)):
        at = block * KEYS + tl.arange(0, KEYS)
        at_ok = (at >= low) & (at < high)
        page = tl.load(pages_ptr + at // PAGE_SIZE, mask=at_ok, other=0)
        slot = page.to(tl.int64) * PAGE_SIZE + at % PAGE_SIZE
        key_row = key_ptr + slot * key_stride
        k = tl.load(key_row[:, None] + d[None, :], mask=at_ok[:, None] & (d < DIM)[None, :], other=0)
        k = widen(k, KEY_KIND, q.dtype)
        scores = dot(q, tl.trans(k), tl.zeros((ROWS, KEYS), tl.float32))
        if REST:
            rest = MAIN + tl.arange(0, REST)
            k_rest = tl.load(key_row[:, None] + rest[None, :], mask=at_ok[:, None] & (rest < DIM)[None, :], other=0)
            scores = dot(q_rest, tl.trans(widen(k_rest, KEY_KIND, q.dtype)), scores)
        if KEY_KIND != PLAIN:
            scores *= tl.load(key_scale_ptr + slot * key_scale_stride, mask=at_ok, other=0.0)[None, :]
        age = position[:, None] - at[None, :]
        seen = at_ok[None, :] & (age >= 0) & (age < window)
        scores = tl.where(seen, scores * scale, float("-inf"))

        new_largest = tl.maximum(largest, tl.max(scores, 1))
        shift = _shifted(new_largest)
        keep = tl.exp2(largest - shift)
        weights = tl.exp2(scores - shift[:, None])
        total = tl.math.fma(total, keep, tl.sum(weights, 1))
        out = out * keep[:, None]
        largest = new_largest

        if VALUES_IN_KEYS:
            v = k
        else:
            value_at = (value_ptr + slot * value_stride)[:, None] + e[None, :]
            v = tl.load(value_at, mask=at_ok[:, None] & (e < VALUE_DIM)[None, :], other=0)
            v = widen(v, VALUE_KIND, q.dtype)
        if VALUE_KIND != PLAIN:
            weights *= tl.load(value_scale_ptr + slot * value_scale_stride, mask=at_ok, other=0.0)[None, :]
        out = dot(_as_operand(weights, q), v, out)
    return out, largest, total


@triton.jit
def attend_kernel(
    q_ptr,
    out_ptr,
    sums_ptr,
    key_ptr,
    key_scale_ptr,
    value_ptr,
    value_scale_ptr,
    pages_ptr,
    starts_ptr,
    counts_ptr,
    first_ptr,
    tile_sequence_ptr,
    tile_token_ptr,
    sinks_ptr,
    scale,
    window,
    num_sequences,
    group,
    split_keys,
    q_stride,
    q_head_stride,
    pages_stride,
    key_stride,
    key_head_stride,
    key_scale_stride,
    key_scale_head_stride,
    value_stride,
    value_head_stride,
    value_scale_stride,
    value_scale_head_stride,
    TOKENS: tl.constexpr,
    HEADS: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    DIM: tl.constexpr,
    MAIN: tl.constexpr,
    REST: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    VALUE_WIDTH: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    KEY_KIND: tl.constexpr,
    VALUE_KIND: tl.constexpr,
    VALUES_IN_KEYS: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    PARTIAL: tl.constexpr,
    FOLD: tl.constexpr,
):
    """One tile of rows: all of its keys, or one split of them (`PARTIAL`), whose sums then go to `sums_ptr`.

    `scale` is in units of log2; `FOLD` walks split by split, else there is one split. `window` is never 0.
    """
    tile = tl.program_id(0)
    head_blocks = tl.cdiv(group, HEADS)
    kv_head = (tl.program_id(1) // head_blocks).to(tl.int64)
    sequence = tl.load(tile_sequence_ptr + tile)
    if sequence >= num_sequences:
        return
    first_token = tl.load(tile_token_ptr + tile)
    start = tl.load(starts_ptr + sequence)
    count = tl.load(counts_ptr + sequence)

    row = tl.arange(0, ROWS)
    head = (tl.program_id(1) % head_blocks) * HEADS + row % HEADS
    token = first_token + row // HEADS
    row_ok = (row < TOKENS * HEADS) & (head < group) & (token < count)
    position = tl.where(row_ok, start + token, -1)
    low = tl.maximum(start + first_token - window + 1, 0)
    high = start + tl.minimum(first_token + TOKENS, count)

    packed = (tl.load(first_ptr + sequence) + token).to(tl.int64)
    query_head = kv_head * group + head
    q_row = q_ptr + packed * q_stride + query_head * q_head_stride
    d = tl.arange(0, MAIN)
    q = tl.load(q_row[:, None] + d[None, :], mask=row_ok[:, None] & (d < DIM)[None, :], other=0)
    q_rest = q
    if REST:
        rest = MAIN + tl.arange(0, REST)
        q_rest = tl.load(q_row[:, None] + rest[None, :], mask=row_ok[:, None] & (rest < DIM)[None, :], other=0)

    pages_ptr += sequence.to(tl.int64) * pages_stride
    key_ptr += kv_head * key_head_stride
    key_scale_ptr += kv_head * key_scale_head_stride
    value_ptr += kv_head * value_head_stride
    value_scale_ptr += kv_head * value_scale_head_stride

    e = tl.arange(0, VALUE_WIDTH)
    out_row = packed * (tl.num_programs(1) // head_blocks * group) + query_head
    first = low // split_keys
    last = tl.cdiv(high, split_keys) if FOLD else first + 1
    if PARTIAL:
        first += tl.program_id(2)
        if first >= last:
            return
        last = first + 1
    sum_largest, sum_total = _sink(sinks_ptr, query_head, row_ok, HAS_SINKS)
    sum_out = tl.zeros((ROWS, VALUE_WIDTH), tl.float32)
    for split in range(first, last):
        out, largest, total = _walk(
            q,
            q_rest,
            position,
            tl.maximum(split * split_keys, low),
            tl.minimum((split + 1) * split_keys, high),
            pages_ptr,
            key_ptr,
            key_scale_ptr,
            value_ptr,
            value_scale_ptr,
            key_stride,
            key_scale_stride,
            value_stride,
            value_scale_stride,
            scale,
            window,
            ROWS,
            KEYS,
            DIM,
            MAIN,
            REST,
            VALUE_DIM,
            VALUE_WIDTH,
            PAGE_SIZE,
            KEY_KIND,
            VALUE_KIND,
            VALUES_IN_KEYS,
        )
        if PARTIAL:
            sums_row = sums_ptr + (out_row * tl.num_programs(2) + tl.program_id(2)) * (VALUE_DIM + 2)
            tl.store(sums_row[:, None] + e[None, :], out, mask=row_ok[:, None] & (e < VALUE_DIM)[None, :])
            tl.store(sums_row + VALUE_DIM, largest, mask=row_ok)
            tl.store(sums_row + VALUE_DIM + 1, total, mask=row_ok)
        else:
            sum_out, sum_largest, sum_total = _merge(sum_out, sum_largest, sum_total, out, largest, total)
    if not PARTIAL:
        sum_out = sum_out / tl.where(sum_total > 0, sum_total, 1.0)[:, None]  # rows that pad the tile saw nothing
        at = out_ptr + out_row[:, None] * VALUE_DIM + e[None, :]
        tl.store(at, round_to(sum_out, out_ptr), mask=row_ok[:, None] & (e < VALUE_DIM)[None, :])


@triton.jit
def combine_kernel(
    sums_ptr,
    out_ptr,
    starts_ptr,
    first_ptr,
    tile_sequence_ptr,
    tile_token_ptr,
    sinks_ptr,
    window,
    num_sequences,
    num_heads,
    split_keys,
    num_splits,
    HEADS: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    VALUE_WIDTH: tl.constexpr,
    HAS_SINKS: tl.constexpr,
):
    """Merge the splits of one token's heads in order, after the sink."""
    tile = tl.program_id(0)
    sequence = tl.load(tile_sequence_ptr + tile)
    if sequence >= num_sequences:
        return
    token = tl.load(tile_token_ptr + tile)
    position = tl.load(starts_ptr + sequence) + token
    low = tl.maximum(position - window + 1, 0)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    head_ok = head < num_heads
    e = tl.arange(0, VALUE_WIDTH)
    ok = head_ok[:, None] & (e < VALUE_DIM)[None, :]
    largest, total = _sink(sinks_ptr, head, head_ok, HAS_SINKS)
    out = tl.zeros((HEADS, VALUE_WIDTH), tl.float32)
    out_row = (tl.load(first_ptr + sequence) + token).to(tl.int64) * num_heads + head
    first = low // split_keys
    for split in range(first, tl.cdiv(position + 1, split_keys)):
        sums_row = sums_ptr + (out_row * num_splits + split - first) * (VALUE_DIM + 2)
        part_out = tl.load(sums_row[:, None] + e[None, :], mask=ok, other=0.0)
        part_largest = tl.load(sums_row + VALUE_DIM, mask=head_ok, other=float("-inf"))
        part_total = tl.load(sums_row + VALUE_DIM + 1, mask=head_ok, other=0.0)
        out, largest, total = _merge(out, largest, total, part_out, part_largest, part_total)
    out = out / tl.where(total > 0, total, 1.0)[:, None]
    tl.store(out_ptr + out_row[:, None] * VALUE_DIM + e[None, :], round_to(out, out_ptr), mask=ok)

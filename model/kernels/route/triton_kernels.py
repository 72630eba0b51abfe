"""The kernels of routing in Triton: choice and weights, and the schedule; `triton.py` says how they work together.

Shapes: T packed tokens, E experts, K experts a token, N = T K choices, B blocks of rows; bins are the experts, padded
to a power of two.
"""

# Indices of Triton's tensors are typed for its compiler alone.
# pyright: reportArgumentType=false, reportCallIssue=false

from __future__ import annotations

import triton
import triton.language as tl

NEVER: tl.constexpr = tl.constexpr(-(2**31))
"""The key of what is never chosen, below that of minus infinity."""

CLOSED: tl.constexpr = tl.constexpr(-2139095041)
"""The key of minus infinity."""


@triton.jit
def _ordered(x):
    """int32 keys in the order of the floats: -0 equals 0, and the least integer is below minus infinity."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _best(keys, K: tl.constexpr, K_PAD: tl.constexpr):
    """Columns of the K largest keys of each row, int32 [rows, K_PAD], best first; of equal keys the first column."""
    columns = tl.arange(0, keys.shape[1])[None, :]
    rank = tl.arange(0, K_PAD)[None, :]
    found = tl.zeros((keys.shape[0], K_PAD), tl.int32)
    for r in range(K):
        best = tl.argmax(keys, 1)
        found = tl.where(rank == r, best[:, None], found)
        keys = tl.where(columns == best[:, None], NEVER, keys)
    return found


@triton.jit
def _open_groups(keys, scores, TOP_GROUPS: tl.constexpr, GROUP_PAD: tl.constexpr, NUM_GROUPS: tl.constexpr):
    """`keys` with those of closed groups at minus infinity: open are the groups whose two best scores sum highest."""
    ROWS: tl.constexpr = scores.shape[0]
    GROUPS_PAD: tl.constexpr = scores.shape[1] // GROUP_PAD
    scores = scores.reshape(ROWS, GROUPS_PAD, GROUP_PAD)
    first, at = tl.max(scores, 2, return_indices=True)
    others = tl.where(tl.arange(0, GROUP_PAD)[None, None, :] == at[:, :, None], -float("inf"), scores)
    group = tl.arange(0, GROUPS_PAD)[None, :]
    rated = tl.where(group < NUM_GROUPS, _ordered(first + tl.max(others, 2)), NEVER)
    is_open = tl.zeros((ROWS, GROUPS_PAD), tl.int32)
    for _ in range(TOP_GROUPS):
        best = tl.argmax(rated, 1)
        is_open = tl.where(group == best[:, None], 1, is_open)
        rated = tl.where(group == best[:, None], NEVER, rated)
    is_open = is_open[:, :, None].broadcast_to(ROWS, GROUPS_PAD, GROUP_PAD).reshape(ROWS, GROUPS_PAD * GROUP_PAD)
    return tl.where((is_open == 0) & (keys > CLOSED), CLOSED, keys)


@triton.jit
def _route_rows(
    logits_ptr,
    logits_stride,
    selection_bias_ptr,
    chosen_ptr,
    weights_ptr,
    first,
    num_tokens,
    scaling,
    NUM_EXPERTS: tl.constexpr,
    TOP_K: tl.constexpr,
    K_PAD: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    TOP_GROUPS: tl.constexpr,
    GROUP_PAD: tl.constexpr,
    COLUMNS: tl.constexpr,
    SIGMOID: tl.constexpr,
    NORMALIZE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    REPLAY: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Choose for the tokens from `first` on (or read the choice), and weigh.

    Columns are the experts, each group padded to a power of two.
    """
    GROUP: tl.constexpr = NUM_EXPERTS // NUM_GROUPS
    token = first + tl.arange(0, ROWS)
    row_ptr = logits_ptr + tl.minimum(token, num_tokens - 1)[:, None].to(tl.int64) * logits_stride
    column = tl.arange(0, COLUMNS)
    expert = column // GROUP_PAD * GROUP + column % GROUP_PAD
    is_expert = (column % GROUP_PAD < GROUP) & (column // GROUP_PAD < NUM_GROUPS)
    logits = tl.load(row_ptr + expert[None, :], mask=is_expert[None, :], other=-float("inf"))
    largest = tl.max(logits, 1)[:, None]
    exps = tl.exp(logits - largest)
    total = tl.sum(exps, 1)[:, None]

    rank = tl.arange(0, K_PAD)[None, :]
    is_choice = (token < num_tokens)[:, None] & (rank < TOP_K)
    choice_at = token[:, None].to(tl.int64) * TOP_K + rank
    if REPLAY:
        chosen = tl.load(chosen_ptr + choice_at, mask=is_choice, other=0).to(tl.int32)
    else:
        scores = logits
        if HAS_BIAS or NUM_GROUPS > 1:
            scores = tl.sigmoid(logits) if SIGMOID else exps / total
            if HAS_BIAS:
                scores += tl.load(selection_bias_ptr + expert, mask=is_expert, other=0.0)[None, :].to(tl.float32)
            scores = tl.where(is_expert[None, :], scores, -float("inf"))
        keys = tl.where(is_expert[None, :], _ordered(scores), NEVER)
        if NUM_GROUPS > 1:
            keys = _open_groups(keys, scores, TOP_GROUPS, GROUP_PAD, NUM_GROUPS)
        best = _best(keys, TOP_K, K_PAD)
        chosen = best // GROUP_PAD * GROUP + best % GROUP_PAD
        tl.store(chosen_ptr + choice_at, chosen.to(tl.int64), mask=is_choice)

    picked = tl.load(row_ptr + chosen, mask=rank < TOP_K, other=-float("inf"))
    if SIGMOID:
        weights = tl.where(rank < TOP_K, tl.sigmoid(picked), 0.0)
        if NORMALIZE:
            weights = weights / (tl.sum(weights, 1)[:, None] + 1e-20)
    elif NORMALIZE:
        weights = tl.exp(picked - tl.max(picked, 1)[:, None])
        weights = weights / tl.sum(weights, 1)[:, None]
    else:
        weights = tl.exp(picked - largest) / total
    tl.store(weights_ptr + choice_at, weights * scaling, mask=is_choice)


@triton.jit
def _fill_blocks(
    start,
    counts,
    ends,
    expert_of_block_ptr,
    row_of_block_ptr,
    num_blocks,
    BLOCK_ROWS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Blocks `start` to `start` + CHUNK, given each expert's rows [bins] and the row after its last."""
    BINS: tl.constexpr = counts.shape[0]
    blocks = (counts + BLOCK_ROWS - 1) // BLOCK_ROWS
    block_ends = tl.cumsum(blocks, 0)
    block = start + tl.arange(0, CHUNK)
    expert = tl.sum((block_ends[None, :] <= block[:, None]).to(tl.int32), 1)
    first_row = ends - counts - (block_ends - blocks) * BLOCK_ROWS
    is_mine = tl.arange(0, BINS)[None, :] == expert[:, None]
    row = tl.sum(tl.where(is_mine, first_row[None, :], 0), 1) + block * BLOCK_ROWS
    is_block = expert < BINS
    tl.store(expert_of_block_ptr + block, tl.where(is_block, expert, -1), mask=block < num_blocks)
    tl.store(row_of_block_ptr + block, tl.where(is_block, row, 0), mask=block < num_blocks)


@triton.jit
def _store_ends(first_row_ptr, ends, NUM_EXPERTS: tl.constexpr):
    """The E + 1 borders between experts: 0, then each expert's end."""
    expert = tl.arange(0, ends.shape[0])
    tl.store(first_row_ptr + 1 + expert, ends, mask=expert < NUM_EXPERTS)
    tl.store(first_row_ptr, 0)


@triton.jit
def _place(chosen_ptr, order_ptr, start, stop, place, STEP: tl.constexpr):
    """Put the choices from `start` to `stop`, in order, where the next row of each expert is: `place` [bins]."""
    bins = tl.arange(0, place.shape[0])
    for first in range(start, stop, STEP):
        choice = first + tl.arange(0, STEP)
        expert = tl.load(chosen_ptr + choice, mask=choice < stop, other=-1).to(tl.int32)
        mine = (bins[None, :] == expert[:, None]).to(tl.int32)
        row = tl.sum(mine * (place[None, :] + tl.cumsum(mine, 0) - mine), 1)
        tl.store(order_ptr + row, choice, mask=choice < stop)
        place += tl.sum(mine, 0)


@triton.jit
def _sort_choices(
    chosen_ptr,
    order_ptr,
    first_row_ptr,
    expert_of_block_ptr,
    row_of_block_ptr,
    num_choices,
    num_blocks,
    NUM_EXPERTS: tl.constexpr,
    BINS: tl.constexpr,
    CHOICES: tl.constexpr,
    STEP: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """The whole schedule of at most CHOICES choices, in one program."""
    choice = tl.arange(0, CHOICES)
    is_choice = choice < num_choices
    expert = tl.load(chosen_ptr + choice, mask=is_choice, other=0).to(tl.int32)
    counts = tl.histogram(expert, BINS, mask=is_choice)
    ends = tl.cumsum(counts, 0)
    _store_ends(first_row_ptr, ends, NUM_EXPERTS)
    _place(chosen_ptr, order_ptr, 0, num_choices, ends - counts, STEP)
    for start in range(0, num_blocks, CHUNK):
        _fill_blocks(start, counts, ends, expert_of_block_ptr, row_of_block_ptr, num_blocks, BLOCK_ROWS, CHUNK)


@triton.jit
def schedule_kernel(
    chosen_ptr,
    order_ptr,
    first_row_ptr,
    expert_of_block_ptr,
    row_of_block_ptr,
    num_choices,
    num_blocks,
    NUM_EXPERTS: tl.constexpr,
    BINS: tl.constexpr,
    CHOICES: tl.constexpr,
    STEP: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """The schedule of few choices. One program."""
    _sort_choices(
        chosen_ptr, order_ptr, first_row_ptr, expert_of_block_ptr, row_of_block_ptr, num_choices, num_blocks,
        NUM_EXPERTS, BINS, CHOICES, STEP, BLOCK_ROWS, CHUNK,
    )  # fmt: skip


@triton.jit
def count_kernel(chosen_ptr, counts_ptr, num_choices, BINS: tl.constexpr, CHUNK: tl.constexpr):
    """Choices of each expert in a chunk."""
    choice = tl.program_id(0) * CHUNK + tl.arange(0, CHUNK)
    is_choice = choice < num_choices
    expert = tl.load(chosen_ptr + choice, mask=is_choice, other=0).to(tl.int32)
    tl.store(counts_ptr + tl.program_id(0) * BINS + tl.arange(0, BINS), tl.histogram(expert, BINS, mask=is_choice))


@triton.jit
def scan_kernel(
    counts_ptr,
    total_ptr,
    first_row_ptr,
    num_chunks,
    NUM_EXPERTS: tl.constexpr,
    BINS: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Turn each chunk's counts into those of the chunks before it; totals and borders of all. One program."""
    bins = tl.arange(0, BINS)
    total = tl.zeros((BINS,), tl.int32)
    for first in range(0, num_chunks, ROWS):
        chunk = first + tl.arange(0, ROWS)
        counts_ptrs = counts_ptr + chunk[:, None] * BINS + bins[None, :]
        is_chunk = (chunk < num_chunks)[:, None]
        counts = tl.load(counts_ptrs, mask=is_chunk, other=0)
        tl.store(counts_ptrs, total[None, :] + tl.cumsum(counts, 0) - counts, mask=is_chunk)
        total += tl.sum(counts, 0)
    tl.store(total_ptr + bins, total)
    _store_ends(first_row_ptr, tl.cumsum(total, 0), NUM_EXPERTS)


@triton.jit
def scatter_kernel(
    chosen_ptr,
    before_ptr,
    total_ptr,
    order_ptr,
    num_choices,
    BINS: tl.constexpr,
    CHUNK: tl.constexpr,
    STEP: tl.constexpr,
):
    """Put a chunk's choices into their rows."""
    bins = tl.arange(0, BINS)
    total = tl.load(total_ptr + bins)
    place = tl.cumsum(total, 0) - total + tl.load(before_ptr + tl.program_id(0) * BINS + bins)
    start = tl.program_id(0) * CHUNK
    _place(chosen_ptr, order_ptr, start, tl.minimum(start + CHUNK, num_choices), place, STEP)


@triton.jit
def blocks_kernel(
    total_ptr,
    expert_of_block_ptr,
    row_of_block_ptr,
    num_blocks,
    BLOCK_ROWS: tl.constexpr,
    BINS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """CHUNK blocks of the schedule, from the choices of each expert."""
    counts = tl.load(total_ptr + tl.arange(0, BINS))
    ends = tl.cumsum(counts, 0)
    start = tl.program_id(0) * CHUNK
    _fill_blocks(start, counts, ends, expert_of_block_ptr, row_of_block_ptr, num_blocks, BLOCK_ROWS, CHUNK)


@triton.jit
def route_kernel(
    logits_ptr,
    logits_stride,
    selection_bias_ptr,
    chosen_ptr,
    weights_ptr,
    num_tokens,
    scaling,
    NUM_EXPERTS: tl.constexpr,
    TOP_K: tl.constexpr,
    K_PAD: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    TOP_GROUPS: tl.constexpr,
    GROUP_PAD: tl.constexpr,
    COLUMNS: tl.constexpr,
    SIGMOID: tl.constexpr,
    NORMALIZE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    REPLAY: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Choices and weights alone, `ROWS` tokens a program."""
    _route_rows(
        logits_ptr, logits_stride, selection_bias_ptr, chosen_ptr, weights_ptr,
        tl.program_id(0) * ROWS, num_tokens, scaling,
        NUM_EXPERTS, TOP_K, K_PAD, NUM_GROUPS, TOP_GROUPS, GROUP_PAD, COLUMNS,
        SIGMOID, NORMALIZE, HAS_BIAS, REPLAY, ROWS,
    )  # fmt: skip


@triton.jit
def route_and_schedule_kernel(
    logits_ptr,
    logits_stride,
    selection_bias_ptr,
    chosen_ptr,
    weights_ptr,
    num_tokens,
    scaling,
    order_ptr,
    first_row_ptr,
    expert_of_block_ptr,
    row_of_block_ptr,
    num_blocks,
    NUM_EXPERTS: tl.constexpr,
    TOP_K: tl.constexpr,
    K_PAD: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    TOP_GROUPS: tl.constexpr,
    GROUP_PAD: tl.constexpr,
    COLUMNS: tl.constexpr,
    SIGMOID: tl.constexpr,
    NORMALIZE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    REPLAY: tl.constexpr,
    ROWS: tl.constexpr,
    BINS: tl.constexpr,
    CHOICES: tl.constexpr,
    STEP: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Choices, weights and schedule of few tokens. One program."""
    for first in range(0, num_tokens, ROWS):
        _route_rows(
            logits_ptr, logits_stride, selection_bias_ptr, chosen_ptr, weights_ptr, first, num_tokens, scaling,
            NUM_EXPERTS, TOP_K, K_PAD, NUM_GROUPS, TOP_GROUPS, GROUP_PAD, COLUMNS,
            SIGMOID, NORMALIZE, HAS_BIAS, REPLAY, ROWS,
        )  # fmt: skip
    tl.debug_barrier()  # other threads of this program read the choices back
    _sort_choices(
        chosen_ptr, order_ptr, first_row_ptr, expert_of_block_ptr, row_of_block_ptr, num_tokens * TOP_K, num_blocks,
        NUM_EXPERTS, BINS, CHOICES, STEP, BLOCK_ROWS, CHUNK,
    )  # fmt: skip

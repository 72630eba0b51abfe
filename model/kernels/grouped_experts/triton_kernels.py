"""The kernels of `triton.py`: products of sorted rows with the matrices of their experts.

A program multiplies one block of the schedule (rows of one expert) with BLOCK_N columns. Weights are read in the layout
of the checkpoint: two codes a byte along the reduced dimension, one scale byte for 32 of them. A weight is

    FORMAT "scaled"   given packed to `tl.dot_scaled`, which decodes it on the way into the matrix instruction
    FORMAT "decoded"  decoded here and given to `tl.dot`; exact for every scale byte, and the only one for fp32 inputs
    FORMAT "dense"    not packed, in the dtype of the rows

Scale bytes past the end of a row are read as 127 and codes as 0, so that what lies there adds 0 and never NaN.

Invariant: fp32 accumulation over k in order, in steps of BLOCK_K, so a row's bits depend on the row, the tile's sizes
and SPLITS, and not on other rows.
"""

# Indices of Triton's tensors are typed for its compiler alone.
# pyright: reportArgumentType=false, reportCallIssue=false

from __future__ import annotations

import triton
import triton.language as tl

from model.kernels.gpu.interpret import INTERPRET, dot, round_to, to_bf16


@triton.jit
def decode(codes, scales, N: tl.constexpr, K: tl.constexpr):
    """uint8 [N, K/2] and [N, K/32] to fp32 [N, K]; exact, and NaN for byte 255."""
    code = tl.join(codes & 15, codes >> 4).reshape(N, K).to(tl.uint32)
    magnitude = code & 7
    bits = tl.where(magnitude > 1, 0x3F000000 + (magnitude << 22), magnitude * 0x3F000000) | ((code & 8) << 28)
    byte = scales.to(tl.uint32)
    scale = tl.where(byte == 0, 0x00400000, tl.where(byte == 255, 0x7FC00000, byte << 23))
    scale = scale.to(tl.uint32).to(tl.float32, bitcast=True)
    values = bits.to(tl.uint32).to(tl.float32, bitcast=True).reshape(N, K // 32, 32)
    return (values * scale[:, :, None]).reshape(N, K)


@triton.jit
def product(
    x_row_ptr,
    is_row,
    w_ptr,
    w_stride,
    s_ptr,
    s_stride,
    column,
    is_column,
    depth,
    first_k,
    last_k,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    FORMAT: tl.constexpr,
):
    """fp32 [BLOCK_M, BLOCK_N]: rows times the matrix rows `column`, over k from `first_k` to `last_k`."""
    column = column.to(tl.int64)
    k = tl.arange(0, BLOCK_K)
    x_ptrs = x_row_ptr[:, None] + k[None, :]
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    if FORMAT == "dense":
        w_ptrs = w_ptr + column[:, None] * w_stride + k[None, :]
        for start in range(first_k, last_k, BLOCK_K):
            is_k = (k < depth - start)[None, :]
            x = tl.load(x_ptrs + start, mask=is_row[:, None] & is_k, other=0.0)
            w = tl.load(w_ptrs + start, mask=is_column[:, None] & is_k, other=0.0)
            acc = dot(x, w.T, acc)
    else:
        byte, block = tl.arange(0, BLOCK_K // 2), tl.arange(0, BLOCK_K // 32)
        w_ptrs = w_ptr + column[:, None] * w_stride + byte[None, :]
        s_ptrs = s_ptr + column[:, None] * s_stride + block[None, :]
        for start in range(first_k, last_k, BLOCK_K):
            left = depth - start
            x = tl.load(x_ptrs + start, mask=is_row[:, None] & (k < left)[None, :], other=0.0)
            codes = tl.load(w_ptrs + start // 2, mask=is_column[:, None] & (byte < left // 2)[None, :], other=0)
            scales = tl.load(s_ptrs + start // 32, mask=is_column[:, None] & (block < left // 32)[None, :], other=127)
            if FORMAT == "scaled":
                acc = tl.dot_scaled(x, None, "bf16", codes.T, scales, "e2m1", acc)
            else:
                w = decode(codes, scales, BLOCK_N, BLOCK_K)
                if x.dtype == tl.bfloat16 and not INTERPRET:
                    w = to_bf16(w)
                acc = dot(x, w.T, acc)
    return acc


@triton.jit
def _locate(num_blocks, num_tiles, GROUP_M: tl.constexpr):
    """Block of rows and tile of columns of this program: GROUP_M blocks share each weight tile while it is cached."""
    program = tl.program_id(0)
    return tl.swizzle2d(program // num_tiles, program % num_tiles, num_blocks, num_tiles, GROUP_M)


@triton.jit
def _share(depth, split, SPLITS: tl.constexpr, BLOCK_K: tl.constexpr):
    """First and last k of one of SPLITS parts; parts are whole steps."""
    steps = tl.cdiv(tl.cdiv(depth, BLOCK_K), SPLITS)
    return split * steps * BLOCK_K, tl.minimum(depth, (split + 1) * steps * BLOCK_K)


@triton.jit
def unit(gate, up, limit, alpha, CLAMP: tl.constexpr):
    """SwiGLU, or gpt-oss's clamped form; fp32."""
    if CLAMP:
        gate = tl.minimum(gate, limit)
        up = tl.minimum(tl.maximum(up, -limit), limit) + 1.0
        return gate * tl.sigmoid(alpha * gate) * up
    else:
        return gate * tl.sigmoid(gate) * up


@triton.jit
def gate_up_kernel(
    x_ptr,
    x_stride,
    order_ptr,
    first_row_ptr,
    expert_of_block_ptr,
    row_of_block_ptr,
    w_ptr,
    w_expert_stride,
    w_stride,
    s_ptr,
    s_expert_stride,
    s_stride,
    bias_ptr,
    out_ptr,
    num_blocks,
    num_rows,
    hidden,
    depth,
    limit,
    alpha,
    TOP_K: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    CLAMP: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
    FORMAT: tl.constexpr,
):
    """The unit of gate x and up x of the tokens in sorted order, [N, F] in the dtype of x.

    With SPLITS > 1 the fp32 parts [SPLITS, N, 2 F] of the products instead.
    Neighbouring columns of a tile are a gate row and its up row, so that the unit needs no exchange between threads.
    """
    block, tile = _locate(num_blocks, tl.cdiv(hidden, BLOCK_N // 2), GROUP_M)
    expert = tl.load(expert_of_block_ptr + block)
    if expert < 0:
        return
    row = tl.load(row_of_block_ptr + block) + tl.arange(0, BLOCK_M)
    is_row = row < tl.load(first_row_ptr + expert + 1)
    token = tl.load(order_ptr + row, mask=is_row, other=0) // TOP_K
    at = tl.arange(0, BLOCK_N)
    of_pair = tile * (BLOCK_N // 2) + at // 2
    first_k, last_k = _share(depth, tl.program_id(1), SPLITS, BLOCK_K)
    expert = expert.to(tl.int64)
    acc = product(
        x_ptr + token.to(tl.int64) * x_stride, is_row,
        w_ptr + expert * w_expert_stride, w_stride, s_ptr + expert * s_expert_stride, s_stride,
        of_pair + at % 2 * hidden, of_pair < hidden, depth, first_k, last_k,
        BLOCK_M, BLOCK_N, BLOCK_K, FORMAT,
    )  # fmt: skip
    gate, up = acc.reshape(BLOCK_M, BLOCK_N // 2, 2).split()
    pair = tile * (BLOCK_N // 2) + tl.arange(0, BLOCK_N // 2)
    is_pair = pair < hidden
    mask = is_row[:, None] & is_pair[None, :]
    row = row.to(tl.int64)
    if SPLITS > 1:
        part_ptr = out_ptr + ((tl.program_id(1).to(tl.int64) * num_rows + row) * 2 * hidden)[:, None] + pair[None, :]
        tl.store(part_ptr, gate, mask=mask)
        tl.store(part_ptr + hidden, up, mask=mask)
    else:
        if HAS_BIAS:
            bias = bias_ptr + expert * 2 * hidden + pair
            gate += tl.load(bias, mask=is_pair, other=0.0).to(tl.float32)[None, :]
            up += tl.load(bias + hidden, mask=is_pair, other=0.0).to(tl.float32)[None, :]
        act = unit(gate, up, limit, alpha, CLAMP)
        tl.store(out_ptr + row[:, None] * hidden + pair[None, :], round_to(act, out_ptr), mask=mask)


@triton.jit
def unit_kernel(
    part_ptr,
    order_ptr,
    chosen_ptr,
    bias_ptr,
    act_ptr,
    num_rows,
    hidden,
    limit,
    alpha,
    HAS_BIAS: tl.constexpr,
    CLAMP: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """What `gate_up_kernel` does after its product, on the sum of its parts in order; BLOCK columns of a row."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_column = column < hidden
    gate = tl.zeros((BLOCK,), tl.float32)
    up = tl.zeros((BLOCK,), tl.float32)
    for split in range(SPLITS):
        at = part_ptr + (split * num_rows.to(tl.int64) + row) * 2 * hidden + column
        gate += tl.load(at, mask=is_column, other=0.0)
        up += tl.load(at + hidden, mask=is_column, other=0.0)
    if HAS_BIAS:
        bias = bias_ptr + tl.load(chosen_ptr + tl.load(order_ptr + row)) * 2 * hidden + column
        gate += tl.load(bias, mask=is_column, other=0.0).to(tl.float32)
        up += tl.load(bias + hidden, mask=is_column, other=0.0).to(tl.float32)
    act = unit(gate, up, limit, alpha, CLAMP)
    tl.store(act_ptr + row * hidden + column, round_to(act, act_ptr), mask=is_column)


@triton.jit
def down_kernel(
    act_ptr,
    order_ptr,
    first_row_ptr,
    expert_of_block_ptr,
    row_of_block_ptr,
    w_ptr,
    w_expert_stride,
    w_stride,
    s_ptr,
    s_expert_stride,
    s_stride,
    out_ptr,
    num_blocks,
    num_rows,
    dim,
    depth,
    SPLITS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
    FORMAT: tl.constexpr,
):
    """The product of sorted rows and down, as fp32 parts [SPLITS, T, K, D] at each row's place among the choices."""
    block, tile = _locate(num_blocks, tl.cdiv(dim, BLOCK_N), GROUP_M)
    expert = tl.load(expert_of_block_ptr + block)
    if expert < 0:
        return
    row = tl.load(row_of_block_ptr + block) + tl.arange(0, BLOCK_M)
    is_row = row < tl.load(first_row_ptr + expert + 1)
    choice = tl.load(order_ptr + row, mask=is_row, other=0)
    column = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    first_k, last_k = _share(depth, tl.program_id(1), SPLITS, BLOCK_K)
    expert = expert.to(tl.int64)
    acc = product(
        act_ptr + row.to(tl.int64) * depth, is_row,
        w_ptr + expert * w_expert_stride, w_stride, s_ptr + expert * s_expert_stride, s_stride,
        column, column < dim, depth, first_k, last_k,
        BLOCK_M, BLOCK_N, BLOCK_K, FORMAT,
    )  # fmt: skip
    at = (tl.program_id(1).to(tl.int64) * num_rows + choice) * dim
    tl.store(out_ptr + at[:, None] + column[None, :], acc, mask=is_row[:, None] & (column < dim)[None, :])


@triton.jit
def combine_kernel(
    part_ptr,
    chosen_ptr,
    weights_ptr,
    bias_ptr,
    y_ptr,
    num_rows,
    dim,
    TOP_K: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Over ranks in order, the sum of weight * (sum of parts in order + bias); BLOCK columns of a token."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_column = column < dim
    y = tl.zeros((BLOCK,), tl.float32)
    for rank in range(TOP_K):
        choice = token * TOP_K + rank
        out = tl.zeros((BLOCK,), tl.float32)
        for split in range(SPLITS):
            at = part_ptr + (split * num_rows.to(tl.int64) + choice) * dim + column
            out += tl.load(at, mask=is_column, other=0.0)
        if HAS_BIAS:
            bias = bias_ptr + tl.load(chosen_ptr + choice) * dim + column
            out += tl.load(bias, mask=is_column, other=0.0).to(tl.float32)
        y += out * tl.load(weights_ptr + choice)
    tl.store(y_ptr + token * dim + column, y, mask=is_column)

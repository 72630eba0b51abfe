"""Logprobs of given tokens straight from hidden states, on a GPU in Triton: no tensor of logits is ever made.

    logits = hidden weight^T        z = logits / temperature        logprob = z[id] - log sum e^z

One program multiplies a block of rows with a chunk of the vocabulary and keeps, of each row, the largest z, the sum of
e^(z - largest) and, for the entropy, the sum of e^(z - largest) (z - largest); the program whose chunk holds the id
keeps its z. A second kernel merges the chunks. Chunks, tiles and the order of every sum are fixed, so a row's bits
depend on that row alone.

Products are of bf16 with fp32 accumulators; fp32 hidden states are cut into three bf16 parts whose sum they are, so
nothing of them is lost. Differs from `reference.logprobs` of fp32 logits by rounding only, and like it gives NaN where
a logit is not finite.

What the interpreter cannot show: the matrix instructions on bf16, races, and speed.

Shapes: R rows, D model dim, V vocabulary, C chunks.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from model.kernels.cpu.build import KernelError
from model.kernels.gpu.aot import TARGETS, AotSpec
from model.kernels.gpu.interpret import dot, to_bf16
from model.kernels.gpu.launch import architecture, launch

CHUNK = 1024
"""Tokens of a chunk: enough programs for few rows, and few sums to merge."""

_BACKWARD_CHUNK = 16384
"""Tokens whose logits the backward holds at a time."""


class Config(NamedTuple):
    """Sizes of a program. The same for every number of rows: with few, reading the weight takes longer anyway."""

    rows: int
    columns: int
    depth: int
    warps: int
    stages: int


CONFIGS: dict[tuple[str, bool], Config] = {
    ("sm_80", False): Config(rows=64, columns=128, depth=64, warps=8, stages=3),
    ("sm_90", False): Config(rows=128, columns=128, depth=64, warps=8, stages=3),
    ("sm_100", False): Config(rows=128, columns=128, depth=64, warps=8, stages=3),
    ("gfx942", False): Config(rows=128, columns=128, depth=32, warps=8, stages=2),
    ("sm_80", True): Config(rows=64, columns=64, depth=32, warps=4, stages=3),
    ("sm_90", True): Config(rows=64, columns=128, depth=32, warps=4, stages=3),
    ("sm_100", True): Config(rows=64, columns=128, depth=32, warps=4, stages=3),
    ("gfx942", True): Config(rows=64, columns=64, depth=32, warps=4, stages=2),
}
"""By architecture and whether hidden states are fp32; others use sm_80's."""


class TokenLogprobs(NamedTuple):
    """Of the given ids, fp32 [R] each; nats."""

    logprobs_R: torch.Tensor
    logsumexps_R: torch.Tensor
    """Of logits / temperature."""
    entropies_R: torch.Tensor | None
    """Where they were asked for."""


@triton.jit
def _product(hidden, weight, acc):
    """Acc + hidden @ weight^T; exact products of an fp32 operand with bf16 by three parts of 8 bits."""
    if hidden.dtype == tl.bfloat16:
        return dot(hidden, tl.trans(weight), acc)
    else:
        high = to_bf16(hidden)
        rest = hidden - high.to(tl.float32)
        middle = to_bf16(rest)
        low = to_bf16(rest - middle.to(tl.float32))
        acc = dot(low, tl.trans(weight), acc)
        acc = dot(middle, tl.trans(weight), acc)
        return dot(high, tl.trans(weight), acc)


@triton.jit
def _chunk_kernel(
    hidden_ptr,
    weight_ptr,
    ids_ptr,
    temperatures_ptr,
    sums_ptr,
    chosen_ptr,
    num_rows,
    vocabulary,
    dim,
    hidden_stride,
    weight_stride,
    CHUNK: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    ENTROPY: tl.constexpr,
):
    """Rows run along the first axis of the grid, so that programs at work share a chunk of the weight in the cache."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    row_ok = row < num_rows
    chunk = tl.program_id(1)
    token = tl.load(ids_ptr + row, mask=row_ok, other=-1)
    temperature = tl.load(temperatures_ptr + row, mask=row_ok, other=1.0)
    hidden_row = hidden_ptr + row.to(tl.int64)[:, None] * hidden_stride
    largest = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    mean = tl.zeros((ROWS,), tl.float32)
    chosen = tl.zeros((ROWS,), tl.float32)
    lowest = tl.zeros((ROWS,), tl.float32)
    for first in range(chunk * CHUNK, tl.minimum((chunk + 1) * CHUNK, vocabulary), COLUMNS):
        column = first + tl.arange(0, COLUMNS)
        column_ok = column < vocabulary
        weight_row = weight_ptr + column.to(tl.int64)[:, None] * weight_stride
        acc = tl.zeros((ROWS, COLUMNS), tl.float32)
        for k in range(0, dim, DEPTH):
            d = k + tl.arange(0, DEPTH)
            d_ok = (d < dim)[None, :]
            hidden = tl.load(hidden_row + d[None, :], mask=row_ok[:, None] & d_ok, other=0.0)
            weight = tl.load(weight_row + d[None, :], mask=column_ok[:, None] & d_ok, other=0.0)
            acc = _product(hidden, weight, acc)
        chosen += tl.sum(tl.where(column[None, :] == token[:, None], acc, 0.0), 1)
        lowest = tl.minimum(lowest, tl.min(acc, 1))  # columns that do not exist are 0
        z = tl.div_rn(acc, tl.broadcast_to(temperature[:, None], (ROWS, COLUMNS)))
        seen = tl.where(column_ok[None, :], z, float("-inf"))
        new_largest = tl.maximum(largest, tl.max(seen, 1))
        moved = largest - new_largest
        keep = tl.exp(moved)
        distance = seen - new_largest[:, None]
        weights = tl.exp(distance)
        if ENTROPY:
            before = tl.where(total > 0, keep * (mean + moved * total), 0.0)
            mean = before + tl.sum(tl.where(weights > 0, weights * distance, 0.0), 1)
        total = total * keep + tl.sum(weights, 1)
        largest = new_largest
    total = tl.where(lowest == float("-inf"), float("nan"), total)  # NaN and +inf made the sum NaN by themselves
    at = sums_ptr + tl.program_id(1).to(tl.int64) * num_rows + row
    plane = tl.num_programs(1).to(tl.int64) * num_rows
    tl.store(at, largest, mask=row_ok)
    tl.store(at + plane, total, mask=row_ok)
    if ENTROPY:
        tl.store(at + 2 * plane, mean, mask=row_ok)
    here = (token >= chunk * CHUNK) & (token < (chunk + 1) * CHUNK)
    tl.store(chosen_ptr + row, tl.div_rn(chosen, temperature), mask=row_ok & here)


@triton.jit
def _merge_kernel(
    sums_ptr,
    chosen_ptr,
    logprobs_ptr,
    logsumexps_ptr,
    entropies_ptr,
    num_rows,
    num_chunks,
    WIDTH: tl.constexpr,
    ENTROPY: tl.constexpr,
):
    row = tl.program_id(0)
    chunk = tl.arange(0, WIDTH)
    ok = chunk < num_chunks
    at = sums_ptr + chunk.to(tl.int64) * num_rows + row
    plane = num_chunks.to(tl.int64) * num_rows
    part_largest = tl.load(at, mask=ok, other=float("-inf"))
    part_total = tl.load(at + plane, mask=ok, other=0.0)
    largest = tl.max(part_largest, 0)
    moved = part_largest - largest
    keep = tl.exp(moved)
    total = tl.sum(part_total * keep, 0)
    logarithm = tl.log(total)
    tl.store(logprobs_ptr + row, (tl.load(chosen_ptr + row) - largest) - logarithm)
    tl.store(logsumexps_ptr + row, largest + logarithm)
    if ENTROPY:
        part_mean = tl.load(at + 2 * plane, mask=ok, other=0.0)
        terms = tl.where(keep > 0, keep * (part_mean + moved * part_total), 0.0)
        tl.store(entropies_ptr + row, logarithm - tl.sum(terms, 0) / total)  # pyright: ignore[reportOperatorIssue]


def logprobs(
    hidden_RD: torch.Tensor,
    weight_VD: torch.Tensor,
    ids_R: torch.Tensor,
    temperature: torch.Tensor | float = 1.0,
    *,
    entropies: bool = False,
) -> TokenLogprobs:
    """`reference.logprobs` of `hidden @ weight.T` in fp32, its logsumexps, and `reference.entropies` where asked for.

    Logprobs are differentiable in hidden states and weight, the other two are not.

    Args:
        hidden_RD: bf16 or fp32, contiguous in a row.
        weight_VD: bf16, contiguous in a row.
        ids_R: int64 in [0, V).
        temperature: Positive, one number or fp32 [R].
        entropies: Whether to compute them too.

    Raises:
        KernelError: Operands that do not fit.
    """
    if (
        hidden_RD.dtype not in (torch.float32, torch.bfloat16)
        or weight_VD.dtype != torch.bfloat16
        or hidden_RD.shape[-1:] != weight_VD.shape[-1:]
        or ids_R.shape != hidden_RD.shape[:1]
    ):
        raise KernelError(
            "logprobs: need hidden states [R, D] in bf16 or fp32, a bf16 weight [V, D] and ids [R], got "
            f"{hidden_RD.dtype} {[*hidden_RD.shape]}, {weight_VD.dtype} {[*weight_VD.shape]} and {[*ids_R.shape]}; "
            "pass the published weight"
        )
    temperatures_R = torch.as_tensor(temperature, dtype=torch.float32, device=hidden_RD.device)
    temperatures_R = temperatures_R.expand(len(ids_R)).contiguous()
    if torch.is_grad_enabled() and (hidden_RD.requires_grad or weight_VD.requires_grad):
        outs = _Logprobs.apply(hidden_RD, weight_VD, ids_R, temperatures_R, entropies)
        return TokenLogprobs(*outs)  # pyright: ignore[reportGeneralTypeIssues]
    return _forward(hidden_RD, weight_VD, ids_R, temperatures_R, entropies)


def _forward(
    hidden_RD: torch.Tensor,
    weight_VD: torch.Tensor,
    ids_R: torch.Tensor,
    temperatures_R: torch.Tensor,
    entropies: bool,
) -> TokenLogprobs:
    hidden_RD, weight_VD = (x if x.stride(-1) == 1 else x.contiguous() for x in (hidden_RD, weight_VD))
    (num_rows, dim), vocabulary = hidden_RD.shape, len(weight_VD)
    num_chunks = triton.cdiv(vocabulary, CHUNK)
    config = _config(architecture(hidden_RD.device), hidden_RD.dtype == torch.float32)
    sums = hidden_RD.new_empty(3 if entropies else 2, num_chunks, num_rows, dtype=torch.float32)
    chosen_R, logprobs_R, logsumexps_R, entropies_R = (
        hidden_RD.new_empty(num_rows, dtype=torch.float32) for _ in range(4)
    )
    launch(
        _chunk_kernel,
        (triton.cdiv(num_rows, config.rows), num_chunks),
        hidden_RD,
        weight_VD,
        ids_R,
        temperatures_R,
        sums,
        chosen_R,
        num_rows,
        vocabulary,
        dim,
        hidden_RD.stride(0),
        weight_VD.stride(0),
        CHUNK=CHUNK,
        ROWS=config.rows,
        COLUMNS=config.columns,
        DEPTH=config.depth,
        ENTROPY=entropies,
        num_warps=config.warps,
        num_stages=config.stages,
    )
    launch(
        _merge_kernel,
        (num_rows,),
        sums,
        chosen_R,
        logprobs_R,
        logsumexps_R,
        entropies_R,
        num_rows,
        num_chunks,
        WIDTH=max(32, triton.next_power_of_2(num_chunks)),
        ENTROPY=entropies,
        num_warps=1,
    )
    return TokenLogprobs(logprobs_R, logsumexps_R, entropies_R if entropies else None)


class _Logprobs(torch.autograd.Function):
    """The kernels forward; backward in torch, chunk by chunk, with logits made again."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_RD: torch.Tensor,
        weight_VD: torch.Tensor,
        ids_R: torch.Tensor,
        temperatures_R: torch.Tensor,
        entropies: bool,
    ) -> TokenLogprobs:
        out = _forward(hidden_RD, weight_VD, ids_R, temperatures_R, entropies)
        ctx.save_for_backward(hidden_RD, weight_VD, ids_R, temperatures_R, out.logsumexps_R)
        ctx.mark_non_differentiable(out.logsumexps_R, *([] if out.entropies_R is None else [out.entropies_R]))
        return out

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Of a logit it is (onehot(id) - softmax) / temperature; its products are in the dtype of the hidden states."""
        hidden_RD, weight_VD, ids_R, temperatures_R, logsumexps_R = ctx.saved_tensors
        by_row_R = grads[0] / temperatures_R
        grad_hidden_RD = torch.zeros_like(hidden_RD, dtype=torch.float32)
        grad_weight_VD = torch.empty_like(weight_VD) if ctx.needs_input_grad[1] else None
        for first in range(0, len(weight_VD), _BACKWARD_CHUNK):
            weight_CD = weight_VD[first : first + _BACKWARD_CHUNK].to(hidden_RD.dtype)
            logits_RC = _product_in_fp32(hidden_RD, weight_CD)
            grad_RC = -(logits_RC / temperatures_R.unsqueeze(-1) - logsumexps_R.unsqueeze(-1)).exp_()
            here_R = (ids_R >= first) & (ids_R < first + len(weight_CD))
            grad_RC.scatter_add_(1, torch.where(here_R, ids_R - first, 0).unsqueeze(-1), here_R.float().unsqueeze(-1))
            grad_RC = (grad_RC * by_row_R.unsqueeze(-1)).to(hidden_RD.dtype)
            grad_hidden_RD += grad_RC @ weight_CD
            if grad_weight_VD is not None:
                grad_weight_VD[first : first + len(weight_CD)] = grad_RC.T @ hidden_RD
        return grad_hidden_RD.to(hidden_RD.dtype), grad_weight_VD, None, None, None


def _product_in_fp32(hidden_RD: torch.Tensor, weight_CD: torch.Tensor) -> torch.Tensor:
    """Fp32 logits: rounded to bf16 they would not fit their logsumexp."""
    if hidden_RD.is_cuda and hidden_RD.dtype == torch.bfloat16:
        return torch.mm(hidden_RD, weight_CD.T, out_dtype=torch.float32)
    return hidden_RD.float() @ weight_CD.float().T


def _config(name: str, is_fp32: bool) -> Config:
    return CONFIGS.get((name, is_fp32), CONFIGS["sm_80", is_fp32])


def _spec(target: str, dtype: str, *, entropy: bool) -> AotSpec:
    config = _config(target, dtype == "fp32")
    types: dict[str, Any] = {"hidden_ptr": f"*{dtype}", "weight_ptr": "*bf16", "ids_ptr": "*i64"}
    constexprs = {
        "CHUNK": CHUNK,
        "ROWS": config.rows,
        "COLUMNS": config.columns,
        "DEPTH": config.depth,
        "ENTROPY": entropy,
    }
    names = [name for name in _chunk_kernel.arg_names if name not in constexprs]
    return AotSpec(
        name=f"chunk_{dtype}{'_entropy' if entropy else ''}_{target}",
        kernel=_chunk_kernel,
        signature={name: types.get(name, "*fp32" if name.endswith("_ptr") else "i32") for name in names},
        constexprs=constexprs,
        unaligned=["num_rows", "vocabulary"],
        num_warps=config.warps,
        num_stages=config.stages,
        features=["wide_mma", "async_copy", "wide_load"],
        targets=(target,),
    )


AOT = [
    *(_spec(target, dtype, entropy=dtype == "bf16") for target in TARGETS for dtype in ("bf16", "fp32")),
    AotSpec(
        name="merge",
        kernel=_merge_kernel,
        signature={name: "i32" if name.startswith("num") else "*fp32" for name in _merge_kernel.arg_names[:7]},
        constexprs={"WIDTH": 256, "ENTROPY": True},
        unaligned=["num_rows", "num_chunks"],
        num_warps=1,
        max_registers=96,
    ),
]

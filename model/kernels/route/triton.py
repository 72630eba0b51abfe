"""Routing in Triton: `reference.route`, `reference.weigh`, and the schedule of the grouped products.

`schedule` sorts the choices by expert and cuts each expert's rows into blocks; a choice's row is the number of choices
of its expert before it, plus the expert's first row. Up to `ONE_PROGRAM` choices one program does it all; beyond that:
counts of chunks, an exclusive scan over the chunks, placing, blocks. At decode sizes the bound is the launch, so
`route_and_schedule` does everything in one program while its loop over tokens is short.

Invariant: a token's choice and weights are a function of its logits alone. The sort is stable and nothing is counted by
atomics, so a schedule is a function of the choices alone. The number of its blocks follows from shapes only, so that a
captured graph can be replayed: blocks past the last one name expert -1.

Shapes: T packed tokens, E experts, K experts a token, N = T K choices, B blocks of rows.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton

from model.kernels.gpu.aot import AotSpec
from model.kernels.gpu.launch import launch
from model.kernels.route import reference
from model.kernels.route.triton_kernels import (
    blocks_kernel,
    count_kernel,
    route_and_schedule_kernel,
    route_kernel,
    scan_kernel,
    scatter_kernel,
    schedule_kernel,
)

_TILE = 2048
"""Scores that a program holds at once."""

_FEW_TILES = 4
"""Most turns of the loop over tokens of the program that also makes the schedule."""

ONE_PROGRAM = 4096
"""Most choices that one program sorts."""

_CHUNK = 1024
"""Choices that one program sorts when there are several."""

_BLOCKS = 16
"""Blocks of the schedule written at once."""

_COUNTERS = 4096
"""Counters, one for each choice and expert, that a program holds at once."""


class Schedule(NamedTuple):
    """The N choices sorted by expert (stable), and the blocks of rows that the grouped products work on.

    Attributes:
        order_N: int32; which choice (token * K + rank) stands in each sorted row.
        first_row_E1: int32 [E + 1]; the sorted rows of expert e are first_row[e] to first_row[e + 1].
        expert_of_block_B: int32; -1 where there is no block.
        row_of_block_B: int32; the block's first sorted row. It ends after `block_rows` rows or with its expert.
        block_rows: Rows of a block.
    """

    order_N: torch.Tensor
    first_row_E1: torch.Tensor
    expert_of_block_B: torch.Tensor
    row_of_block_B: torch.Tensor
    block_rows: int


def route(
    logits_TE: torch.Tensor,
    *,
    top_k: int,
    scores: str,
    normalize: bool,
    scaling: float,
    selection_bias: torch.Tensor | None = None,
    num_groups: int = 1,
    top_groups: int = 1,
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `reference.route`: int64 choices in rank order and fp32 weights, [T, K] each."""
    options = _options(
        logits_TE.shape[1],
        top_k,
        scores,
        normalize,
        has_bias=selection_bias is not None,
        num_groups=num_groups,
        top_groups=top_groups,
    )
    chosen_TK = torch.empty(len(logits_TE), top_k, dtype=torch.int64, device=logits_TE.device)
    return chosen_TK, _route(logits_TE, chosen_TK, selection_bias, scaling, options)


def weigh(
    logits_TE: torch.Tensor, chosen_TK: torch.Tensor, *, scores: str, normalize: bool, scaling: float
) -> torch.Tensor:
    """As `reference.weigh`: the fp32 weights [T, K] of a recorded choice."""
    options = _options(logits_TE.shape[1], chosen_TK.shape[1], scores, normalize, replay=True)
    return _route(logits_TE, chosen_TK.long().contiguous(), None, scaling, options)


def route_and_schedule(
    logits_TE: torch.Tensor,
    block_rows: int,
    *,
    top_k: int,
    scores: str,
    normalize: bool,
    scaling: float,
    selection_bias: torch.Tensor | None = None,
    num_groups: int = 1,
    top_groups: int = 1,
) -> tuple[torch.Tensor, torch.Tensor, Schedule]:
    """`route`, and the `schedule` of its choices in blocks of `block_rows`."""
    num_tokens, num_experts = logits_TE.shape
    options = _options(
        logits_TE.shape[1],
        top_k,
        scores,
        normalize,
        has_bias=selection_bias is not None,
        num_groups=num_groups,
        top_groups=top_groups,
    )
    chosen_TK = torch.empty(num_tokens, top_k, dtype=torch.int64, device=logits_TE.device)
    has_gradient = torch.is_grad_enabled() and logits_TE.requires_grad
    is_few = not has_gradient and 0 < num_tokens <= _FEW_TILES * options["ROWS"] and num_tokens * top_k <= ONE_PROGRAM
    if not is_few:
        weights_TK = _route(logits_TE, chosen_TK, selection_bias, scaling, options)
        return chosen_TK, weights_TK, schedule(chosen_TK, num_experts, block_rows)
    logits_TE, bias = _operands(logits_TE, selection_bias)
    weights_TK = torch.empty(num_tokens, top_k, device=logits_TE.device)
    made = _empty_schedule(chosen_TK, num_experts, block_rows)
    options |= _one_program(num_tokens * top_k, num_experts, block_rows)
    routed = (logits_TE, logits_TE.stride(0), bias, chosen_TK, weights_TK, num_tokens, scaling)
    launch(route_and_schedule_kernel, (1,), *routed, *made[:4], len(made.expert_of_block_B), **options)
    return chosen_TK, weights_TK, made


def _route(
    logits_TE: torch.Tensor,
    chosen_TK: torch.Tensor,
    selection_bias: torch.Tensor | None,
    scaling: float,
    options: dict[str, Any],
) -> torch.Tensor:
    """Choose (or read the choice), and weigh."""
    if torch.is_grad_enabled() and logits_TE.requires_grad:
        return _Route.apply(logits_TE, chosen_TK, selection_bias, scaling, options)  # pyright: ignore[reportReturnType]
    return _launch_route(logits_TE, chosen_TK, selection_bias, scaling, options)


class _Route(torch.autograd.Function):
    """The kernel forward; backward in torch, from the logits and the choice."""

    @staticmethod
    def forward(
        ctx: Any,
        logits_TE: torch.Tensor,
        chosen_TK: torch.Tensor,
        selection_bias: torch.Tensor | None,
        scaling: float,
        options: dict[str, Any],
    ) -> torch.Tensor:
        weights_TK = _launch_route(logits_TE, chosen_TK, selection_bias, scaling, options)
        ctx.save_for_backward(logits_TE, chosen_TK)
        ctx.weighing = {
            "scores": "sigmoid" if options["SIGMOID"] else "softmax",
            "normalize": options["NORMALIZE"],
            "scaling": scaling,
        }
        return weights_TK

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        logits_TE, chosen_TK = ctx.saved_tensors
        with torch.enable_grad():
            logits_TE = logits_TE.detach().requires_grad_()
            weights_TK = reference.weigh(logits_TE, chosen_TK, **ctx.weighing)
        return (*torch.autograd.grad(weights_TK, logits_TE, grads), None, None, None, None)


def _launch_route(
    logits_TE: torch.Tensor,
    chosen_TK: torch.Tensor,
    selection_bias: torch.Tensor | None,
    scaling: float,
    options: dict[str, Any],
) -> torch.Tensor:
    logits_TE, bias = _operands(logits_TE, selection_bias)
    weights_TK = torch.empty(chosen_TK.shape, device=logits_TE.device)
    grid = (triton.cdiv(len(logits_TE), options["ROWS"]),)
    routed = (logits_TE, logits_TE.stride(0), bias, chosen_TK, weights_TK, len(logits_TE), scaling)
    launch(route_kernel, grid, *routed, **options)
    return weights_TK


def _operands(logits_TE: torch.Tensor, bias: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits with contiguous rows; the selection bias, or any pointer where there is none."""
    logits_TE = logits_TE.float()
    logits_TE = logits_TE if logits_TE.stride(-1) == 1 else logits_TE.contiguous()
    return logits_TE, logits_TE if bias is None else bias.contiguous()


def _options(
    num_experts: int,
    top_k: int,
    scores: str,
    normalize: bool,
    *,
    has_bias: bool = False,
    num_groups: int = 1,
    top_groups: int = 1,
    replay: bool = False,
) -> dict[str, Any]:
    """Compile-time arguments of `_route_rows`."""
    group_pad = triton.next_power_of_2(num_experts // num_groups)
    columns = triton.next_power_of_2(num_groups) * group_pad
    return {
        "NUM_EXPERTS": num_experts,
        "TOP_K": top_k,
        "K_PAD": triton.next_power_of_2(top_k),
        "NUM_GROUPS": num_groups,
        "TOP_GROUPS": top_groups,
        "GROUP_PAD": group_pad,
        "COLUMNS": columns,
        "SIGMOID": scores == "sigmoid",
        "NORMALIZE": normalize,
        "HAS_BIAS": has_bias,
        "REPLAY": replay,
        "ROWS": min(32, max(1, _TILE // columns)),
    }


def schedule(chosen_TK: torch.Tensor, num_experts: int, block_rows: int) -> Schedule:
    """Sort the choices [T, K] by expert and cut each expert's rows into blocks of `block_rows`."""
    chosen_TK = chosen_TK.long().contiguous()
    made = _empty_schedule(chosen_TK, num_experts, block_rows)
    num_choices, num_blocks, bins = chosen_TK.numel(), len(made.expert_of_block_B), _bins(num_experts)
    if num_choices == 0:
        made.first_row_E1.zero_()
        return made
    if num_choices <= ONE_PROGRAM:
        options = _one_program(num_choices, num_experts, block_rows)
        launch(schedule_kernel, (1,), chosen_TK, *made[:4], num_choices, num_blocks, **options)
        return made
    num_chunks = triton.cdiv(num_choices, _CHUNK)
    counts = torch.empty(num_chunks, bins, dtype=torch.int32, device=chosen_TK.device)
    total = counts.new_empty(bins)
    launch(count_kernel, (num_chunks,), chosen_TK, counts, num_choices, **_chunk(num_experts))
    launch(scan_kernel, (1,), counts, total, made.first_row_E1, num_chunks, **_scan(num_experts))
    placed = (chosen_TK, counts, total, made.order_N, num_choices)
    launch(scatter_kernel, (num_chunks,), *placed, **_scatter(num_experts))
    filled = (total, made.expert_of_block_B, made.row_of_block_B, num_blocks)
    launch(blocks_kernel, (triton.cdiv(num_blocks, _BLOCKS),), *filled, **_fill(num_experts, block_rows))
    return made


def _empty_schedule(chosen_TK: torch.Tensor, num_experts: int, block_rows: int) -> Schedule:
    """Memory for the schedule of these choices."""
    num_choices = chosen_TK.numel()
    num_blocks = most_blocks(num_choices, num_experts, block_rows)
    order_N, first_row_E1, expert_of_block_B, row_of_block_B = (
        torch.empty(size, dtype=torch.int32, device=chosen_TK.device)
        for size in (num_choices, num_experts + 1, num_blocks, num_blocks)
    )
    return Schedule(order_N, first_row_E1, expert_of_block_B, row_of_block_B, block_rows)


def _one_program(num_choices: int, num_experts: int, block_rows: int) -> dict[str, Any]:
    """Compile-time arguments of `_sort_choices`, and its warps."""
    return {
        "NUM_EXPERTS": num_experts,
        "BINS": _bins(num_experts),
        "CHOICES": max(16, triton.next_power_of_2(num_choices)),
        "STEP": _step(_bins(num_experts)),
        "BLOCK_ROWS": block_rows,
        "CHUNK": _BLOCKS,
        "num_warps": 8,
    }


def _chunk(num_experts: int) -> dict[str, Any]:
    return {"BINS": _bins(num_experts), "CHUNK": _CHUNK}


def _scan(num_experts: int) -> dict[str, Any]:
    bins = _bins(num_experts)
    return {"NUM_EXPERTS": num_experts, "BINS": bins, "ROWS": max(1, _step(bins) // 2), "num_warps": 8}


def _scatter(num_experts: int) -> dict[str, Any]:
    return {**_chunk(num_experts), "STEP": _step(_bins(num_experts)), "num_warps": 8}


def _fill(num_experts: int, block_rows: int) -> dict[str, Any]:
    return {"BLOCK_ROWS": block_rows, "BINS": _bins(num_experts), "CHUNK": _BLOCKS}


def _step(bins: int) -> int:
    """Choices that a program of 8 warps places at once."""
    return min(64, max(1, _COUNTERS // bins))


def _bins(num_experts: int) -> int:
    """Experts, padded to a power of two."""
    return max(16, triton.next_power_of_2(num_experts))


def most_blocks(num_choices: int, num_experts: int, block_rows: int) -> int:
    """Most blocks that any distribution over the experts needs: each touched expert leaves one block partly empty."""
    touched = min(num_experts, num_choices)
    return (num_choices + touched * (block_rows - 1)) // block_rows


def _spec(name: str, kernel: Any, constexprs: dict[str, Any]) -> AotSpec:
    kinds = {"logits_ptr": "*fp32", "selection_bias_ptr": "*fp32", "chosen_ptr": "*i64", "weights_ptr": "*fp32"}
    kinds["scaling"] = "fp32"
    names = [argument for argument in kernel.arg_names if argument not in constexprs]
    return AotSpec(
        name=name,
        kernel=kernel,
        signature={n: kinds.get(n, "*i32" if n.endswith("_ptr") else "i32") for n in names},
        constexprs={n: value for n, value in constexprs.items() if n != "num_warps"},
        unaligned=[n for n in names if n.startswith("num_")],
        num_warps=constexprs.get("num_warps", 4),
        max_registers=128,
    )


_GPT_OSS = _options(32, 4, "softmax", normalize=True)
_DEEPSEEK = _options(256, 8, "sigmoid", normalize=True, has_bias=True, num_groups=8, top_groups=4)
_EXPERTS = 128

AOT = [
    _spec("route", route_kernel, _GPT_OSS),
    _spec("route_groups", route_kernel, _DEEPSEEK),
    _spec("route_and_schedule", route_and_schedule_kernel, _GPT_OSS | _one_program(256, 32, 64)),
    _spec("route_and_schedule_groups", route_and_schedule_kernel, _DEEPSEEK | _one_program(256, 256, 64)),
    _spec("schedule", schedule_kernel, _one_program(ONE_PROGRAM, _EXPERTS, 64)),
    _spec("count", count_kernel, _chunk(_EXPERTS)),
    _spec("scan", scan_kernel, _scan(_EXPERTS)),
    _spec("scatter", scatter_kernel, _scatter(_EXPERTS)),
    _spec("blocks", blocks_kernel, _fill(_EXPERTS, 64)),
]

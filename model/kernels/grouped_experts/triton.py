"""The grouped expert MLP in Triton: `reference.experts_forward` on packed (MXFP4) or plain matrices.

    schedule    sort the choices by expert (`route.triton`), unless the router's kernel made the schedule
    gate_up     gathered rows times gate and up, + bias, gated unit           -> sorted rows [N, F], compute dtype
    down        sorted rows times down                                        -> [T, K, D], fp32
    combine     + bias, times weight, sum over ranks in order                 -> [T, D], fp32

Nothing is added by atomics. With `batch_invariant` a row's bits do not depend on the other rows: one tile per
architecture, whatever the number of rows. Without, the tile follows the rows per expert, and few rows split the
reduction into parts that are summed in order.

Shapes: T packed tokens, D model dim, F expert dim, E experts, K experts a token, N = T K rows sorted by expert.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
import triton

from model.kernels.gpu.aot import TARGETS, AotSpec
from model.kernels.gpu.launch import INTERPRETER, architecture, launch
from model.kernels.grouped_experts import eager
from model.kernels.grouped_experts.reference import Clamp
from model.kernels.grouped_experts.triton_kernels import combine_kernel, down_kernel, gate_up_kernel, unit_kernel
from model.kernels.route.triton import Schedule, schedule

_COLUMNS = 1024
"""Columns of a program of the two elementwise kernels."""


class Mxfp4(NamedTuple):
    """Packed matrices in the layout of the checkpoint (`model.mxfp4`)."""

    blocks: torch.Tensor
    """uint8 [E, out, in/32, 16]."""
    scales: torch.Tensor
    """uint8 [E, out, in/32]."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tile:
    """How a product is cut.

    Attributes:
        block_m: Rows of a block of the schedule, at least 16.
        block_n: Columns of a program.
        block_k: Step along the reduced dimension, a multiple of 32.
        group_m: Blocks of rows that share a weight tile while it is in the second-level cache.
        splits: Parts of the reduced dimension.
        decode: MXFP4 is decoded by the kernel, and not by `tl.dot_scaled`; fp32 rows always need it.
        num_warps: Warps of a program.
        num_stages: Steps that are in flight.
    """

    block_m: int
    block_n: int = 128
    block_k: int = 64
    group_m: int = 8
    splits: int = 1
    decode: bool = False
    num_warps: int = 4
    num_stages: int = 3


_FEW = Tile(block_m=16, block_n=64, block_k=128, num_stages=4)
_SOME = Tile(block_m=64)
_MANY = Tile(block_m=128, num_warps=8)
_FP32 = Tile(block_m=32, block_n=64, block_k=32, decode=True)  # multiplied without matrix instructions on NVIDIA
_INTERPRETED = Tile(block_m=16, block_n=64, block_k=64)


def choose_tile(target: str, dtype: torch.dtype, num_rows: int, num_experts: int, *, batch_invariant: bool) -> Tile:
    """The tile for `num_rows` sorted rows, bf16 or fp32, on an architecture."""
    if target == INTERPRETER:
        return _INTERPRETED
    if dtype == torch.float32:
        return _FP32
    rows_per_expert = num_rows / max(1, min(num_rows, num_experts))
    if batch_invariant:
        tile = _SOME
    elif num_rows <= 16:  # as few programs as matrices: parts of the reduction fill the machine
        tile = replace(_FEW, splits=4)
    elif rows_per_expert <= 16:
        tile = _FEW
    else:
        tile = _SOME if rows_per_expert <= 128 else _MANY
    return tile if target.startswith("sm_") else replace(tile, decode=True, num_stages=2)


def experts_forward(
    x_TD: torch.Tensor,
    gate_up_E2FD: torch.Tensor | Mxfp4,
    down_EDF: torch.Tensor | Mxfp4,
    chosen_TK: torch.Tensor,
    weights_TK: torch.Tensor,
    *,
    gate_up_bias_E2F: torch.Tensor | None = None,
    down_bias_ED: torch.Tensor | None = None,
    clamp: Clamp | None = None,
    made: Schedule | None = None,
    batch_invariant: bool = True,
    tile: Tile | None = None,
) -> torch.Tensor:
    """As `reference.experts_forward`; plain matrices take gradients.

    Args:
        x_TD: Inputs, fp32 or bf16.
        gate_up_E2FD: Packed, or plain in the dtype of the inputs.
        down_EDF: As `gate_up_E2FD`.
        chosen_TK: int64 expert indices.
        weights_TK: fp32 factor of each choice.
        gate_up_bias_E2F: Bias in any floating dtype, or `None`.
        down_bias_ED: As `gate_up_bias_E2F`.
        clamp: The gated unit; `None` for SwiGLU.
        made: The schedule of `chosen_TK` with the tile's `block_m`; `None`: it is made here.
        batch_invariant: A row's bits do not depend on the other rows.
        tile: `None`: `choose_tile`.

    Returns:
        fp32 [T, D].
    """
    num_rows, num_experts = chosen_TK.numel(), len(gate_up_E2FD[0] if isinstance(gate_up_E2FD, Mxfp4) else gate_up_E2FD)
    if tile is None:
        target = architecture(x_TD.device)
        tile = choose_tile(target, x_TD.dtype, num_rows, num_experts, batch_invariant=batch_invariant)
    made = schedule(chosen_TK, num_experts, tile.block_m) if made is None else made
    arguments = (x_TD, gate_up_E2FD, down_EDF, weights_TK, gate_up_bias_E2F, down_bias_ED)
    if torch.is_grad_enabled() and any(isinstance(a, torch.Tensor) and a.requires_grad for a in arguments):
        return _Experts.apply(*arguments, chosen_TK, clamp, made, tile)  # pyright: ignore[reportReturnType]
    return _forward(*arguments, chosen_TK, clamp, made, tile)


class _Experts(torch.autograd.Function):
    """The kernels forward; backward in torch, from the inputs."""

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> torch.Tensor:
        *tensors, chosen_TK, clamp, _, _ = arguments
        ctx.save_for_backward(*tensors, chosen_TK)
        ctx.clamp = clamp
        return _forward(*arguments)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        *tensors, chosen_TK = ctx.saved_tensors
        tensors: list[Any] = [None if t is None else t.detach().requires_grad_(t.requires_grad) for t in tensors]
        x_TD, gate_up_E2FD, down_EDF, weights_TK, gate_up_bias_E2F, down_bias_ED = tensors
        with torch.enable_grad():
            y_TD = eager.experts_forward(
                x_TD,
                gate_up_E2FD,
                down_EDF,
                chosen_TK,
                weights_TK,
                gate_up_bias_E2F=gate_up_bias_E2F,
                down_bias_ED=down_bias_ED,
                clamp=ctx.clamp,
            )
        wanted = [t for t in tensors if t is not None and t.requires_grad]
        found = iter(torch.autograd.grad(y_TD, wanted, grads))
        mine = (next(found) if t is not None and t.requires_grad else None for t in tensors)
        return (*mine, None, None, None, None)


def _forward(
    x_TD: torch.Tensor,
    gate_up_E2FD: torch.Tensor | Mxfp4,
    down_EDF: torch.Tensor | Mxfp4,
    weights_TK: torch.Tensor,
    gate_up_bias_E2F: torch.Tensor | None,
    down_bias_ED: torch.Tensor | None,
    chosen_TK: torch.Tensor,
    clamp: Clamp | None,
    made: Schedule,
    tile: Tile,
) -> torch.Tensor:
    num_tokens, top_k = chosen_TK.shape
    num_rows, num_blocks = num_tokens * top_k, len(made.expert_of_block_B)
    gate_up, down = _Matrices.of(gate_up_E2FD, x_TD, tile), _Matrices.of(down_EDF, x_TD, tile)
    hidden, dim = gate_up.rows // 2, down.rows
    x_TD = x_TD if x_TD.stride(-1) == 1 else x_TD.contiguous()
    chosen_TK, weights_TK = chosen_TK.contiguous(), weights_TK.float().contiguous()
    has_bias = gate_up_bias_E2F is not None
    gate_up_bias = gate_up_bias_E2F.contiguous() if gate_up_bias_E2F is not None else x_TD  # never followed
    down_bias = down_bias_ED.contiguous() if down_bias_ED is not None else x_TD
    limit, alpha = clamp or (0.0, 0.0)
    blocks = made[1:4]
    cut: dict[str, Any] = {
        "SPLITS": tile.splits,
        "BLOCK_M": tile.block_m,
        "BLOCK_N": tile.block_n,
        "BLOCK_K": tile.block_k,
        "GROUP_M": tile.group_m,
        "num_warps": tile.num_warps,
        "num_stages": tile.num_stages,
    }
    activation: dict[str, Any] = {"HAS_BIAS": has_bias, "CLAMP": clamp is not None}

    act_NF = x_TD.new_empty(num_rows, hidden)
    part = act_NF if tile.splits == 1 else x_TD.new_empty(tile.splits, num_rows, 2 * hidden, dtype=torch.float32)
    launch(
        gate_up_kernel,
        (num_blocks * triton.cdiv(hidden, tile.block_n // 2), tile.splits),
        *(x_TD, x_TD.stride(0), made.order_N, *blocks, *gate_up.arguments, gate_up_bias, part),
        *(num_blocks, num_rows, hidden, x_TD.shape[1], limit, alpha),
        **cut | activation | {"TOP_K": top_k, "FORMAT": gate_up.format},
    )
    if tile.splits > 1:
        launch(
            unit_kernel,
            (num_rows, triton.cdiv(hidden, _COLUMNS)),
            *(part, made.order_N, chosen_TK, gate_up_bias, act_NF, num_rows, hidden, limit, alpha),
            **activation | {"SPLITS": tile.splits, "BLOCK": _COLUMNS},
        )
    part = x_TD.new_empty(tile.splits, num_rows, dim, dtype=torch.float32)
    launch(
        down_kernel,
        (num_blocks * triton.cdiv(dim, tile.block_n), tile.splits),
        *(act_NF, made.order_N, *blocks, *down.arguments, part, num_blocks, num_rows, dim, hidden),
        **cut | {"FORMAT": down.format},
    )
    y_TD = x_TD.new_empty(num_tokens, dim, dtype=torch.float32)
    launch(
        combine_kernel,
        (num_tokens, triton.cdiv(dim, _COLUMNS)),
        *(part, chosen_TK, weights_TK, down_bias, y_TD, num_rows, dim),
        **{"TOP_K": top_k, "HAS_BIAS": down_bias_ED is not None, "SPLITS": tile.splits, "BLOCK": _COLUMNS},
    )
    return y_TD


class _Matrices(NamedTuple):
    """Matrices as the kernels take them."""

    arguments: tuple[Any, ...]
    """Values, their strides of an expert and of a row; scale bytes and theirs."""
    rows: int
    format: str

    @classmethod
    def of(cls, matrices: torch.Tensor | Mxfp4, x_TD: torch.Tensor, tile: Tile) -> _Matrices:
        if not isinstance(matrices, Mxfp4):
            plain = matrices if matrices.stride(-1) == 1 else matrices.contiguous()
            strides = (plain.stride(0), plain.stride(1))
            return cls((plain, *strides, plain, *strides), plain.shape[1], "dense")
        blocks, scales = matrices
        blocks = blocks if blocks.stride()[2:] == (16, 1) else blocks.contiguous()
        scales = scales if scales.stride(2) == 1 else scales.contiguous()
        is_decoded = tile.decode or x_TD.dtype == torch.float32
        arguments = (blocks, blocks.stride(0), blocks.stride(1), scales, scales.stride(0), scales.stride(1))
        return cls(arguments, blocks.shape[1], "decoded" if is_decoded else "scaled")


def _spec(name: str, kernel: Any, kinds: dict[str, str], constexprs: dict[str, Any], **options: Any) -> AotSpec:
    """A spec whose arguments are int32 where `kinds` says nothing; strides of an expert are int64 in real models."""
    fixed = {"limit": "fp32", "alpha": "fp32", "w_expert_stride": "i64", "s_expert_stride": "i64"}
    names = [argument for argument in kernel.arg_names if argument not in constexprs]
    signature = {argument: kinds.get(argument) or fixed.get(argument, "i32") for argument in names}
    return AotSpec(name=name, kernel=kernel, signature=signature, constexprs=constexprs, **options)


def _product_specs(
    name: str, tile: Tile, targets: Sequence[str], *, packed: bool = True, rows: str = "*bf16"
) -> list[AotSpec]:
    """Both products of gpt-oss's shapes."""
    kinds = dict.fromkeys(("order_ptr", "first_row_ptr", "expert_of_block_ptr", "row_of_block_ptr"), "*i32")
    kinds |= dict.fromkeys(("x_ptr", "act_ptr", "bias_ptr"), rows)
    kinds |= dict.fromkeys(("w_ptr", "s_ptr"), "*u8" if packed else "*bf16")
    cut: dict[str, Any] = {
        "SPLITS": tile.splits,
        "BLOCK_M": tile.block_m,
        "BLOCK_N": tile.block_n,
        "BLOCK_K": tile.block_k,
        "GROUP_M": tile.group_m,
        "FORMAT": ("decoded" if tile.decode else "scaled") if packed else "dense",
    }
    options: dict[str, Any] = {
        "num_warps": tile.num_warps,
        "num_stages": tile.num_stages,
        "unaligned": ("s_expert_stride", "s_stride", "num_blocks", "num_rows"),
        "features": ("async_copy", "wide_load") if rows == "*fp32" else ("mma", "async_copy", "wide_load"),
        "targets": targets,
    }
    part = rows if tile.splits == 1 else "*fp32"
    gate_up = cut | {"TOP_K": 4, "HAS_BIAS": True, "CLAMP": True}
    return [
        _spec(f"gate_up_{name}", gate_up_kernel, kinds | {"out_ptr": part}, gate_up, **options),
        _spec(f"down_{name}", down_kernel, kinds | {"out_ptr": "*fp32"}, cut, **options),
    ]


_NVIDIA, _AMD = TARGETS[:3], TARGETS[3:]
_INVARIANT, _SPLIT, _LARGE = 64, 16, 1 << 15


def _tiles(targets: Sequence[str]) -> dict[str, Tile]:
    """The tiles of gpt-oss-20b that differ."""
    return {
        "invariant": choose_tile(targets[0], torch.bfloat16, _INVARIANT, 32, batch_invariant=True),
        "split": choose_tile(targets[0], torch.bfloat16, _SPLIT, 32, batch_invariant=False),
        "many": choose_tile(targets[0], torch.bfloat16, _LARGE, 32, batch_invariant=False),
    }


AOT = [
    *(s for name, tile in _tiles(_NVIDIA).items() for s in _product_specs(name, tile, _NVIDIA)),
    *(s for name, tile in _tiles(_AMD).items() for s in _product_specs(f"{name}_decoded", tile, _AMD)),
    *_product_specs("fp32", _FP32, TARGETS, rows="*fp32"),
    *_product_specs("dense", _tiles(_NVIDIA)["invariant"], _NVIDIA, packed=False)[:1],
    *_product_specs("invariant_decoded_nvidia", replace(_SOME, decode=True), _NVIDIA)[:1],
    _spec(
        "unit",
        unit_kernel,
        {"order_ptr": "*i32", "chosen_ptr": "*i64", "bias_ptr": "*bf16", "act_ptr": "*bf16", "part_ptr": "*fp32"},
        {"HAS_BIAS": True, "CLAMP": True, "SPLITS": 4, "BLOCK": _COLUMNS},
        features=("wide_load",),
        max_registers=64,
    ),
    _spec(
        "combine",
        combine_kernel,
        {"part_ptr": "*fp32", "chosen_ptr": "*i64", "weights_ptr": "*fp32", "bias_ptr": "*bf16", "y_ptr": "*fp32"},
        {"TOP_K": 4, "HAS_BIAS": True, "SPLITS": 1, "BLOCK": _COLUMNS},
        features=("wide_load",),
        max_registers=64,
    ),
]

"""The MXFP4 quantizer in Triton: the bytes of `model.mxfp4.quantize`, and which blocks differ from the last version.

One pass reads 4 bytes a value (2 in bf16) and writes 0.53. Random rounding uses the counter generator of the
definition, SplitMix64 keyed by seed and element, so the bytes are the same on every device.

Shapes: K values along the last axis, N blocks.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton

from model import mxfp4
from model.kernels.gpu.aot import AotSpec
from model.kernels.gpu.launch import launch
from model.kernels.quantize.triton_kernels import quantize_kernel
from model.mxfp4 import BLOCK, BLOCK_BYTES, ScaleRule
from model.mxfp4_rounding import Rounding

_BLOCKS = 64
"""Blocks of a program."""

_TOO_LARGE = 0x7F600000
"""The fp32 bits of `mxfp4.LIMIT`."""


class Requantized(NamedTuple):
    """The next version of a packed weight."""

    blocks: torch.Tensor
    """uint8 [..., K/32, 16]."""
    scales: torch.Tensor
    """uint8 [..., K/32]."""
    changed: torch.Tensor
    """bool [..., K/32]: any of the block's 17 bytes differs from the previous version."""


def quantize(
    w: torch.Tensor,
    *,
    rule: ScaleRule = ScaleRule.EVEN,
    rounding: Rounding = Rounding.NEAREST_EVEN,
    seed: int | None = None,
    first_block: int = 0,
    previous_scales: torch.Tensor | None = None,
    name: str = "tensor",
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `mxfp4.quantize`: blocks, uint8 [..., K/32, 16], and scales, uint8 [..., K/32].

    Raises:
        MXFP4Error: As there.
    """
    options: dict[str, Any] = {"rule": rule, "rounding": rounding, "seed": seed, "first_block": first_block}
    return _quantize(w, None, previous_scales, previous_scales is not None, name, options)[:2]


def requantize(
    w: torch.Tensor,
    previous_blocks: torch.Tensor,
    previous_scales: torch.Tensor,
    *,
    keep_scales: bool = False,
    rule: ScaleRule = ScaleRule.EVEN,
    rounding: Rounding = Rounding.NEAREST_EVEN,
    seed: int | None = None,
    first_block: int = 0,
    name: str = "tensor",
) -> Requantized:
    """Quantize, and say which blocks changed.

    Args:
        w: As for `mxfp4.quantize`.
        previous_blocks: Of the last version, uint8 [..., K/32, 16].
        previous_scales: uint8 [..., K/32].
        keep_scales: Keep previous scales as `mxfp4.quantize` does when it is given them.
        rule: Scale rule.
        rounding: Rounding of the elements.
        seed: Given exactly when rounding is stochastic.
        first_block: Index of `w`'s first block in the whole tensor.
        name: What the tensor is called in an error.

    Raises:
        MXFP4Error: As `mxfp4.quantize`, or the previous bytes do not belong to this tensor.
    """
    mxfp4.check_packed(name, previous_blocks, previous_scales)
    options: dict[str, Any] = {"rule": rule, "rounding": rounding, "seed": seed, "first_block": first_block}
    return _quantize(w, previous_blocks, previous_scales, keep_scales, name, options)


def _quantize(
    w: torch.Tensor,
    previous_blocks: torch.Tensor | None,
    previous_scales: torch.Tensor | None,
    keep_scales: bool,
    name: str,
    options: dict[str, Any],
) -> Requantized:
    lead = (*w.shape[:-1], w.shape[-1] // BLOCK) if w.ndim else ()
    rounding, seed, first_block = options["rounding"], options["seed"], options["first_block"]
    fits = w.ndim > 0 and w.shape[-1] % BLOCK == 0 and w.is_floating_point()
    fits = fits and (seed is not None) is (rounding is Rounding.STOCHASTIC) and 0 <= (seed or 0) < 2**63
    fits = fits and first_block >= 0
    if previous_scales is not None:
        fits = fits and previous_scales.dtype == torch.uint8 and previous_scales.shape == lead
    if not fits:
        mxfp4.quantize(w, previous_scales=previous_scales, name=name, **options)  # says what does not fit
    w = w.detach() if w.dtype in (torch.float32, torch.bfloat16) else w.detach().float()
    w = w.contiguous()
    blocks = torch.empty(*lead, BLOCK_BYTES, dtype=torch.uint8, device=w.device)
    scales = torch.empty(lead, dtype=torch.uint8, device=w.device)
    changed = torch.empty(lead if previous_blocks is not None else 0, dtype=torch.uint8, device=w.device)
    num_programs = triton.cdiv(scales.numel(), _BLOCKS)
    largest = torch.empty(num_programs, dtype=torch.int32, device=w.device)
    launch(
        quantize_kernel,
        (num_programs,),
        w,
        blocks if previous_blocks is None else previous_blocks.to(w.device).contiguous(),  # followed only to compare
        scales if previous_scales is None else previous_scales.to(w.device).contiguous(),
        *(blocks, scales, changed, largest, scales.numel(), first_block, 0 if seed is None else _mix64(seed)),
        CARRY=options["rule"].carry,
        STOCHASTIC=seed is not None,
        KEEP=keep_scales,
        COMPARE=previous_blocks is not None,
        BLOCKS=_BLOCKS,
    )
    if num_programs and int(largest.max()) >= _TOO_LARGE:
        mxfp4.quantize(w, name=name, **options)  # says which value is too large
    return Requantized(blocks, scales, changed.bool())


def _mix64(z: int) -> int:
    """SplitMix64's finalizer, as a signed 64-bit integer."""
    mask = 2**64 - 1
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        z = (z ^ z >> shift) * factor & mask
    z ^= z >> 31
    return z - (z >> 63 << 64)


def _spec(name: str, kind: str, **constexprs: Any) -> AotSpec:
    kinds = {"w_ptr": kind, "largest_ptr": "*i32", "num_blocks": "i64", "first_block": "i64", "key": "i64"}
    fixed = {"CARRY": ScaleRule.EVEN.carry, "STOCHASTIC": False, "KEEP": False, "COMPARE": False, "BLOCKS": _BLOCKS}
    constexprs = fixed | constexprs
    return AotSpec(
        name=name,
        kernel=quantize_kernel,
        signature={n: kinds.get(n, "*u8") for n in quantize_kernel.arg_names if n not in constexprs},
        constexprs=constexprs,
        unaligned=("num_blocks", "first_block", "key"),
        features=("wide_load",),
        max_registers=80,
    )


AOT = [
    _spec("nearest", "*fp32"),
    _spec("requantize", "*fp32", KEEP=True, COMPARE=True),
    _spec("stochastic_bf16", "*bf16", STOCHASTIC=True),
]

"""Starting a Triton kernel on the device of its tensors, and the name of that device's architecture."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from functools import cache
from typing import Any

import torch

INTERPRETER = "interpreter"
"""The architecture of CPU tensors."""


@cache
def architecture(device: torch.device) -> str:
    """Name of the device's architecture as in `aot.TARGETS` (`sm_90`, `gfx942`), or `INTERPRETER`."""
    if device.type == "cpu":
        return INTERPRETER
    if torch.version.hip:
        return torch.cuda.get_device_properties(device).gcnArchName.partition(":")[0]
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm_{major}{minor}"


FIXED: Mapping[str, Any] = {"enable_fp_fusion": False}
"""Options of every kernel: a product and a sum are rounded one after the other, as in torch, unless a kernel says fma;
the compiler's own default differs from version to version."""


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, **options: Any) -> None:
    """Run `kernel` on a grid of programs; without programs nothing is started.

    Args:
        kernel: A function decorated with `triton.jit`.
        grid: Programs along one to three axes.
        args: Its run-time arguments, at least one tensor among them; all tensors lie on one device.
        options: Its compile-time arguments, `num_warps` and `num_stages`.
    """
    if 0 in grid:
        return
    device = next(arg.device for arg in args if isinstance(arg, torch.Tensor))
    with torch.cuda.device(device) if device.type == "cuda" else nullcontext():  # Triton starts on the current device
        kernel[grid](*args, **FIXED, **options)

"""Starting a Triton kernel on the device of its tensors."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch


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
        kernel[grid](*args, **options)

"""Tensors of an optimizer on disk, with the number of steps that made them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import load_file

from model.safetensors_file import write_safetensors


def save_counted(file: Path, tensors: Mapping[str, torch.Tensor], num_steps: int) -> None:
    """Write a safetensors file that tells the number of steps."""
    write_safetensors(file, tensors, {"num_steps": str(num_steps)})


def load_counted(file: Path) -> tuple[dict[str, torch.Tensor], int]:
    """What `save_counted` wrote."""
    with safe_open(file, framework="pt") as stored:
        num_steps = int(stored.metadata()["num_steps"])
    return load_file(file), num_steps

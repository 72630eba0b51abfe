"""What a layer calls instead of torch's product, where its weight is packed for a kernel."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeAlias

import torch

Parameters: TypeAlias = Callable[[], "tuple[torch.Tensor, torch.Tensor | None]"]
"""Weight and bias of a product as tensors that take gradients; called only where one is computed."""


class Product(Protocol):
    """A product with a weight that was packed for a kernel."""

    def __call__(self, x: torch.Tensor, parameters: Parameters) -> torch.Tensor:
        """`x @ weight.T + bias` in the dtype of `x`."""
        ...

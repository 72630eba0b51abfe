"""The definition of the gate: silu(g) u of rows that hold F gates g and then F values u (Shazeer 2020, SwiGLU).

Computed in fp32 and rounded once.

Shapes: T rows, F values.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F


def gated_unit(h_T2F: torch.Tensor) -> torch.Tensor:
    """[T, F] in the dtype of `h_T2F`."""
    gate_TF, up_TF = h_T2F.float().chunk(2, dim=-1)
    return (F.silu(gate_TF) * up_TF).to(h_T2F.dtype)

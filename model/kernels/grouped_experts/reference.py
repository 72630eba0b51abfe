"""The definition of the grouped expert MLP: a loop over experts in plain autograd. Every other version equals this one.

    y_t = sum over k of weights[t, k] * down[e] @ (silu(gate[e] @ x_t) * (up[e] @ x_t)),   e = chosen[t, k]

`gate_up_E2FD` holds the F gate rows of an expert first and its F up rows after them.

Shapes: T packed tokens, D model dim, F expert dim, E experts, K experts a token.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F


def experts_forward(
    x_TD: torch.Tensor,
    gate_up_E2FD: torch.Tensor,
    down_EDF: torch.Tensor,
    chosen_TK: torch.Tensor,
    weights_TK: torch.Tensor,
) -> torch.Tensor:
    """Apply each token's chosen experts and sum their outputs in rank order.

    Args:
        x_TD: Inputs in the compute dtype (fp32 or bf16); the matrices have the same dtype.
        gate_up_E2FD: Gate rows, then up rows.
        down_EDF: Output matrices.
        chosen_TK: int64 expert indices. An expert may get no token; a token names an expert at most once.
        weights_TK: fp32 factor of each choice.

    Returns:
        fp32 [T, D], accumulated in fp32 (fp64 when the inputs are, for finite differences).
    """
    dtype = torch.promote_types(x_TD.dtype, torch.float32)
    out_TKD = torch.zeros(*chosen_TK.shape, x_TD.shape[-1], dtype=dtype, device=x_TD.device)
    for expert, (gate_up_2FD, down_DF) in enumerate(zip(gate_up_E2FD, down_EDF, strict=True)):
        token, rank = torch.where(chosen_TK == expert)
        gate, up = F.linear(x_TD[token], gate_up_2FD).chunk(2, dim=-1)
        out = F.linear(F.silu(gate) * up, down_DF).to(dtype) * weights_TK[token, rank].unsqueeze(-1)
        out_TKD = out_TKD.index_put((token, rank), out)
    y_TD = torch.zeros_like(out_TKD[:, 0])
    for rank in range(chosen_TK.shape[1]):
        y_TD = y_TD + out_TKD[:, rank]
    return y_TD

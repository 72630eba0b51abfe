"""The definition of the grouped expert MLP: a loop over experts in plain autograd. Every other version equals this one.

    y_t = sum over k of weights[t, k] * (down[e] @ unit(gate[e] @ x_t, up[e] @ x_t) + down_bias[e]),   e = chosen[t, k]

    unit(g, u) = silu(g) * u                                                       SwiGLU (Shazeer 2020)
               = g' sigmoid(alpha g') (u' + 1),  g' = min(g, limit), u' = clip(u, -limit, limit)      with a `Clamp`

`gate_up_E2FD` holds the F gate rows of an expert first and its F up rows after them; so does the bias, which is added
to g and u before the unit.

Shapes: T packed tokens, D model dim, F expert dim, E experts, K experts a token.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F


class Clamp(NamedTuple):
    """gpt-oss's gated unit: both inputs are clamped (the gate from above only), and the up part is shifted by one."""

    limit: float
    alpha: float


def gated_unit(gate_NF: torch.Tensor, up_NF: torch.Tensor, clamp: Clamp | None) -> torch.Tensor:
    """[N, F] in the dtype of the inputs."""
    if clamp is None:
        return F.silu(gate_NF) * up_NF
    gate_NF, up_NF = gate_NF.clamp(max=clamp.limit), up_NF.clamp(-clamp.limit, clamp.limit)
    return gate_NF * torch.sigmoid(clamp.alpha * gate_NF) * (up_NF + 1)


def experts_forward(
    x_TD: torch.Tensor,
    gate_up_E2FD: torch.Tensor,
    down_EDF: torch.Tensor,
    chosen_TK: torch.Tensor,
    weights_TK: torch.Tensor,
    *,
    gate_up_bias_E2F: torch.Tensor | None = None,
    down_bias_ED: torch.Tensor | None = None,
    clamp: Clamp | None = None,
) -> torch.Tensor:
    """Apply each token's chosen experts and sum their outputs in rank order.

    Args:
        x_TD: Inputs in the compute dtype (fp32 or bf16); the matrices have the same dtype.
        gate_up_E2FD: Gate rows, then up rows.
        down_EDF: Output matrices.
        chosen_TK: int64 expert indices. An expert may get no token; a token names an expert at most once.
        weights_TK: fp32 factor of each choice.
        gate_up_bias_E2F: Bias of gate and up rows in the compute dtype, or `None`.
        down_bias_ED: Bias of the output, once for each expert that a token chose, or `None`.
        clamp: The gated unit; `None` for SwiGLU.

    Returns:
        fp32 [T, D], accumulated in fp32 (fp64 when the inputs are, for finite differences).
    """
    dtype = torch.promote_types(x_TD.dtype, torch.float32)
    out_TKD = torch.zeros(*chosen_TK.shape, x_TD.shape[-1], dtype=dtype, device=x_TD.device)
    for expert, (gate_up_2FD, down_DF) in enumerate(zip(gate_up_E2FD, down_EDF, strict=True)):
        token, rank = torch.where(chosen_TK == expert)
        gate_up_bias_2F = None if gate_up_bias_E2F is None else gate_up_bias_E2F[expert]
        down_bias_D = None if down_bias_ED is None else down_bias_ED[expert]
        gate, up = F.linear(x_TD[token], gate_up_2FD, gate_up_bias_2F).chunk(2, dim=-1)
        out = F.linear(gated_unit(gate, up, clamp), down_DF, down_bias_D).to(dtype)
        out = out * weights_TK[token, rank].unsqueeze(-1)
        out_TKD = out_TKD.index_put((token, rank), out)
    y_TD = torch.zeros_like(out_TKD[:, 0])
    for rank in range(chosen_TK.shape[1]):
        y_TD = y_TD + out_TKD[:, rank]
    return y_TD

"""The definition of what happens to queries and keys between projection and attention: an RMSNorm, then a rotation.

The norm, where there is one, is over each head (weight [d]) or over all heads of a token together (weight [H d]). The
first 2 h values of each head are h adjacent pairs, each one complex number, turned by one complex product
(`model/rope.py`); values beyond them keep theirs.

Shapes: T tokens, H heads, d head dim, h rotated pairs of a head.
"""

from __future__ import annotations

import torch

from model.kernels.rms_norm.reference import rms_norm


def rotary(
    x_THd: torch.Tensor,
    by_T1h: torch.Tensor,
    weight: torch.Tensor | None = None,
    eps: float = 0.0,
    *,
    together: bool = False,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """[T, H, d] in any floating dtype to `out_dtype` (`None`: as it came); fp32 between, rounded once at the end.

    `by_T1h` is complex64, `weight` fp32 or bf16, in the order of adjacent pairs as `x_THd`.
    """
    y_THd = x_THd.float()
    if weight is not None:
        y_THd = rms_norm(y_THd.flatten(1) if together else y_THd, weight, eps).view(x_THd.shape)
    rotated, rest = y_THd.tensor_split([2 * by_T1h.shape[-1]], dim=-1)
    pairs_THh = torch.view_as_complex(rotated.unflatten(-1, (-1, 2)).contiguous())
    y_THd = torch.cat([torch.view_as_real(pairs_THh * by_T1h).flatten(-2), rest], dim=-1)
    return y_THd.to(out_dtype or x_THd.dtype)

"""Rotary position embedding (Su et al. 2021, RoFormer, eq. 34), and its stretched forms.

A checkpoint of the Hugging Face families pairs element i of a head of size d with element i + d/2 (the NeoX layout),
and turns the pair by position * f_i, f_i = theta^(-2 i / d). Here the rows of the query and key projections are
reordered first, so that the two elements of a pair are adjacent (`adjacent_pairs`): a pair is then one complex number
and the rotation one complex product, a third of the time of products on halves. Queries and keys are permuted alike, so
every score is the same; whoever caches keys caches them in this order. Parameters keep the checkpoint's order.

Stretching to a longer context changes the frequencies once, for every length (`RopeConfig.scaling`):

    linear   f_i / factor                                                         Chen et al. 2023
    yarn     f_i for pairs that turn often, f_i / factor for those that turn seldom, a ramp between; cosine and sine
             are multiplied by 0.1 ln(factor) + 1                                 Peng et al. 2023, section 3.2-3.4
    llama3   as yarn with a ramp in 1 / wavelength and without the multiplication Llama 3.1

Angles and products are fp32; the frequencies are computed in fp64.

Shapes: T packed tokens, H heads, d rotated values of a head, h = d / 2, O rows of a projection, D model dim.
"""

from __future__ import annotations

import math

import torch

from model.config import RopeConfig, RopeScaling


def adjacent_pairs(rows: torch.Tensor, head_dim: int) -> torch.Tensor:
    """Reorder the rows of a projection [H d, ...] (or its bias, or a norm's weight) in each head: 0, d/2, 1, ..."""
    by_half = rows.view(-1, 2, head_dim // 2, *rows.shape[1:])
    return by_half.transpose(1, 2).reshape(rows.shape)


def rotation(positions_T: torch.Tensor, rotary_dim: int, config: RopeConfig) -> torch.Tensor:
    """The turns of int64 positions, complex64 [T, 1, h]; they serve every layer. Each sequence counts from 0."""
    frequency_h = inverse_frequencies(rotary_dim, config).to(positions_T.device, torch.float32)
    angle_Th = positions_T.float().unsqueeze(-1) * frequency_h
    return torch.polar(torch.full_like(angle_Th, attention_factor(config)), angle_Th).unsqueeze(1)


class RotationTable:
    """The turns of every position that was asked for, so that a position has the same bits in any batch.

    (Torch's cosine differs in the last bit between a tensor's last values and the others.) Positions are added in
    chunks of one size; rows are `rotation`'s.
    """

    _CHUNK = 1024

    def __init__(self, rotary_dim: int, config: RopeConfig) -> None:
        self._rotary_dim, self._config = rotary_dim, config
        self._by_P1h: torch.Tensor | None = None

    def __call__(self, positions_T: torch.Tensor) -> torch.Tensor:
        """complex64 [T, 1, h] of int64 positions."""
        table = self._by_P1h
        if table is None or table.device != positions_T.device:
            table = positions_T.new_empty(0, 1, self._rotary_dim // 2, dtype=torch.complex64)
        needed = int(positions_T.max()) + 1 if len(positions_T) else 0
        while len(table) < needed:
            more_C = torch.arange(len(table), len(table) + self._CHUNK, device=positions_T.device)
            table = torch.cat([table, rotation(more_C, self._rotary_dim, self._config)])
        self._by_P1h = table
        return table.index_select(0, positions_T)


def rotate(x_THd: torch.Tensor, by_T1h: torch.Tensor) -> torch.Tensor:
    """Turn every head of [T, H, d], whose pairs are adjacent; returned in the dtype of `x_THd`."""
    pairs_THh = torch.view_as_complex(x_THd.float().unflatten(-1, (-1, 2)))
    return torch.view_as_real(pairs_THh * by_T1h).flatten(-2).to(x_THd.dtype)


def inverse_frequencies(rotary_dim: int, config: RopeConfig) -> torch.Tensor:
    """Radians a position, fp64 [h]."""
    exponent_h = torch.arange(0, rotary_dim, 2, dtype=torch.float64) / rotary_dim
    frequency_h = config.theta**-exponent_h
    match config.scaling:
        case RopeScaling.none:
            return frequency_h
        case RopeScaling.linear:
            return frequency_h / config.factor
        case RopeScaling.yarn:
            kept_h = _yarn_kept(rotary_dim, config)
        case RopeScaling.llama3:
            turns_h = config.original_positions * frequency_h / (2 * math.pi)  # in the original context
            low, high = config.low_freq_factor, config.high_freq_factor
            kept_h = ((turns_h - low) / (high - low)).clamp(0, 1)
    return frequency_h * kept_h + frequency_h / config.factor * (1 - kept_h)


def attention_factor(config: RopeConfig) -> float:
    """What multiplies cosine and sine (DeepSeek divides it by the part that `score_factor` takes over)."""
    if config.attention_factor is not None:
        return config.attention_factor
    if config.scaling is not RopeScaling.yarn:
        return 1.0
    if config.mscale and config.mscale_all_dim:
        return _magnitude(config.factor, config.mscale) / _magnitude(config.factor, config.mscale_all_dim)
    return _magnitude(config.factor, 1.0)


def score_factor(config: RopeConfig) -> float:
    """What multiplies every score beside 1 / sqrt(head dim): DeepSeek-V3's mscale_all_dim, for all of a head."""
    if config.scaling is RopeScaling.none or not config.mscale_all_dim:
        return 1.0
    return _magnitude(config.factor, config.mscale_all_dim) ** 2


def _magnitude(factor: float, mscale: float) -> float:
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1.0 else 1.0


def _yarn_kept(rotary_dim: int, config: RopeConfig) -> torch.Tensor:
    """The share of each frequency that is kept, [h]: 1 where a pair turns `beta_fast` times in the original context."""

    def pair_that_turns(times: float) -> float:
        wavelengths = config.original_positions / (times * 2 * math.pi)
        return rotary_dim * math.log(wavelengths) / (2 * math.log(config.theta))

    low, high = pair_that_turns(config.beta_fast), pair_that_turns(config.beta_slow)
    if config.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rotary_dim - 1)
    if low == high:
        high += 0.001  # a step instead of a ramp
    index_h = torch.arange(rotary_dim // 2, dtype=torch.float64)
    return 1 - ((index_h - low) / (high - low)).clamp(0, 1)

"""Self-attention, grouped-query or latent, with the scores left to an object that the caller injects.

The layer projects, rotates and projects back; `attend` decides which keys a query sees. A learner passes
`PackedAttention` (`model/packed_attention.py`), an engine its cache, and both run the same transformer.

A window of w tokens lets a query see the w newest keys, its own included. A sink is one learned logit a head that takes
part in the softmax and has no value: it adds exp(sink) to the denominator (gpt-oss; Xiao et al. 2023 for the idea).

Shapes: T packed tokens, D model dim, H query heads, G key-value heads (H / G query heads share one), d head dim of
queries and keys (p plain values and r rotated ones in latent attention), e head dim of values, R latent dim.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import nn

from model.config import ModelConfig, QkNorm
from model.layers import TORCH_DTYPE, HeadLinear, HeadNorm, Linear, RMSNorm, side_by_side, with_adapters
from model.product import Product
from model.rope import adjacent_pairs, rotate, score_factor


class Attend(Protocol):
    """Softmax attention over whatever keys the caller holds."""

    keeps_keys: bool
    """Whether keys and values are kept for later calls, so that small ones are worth more arithmetic."""

    def __call__(
        self,
        layer_index: int,
        q_THd: torch.Tensor,
        k_TGd: torch.Tensor,
        v_TGe: torch.Tensor,
        *,
        scale: float | None = None,
        window: int = 0,
        sinks_H: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Outputs [T, H, e] in the dtype of `q_THd`, for new tokens whose keys and values are given.

        Scores are multiplied by `scale` (`None`: 1 / sqrt(d)); `window` 0 means that a query sees every key before it.
        """
        ...


class Turn(Protocol):
    """A kernel that norms the heads of queries or keys (`norm` None: does not) and rotates them."""

    def __call__(self, x_THd: torch.Tensor, by_T1h: torch.Tensor, norm: HeadNorm | None) -> torch.Tensor:
        """[T, H, d], perhaps with a row stride of its own, to the same in its dtype."""
        ...


def make_attention(config: ModelConfig, layer_index: int) -> nn.Module:
    """The attention of one layer; both kinds take normed [T, D], `rope.rotation` and `attend`, and return [T, D]."""
    return LatentAttention(config, layer_index) if config.is_latent else Attention(config, layer_index)


class Attention(nn.Module):
    """Grouped-query attention (Ainslie et al. 2023)."""

    def __init__(self, config: ModelConfig, layer_index: int) -> None:
        super().__init__()
        dim, head_dim, bias = config.hidden_size, config.head_dim, config.attention_bias
        adjacent = config.rope.adjacent_pairs
        self.layer_index = layer_index
        self.head_dim = head_dim
        self.num_heads, self.num_kv_heads = config.num_heads, config.num_kv_heads
        self.compute_dtype = TORCH_DTYPE[config.compute_dtype]
        self.scale = head_dim**-0.5 * score_factor(config.rope)
        self.window = config.window(layer_index)
        self.q_proj = HeadLinear(dim, config.num_heads, head_dim, bias=bias, adjacent=adjacent)
        self.k_proj = HeadLinear(dim, config.num_kv_heads, head_dim, bias=bias, adjacent=adjacent)
        self.v_proj = Linear(dim, config.num_kv_heads * head_dim, bias=bias)
        self.o_proj = Linear(config.num_heads * head_dim, dim, bias=bias)
        self.q_norm = self.k_norm = None
        if config.qk_norm is not QkNorm.none:
            together, eps = config.qk_norm is QkNorm.projection, config.rms_norm_eps
            self.q_norm = HeadNorm(config.num_heads, head_dim, eps, together=together, adjacent=adjacent)
            self.k_norm = HeadNorm(config.num_kv_heads, head_dim, eps, together=together, adjacent=adjacent)
        self.sinks = nn.Parameter(torch.empty(config.num_heads)) if config.attention_sinks else None
        self.qkv: Product | None = None
        self.turn: Turn | None = None

    def forward(self, x_TD: torch.Tensor, by_T1h: torch.Tensor, attend: Attend) -> torch.Tensor:
        """[T, D] in, [T, D] out in the compute dtype; `by_T1h` is `rope.rotation` of the positions."""
        q_THd, k_TGd, v_TGd = self._project(x_TD.to(self.compute_dtype), by_T1h)
        out_THd = attend(
            self.layer_index,
            q_THd,
            k_TGd,
            v_TGd,
            scale=self.scale,
            window=self.window,
            sinks_H=None if self.sinks is None else self.sinks.float(),
        )
        return self.o_proj(out_THd.reshape(len(x_TD), -1))

    def _project(self, x_TD: torch.Tensor, by_T1h: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Queries and keys, normed and rotated, and values."""
        if self.qkv is not None and self.turn is not None:
            layers = (self.q_proj, self.k_proj, self.v_proj)
            all_TXd = with_adapters(self.qkv(x_TD, side_by_side(*layers)), x_TD, *layers)
            all_TXd = all_TXd.view(len(x_TD), -1, self.head_dim)
            q_THd, k_TGd, v_TGd = all_TXd.split([self.num_heads, self.num_kv_heads, self.num_kv_heads], dim=1)
            return self.turn(q_THd, by_T1h, self.q_norm), self.turn(k_TGd, by_T1h, self.k_norm), v_TGd
        q_THd, k_TGd = self.q_proj(x_TD), self.k_proj(x_TD)
        if self.q_norm is not None and self.k_norm is not None:
            q_THd, k_TGd = self.q_norm(q_THd), self.k_norm(k_TGd)
        q_THd, k_TGd = (rotate(x_THd, by_T1h).to(self.compute_dtype) for x_THd in (q_THd, k_TGd))
        return q_THd, k_TGd, self.v_proj(x_TD).view(len(x_TD), -1, self.head_dim)


_LATENT_NORM_EPS = 1e-6
"""DeepSeek's norms of the latents do not follow the model's `rms_norm_eps`."""


class LatentAttention(nn.Module):
    """Multi-head latent attention (DeepSeek-V2, section 2.1): keys and values are linear maps of one small latent.

    Where keys are kept for later, the latent itself is kept and the maps are moved to the query and the output
    (`q' = W_k q`, and the values' map after the sum): one key-value head of R + r values a token, the same scores.
    Without a cache the expanded heads cost less arithmetic.
    """

    def __init__(self, config: ModelConfig, layer_index: int) -> None:
        super().__init__()
        dim, bias, num_heads = config.hidden_size, config.attention_bias, config.num_heads
        self.layer_index = layer_index
        self.compute_dtype = TORCH_DTYPE[config.compute_dtype]
        self.scale = config.head_dim**-0.5 * score_factor(config.rope)
        self.window = config.window(layer_index)
        self.adjacent = config.rope.adjacent_pairs
        self.rotary_dim = config.qk_rope_head_dim
        self.plain_dim = config.head_dim - config.qk_rope_head_dim
        self.value_dim = config.v_head_dim
        self.latent_dim = config.kv_lora_rank
        self.num_heads = num_heads
        if config.q_lora_rank:
            self.q_a_proj = Linear(dim, config.q_lora_rank, bias=bias)
            self.q_a_layernorm = RMSNorm(config.q_lora_rank, _LATENT_NORM_EPS)
            self.q_b_proj = Linear(config.q_lora_rank, num_heads * config.head_dim)
            self.q_proj = None
        else:
            self.q_proj = Linear(dim, num_heads * config.head_dim)
        self.kv_a_proj_with_mqa = Linear(dim, config.kv_lora_rank + config.qk_rope_head_dim, bias=bias)
        self.kv_a_layernorm = RMSNorm(config.kv_lora_rank, _LATENT_NORM_EPS)
        self.kv_b_proj = Linear(config.kv_lora_rank, num_heads * (self.plain_dim + config.v_head_dim))
        self.o_proj = Linear(num_heads * config.v_head_dim, dim, bias=bias)
        self.to_key: Product | None = None
        self.to_value: Product | None = None
        self.turn: Turn | None = None

    def forward(self, x_TD: torch.Tensor, by_T1h: torch.Tensor, attend: Attend) -> torch.Tensor:
        """As `Attention.forward`."""
        x_TD = x_TD.to(self.compute_dtype)
        q_THp, q_THr = self._queries(x_TD).split([self.plain_dim, self.rotary_dim], dim=-1)
        latent_TR, k_Tr = self.kv_a_proj_with_mqa(x_TD).split([self.latent_dim, self.rotary_dim], dim=-1)
        q_THr, k_T1r = self._rotate(q_THr, by_T1h), self._rotate(k_Tr.unsqueeze(1), by_T1h)
        latent_TR = self.kv_a_layernorm(latent_TR).to(self.compute_dtype)
        if attend.keeps_keys:
            q_THd = torch.cat([self._key_map(q_THp), q_THr], dim=-1)
            k_T1d = torch.cat([latent_TR.unsqueeze(1), k_T1r], dim=-1)
            v_T1R = k_T1d[..., : self.latent_dim]
            out_THR = attend(self.layer_index, q_THd, k_T1d, v_T1R, scale=self.scale, window=self.window)
            out_THe = self._value_map(out_THR)
        else:
            to_key_HpR, to_value_HeR = self.maps()
            q_THd = torch.cat([q_THp, q_THr], dim=-1)
            k_THp = torch.einsum("tr,hpr->thp", latent_TR, to_key_HpR)
            k_THd = torch.cat([k_THp, k_T1r.expand(-1, self.num_heads, -1)], dim=-1)
            v_THe = torch.einsum("tr,her->the", latent_TR, to_value_HeR)
            out_THe = attend(self.layer_index, q_THd, k_THd, v_THe, scale=self.scale, window=self.window)
        return self.o_proj(out_THe.reshape(len(x_TD), -1))

    def _queries(self, x_TD: torch.Tensor) -> torch.Tensor:
        if self.q_proj is not None:
            q = self.q_proj(x_TD)
        else:
            q = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x_TD)).to(self.compute_dtype))
        return q.view(len(x_TD), self.num_heads, -1)

    def maps(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The maps from the latent to each head's key [H, p, R] and value [H, e, R], in the compute dtype."""
        maps = self.kv_b_proj.weight.to(self.compute_dtype).view(self.num_heads, -1, self.latent_dim)
        to_key_HpR, to_value_HeR = maps.split([self.plain_dim, self.value_dim], dim=1)
        return to_key_HpR, to_value_HeR

    def _key_map(self, q_THp: torch.Tensor) -> torch.Tensor:
        if self.to_key is not None:
            return self.to_key(q_THp, lambda: (self.maps()[0].mT, None))
        return torch.einsum("thp,hpr->thr", q_THp, self.maps()[0])

    def _value_map(self, out_THR: torch.Tensor) -> torch.Tensor:
        if self.to_value is not None:
            return self.to_value(out_THR, lambda: (self.maps()[1], None))
        return torch.einsum("thr,her->the", out_THR, self.maps()[1])

    def _rotate(self, x_THr: torch.Tensor, by_T1h: torch.Tensor) -> torch.Tensor:
        if not self.adjacent:
            x_THr = adjacent_pairs(x_THr.movedim(-1, 0), self.rotary_dim).movedim(0, -1).contiguous()
        return rotate(x_THr, by_T1h) if self.turn is None else self.turn(x_THr, by_T1h, None)

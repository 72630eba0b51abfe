"""What `scripts/gpu_check.py` runs: each Triton kernel with a reference, the bytes and operations it needs, and rivals.

Shapes are gpt-oss-20b's unless a name says otherwise: D 2880, 64 query and 8 key-value heads of 64, a window of 128,
32 experts of 2880, 4 a token, vocabulary 201088. `Size` scales them: `tiny` for the interpreter, `small` to compare
with the reference, `large` to time. Bytes count what must be read and written once; operations count a product as two.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import torch
import torch.nn.functional as F

from model import mxfp4
from model.config import RopeConfig
from model.kernels.attention import reference as attention_reference
from model.kernels.attention import triton as attention
from model.kernels.attention import triton_pages
from model.kernels.attention.reference import Pages, PageTable
from model.kernels.grouped_experts import reference as experts_reference
from model.kernels.grouped_experts import triton as experts
from model.kernels.grouped_experts.reference import Clamp
from model.kernels.logprob import reference as logprob_reference
from model.kernels.logprob import triton as logprob
from model.kernels.quantize import triton as quantize
from model.kernels.rms_norm import reference as norm_reference
from model.kernels.rms_norm import triton as norm
from model.kernels.rotary import reference as rotary_reference
from model.kernels.rotary import triton as rotary
from model.kernels.route import reference as route_reference
from model.kernels.route import triton as route
from model.kernels.sample import reference as sample_reference
from model.kernels.sample import triton as sample
from model.rope import rotation

BF16 = torch.bfloat16
BF16_ROUNDING = 2.0**-7
"""Relative to the largest value: operands and outputs in bf16 are off by at most 2^-9 each, a few times over."""
FP32_SUMS = 2.0**-18
"""Relative to the largest value: fp32 sums of up to 4096 terms in another order."""
PAGE_SIZE = 16


class Size(StrEnum):
    """How large the operands are."""

    TINY = "tiny"
    SMALL = "small"
    LARGE = "large"


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """One kernel with its operands.

    Attributes:
        run: The kernel.
        expected: The definition, or other ways to the same bits.
        tolerance: Largest difference over the largest expected value; 0: every bit.
        num_bytes: That the kernel must read and write.
        num_operations: bf16 matrix operations, 0 where memory decides.
        rivals: Torch's ways to the same result, by name.
    """

    run: Callable[[], Any]
    expected: Callable[[], Any]
    tolerance: float
    num_bytes: int = 0
    num_operations: int = 0
    rivals: Mapping[str, Callable[[], Any]] = field(default_factory=dict)


Case = Callable[[Size, str], Work]


def _normal(*shape: int, device: str, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator(device).manual_seed(seed)
    return torch.randn(shape, generator=generator, device=device).to(dtype)


def _of(size: Size, tiny: int, small: int, large: int) -> int:
    return {Size.TINY: tiny, Size.SMALL: small, Size.LARGE: large}[size]


def _paged(
    device: str, contexts: list[int], news: list[int], kv_heads: int, dim: int, stored: torch.dtype, *, latent: int = 0
) -> tuple[Pages, Pages, PageTable]:
    """Filled pages in random order; with `latent` the values are that many leading values of the keys."""
    needed = [-(-(context + new) // PAGE_SIZE) for context, new in zip(contexts, news, strict=True)]
    order = torch.randperm(sum(needed), generator=torch.Generator().manual_seed(1)).int()
    pages = torch.zeros(len(contexts), max(needed), dtype=torch.int32)
    ends = list(itertools.accumulate(needed))
    for n, (end, count) in enumerate(zip(ends, needed, strict=True)):
        pages[n, :count] = order[end - count : end]
    slots = torch.arange(sum(needed) * PAGE_SIZE, device=device)

    def fill(seed: int) -> Pages:
        rows = torch.zeros(len(slots), kv_heads, dim, dtype=stored, device=device)
        has_scales = stored in (torch.int8, torch.float8_e4m3fn)
        kept = Pages(rows, torch.zeros(len(slots), kv_heads, device=device) if has_scales else None)
        triton_pages.write(kept, slots, _normal(len(slots), kv_heads, dim, device=device, dtype=BF16, seed=seed))
        return kept

    keys = fill(2)
    values = Pages(keys.rows_SGd[..., :latent], keys.scales_SG) if latent else fill(3)
    starts, counts = (torch.tensor(x, dtype=torch.int32, device=device) for x in (contexts, news))
    return keys, values, PageTable(pages.to(device), starts, counts, PAGE_SIZE)


def _attention(
    size: Size, device: str, contexts: list[int], news: list[int], *, heads: int = 64, kv_heads: int = 8, dim: int = 64,
    stored: torch.dtype = BF16, window: int = 0, latent: int = 0,
) -> Work:  # fmt: skip
    if size is Size.TINY:
        heads, kv_heads = 4, min(2, kv_heads)
    keys, values, table = _paged(device, contexts, news, kv_heads, dim, stored, latent=latent)
    q = _normal(sum(news), heads, dim, device=device, dtype=BF16, seed=4)
    options: dict[str, Any] = {"scale": dim**-0.5, "window": window}
    sinks = _normal(heads, device=device, seed=5)
    value_dim = latent or dim
    pairs = visible = 0
    for context, new in zip(contexts, news, strict=True):
        pairs += sum(min(window or n, n) for n in range(context + 1, context + new + 1))
        visible += min(context + new, (window or context) + new - 1) if window else context + new
    row_bytes = kv_heads * (dim + (0 if latent else dim)) * keys.rows_SGd.element_size()
    rivals: dict[str, Callable[[], Any]] = {}
    if size is Size.LARGE and not latent and not window and stored == BF16 and len(set(contexts)) == 1:
        k, v = (_normal(len(news), kv_heads, contexts[0] + news[0], dim, device=device, dtype=BF16) for _ in range(2))
        q_dense = q.view(len(news), news[0], heads, dim).transpose(1, 2)
        rivals["torch sdpa, keys not in pages, no sinks"] = lambda: F.scaled_dot_product_attention(
            q_dense, k, v, is_causal=news[0] > 1, enable_gqa=True
        )
    return Work(
        run=lambda: attention.paged_attention(q, keys, values, table, sinks_H=sinks, **options),
        expected=lambda: attention_reference.paged_attention(q, keys, values, table, sinks_H=sinks, **options),
        tolerance=BF16_ROUNDING,
        num_bytes=visible * row_bytes + q.numel() * 2 + sum(news) * heads * value_dim * 2,
        num_operations=2 * pairs * heads * (dim + value_dim) if max(news) > 1 else 0,
        rivals=rivals,
    )


def _decode(size: Size, device: str, **options: Any) -> Work:
    batch, context = _of(size, 2, 3, 64), _of(size, 40, 3000, 4095)
    contexts = [context - (0 if size is Size.LARGE else 7 * n) for n in range(batch)]
    return _attention(size, device, contexts, [1] * batch, **options)


def _prefill(size: Size, device: str, **options: Any) -> Work:
    if size is Size.LARGE:
        return _attention(size, device, [0], [8192], **options)
    return _attention(size, device, [0, 30], [_of(size, 20, 500, 0), _of(size, 9, 333, 0)], **options)


def _decode_equals_prefill(size: Size, device: str) -> Work:
    """Every bit: the last token of each sequence decoded, and prefilled behind another one."""
    context = 60 if size is Size.TINY else 2500
    heads, kv_heads = (4, 2) if size is Size.TINY else (64, 8)
    keys, values, table = _paged(device, [context, context - 9], [2, 2], kv_heads, 64, BF16)
    q = _normal(4, heads, 64, device=device, dtype=BF16)
    last = PageTable(table.pages_NB, table.starts_N + 1, table.counts_N - 1, PAGE_SIZE)
    return Work(
        run=lambda: attention.paged_attention(q[1::2].contiguous(), keys, values, last, scale=0.125),
        expected=lambda: attention.paged_attention(q, keys, values, table, scale=0.125)[1::2],
        tolerance=0.0,
    )


def _rotate_and_write(size: Size, device: str) -> Work:
    tokens, heads, kv_heads, dim = _of(size, 3, 100, 8192), 64, 8, 64
    qkv = _normal(tokens, (heads + 2 * kv_heads) * dim, device=device, dtype=BF16)
    by = rotation(torch.arange(tokens, device=device), dim, RopeConfig())
    slots = torch.arange(tokens, device=device)

    def pages() -> tuple[Pages, Pages]:
        keys, values = (torch.zeros(tokens, kv_heads, dim, dtype=BF16, device=device) for _ in range(2))
        return Pages(keys), Pages(values)

    mine, theirs = pages(), pages()

    def run() -> list[torch.Tensor]:
        q = rotary.rotate_and_write(qkv, by, *mine, slots, num_heads=heads)
        return [q, mine[0].rows_SGd, mine[1].rows_SGd]

    def expected() -> list[torch.Tensor]:
        q, k, v = qkv.unflatten(-1, (-1, dim)).split([heads, kv_heads, kv_heads], dim=1)
        attention_reference.write(theirs[0], slots, rotary_reference.rotary(k, by))
        attention_reference.write(theirs[1], slots, v)
        return [rotary_reference.rotary(q, by), theirs[0].rows_SGd, theirs[1].rows_SGd]

    return Work(
        run=run, expected=expected, tolerance=BF16_ROUNDING, num_bytes=2 * qkv.numel() * 2 + by.numel() * 8,
        rivals={"torch, op by op": expected},
    )  # fmt: skip


def _add_rms_norm(size: Size, device: str) -> Work:
    tokens, dim = _of(size, 3, 100, 8192), 2880
    x, y = _normal(tokens, dim, device=device), _normal(tokens, dim, device=device, dtype=BF16, seed=1)
    weight = _normal(dim, device=device, seed=2)

    def expected() -> list[torch.Tensor]:
        total = x + y
        return [total, norm_reference.rms_norm(total, weight, 1e-5).to(BF16)]

    return Work(
        run=lambda: norm.add_rms_norm(x, y, weight, 1e-5, dtype=BF16),
        expected=expected,
        tolerance=BF16_ROUNDING,
        num_bytes=tokens * dim * (4 + 2 + 4 + 2),
        rivals={"torch, F.rms_norm": lambda: F.rms_norm(x + y, (dim,), weight, 1e-5).to(BF16)},
    )


def _logprobs(size: Size, device: str, rows: int, dtype: torch.dtype = BF16) -> Work:
    rows, dim, vocabulary = _of(size, 2, 70, rows), _of(size, 70, 2880, 2880), _of(size, 1100, 20001, 201088)
    hidden = _normal(rows, dim, device=device, dtype=dtype)
    weight = _normal(vocabulary, dim, device=device, dtype=BF16, seed=1) / 16
    ids = torch.arange(rows, device=device) * 13 % vocabulary
    ones = torch.ones(rows, device=device)

    def torch_way() -> torch.Tensor:
        logits = (hidden.to(BF16) @ weight.T).float()
        return logits.gather(1, ids[:, None])[:, 0] - logits.logsumexp(-1)

    return Work(
        run=lambda: logprob.logprobs(hidden, weight, ids).logprobs_R,
        expected=lambda: logprob_reference.logprobs(hidden.float() @ weight.float().T, ids, ones),
        tolerance=FP32_SUMS * 4,
        num_bytes=weight.numel() * 2 + hidden.numel() * hidden.element_size(),
        num_operations=2 * rows * dim * vocabulary * (1 if dtype == BF16 else 3),
        rivals={"torch, bf16 logits": torch_way},
    )


def _sample(size: Size, device: str, *, cuts: bool) -> Work:
    rows, vocabulary = _of(size, 2, 16, 64), _of(size, 300, 201088, 201088)
    logits = _normal(rows, vocabulary, device=device) * 3
    per_row = {
        "temperatures_N": torch.linspace(0.0, 1.5, rows, device=device),
        "uniforms_N": torch.linspace(0.0, 1 - 2**-53, rows, dtype=torch.float64, device=device),
    }
    if cuts:
        per_row["top_k_N"] = torch.arange(rows, device=device) % 3 * 25
        per_row["top_p_N"] = torch.linspace(0.5, 1.0, rows, dtype=torch.float64, device=device)
        per_row["min_p_N"] = torch.arange(rows, device=device) % 2 * 0.02

    def torch_way() -> torch.Tensor:
        probabilities = logits.softmax(-1)
        if cuts:
            ranked, order = probabilities.sort(dim=-1, descending=True)
            kept = ranked.masked_fill(ranked.cumsum(-1) - ranked > 0.9, 0.0)
            return order.gather(-1, torch.multinomial(kept, 1))
        return torch.multinomial(probabilities, 1)

    on_cpu = {name: values.cpu() for name, values in per_row.items()}
    return Work(
        run=lambda: sample.sample(logits, **per_row).ids_N,
        expected=lambda: sample_reference.sample(logits.cpu(), **on_cpu).ids_N,
        tolerance=0.0,
        num_bytes=logits.numel() * 4,
        rivals={"torch, sort and multinomial" if cuts else "torch, softmax and multinomial": torch_way},
    )


def _experts(size: Size, device: str, tokens: int) -> Work:
    tokens, num, dim, chosen_each = _of(size, 3, 50, tokens), _of(size, 4, 8, 32), _of(size, 64, 2880, 2880), 4
    x = _normal(tokens, dim, device=device, dtype=BF16)
    g = torch.Generator(device).manual_seed(1)

    def packed(rows: int) -> experts.Mxfp4:
        blocks = torch.randint(0, 256, (num, rows, dim // 32, 16), dtype=torch.uint8, device=device, generator=g)
        scales = torch.randint(119, 122, (num, rows, dim // 32), dtype=torch.uint8, device=device, generator=g)
        return experts.Mxfp4(blocks, scales)

    gate_up, down = packed(2 * dim), packed(dim)
    order = torch.rand(tokens, num, device=device, generator=g)
    chosen = order.argsort(-1)[:, :chosen_each].contiguous()
    weights = torch.rand(tokens, chosen_each, device=device, generator=g)
    clamp = Clamp(7.0, 1.702)
    touched = int(chosen.unique().numel())
    dense = [mxfp4.dequantize(*matrices, dtype=BF16) for matrices in (gate_up, down)] if size is not Size.LARGE else []
    return Work(
        run=lambda: experts.experts_forward(x, gate_up, down, chosen, weights, clamp=clamp),
        expected=lambda: experts_reference.experts_forward(x, dense[0], dense[1], chosen, weights, clamp=clamp),
        tolerance=2 * BF16_ROUNDING,
        num_bytes=touched * 3 * dim * dim * 17 // 32 + tokens * dim * (2 + 4),
        num_operations=2 * tokens * chosen_each * 3 * dim * dim,
    )


def _route(size: Size, device: str) -> Work:
    logits = _normal(_of(size, 5, 1000, 8192), 32, device=device)
    options: dict[str, Any] = {"top_k": 4, "scores": "softmax", "normalize": True, "scaling": 1.0}
    return Work(
        run=lambda: route.route(logits, **options),
        expected=lambda: route_reference.route(logits, **options),
        tolerance=FP32_SUMS,
        num_bytes=logits.numel() * 4 + len(logits) * 4 * 12,
        rivals={"torch, topk and softmax": lambda: logits.topk(4).values.softmax(-1)},
    )


def _quantize(size: Size, device: str) -> Work:
    w = _normal(_of(size, 3, 500, 8 * 5760), _of(size, 64, 2880, 2880), device=device) * 0.02
    return Work(
        run=lambda: quantize.quantize(w),
        expected=lambda: mxfp4.quantize(w),
        tolerance=0.0,
        num_bytes=w.numel() * 4 + w.numel() * 17 // 32,
        rivals={"torch, op by op": lambda: mxfp4.quantize(w)},
    )


FP8 = torch.float8_e4m3fn
CASES: dict[str, Case] = {
    "decode": _decode,
    "decode_window": lambda size, device: _decode(size, device, window=128),
    "decode_fp8": lambda size, device: _decode(size, device, stored=FP8),
    "decode_int8_128": lambda size, device: _decode(size, device, stored=torch.int8, dim=128, heads=32),
    "decode_latent": lambda size, device: _decode(size, device, heads=128, kv_heads=1, dim=576, latent=512),
    "prefill": _prefill,
    "prefill_window": lambda size, device: _prefill(size, device, window=128),
    "prefill_128": lambda size, device: _prefill(size, device, dim=128, heads=32),
    "prefill_fp8": lambda size, device: _prefill(size, device, stored=FP8),
    "decode_equals_prefill": _decode_equals_prefill,
    "rotate_and_write": _rotate_and_write,
    "add_rms_norm": _add_rms_norm,
    "logprobs_64": lambda size, device: _logprobs(size, device, 64),
    "logprobs_4096": lambda size, device: _logprobs(size, device, 4096),
    "logprobs_fp32_64": lambda size, device: _logprobs(size, device, 64, torch.float32),
    "sample": lambda size, device: _sample(size, device, cuts=False),
    "sample_cut": lambda size, device: _sample(size, device, cuts=True),
    "route": _route,
    "experts_1": lambda size, device: _experts(size, device, 1),
    "experts_64": lambda size, device: _experts(size, device, 64),
    "experts_4096": lambda size, device: _experts(size, device, 4096),
    "quantize": _quantize,
}

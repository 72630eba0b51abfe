"""Sampling on a GPU, in Triton: the ids of `reference.sample`, found without sorting.

A program has one row. Its weights, integers whose sums no order changes, are computed once and kept in memory that the
cache holds. Where the rank of a cut ends is searched for in the bits of the weights: every sweep counts and sums the
tokens above three pivots and keeps the quarter in which the cut lies, until it holds one token or equal ones; of equal
ones the smaller ids stay. Two more sweeps sum what is kept and find the token at the row's uniform number.

Arithmetic is that of the definition, step by step (products and sums are not fused), so ids are equal and logprobs
differ by the last bit of a logarithm. What the interpreter cannot show: that the compiled code rounds alike
(`scripts/gpu_check.py` compares ids), and speed. A row is one program, so a few rows use a small part of the device.

Shapes: N rows, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from model.kernels.cpu.build import KernelError
from model.kernels.gpu.aot import AotSpec
from model.kernels.gpu.launch import launch
from model.kernels.sample.reference import Sampled

MAX_VOCABULARY = 2**18
"""Weights that an int64 sum holds."""

BLOCK = 4096
_WARPS = 16
_BY_COUNT: tl.constexpr = tl.constexpr(False)
_BY_UNITS: tl.constexpr = tl.constexpr(True)


@triton.jit
def _weight(distance):
    """e^x of fp32 at most 0, as `logprob/reference.py` defines it."""
    x = tl.maximum(distance, -87.0)
    n = (x * 1.44269504088896341 + 12582912.0) - 12582912.0  # rounded to an integer, ties to even
    r = (x - n * 0.693359375) - n * -2.12194440e-4
    p = r * 1.9875691500e-4 + 1.3981999507e-3
    p = p * r + 8.3334519073e-3
    p = p * r + 4.1665795894e-2
    p = p * r + 1.6666665459e-1
    p = p * r + 5.0000001201e-1
    p = (p * (r * r) + r) + 1.0
    return p * ((n.to(tl.int32) + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def _units(weight):
    """The weight as an integer, w 2^44 rounded, ties to even: adding 2^52 rounds and leaves it in the low bits."""
    return (weight.to(tl.float64) * 17592186044416.0 + 4503599627370496.0).to(tl.int64, bitcast=True) - (1075 << 52)


@triton.jit
def _search(bits_ptr, vocabulary, all_units, need, BY_UNITS: tl.constexpr, BLOCK: tl.constexpr):
    """The end of the shortest prefix of ranks that has `need` tokens, or units.

    Returns:
        Bits from which on a token is in the prefix for sure; bits from which on it may be; how many of those may be,
        in order of ids; and the prefix's units.
    """
    low = (all_units * 0).to(tl.int32) + 1
    high = low + 0x3F800000
    low_count = low * 0 + vocabulary
    high_count = low * 0
    low_units = all_units
    high_units = all_units * 0
    while (high - low > 1) & (low_count - high_count > 1):
        step = tl.maximum((high - low) // 4, 1)
        pivot_1 = low + step
        pivot_2 = tl.minimum(low + 2 * step, high - 1)
        pivot_3 = tl.minimum(low + 3 * step, high - 1)
        count_1 = low * 0
        count_2 = low * 0
        count_3 = low * 0
        units_1 = all_units * 0
        units_2 = all_units * 0
        units_3 = all_units * 0
        for first in range(0, vocabulary, BLOCK):
            token = first + tl.arange(0, BLOCK)
            bits = tl.load(bits_ptr + token, mask=token < vocabulary, other=0)
            units = _units(bits.to(tl.float32, bitcast=True))
            count_1 += tl.sum((bits >= pivot_1).to(tl.int32), 0)
            count_2 += tl.sum((bits >= pivot_2).to(tl.int32), 0)
            count_3 += tl.sum((bits >= pivot_3).to(tl.int32), 0)
            units_1 += tl.sum(tl.where(bits >= pivot_1, units, 0), 0)
            units_2 += tl.sum(tl.where(bits >= pivot_2, units, 0), 0)
            units_3 += tl.sum(tl.where(bits >= pivot_3, units, 0), 0)
        if BY_UNITS:
            in_1 = units_1 >= need
            in_2 = units_2 >= need
            in_3 = units_3 >= need
        else:
            in_1 = count_1 >= need
            in_2 = count_2 >= need
            in_3 = count_3 >= need
        high = tl.where(in_3, high, tl.where(in_2, pivot_3, tl.where(in_1, pivot_2, pivot_1)))
        high_count = tl.where(in_3, high_count, tl.where(in_2, count_3, tl.where(in_1, count_2, count_1)))
        high_units = tl.where(in_3, high_units, tl.where(in_2, units_3, tl.where(in_1, units_2, units_1)))
        low = tl.where(in_3, pivot_3, tl.where(in_2, pivot_2, tl.where(in_1, pivot_1, low)))
        low_count = tl.where(in_3, count_3, tl.where(in_2, count_2, tl.where(in_1, count_1, low_count)))
        low_units = tl.where(in_3, units_3, tl.where(in_2, units_2, tl.where(in_1, units_1, low_units)))
    # Either one token lies between the bounds, or all that do have the same weight.
    single = low_count - high_count <= 1
    each = tl.where(single, low_units - high_units, _units(low.to(tl.float32, bitcast=True)))
    ties = (need - high_count).to(tl.int64)
    if BY_UNITS:
        # The quotient, at most V, rounded up; in fp64 it may fall below a whole number that it is not below.
        missing = need - high_units
        ties = (missing.to(tl.float64) / tl.maximum(each, 1).to(tl.float64)).to(tl.int64)
        ties = tl.where(ties * each < missing, ties + 1, ties)
        ties = tl.where(ties * each < missing, ties + 1, ties)
    return high, low, ties.to(tl.int32), high_units + ties * each


@triton.jit
def _kept_units(
    bits_ptr,
    first,
    vocabulary,
    least,
    k_high,
    k_low,
    k_ties,
    k_seen,
    p_high,
    p_low,
    p_ties,
    p_seen,
    BLOCK: tl.constexpr,
):
    """Units of one block's tokens, 0 where cut off, and how many ties of either cut have been met after it."""
    token = first + tl.arange(0, BLOCK)
    bits = tl.load(bits_ptr + token, mask=token < vocabulary, other=0)
    weight = bits.to(tl.float32, bitcast=True)
    k_tie = ((bits >= k_low) & (bits < k_high)).to(tl.int32)
    p_tie = ((bits >= p_low) & (bits < p_high)).to(tl.int32)
    k_in = (bits >= k_high) | ((k_tie > 0) & (k_seen + tl.cumsum(k_tie, 0) <= k_ties))
    p_in = (bits >= p_high) | ((p_tie > 0) & (p_seen + tl.cumsum(p_tie, 0) <= p_ties))
    units = tl.where(k_in & p_in & (weight >= least), _units(weight), 0)
    return units, k_seen + tl.sum(k_tie, 0), p_seen + tl.sum(p_tie, 0)


@triton.jit
def _sample_kernel(
    logits_ptr,
    temperatures_ptr,
    uniforms_ptr,
    top_k_ptr,
    top_p_ptr,
    min_p_ptr,
    bits_ptr,
    ids_ptr,
    logprobs_ptr,
    model_logprobs_ptr,
    vocabulary,
    logits_stride,
    HAS_TOP_K: tl.constexpr,
    HAS_TOP_P: tl.constexpr,
    HAS_MIN_P: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * logits_stride
    bits_ptr += row * vocabulary
    temperature = tl.load(temperatures_ptr + row)
    greedy = temperature == 0
    temperature = tl.where(greedy, 1.0, temperature)

    top = tl.load(logits_ptr).to(tl.float32)
    best = row * 0
    finite = top == top
    for first in range(0, vocabulary, BLOCK):
        token = first + tl.arange(0, BLOCK)
        logits = tl.load(logits_ptr + token, mask=token < vocabulary, other=float("-inf")).to(tl.float32)
        bad = (tl.abs(logits) == float("inf")) | (logits != logits)
        finite = finite & (tl.sum((bad & (token < vocabulary)).to(tl.int32), 0) == 0)
        block_top = tl.max(logits, 0)
        at = tl.min(tl.where(logits == block_top, token, 0x7FFFFFFF), 0).to(tl.int64)  # pyright: ignore
        best = tl.where((block_top > top) | ((block_top == top) & (first == 0)), at, best)
        top = tl.maximum(top, block_top)
    scaled_top = tl.div_rn(top, temperature)
    finite = finite & (tl.abs(scaled_top) < float("inf"))
    scaled_top = tl.where(finite, scaled_top, 0.0)
    weighed = tl.where(finite, vocabulary, 0)

    all_units = row * 0
    model_units = row * 0
    for first in range(0, vocabulary, BLOCK):
        token = first + tl.arange(0, BLOCK)
        ok = token < weighed
        logits = tl.load(logits_ptr + token, mask=ok, other=0.0).to(tl.float32)
        weight = tl.where(ok, _weight(tl.div_rn(logits, tl.zeros_like(logits) + temperature) - scaled_top), 0.0)
        model_weight = tl.where(ok, _weight(logits - tl.where(finite, top, 0.0)), 0.0)
        all_units += tl.sum(_units(weight), 0)
        model_units += tl.sum(_units(model_weight), 0)
        tl.store(bits_ptr + token, weight.to(tl.int32, bitcast=True), mask=ok)
    tl.debug_barrier()  # the sweeps read what other threads may have stored

    k_high = (row * 0).to(tl.int32)
    k_low = k_high
    k_ties = k_high
    p_high = k_high
    p_low = k_high
    p_ties = k_high
    k_units = all_units
    least = 0.0
    if HAS_TOP_K:
        top_k = tl.load(top_k_ptr + row)
        if finite & (top_k > 0) & (top_k < vocabulary) & (greedy == 0):
            k_high, k_low, k_ties, k_units = _search(bits_ptr, vocabulary, all_units, top_k, _BY_COUNT, BLOCK)
    if HAS_TOP_P:
        top_p = tl.load(top_p_ptr + row)
        if finite & (top_p < 1.0) & (greedy == 0):
            enough = tl.ceil(top_p * k_units.to(tl.float64)).to(tl.int64)  # pyright: ignore
            enough = tl.minimum(tl.maximum(enough, 1), k_units)
            p_high, p_low, p_ties, _ = _search(bits_ptr, vocabulary, all_units, enough, _BY_UNITS, BLOCK)
    if HAS_MIN_P:
        least = tl.where(greedy, 0.0, tl.minimum(tl.load(min_p_ptr + row), 1.0))

    kept_units = all_units
    if HAS_TOP_K or HAS_TOP_P or HAS_MIN_P:
        kept_units = row * 0
        k_seen = k_high * 0
        p_seen = k_high * 0
        for first in range(0, vocabulary, BLOCK):
            units, k_seen, p_seen = _kept_units(
                bits_ptr, first, vocabulary, least,
                k_high, k_low, k_ties, k_seen, p_high, p_low, p_ties, p_seen, BLOCK,
            )  # fmt: skip
            kept_units += tl.sum(units, 0)

    target = (tl.load(uniforms_ptr + row) * kept_units.to(tl.float64)).to(tl.int64)
    target = tl.minimum(tl.maximum(target, 0), kept_units - 1)
    chosen = best
    if finite & (greedy == 0):
        first = k_high * 0
        k_seen = k_high * 0
        p_seen = k_high * 0
        below = row * 0
        searching = first == 0
        while searching & (first < vocabulary):
            units, k_seen, p_seen = _kept_units(
                bits_ptr, first, vocabulary, least,
                k_high, k_low, k_ties, k_seen, p_high, p_low, p_ties, p_seen, BLOCK,
            )  # fmt: skip
            block_units = tl.sum(units, 0)
            if below + block_units > target:
                before = (below + tl.cumsum(units, 0) <= target).to(tl.int32)
                chosen = (first + tl.sum(before, 0)).to(tl.int64)
                searching = first < 0
            below += block_units
            first += BLOCK

    chosen = tl.where(finite, chosen, 0)
    logit = tl.load(logits_ptr + chosen).to(tl.float32)
    distance = (tl.div_rn(logit, temperature) - scaled_top).to(tl.float64)
    model_distance = (logit - top).to(tl.float64)
    unit = 5.684341886080802e-14  # 2^-44
    logprob = distance - tl.log(kept_units.to(tl.float64) * unit)
    model_logprob = model_distance - tl.log(model_units.to(tl.float64) * unit)
    tl.store(ids_ptr + row, chosen)
    tl.store(logprobs_ptr + row, tl.where(finite, logprob, float("nan")).to(tl.float32))
    tl.store(model_logprobs_ptr + row, tl.where(finite, model_logprob, float("nan")).to(tl.float32))


@triton.jit
def _mixed(state):
    """SplitMix64's output function (Steele, Lea and Flood 2014), uint64."""
    z = state + 0x9E3779B97F4A7C15
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB
    return z ^ (z >> 31)


@triton.jit
def _uniforms_kernel(seeds_ptr, positions_ptr, out_ptr, num_rows, BLOCK: tl.constexpr):
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    ok = row < num_rows
    seed = tl.load(seeds_ptr + row, mask=ok, other=0).to(tl.uint64, bitcast=True)
    position = tl.load(positions_ptr + row, mask=ok, other=0).to(tl.uint64, bitcast=True)
    mixed = _mixed(_mixed(seed) + position)
    tl.store(out_ptr + row, (mixed >> 11).to(tl.float64) * 1.1102230246251565e-16, mask=ok)


def sample(
    logits_NV: torch.Tensor,
    temperatures_N: torch.Tensor,
    uniforms_N: torch.Tensor,
    *,
    top_k_N: torch.Tensor | None = None,
    top_p_N: torch.Tensor | None = None,
    min_p_N: torch.Tensor | None = None,
) -> Sampled:
    """As `reference.sample`; logits may be bf16, too.

    Raises:
        KernelError: Shapes that do not belong together, or too large a vocabulary.
    """
    per_row = (temperatures_N, uniforms_N, top_k_N, top_p_N, min_p_N)
    if (
        logits_NV.ndim != 2
        or not 0 < logits_NV.shape[1] <= MAX_VOCABULARY
        or any(values is not None and values.shape != logits_NV.shape[:1] for values in per_row)
    ):
        shapes = [None if values is None else [*values.shape] for values in per_row]
        raise KernelError(
            f"sample: need logits [N, V] with V of 1 to {MAX_VOCABULARY} and one value a row, got "
            f"{[*logits_NV.shape]} and {shapes}; pass one row for each token to choose"
        )
    num_rows, vocabulary = logits_NV.shape
    logits_NV = logits_NV if logits_NV.stride(-1) == 1 else logits_NV.contiguous()
    types = (torch.float32, torch.float64, torch.int64, torch.float64, torch.float32)
    given = [
        None if values is None else values.to(kind).contiguous() for values, kind in zip(per_row, types, strict=True)
    ]
    ids_N = logits_NV.new_empty(num_rows, dtype=torch.int64)
    logprobs_N, model_logprobs_N = (logits_NV.new_empty(num_rows, dtype=torch.float32) for _ in range(2))
    launch(
        _sample_kernel,
        (num_rows,),
        logits_NV,
        *(ids_N if values is None else values for values in given),
        logits_NV.new_empty(num_rows, vocabulary, dtype=torch.int32),
        ids_N,
        logprobs_N,
        model_logprobs_N,
        vocabulary,
        logits_NV.stride(0),
        HAS_TOP_K=top_k_N is not None,
        HAS_TOP_P=top_p_N is not None,
        HAS_MIN_P=min_p_N is not None,
        BLOCK=BLOCK,
        num_warps=_WARPS,
    )
    return Sampled(ids_N, logprobs_N, model_logprobs_N)


def counter_uniforms(seeds_N: torch.Tensor, positions_N: torch.Tensor) -> torch.Tensor:
    """Uniform numbers in [0, 1), float64 [N], of int64 seeds and positions: those of `rollout.engine.sampling`."""
    out_N = seeds_N.new_empty(seeds_N.shape, dtype=torch.float64)
    launch(_uniforms_kernel, (triton.cdiv(len(out_N), 256),), seeds_N, positions_N, out_N, len(out_N), BLOCK=256)
    return out_N


def _spec(name: str, *, cuts: bool) -> AotSpec:
    types: dict[str, Any] = {
        "uniforms_ptr": "*fp64",
        "top_k_ptr": "*i64",
        "top_p_ptr": "*fp64",
        "bits_ptr": "*i32",
        "ids_ptr": "*i64",
    }
    constexprs = {"HAS_TOP_K": cuts, "HAS_TOP_P": cuts, "HAS_MIN_P": cuts, "BLOCK": BLOCK}
    names = [arg for arg in _sample_kernel.arg_names if arg not in constexprs]
    return AotSpec(
        name=name,
        kernel=_sample_kernel,
        signature={arg: types.get(arg, "*fp32" if arg.endswith("_ptr") else "i32") for arg in names},
        constexprs=constexprs,
        num_warps=_WARPS,
        max_registers=255,
        features=["wide_load"],
    )


AOT = [
    _spec("sample", cuts=False),
    _spec("sample_cut", cuts=True),
    AotSpec(
        name="counter_uniforms",
        kernel=_uniforms_kernel,
        signature={"seeds_ptr": "*i64", "positions_ptr": "*i64", "out_ptr": "*fp64", "num_rows": "i32"},
        constexprs={"BLOCK": 256},
        max_registers=48,
    ),
]

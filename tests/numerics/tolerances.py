"""Every tolerance of the numerics tests, with its derivation. u = 2^-24: fp32's unit roundoff; 2^-8: bf16's.

Errors are measured relative to the largest magnitude of the expected tensor (`relative_error`): what a sum of n
products loses depends on the size of its terms, not on that of the result, which may cancel.

A sum of n terms in some order differs from the same sum in another order by at most 2 n u times the sum of
magnitudes, and for terms of random sign by about sqrt(n) u times the root of the sum of squares. We allow 8 times the
random-sign estimate, and never less than 8 u, for the elementwise functions (silu, exp, rsqrt: within 2 u each).
"""

import math

import torch

U32 = 2.0**-24
U16 = 2.0**-8


def summed(num_terms: int, *, unit: float = U32) -> float:
    """Relative error allowed between two orders of one sum."""
    return 8 * unit * max(1.0, math.sqrt(num_terms))


EXPERTS_FORWARD = summed(128) + summed(128)
"""Two chained products of at most 128 terms."""

EXPERTS_BACKWARD = summed(128) + summed(128) + summed(256)
"""Down, activation and gate_up backward; weight gradients sum over at most 140 rows instead."""

PACKED_EXPERTS_RMS = 1e-6
"""Packed products against fp64, root mean square over root mean square: n additions, each off by at most u of a sum
that grows as a square root, come to about sqrt(n / 6) u, which is 1.3e-6 at n = 2880 in the worst order; the kernels
sum at least 16 lanes or 32-blocks apart and stay 4 times below."""

PACKED_EXPERTS_BF16 = U16
"""With the unit's output rounded to bf16 once: each term of the down product is off by at most U16 / 2."""

ATTENTION = summed(64) + summed(256)
"""Scores sum over head_dim <= 64, outputs over at most 256 keys; backward has the same two products again."""

ATTENTION_BACKWARD = 2 * ATTENTION

NORM = summed(128)

LINEAR_BACKWARD = summed(40)
"""Gradients of a dense product in its tests: sums over 21 outputs, or over 39 rows and groups at most."""

ROTATION = 512 * U32 + summed(2)
"""The fp32 angle at positions below 512 is off by up to 512 u radians, and a pair is a sum of two products."""

TRANSFORMER_PACKING = 4 * 3 * summed(128)
"""Packing changes row counts of products, and so the order of their sums: 3 chained products in each of 4 layers."""

BF16_TRANSFORMER = 16 * U16
"""bf16 compute against fp32: 2 roundings to bf16 in each of 8 branches that add up in fp32."""

ENGINE_LOGPROB = 2 * (TRANSFORMER_PACKING + summed(128))
"""Decoding on a cache against one full forward, relative to the largest logit: hidden states as under another packing,
one more product for the logits, and a logprob is the difference of a logit and a logsumexp of logits."""

BF16_ENGINE_LOGPROB = 2 * BF16_TRANSFORMER
"""The same in bf16 compute, where the two sides round attention differently; routes are replayed."""


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Largest difference over the largest expected magnitude; infinite when either is not finite or shapes differ."""
    if actual.shape != expected.shape or not (actual.isfinite().all() and expected.isfinite().all()):
        return math.inf
    if expected.numel() == 0:
        return 0.0
    scale = expected.double().abs().max().item()
    difference = (actual.double() - expected.double()).abs().max().item()
    return difference / scale if scale else (0.0 if difference == 0.0 else math.inf)


def attention_sums(head_dim: int, num_keys: int) -> float:
    """Attention in another order of its sums: scores over `head_dim` terms, outputs over `num_keys`, as `ATTENTION`."""
    return summed(head_dim) + summed(num_keys)


def relative_rms(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Root mean square of the difference over that of `expected`; infinite where `relative_error` is."""
    if actual.shape != expected.shape or not (actual.isfinite().all() and expected.isfinite().all()):
        return math.inf
    difference = (actual.double() - expected.double()).square().mean().sqrt().item()
    scale = expected.double().square().mean().sqrt().item()
    return difference / scale if scale else (0.0 if difference == 0.0 else math.inf)


ATTENTION_BF16_WEIGHTS = 2 * U16
"""Attention that rounds the softmax's weights to bf16 for its product, and its output. Each is off by at most U16 / 2
of a term; the terms of an output sum in magnitude to at most the largest value, up to 3 times the largest output."""

"""Signal to noise of the scale rules, on weights of the size of one published expert matrix slice."""

import math

import pytest
import torch

from model.mxfp4 import ScaleRule, dequantize, quantize

SIGMAS = [0.02 * 2 ** (i / 16) for i in range(16)]
"""One octave: the noise depends on the phase of sigma between powers of two."""

TOLERANCE_DB = 0.1


def unit_weights(distribution: str) -> torch.Tensor:
    """[256, 2880] of mean 0 and variance 1."""
    torch.manual_seed(0)
    shape = torch.Size((256, 2880))
    if distribution == "gaussian":
        return torch.randn(shape)
    if distribution == "laplace":
        return torch.distributions.Laplace(0.0, math.sqrt(0.5)).sample(shape)
    if distribution == "t5":
        return torch.distributions.StudentT(5.0, scale=math.sqrt(3 / 5)).sample(shape)
    return (2 * torch.rand(shape) - 1) * math.sqrt(3)


def decibels(weight: torch.Tensor, rule: ScaleRule) -> float:
    error = weight - dequantize(*quantize(weight, rule=rule))
    return 10 * math.log10(weight.double().square().sum() / error.double().square().sum())


@pytest.mark.parametrize(
    ("rule", "gaussian", "mean"),
    [
        (ScaleRule.FLOOR, (18.57, 18.93), {"laplace": 17.97, "t5": 17.98, "uniform": 19.20}),
        (ScaleRule.EVEN, (18.92, 19.07), {"laplace": 18.15, "t5": 18.15, "uniform": 19.59}),
        (ScaleRule.RCEIL, (18.51, 18.77), {"laplace": 17.57, "t5": 17.56, "uniform": 19.48}),
    ],
)
def test_noise_of_each_rule(rule, gaussian, mean):
    """Smallest and largest over the octave for Gaussian weights, the mean for the others.

    The sampling error of one figure is about 0.01 dB: 7e5 squared errors.
    """
    noise = [decibels(unit_weights("gaussian") * sigma, rule) for sigma in SIGMAS]
    assert (min(noise), max(noise)) == pytest.approx(gaussian, abs=TOLERANCE_DB)
    for distribution, expected in mean.items():
        weight = unit_weights(distribution)
        noise = [decibels(weight * sigma, rule) for sigma in SIGMAS]
        assert sum(noise) / len(noise) == pytest.approx(expected, abs=TOLERANCE_DB), distribution

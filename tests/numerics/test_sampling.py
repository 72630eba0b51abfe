"""The random numbers that choose tokens, and the distribution that an engine samples from with them."""

import dataclasses
import math

import numpy as np
import pytest

from rollout.engine.sampling import counter_uniform
from tests.numerics.engines import CONFIG, ask, full_forward, make_engine, make_model

CHI2_999 = {11: 31.26, 99: 148.23}
"""99.9 % quantiles of the chi-square distribution by degrees of freedom (Abramowitz and Stegun, table 26.8)."""


def chi_square(counts, probabilities):
    expected = probabilities * counts.sum()
    assert expected.min() > 5
    return float(((counts - expected) ** 2 / expected).sum())


def test_the_engine_samples_what_its_model_says():
    model = make_model(dataclasses.replace(CONFIG, vocab_size=12, num_layers=1))
    engine = make_engine(model, max_batch_size=256, max_seq_len=8)
    ids, counts = (3, 7, 1), np.zeros(12)
    for start in range(0, 2048, 256):
        requests = [ask(n, ids=ids, seed=start + n, max_tokens=1, temperature=1.0) for n in range(256)]
        for generation in engine.sample(requests):
            counts[generation.ids[0]] += 1
        for request in requests:
            engine.close_session(request.session)
    logits = full_forward(model, ids)[0][-1]
    assert chi_square(counts, logits.softmax(-1).double().numpy()) < CHI2_999[11]
    assert chi_square(counts, (logits / 1.2).softmax(-1).double().numpy()) > CHI2_999[11]


def _splitmix64(state):
    """Python integers; returns the next state and the output."""
    state = (state + 0x9E3779B97F4A7C15) % 2**64
    z = state
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB % 2**64
    return state, z ^ (z >> 31)


def test_counter_numbers_are_splitmix64():
    state, outputs = 1234567, []
    for _ in range(3):
        state, output = _splitmix64(state)
        outputs.append(output)
    assert outputs == [6457827717110365317, 3203168211198807973, 9817491932198370423]  # the published test vector
    cases = [(0, 0), (1, 0), (0, 1), (2**64 - 1, 2**40), (2**63, 191), (7, 3)]
    got = counter_uniform(np.array([seed for seed, _ in cases], np.uint64), np.array([at for _, at in cases]))
    for (seed, position), number in zip(cases, got.tolist(), strict=True):
        mixed = _splitmix64((_splitmix64(seed)[1] + position) % 2**64)[1]
        assert number == (mixed >> 11) / 2**53


@pytest.mark.parametrize("along", ["seeds", "positions", "both"])
def test_counter_numbers_are_uniform_and_independent(along):
    steps, still = np.arange(50_000), np.full(50_000, 3)
    numbers = counter_uniform(steps if along != "positions" else still, steps if along != "seeds" else still)
    assert numbers.dtype == np.float64
    assert 0.0 <= numbers.min() < numbers.max() < 1.0
    counts = np.bincount((numbers * 100).astype(int), minlength=100)
    assert chi_square(counts, np.full(100, 0.01)) < CHI2_999[99]
    neighbours = np.corrcoef(numbers[:-1], numbers[1:])[0, 1]
    assert abs(neighbours) < 4 / math.sqrt(len(numbers))
    assert len(np.unique(numbers)) == len(numbers)

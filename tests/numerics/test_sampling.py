"""The distribution that tokens are sampled from, and the random numbers that choose them."""

import dataclasses
import math

import numpy as np
import pytest
import torch

from rollout.config import EngineConfig
from rollout.engine.engine import Engine
from rollout.engine.sampling import Rows, choose, counter_uniform
from rollout.types import SampleRequest, SamplingParams, WeightVersion
from tests.numerics.test_engine import CONFIG, STOP, ask, full_forward, make_model

CHI2_999 = {11: 31.26, 99: 148.23}
"""99.9 % quantiles of the chi-square distribution by degrees of freedom (Abramowitz and Stegun, table 26.8)."""


def chi_square(counts, probabilities):
    expected = probabilities * counts.sum()
    assert expected.min() > 5
    return float(((counts - expected) ** 2 / expected).sum())


def test_tokens_follow_the_softmax_and_no_other_distribution():
    logits = torch.linspace(-1.5, 1.5, 12)[torch.randperm(12, generator=torch.Generator().manual_seed(0))]
    num = 20_000
    uniforms = torch.from_numpy(counter_uniform(np.arange(num), np.full(num, 9)))
    for temperature in (1.0, 0.7):
        ids, logprobs = choose(logits.expand(num, -1), torch.full((num,), temperature), uniforms)
        counts = np.bincount(ids.numpy(), minlength=12)
        right = (logits / temperature).softmax(-1).double().numpy()
        assert chi_square(counts, right) < CHI2_999[11]
        assert chi_square(counts, (logits / (temperature * 1.1)).softmax(-1).double().numpy()) > CHI2_999[11]
        assert chi_square(counts, np.roll(right, 1)) > CHI2_999[11]
        assert np.allclose(logprobs.double().exp().numpy(), right[ids.numpy()], rtol=1e-5)


def test_the_engine_samples_what_its_model_says():
    model = make_model(dataclasses.replace(CONFIG, vocab_size=12, num_layers=1))
    engine = Engine(model.config, EngineConfig(max_batch_size=256, max_seq_len=8), stop_ids={STOP})
    engine.swap_weights(WeightVersion(0), model.state_dict())
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


LAST_BELOW_ONE = 1.0 - 2.0**-53


def test_a_number_next_to_one_stays_in_the_vocabulary():
    for seed in range(50):
        generator = torch.Generator().manual_seed(seed)
        logits = torch.randn(64, 1 + 7 * seed, generator=generator) * 5
        ids, logprobs = choose(logits, torch.full((64,), 0.3), torch.full((64,), LAST_BELOW_ONE, dtype=torch.float64))
        assert ids.max().item() < logits.shape[1]
        assert logprobs.isfinite().all()


@pytest.mark.parametrize("uniform", [0.0, 0.5, LAST_BELOW_ONE])
def test_a_token_without_probability_is_never_chosen(uniform):
    logits = torch.full((1, 9), -torch.inf)
    logits[0, 3:6] = torch.tensor([0.0, 1.0, 2.0])
    ids, logprobs = choose(logits, torch.ones(1), torch.tensor([uniform], dtype=torch.float64))
    assert ids.tolist() == [{0.0: 3, 0.5: 5}.get(uniform, 5)]
    assert logprobs[0].item() == pytest.approx(logits[0].log_softmax(-1)[ids[0]].item())


def test_greedy_takes_the_first_largest_logit_and_its_logprob_at_temperature_one():
    logits = torch.tensor([[0.0, 2.0, 2.0, 1.0], [3.0, 0.0, 0.0, 0.0]])
    ids, logprobs = choose(logits, torch.zeros(2), torch.tensor([0.99, 0.99], dtype=torch.float64))
    assert ids.tolist() == [1, 0]
    assert torch.equal(logprobs, logits.log_softmax(-1).gather(1, ids[:, None])[:, 0])


# ---- tokens that take no part


def rows(num, **how):
    return Rows([SampleRequest(session=0, prompt_ids=(0,), params=SamplingParams(**how), seed=9)] * num)


def nucleus(logits, *, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0):
    """The definition in NumPy, one row: probabilities of all tokens, 0 for those that take no part."""
    scaled = logits.double().numpy() / temperature
    order = sorted(range(len(scaled)), key=lambda token: (-scaled[token], token))
    order = order[:top_k] if top_k else order
    weights = np.exp(scaled - scaled.max())
    share = {token: weights[token] / weights[order].sum() for token in order}
    kept, total = [], 0.0
    for token in order:
        if total < top_p or top_p == 1.0:
            kept.append(token)
        total += share[token]
    kept = [token for token in kept if share[token] >= min_p * share[order[0]]]
    probabilities = np.zeros(len(scaled))
    probabilities[kept] = weights[kept] / weights[kept].sum()
    return probabilities


CUTS = [
    {"top_k": 1},
    {"top_k": 4, "temperature": 0.8},
    {"top_p": 0.6},
    {"top_p": 1e-6},
    {"min_p": 0.3, "temperature": 1.4},
    {"min_p": 1.0},
    {"top_k": 9, "top_p": 0.8, "min_p": 0.05, "temperature": 1.2},
    {"top_k": 100},
]


@pytest.mark.parametrize("how", CUTS, ids=str)
def test_cut_distributions_are_those_of_the_definition(how):
    logits = torch.linspace(-1.5, 1.5, 12)[torch.randperm(12, generator=torch.Generator().manual_seed(0))]
    logits[3] = logits[7]  # a tie: the smaller id is the likelier one
    num = 20_000
    choice = rows(num, **how).choose(logits.expand(num, -1), np.arange(num))
    right = nucleus(logits, **how)
    counts = np.bincount(choice.ids_N.numpy(), minlength=12)
    assert set(counts.nonzero()[0]) == set(right.nonzero()[0])
    if (right > 0).sum() > 1:
        assert chi_square(counts[right > 0], right[right > 0]) < CHI2_999[11]
    assert np.allclose(choice.logprobs_N.double().exp().numpy(), right[choice.ids_N.numpy()], rtol=1e-5)
    whole = logits.log_softmax(-1)[choice.ids_N]
    assert torch.allclose(choice.model_logprobs_N, whole, rtol=1e-6)


def test_rows_of_a_batch_keep_their_own_parameters():
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(len(CUTS), 50, generator=generator) * 2
    requests = [
        SampleRequest(session=n, prompt_ids=(0,), params=SamplingParams(**how), seed=n) for n, how in enumerate(CUTS)
    ]
    positions = np.arange(len(CUTS)) + 5
    together = Rows(requests).choose(logits, positions)
    for n, request in enumerate(requests):
        alone = Rows([request]).choose(logits[n : n + 1], positions[n : n + 1])
        assert alone.ids_N.item() == together.ids_N[n].item()
        assert alone.logprobs_N.item() == pytest.approx(together.logprobs_N[n].item(), abs=1e-6)
        assert alone.model_logprobs_N.item() == pytest.approx(together.model_logprobs_N[n].item(), abs=1e-6)


def test_a_number_next_to_one_stays_among_the_kept_tokens():
    logits = torch.tensor([[3.0, 2.9, 2.8, -5.0, -5.0]])
    kept = torch.tensor([[True, True, False, False, False]])
    ids, logprobs = choose(logits, torch.ones(1), torch.tensor([LAST_BELOW_ONE], dtype=torch.float64), kept)
    assert ids.item() == 1
    assert logprobs.isfinite().all()

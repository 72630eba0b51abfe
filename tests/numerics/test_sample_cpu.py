"""Sampling on a CPU: the ids of the definition exactly, logprobs bit-equal to the kernel that the learner calls."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from model.kernels.cpu.build import KernelError
from model.kernels.cpu.isa import available_isas
from model.kernels.logprob.cpu import Logprobs
from model.kernels.sample import reference
from model.kernels.sample.cpu import Sample
from tests.numerics.tolerances import relative_error, summed

ISAS = available_isas()
each_isa = pytest.mark.parametrize("isa", ISAS)
SIZES = [1, 2, 63, 64, 65, 1024, 1025, 5003]
CUTS = ("top_k_N", "top_p_N", "min_p_N")


def rows(num_rows: int, vocabulary: int, scale: float = 3.0, seed: int = 0) -> dict[str, torch.Tensor]:
    """Every combination of cuts, some greedy rows, uniforms at both ends."""
    generator = torch.Generator().manual_seed(num_rows * vocabulary + seed)
    index = torch.arange(num_rows)
    uniforms = torch.rand(num_rows, generator=generator, dtype=torch.float64)
    uniforms[0::7], uniforms[1::7] = 0.0, 1.0 - 2.0**-53
    temperatures = torch.rand(num_rows, generator=generator) * 1.8 + 0.2
    temperatures[::3], temperatures[::11] = 1.0, 0.0
    top_k = torch.randint(1, min(vocabulary, 80) + 1, (num_rows,), generator=generator)
    top_p = torch.rand(num_rows, generator=generator, dtype=torch.float64)
    return {
        "logits_NV": torch.randn(num_rows, vocabulary, generator=generator) * scale,
        "temperatures_N": temperatures,
        "uniforms_N": uniforms,
        "top_k_N": torch.where(index % 2 == 0, top_k, 0),
        "top_p_N": torch.where(index // 2 % 2 == 0, top_p, 1.0),
        "min_p_N": torch.where(index // 4 % 2 == 0, torch.rand(num_rows, generator=generator) ** 4, 0.0),
    }


def check(isa, arguments: dict[str, torch.Tensor]) -> reference.Sampled:
    found, expected = Sample(isa)(**arguments), reference.sample(**arguments)
    assert torch.equal(found.ids_N, expected.ids_N)
    for mine, theirs in ((found.logprobs_N, expected.logprobs_N), (found.model_logprobs_N, expected.model_logprobs_N)):
        # The sums are equal; the logarithms in float64 may differ in their last bit, and so the fp32 numbers rarely do.
        assert (mine.view(torch.int32) - theirs.view(torch.int32)).abs().max() <= 1
    return found


@each_isa
@pytest.mark.parametrize("vocabulary", SIZES)
@pytest.mark.parametrize("scale", [1e-3, 3.0, 40.0])
def test_ids_and_logprobs_are_those_of_the_definition(isa, vocabulary, scale):
    check(isa, rows(48, vocabulary, scale))


@each_isa
@pytest.mark.parametrize("cut", [None, *CUTS])
def test_each_cut_alone(isa, cut):
    arguments = {key: value for key, value in rows(40, 777).items() if key not in CUTS or key == cut}
    check(isa, arguments)


@each_isa
def test_a_vocabulary_of_201_thousand(isa):
    check(isa, rows(4, 201_088, seed=1))


@given(
    logits=st.lists(st.integers(-6, 6), min_size=1, max_size=150),
    temperature=st.sampled_from([0.0, 0.3, 1.0, 1.7]),
    uniform=st.floats(0, 1, exclude_max=True),
    top_k=st.integers(0, 160),
    top_p=st.floats(0.01, 1.0),
    min_p=st.sampled_from([0.0, 0.05, math.exp(-1), 0.5, 1.0]),
)
@settings(max_examples=150, deadline=None)
def test_rows_with_many_ties(logits, temperature, uniform, top_k, top_p, min_p):
    for isa in ISAS:
        check(
            isa,
            {
                "logits_NV": torch.tensor([logits], dtype=torch.float32) / 2,
                "temperatures_N": torch.tensor([temperature]),
                "uniforms_N": torch.tensor([uniform], dtype=torch.float64),
                "top_k_N": torch.tensor([top_k]),
                "top_p_N": torch.tensor([top_p], dtype=torch.float64),
                "min_p_N": torch.tensor([min_p]),
            },
        )


def ids_of(logits: list[float], **cuts) -> list[int]:
    """Every id that some uniform number gives, by the definition."""
    n = 1001
    arguments = {f"{name}_N": torch.full((n,), value) for name, value in cuts.items()}
    uniforms = torch.linspace(0, 1 - 2.0**-53, n, dtype=torch.float64)
    sampled = reference.sample(torch.tensor([logits]).expand(n, -1), torch.ones(n), uniforms, **arguments)
    return sorted(set(sampled.ids_N.tolist()))


def test_what_the_cuts_of_the_definition_keep():
    thirds = [math.log(p) for p in (0.1, 0.4, 0.4, 0.06, 0.04)]
    assert ids_of(thirds) == [0, 1, 2, 3, 4]
    assert ids_of(thirds, top_k=1) == [1]  # of equals the smaller id
    assert ids_of(thirds, top_k=3) == [0, 1, 2]
    assert ids_of(thirds, top_p=0.39) == [1]
    assert ids_of(thirds, top_p=0.79) == [1, 2]
    assert ids_of(thirds, top_p=0.85) == [0, 1, 2]
    assert ids_of(thirds, min_p=0.2) == [0, 1, 2]
    assert ids_of(thirds, min_p=0.3) == [1, 2]
    assert ids_of(thirds, top_k=3, top_p=0.85) == [1, 2]  # 0.8 of the 0.9 that top-k keeps
    assert ids_of(thirds, top_k=1, top_p=0.01, min_p=1.0) == [1]
    assert ids_of(thirds, min_p=2.0) == [1, 2]


def test_frequencies_and_logprobs_of_the_definition_are_the_distribution():
    logits = torch.tensor([[0.3, -1.0, 2.0, 1.1, -3.0]])
    n = 10_000
    uniforms = (torch.arange(n, dtype=torch.float64) + 0.5) / n
    found = reference.sample(logits.expand(n, -1), torch.full((n,), 0.7), uniforms)
    expected = torch.softmax(logits[0].double() / 0.7, -1)
    assert (found.ids_N.bincount(minlength=5) / n - expected).abs().max() <= 1.0 / n
    assert relative_error(found.logprobs_N, expected.log()[found.ids_N].float()) <= 2 * summed(1)
    model = torch.log_softmax(logits[0].double(), -1)[found.ids_N].float()
    assert relative_error(found.model_logprobs_N, model) <= 2 * summed(1)


@each_isa
def test_logprobs_have_the_bits_that_the_learner_computes(isa):
    arguments = rows(64, 1999)
    sample, logprobs = Sample(isa), Logprobs(isa)
    logits, temperatures = arguments["logits_NV"], arguments["temperatures_N"]
    for cuts in (CUTS, ()):
        found = sample(**{key: value for key, value in arguments.items() if key not in CUTS or key in cuts})
        assert torch.equal(found.model_logprobs_N, logprobs(logits, found.ids_N))
    at_temperature = logprobs(logits, found.ids_N, torch.where(temperatures == 0, 1.0, temperatures))
    assert torch.equal(found.logprobs_N, at_temperature)


def test_rows_have_the_same_bits_alone_in_a_batch_with_two_threads_and_on_every_instruction_set():
    arguments = rows(40, 2050)
    found = []
    for isa in ISAS:
        sample = Sample(isa)
        found.append(sample(**arguments))
        alone = [sample(**{key: value[[r]] for key, value in arguments.items()}) for r in range(40)]
        found.append(reference.Sampled(*(torch.cat(part) for part in zip(*alone, strict=True))))
        torch.set_num_threads(2)
        found.append(sample(**arguments))
        torch.set_num_threads(1)
    for sampled in found:
        assert all(torch.equal(a, b) for a, b in zip(sampled, found[0], strict=True))


@each_isa
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("cuts", [(), CUTS])
def test_a_row_that_is_not_finite_is_nan_and_no_other_row(isa, bad, cuts):
    arguments = {key: value for key, value in rows(12, 70).items() if key not in CUTS or key in cuts}
    arguments["logits_NV"][[4, 11], [69, 0]] = bad  # row 11 is greedy
    for found in (Sample(isa)(**arguments), reference.sample(**arguments)):
        for logprobs in (found.logprobs_N, found.model_logprobs_N):
            assert logprobs.isnan().nonzero().flatten().tolist() == [4, 11]
        assert found.ids_N[[4, 11]].tolist() == [0, 0]
    arguments = rows(12, 70)
    arguments["temperatures_N"][5] = 1e-38
    assert Sample(isa)(**arguments).logprobs_N.isnan().nonzero().flatten().tolist() == [5]
    assert reference.sample(**arguments).logprobs_N.isnan().nonzero().flatten().tolist() == [5]


@each_isa
def test_greedy_takes_the_smallest_id_of_the_largest(isa):
    logits = torch.tensor([[0.0, 5.0, -1.0, 5.0] * 40, [-0.0, 0.0, -1.0, -2.0] * 40])
    found = Sample(isa)(logits, torch.zeros(2), torch.full((2,), 0.9, dtype=torch.float64))
    assert found.ids_N.tolist() == [1, 0]
    assert torch.equal(found.logprobs_N, found.model_logprobs_N)


@each_isa
def test_operands_that_do_not_fit(isa):
    sample = Sample(isa)
    with pytest.raises(KernelError, match="need logits"):
        sample(torch.ones(3), torch.ones(1), torch.ones(1))
    with pytest.raises(KernelError, match=r"need top_k of shape \(2,\), got \(1,\)"):
        sample(torch.ones(2, 3), torch.ones(2), torch.zeros(2), top_k_N=torch.ones(1))
    assert sample(torch.empty(0, 3), torch.empty(0), torch.empty(0)).ids_N.shape == (0,)

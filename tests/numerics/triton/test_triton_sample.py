"""Sampling without sorting finds the ids of the definition; counter random numbers are those of the engine."""

import numpy as np
import pytest
import torch

from model.kernels.cpu.build import KernelError
from model.kernels.sample import reference
from model.kernels.sample import triton as sampling
from rollout.engine.sampling import counter_uniform

CUTS = ("top_k_N", "top_p_N", "min_p_N")


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch):
    """Blocks that small vocabularies fill and overflow; memory that a launcher reserves starts poisoned."""
    monkeypatch.setattr(sampling, "BLOCK", 64)
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


def rows(num_rows, vocabulary, *, scale=3.0, seed=0):
    """Every combination of cuts, greedy rows, uniform numbers at both ends."""
    g = torch.Generator().manual_seed(num_rows * vocabulary + seed)
    index = torch.arange(num_rows)
    uniforms = torch.rand(num_rows, generator=g, dtype=torch.float64)
    uniforms[0::7], uniforms[1::7] = 0.0, 1.0 - 2.0**-53
    temperatures = torch.rand(num_rows, generator=g) * 1.8 + 0.2
    temperatures[::3], temperatures[::11] = 1.0, 0.0
    top_k = torch.randint(1, vocabulary + 2, (num_rows,), generator=g)
    top_p = torch.rand(num_rows, generator=g, dtype=torch.float64)
    return {
        "logits_NV": torch.randn(num_rows, vocabulary, generator=g) * scale,
        "temperatures_N": temperatures,
        "uniforms_N": uniforms,
        "top_k_N": torch.where(index % 2 == 0, top_k, 0),
        "top_p_N": torch.where(index // 2 % 2 == 0, top_p, 1.0),
        "min_p_N": torch.where(index // 4 % 2 == 0, torch.rand(num_rows, generator=g) ** 4, 0.0),
    }


def check(arguments, device):
    expected = reference.sample(**arguments)
    found = sampling.sample(**{name: value.to(device) for name, value in arguments.items()})
    found = reference.Sampled(*(values.cpu() for values in found))
    assert torch.equal(found.ids_N, expected.ids_N)
    for mine, theirs in ((found.logprobs_N, expected.logprobs_N), (found.model_logprobs_N, expected.model_logprobs_N)):
        # The sums are equal; the logarithms in float64 may differ in their last bit, and so the fp32 numbers rarely do.
        assert (mine.view(torch.int32) - theirs.view(torch.int32)).abs().max() <= 1
    return found


@pytest.mark.parametrize(("vocabulary", "scale"), [(1, 3.0), (2, 40.0), (63, 1e-3), (64, 3.0), (65, 40.0), (150, 3.0)])
def test_ids_and_logprobs_are_those_of_the_definition(vocabulary, scale, device):
    check(rows(8, vocabulary, scale=scale), device)


@pytest.mark.parametrize("cut", [None, *CUTS])
def test_each_cut_alone(cut, device):
    check({key: value for key, value in rows(4, 100).items() if key not in CUTS or key == cut}, device)


@pytest.mark.parametrize("levels", [1, 2, 5])
def test_of_equal_weights_the_smaller_ids_stay(levels, device):
    """Whole-number logits tie across blocks; cuts end inside a tie."""
    arguments = rows(6, 150, seed=levels)
    g = torch.Generator().manual_seed(levels)
    arguments["logits_NV"] = torch.randint(0, levels, (6, 150), generator=g).float()
    check(arguments, device)


def test_every_token_can_be_chosen_at_its_share(device):
    """Uniform numbers on a grid: each id as often as its probability says, in the order of ids."""
    logits = torch.tensor([0.0, 1.0, -2.0, 0.5]).expand(20, 4)
    uniforms = (torch.arange(20, dtype=torch.float64) + 0.5) / 20
    found = check({"logits_NV": logits, "temperatures_N": torch.ones(20), "uniforms_N": uniforms}, device)
    bounds = logits[0].double().softmax(-1).cumsum(-1)
    assert torch.equal(found.ids_N, torch.searchsorted(bounds, uniforms))


def test_rows_that_are_not_finite_get_nan(device):
    arguments = rows(5, 70)
    for row, bad in enumerate((torch.nan, torch.inf, -torch.inf)):
        arguments["logits_NV"][row, 66] = bad
    arguments["logits_NV"][3] = 3e38
    arguments["temperatures_N"][3] = 0.1  # the largest overflows in the division
    expected = reference.sample(**arguments)
    found = sampling.sample(**{name: value.to(device) for name, value in arguments.items()})
    assert torch.equal(found.ids_N.cpu(), expected.ids_N)
    assert torch.equal(found.logprobs_N.cpu().isnan(), expected.logprobs_N.isnan())
    assert found.logprobs_N.isnan().tolist() == [True, True, True, True, False]


def test_a_row_does_not_depend_on_the_others(device):
    arguments = {name: value.to(device) for name, value in rows(5, 70).items()}
    together = sampling.sample(**arguments)
    alone = sampling.sample(**{name: value[4:5] for name, value in arguments.items()})
    for part, whole in zip(alone, together, strict=True):
        assert torch.equal(part, whole[4:5])


def test_offsets_beyond_2_to_the_31(device, monkeypatch):
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", False)
    arguments = rows(3, 20)
    arguments["logits_NV"] = arguments["logits_NV"].bfloat16()
    near = {name: value.to(device) for name, value in arguments.items()}
    far = torch.as_strided(torch.empty((1 << 31) + 64, dtype=torch.bfloat16, device=device), (3, 20), (1 << 30, 1))
    found = sampling.sample(**near | {"logits_NV": far.copy_(arguments["logits_NV"])})
    assert torch.equal(found.ids_N, sampling.sample(**near).ids_N)
    assert torch.equal(found.ids_N.cpu(), reference.sample(**arguments).ids_N)


def test_no_rows_and_shapes_that_do_not_fit(device):
    arguments = {name: value[:0].to(device) for name, value in rows(1, 5).items()}
    assert sampling.sample(**arguments).ids_N.shape == (0,)
    with pytest.raises(KernelError, match=r"one value a row, got \[0, 5\] and \[\[2\]"):
        sampling.sample(**arguments | {"temperatures_N": torch.ones(2, device=device)})


def test_counter_random_numbers_are_those_of_the_engine(device):
    g = torch.Generator().manual_seed(0)
    seeds = torch.randint(-(2**63), 2**63 - 1, (300,), generator=g)
    seeds[:3] = torch.tensor([0, -1, 2**63 - 1])
    positions = torch.randint(0, 10**6, (300,), generator=g)
    found = sampling.counter_uniforms(seeds.to(device), positions.to(device))
    expected = counter_uniform(seeds.numpy().view(np.uint64), positions.numpy())
    assert np.array_equal(found.cpu().numpy(), expected)

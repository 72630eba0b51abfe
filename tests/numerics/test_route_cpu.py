"""Routing on a CPU against its definition: choices exactly, weights to rounding, whatever the batch and threads."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from model.kernels.cpu.build import KernelError
from model.kernels.cpu.isa import available_isas
from model.kernels.route import reference
from model.kernels.route.cpu import Route
from tests.numerics.tolerances import relative_error, summed

ISAS = available_isas()
each_isa = pytest.mark.parametrize("isa", ISAS)
KINDS: dict[str, dict[str, Any]] = {
    "softmax over the chosen": {"scores": "softmax", "normalize": True, "scaling": 1.0},
    "softmax over all": {"scores": "softmax", "normalize": False, "scaling": 1.0},
    "sigmoid": {"scores": "sigmoid", "normalize": False, "scaling": 1.5},
    "sigmoid, normalized": {"scores": "sigmoid", "normalize": True, "scaling": 2.5},
}
each_kind = pytest.mark.parametrize("kind", KINDS)


def logits_of(num_tokens: int, num_experts: int, scale: float = 2.0) -> torch.Tensor:
    return torch.randn(num_tokens, num_experts, generator=torch.Generator().manual_seed(num_experts)) * scale


def bias_of(num_experts: int) -> torch.Tensor:
    return torch.randn(num_experts, generator=torch.Generator().manual_seed(7)) * 0.1


def check(isa, logits: torch.Tensor, **options) -> None:
    chosen, weights = Route(isa)(logits, **options)
    expected, expected_weights = reference.route(logits, **options)
    assert chosen.dtype == torch.int64
    assert torch.equal(chosen, expected)
    assert relative_error(weights, expected_weights) <= 2 * summed(logits.shape[1])  # a sum of E exponentials


@each_isa
@each_kind
@pytest.mark.parametrize(("num_experts", "top_k"), [(1, 1), (4, 4), (17, 3), (60, 4), (128, 8), (384, 64), (1024, 22)])
def test_choice_and_weights_are_those_of_the_definition(isa, kind, num_experts, top_k):
    logits = logits_of(37, num_experts)
    check(isa, logits, top_k=top_k, **KINDS[kind])
    check(isa, logits, top_k=top_k, selection_bias=bias_of(num_experts), **KINDS[kind])


@each_isa
@each_kind
@pytest.mark.parametrize(
    ("num_experts", "num_groups", "top_groups", "top_k"),
    [(12, 4, 2, 4), (256, 8, 4, 8), (1024, 512, 3, 6), (6, 3, 3, 6)],
)
def test_groups_of_experts(isa, kind, num_experts, num_groups, top_groups, top_k):
    options = {"top_k": top_k, "num_groups": num_groups, "top_groups": top_groups, **KINDS[kind]}
    check(isa, logits_of(29, num_experts), **options)
    check(isa, logits_of(29, num_experts), selection_bias=bias_of(num_experts), **options)


@given(
    logits=st.lists(st.sampled_from([-2.0, -0.0, 0.0, 1.5, 4.0]), min_size=24, max_size=24),
    bias=st.lists(st.sampled_from([0.0, 0.25]), min_size=24, max_size=24),
    kind=st.sampled_from(sorted(KINDS)),
    top_k=st.integers(1, 24),
    groups=st.sampled_from([(1, 1), (4, 2), (12, 5), (3, 1)]),
    biased=st.booleans(),
)
@settings(max_examples=150, deadline=None)
def test_of_equal_experts_and_groups_the_first_wins(logits, bias, kind, top_k, groups, biased):
    options = {
        "num_groups": groups[0],
        "top_groups": groups[1],
        "selection_bias": torch.tensor(bias) if biased else None,
    }
    for isa in ISAS:
        check(isa, torch.tensor([logits]), top_k=top_k, **options, **KINDS[kind])


def test_ties_by_hand():
    for isa in ISAS:
        route = Route(isa)
        chosen, weights = route(torch.tensor([[1.0, 3.0, 3.0, 1.0, 3.0]]), top_k=4, **KINDS["softmax over the chosen"])
        assert chosen.tolist() == [[1, 2, 4, 0]]
        e = math.exp(-2)
        assert weights[0].tolist() == pytest.approx([1 / (3 + e)] * 3 + [e / (3 + e)], rel=1e-6)
        chosen, _ = route(torch.zeros(1, 8), top_k=3, num_groups=4, top_groups=2, **KINDS["sigmoid"])
        assert chosen.tolist() == [[0, 1, 2]]


@each_isa
@each_kind
def test_a_replayed_choice_gets_the_same_bits(isa, kind):
    logits, route = logits_of(40, 96), Route(isa)
    chosen, weights = route(logits, top_k=6, selection_bias=bias_of(96), **KINDS[kind])
    assert torch.equal(route.weigh(logits, chosen, **KINDS[kind]), weights)
    other = torch.randint(0, 96, (40, 5), generator=torch.Generator().manual_seed(1), dtype=torch.int32)
    expected = reference.weigh(logits, other.long(), **KINDS[kind])
    assert relative_error(route.weigh(logits, other, **KINDS[kind]), expected) <= 2 * summed(96)


@each_kind
def test_a_token_has_the_same_bits_alone_in_a_batch_and_with_two_threads(kind):
    logits = logits_of(300, 130)
    for options in ({}, {"num_groups": 10, "top_groups": 3, "selection_bias": bias_of(130)}):
        for isa in ISAS:
            route = Route(isa)
            batch = route(logits, top_k=7, **options, **KINDS[kind])
            alone = [route(logits[[t]], top_k=7, **options, **KINDS[kind]) for t in range(0, 300, 23)]
            torch.set_num_threads(2)
            threads = route(logits, top_k=7, **options, **KINDS[kind])
            torch.set_num_threads(1)
            for part in (0, 1):
                assert torch.equal(torch.cat([one[part] for one in alone]), batch[part][::23])
                assert torch.equal(threads[part], batch[part])


@each_isa
@each_kind
def test_gradient_of_the_weights(isa, kind):
    grad = torch.randn(21, 4, generator=torch.Generator().manual_seed(2))
    route = Route(isa)

    def run(forward, logits, replay):
        logits = logits.clone().requires_grad_()
        if replay is None:
            chosen, weights = forward(logits, top_k=4, **KINDS[kind])
            assert not chosen.requires_grad
        else:
            weights = forward.weigh(logits, replay, **KINDS[kind])
        weights.backward(grad)
        return logits.grad

    logits = logits_of(21, 40)
    replay = torch.randint(0, 40, (21, 4), generator=torch.Generator().manual_seed(3))
    assert torch.equal(run(route, logits, None), run(reference.route, logits, None))
    assert torch.equal(run(route, logits, replay), run(reference, logits, replay))


@given(
    logits=st.lists(st.sampled_from([math.nan, -math.nan, math.inf, -math.inf, 0.0, 1.0]), min_size=12, max_size=12),
    kind=st.sampled_from(sorted(KINDS)),
    top_k=st.integers(1, 12),
    options=st.sampled_from([{}, {"num_groups": 4, "top_groups": 1}, {"selection_bias": torch.zeros(12)}]),
)
@settings(max_examples=100, deadline=None)
def test_logits_that_are_not_finite_still_give_different_experts(logits, kind, top_k, options):
    for isa in ISAS:
        chosen, weights = Route(isa)(torch.tensor([logits]), top_k=top_k, **options, **KINDS[kind])
        assert len(set(chosen[0].tolist())) == top_k
        assert set(chosen[0].tolist()) <= set(range(12))
        assert weights.shape == (1, top_k)


@each_isa
def test_operands_that_do_not_fit(isa):
    route, options = Route(isa), KINDS["sigmoid"]
    for logits, top_k in (
        (torch.ones(2, 1025), 1),
        (torch.ones(2, 8), 9),
        (torch.ones(2, 100), 65),
        (torch.ones(8), 1),
    ):
        with pytest.raises(KernelError, match="need logits"):
            route(logits, top_k=top_k, **options)
    with pytest.raises(KernelError, match="got 1 of 3 groups of 8 experts"):
        route(torch.ones(2, 8), top_k=1, num_groups=3, **options)
    with pytest.raises(KernelError, match="one selection bias an expert"):
        route(torch.ones(2, 8), top_k=1, selection_bias=torch.ones(7), **options)
    with pytest.raises(KernelError, match=r"choices must be in \[0, 8\), got 0 to 8"):
        route.weigh(torch.ones(1, 8), torch.tensor([[0, 8]]), **options)
    with pytest.raises(KernelError, match="scores must be softmax or sigmoid, got 'relu'"):
        route(torch.ones(2, 8), top_k=1, scores="relu", normalize=True, scaling=1.0)
    assert route(torch.empty(0, 8), top_k=2, **options)[0].shape == (0, 2)

"""The router against its definition, one token at a time in plain Python."""

import dataclasses
import math

import pytest
import torch

from model.config import ModelConfig, RouterScores
from model.moe import Router

BASE = ModelConfig(hidden_size=32, num_experts=12, num_experts_per_tok=4)
KINDS = {
    "softmax over the chosen": BASE,
    "softmax over all": dataclasses.replace(BASE, normalize_topk=False),
    "sigmoid": dataclasses.replace(BASE, router_scores=RouterScores.sigmoid, normalize_topk=False),
    "DeepSeek-V3": dataclasses.replace(
        BASE, router_scores=RouterScores.sigmoid, router_selection_bias=True, num_expert_groups=4, num_groups_per_tok=2,
        routed_scaling=2.5,
    ),
    "softmax with a bias in the choice": dataclasses.replace(BASE, router_bias=True, router_selection_bias=True),
}  # fmt: skip


def make_router(config):
    router = Router(config)
    g = torch.Generator().manual_seed(0)
    for parameter in router.parameters():
        torch.nn.init.normal_(parameter, std=0.3, generator=g)
    return router


def by_hand(config, logits, selection_bias):
    """Choice and weights of one token from its logits."""
    if config.router_scores is RouterScores.sigmoid:
        scores = [1 / (1 + math.exp(-x)) for x in logits]
    else:
        total = sum(math.exp(x) for x in logits)
        scores = [math.exp(x) / total for x in logits]
    biased = [score + bias for score, bias in zip(scores, selection_bias, strict=True)]
    size = config.num_experts // config.num_expert_groups
    groups = [range(start, start + size) for start in range(0, config.num_experts, size)]
    strength = [sum(sorted((biased[e] for e in group), reverse=True)[:2]) for group in groups]
    best = sorted(range(len(groups)), key=lambda group: -strength[group])[: config.num_groups_per_tok]
    allowed = [e for group in best for e in groups[group]]
    chosen = sorted(allowed, key=lambda e: -biased[e])[: config.num_experts_per_tok]
    total = sum(scores[e] for e in chosen) if config.normalize_topk else 1.0
    return chosen, [scores[e] / total * config.routed_scaling for e in chosen]


@pytest.mark.parametrize("kind", KINDS)
def test_choice_and_weights_are_the_definition(kind):
    config = KINDS[kind]
    router = make_router(config)
    x = torch.randn(200, config.hidden_size, generator=torch.Generator().manual_seed(1))
    routing = router(x, None)
    bias = [0.0] * config.num_experts if router.selection_bias is None else router.selection_bias.tolist()
    for logits, chosen, weights in zip(*(part.tolist() for part in routing), strict=True):
        expected, expected_weights = by_hand(config, logits, bias)
        assert chosen == expected
        assert weights == pytest.approx(expected_weights, rel=1e-5)


def test_selection_bias_and_groups_change_the_choice():
    """Otherwise the test above would pass without them."""
    config = KINDS["DeepSeek-V3"]
    x = torch.randn(200, config.hidden_size, generator=torch.Generator().manual_seed(1))
    router = make_router(config)
    full = router(x, None).chosen_TK.sort().values
    ungrouped = dataclasses.replace(config, num_expert_groups=1, num_groups_per_tok=1)
    assert not torch.equal(full, make_router(ungrouped)(x, None).chosen_TK.sort().values)
    with torch.no_grad():
        router.selection_bias.zero_()
    assert not torch.equal(full, router(x, None).chosen_TK.sort().values)


@pytest.mark.parametrize("kind", KINDS)
def test_a_replayed_choice_is_weighed_as_it_was_and_gives_gradient(kind):
    router = make_router(KINDS[kind])
    x = torch.randn(20, 32, generator=torch.Generator().manual_seed(1))
    first = router(x, None)
    again = router(x, first.chosen_TK.to(torch.uint8))
    assert torch.equal(again.weights_TK, first.weights_TK)
    (grad,) = torch.autograd.grad(again.weights_TK[:, 0].sum(), router.weight)
    assert grad.abs().max() > 0
    other = router(x, first.chosen_TK.flip(-1))
    torch.testing.assert_close(other.weights_TK, first.weights_TK.flip(-1))

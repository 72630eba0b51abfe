"""Router losses against numbers worked out by hand, and their independence of packing and micro-batching."""

import math

import pytest
import torch

from model.config import RouterScores
from model.moe_losses import (
    RouterLossError,
    dispatch_totals,
    load_balancing_loss,
    router_sums,
    router_z_loss,
    sequence_balance_loss,
    update_selection_bias,
)
from tests.numerics.tolerances import summed


def case(num_tokens=60, num_layers=3, num_experts=5, top_k=2, seed=0):
    g = torch.Generator().manual_seed(seed)
    logits = [torch.randn(num_tokens, num_experts, generator=g).requires_grad_() for _ in range(num_layers)]
    routes = torch.stack([layer.topk(top_k).indices for layer in logits], 1).to(torch.uint8)
    mask = torch.rand(num_tokens, generator=g) < 0.7
    return logits, routes, mask


def both_losses(logits, routes, mask, totals=None):
    totals = dispatch_totals(routes, mask, logits[0].shape[1]) if totals is None else totals
    sums = router_sums(logits, mask)
    return load_balancing_loss(sums, totals), router_z_loss(sums, totals)


def test_uniform_routing_is_one_and_collapse_is_the_number_of_experts():
    mask = torch.ones(8, dtype=torch.bool)
    uniform = torch.arange(8).view(8, 1, 1) % 4
    balance, z = both_losses([torch.zeros(8, 4)], uniform, mask)
    assert balance.item() == pytest.approx(1.0)
    assert z.item() == pytest.approx(math.log(4) ** 2)
    collapsed = torch.tensor([[30.0, 0.0, 0.0, 0.0]]).repeat(8, 1)
    balance, z = both_losses([collapsed], torch.zeros(8, 1, 1, dtype=torch.int64), mask)
    assert balance.item() == pytest.approx(4.0)
    assert z.item() == pytest.approx(900.0)


def test_a_batch_worked_out_by_hand():
    """Two tokens, three experts, top 2: f = (2, 1, 1) / 4; P is the mean of (.5, .25, .25) and (.25, .5, .25)."""
    logits = torch.tensor([[0.5, 0.25, 0.25], [0.25, 0.5, 0.25]]).log()
    routes = torch.tensor([[[0, 1]], [[0, 2]]], dtype=torch.uint8)
    balance, z = both_losses([logits], routes, torch.ones(2, dtype=torch.bool))
    assert balance.item() == pytest.approx(3 * (0.5 * 0.375 + 0.25 * 0.375 + 0.25 * 0.25))
    assert z.item() == pytest.approx(0.0, abs=1e-12)


def test_layers_are_averaged():
    logits, routes, mask = case()
    balance, z = both_losses(logits, routes, mask)
    alone = [both_losses([layer], routes[:, [index]], mask) for index, layer in enumerate(logits)]
    torch.testing.assert_close(balance, torch.stack([b for b, _ in alone]).mean())
    torch.testing.assert_close(z, torch.stack([z for _, z in alone]).mean())


def test_masked_tokens_count_nowhere():
    logits, routes, mask = case()
    balance, z = both_losses(logits, routes, mask)
    kept = both_losses([layer[mask] for layer in logits], routes[mask], mask[mask])
    torch.testing.assert_close(torch.stack(kept), torch.stack([balance, z]))
    poisoned = [layer.detach().masked_fill(~mask.unsqueeze(-1), torch.nan) for layer in logits]
    torch.testing.assert_close(torch.stack(both_losses(poisoned, routes, mask)), torch.stack([balance, z]).detach())
    grads = torch.autograd.grad(balance + z, logits)
    assert all(not grad[~mask].any() and grad[mask].any() for grad in grads)


@pytest.mark.parametrize("cuts", [[60], [1, 59], [20, 20, 20], [7, 30, 3, 20]])
def test_micro_batches_add_up_to_the_batch_with_their_gradients(cuts):
    logits, routes, mask = case()
    whole = both_losses(logits, routes, mask)
    expected = torch.autograd.grad(whole[0] + 0.1 * whole[1], logits)
    pieces = list(zip(*([layer.split(cuts) for layer in logits]), routes.split(cuts), mask.split(cuts), strict=True))
    totals = None
    for *_, piece_routes, piece_mask in pieces:
        part = dispatch_totals(piece_routes, piece_mask, 5)
        totals = part if totals is None else totals + part
    parts = [both_losses(piece_logits, r, m, totals) for *piece_logits, r, m in pieces]
    balance, z = sum(b for b, _ in parts), sum(z for _, z in parts)
    tolerance = {"rtol": summed(60), "atol": 0.0}
    torch.testing.assert_close(balance, whole[0], **tolerance)
    torch.testing.assert_close(z, whole[1], **tolerance)
    grads = torch.autograd.grad(balance + 0.1 * z, logits)
    for grad, expected_grad in zip(grads, expected, strict=True):
        torch.testing.assert_close(grad, expected_grad, rtol=summed(60), atol=1e-8)


def test_packing_order_does_not_matter():
    logits, routes, mask = case()
    order = torch.randperm(60, generator=torch.Generator().manual_seed(1))
    shuffled = both_losses([layer[order] for layer in logits], routes[order], mask[order])
    torch.testing.assert_close(torch.stack(shuffled), torch.stack(both_losses(logits, routes, mask)))


def test_counts_come_from_the_dispatched_routes():
    _, routes, _ = case()
    totals = dispatch_totals(routes, torch.tensor([True, False] * 30), 5)
    assert totals.num_tokens == 30
    assert totals.counts_LE.sum(-1).tolist() == [60, 60, 60]
    assert totals.counts_LE[1, 3].item() == int((routes[::2, 1] == 3).sum())
    assert totals.counts_LE.dtype == torch.int64


def test_balancing_pushes_down_the_router_of_the_crowded_expert():
    logits = torch.zeros(4, 3, requires_grad=True)
    routes = torch.tensor([0, 0, 0, 1]).view(4, 1, 1)
    both_losses([logits], routes, torch.ones(4, dtype=torch.bool))[0].backward()
    assert (logits.grad[:, 0] > 0).all()
    assert (logits.grad[:, 2] < 0).all()


def test_an_empty_micro_batch_is_zero_and_an_empty_batch_is_an_error():
    logits, routes, mask = case()
    nothing = torch.zeros_like(mask)
    totals = dispatch_totals(routes, mask, 5)
    balance, z = both_losses(logits, routes, nothing, totals)
    assert balance.item() == z.item() == 0.0
    with pytest.raises(RouterLossError, match="must have a real token, got 0"):
        both_losses(logits, routes, nothing)


def test_a_router_of_sigmoids_balances_their_shares():
    """One token with sigmoids .5, .25 and .25, so shares 1/2, 1/4 and 1/4; its one choice makes f = (1, 0, 0)."""
    logits = torch.tensor([[0.5, 0.25, 0.25]]).logit()
    mask = torch.ones(1, dtype=torch.bool)
    totals = dispatch_totals(torch.zeros(1, 1, 1, dtype=torch.uint8), mask, 3)
    loss = load_balancing_loss(router_sums([logits], mask, RouterScores.sigmoid), totals)
    assert loss.item() == pytest.approx(3 * 0.5)


def test_the_sequence_wise_loss_is_the_batchs_for_each_sequence_alone():
    logits, routes, _ = case()
    cuts = [7, 1, 30, 22]
    cu_seqlens = torch.tensor([0, 7, 8, 38, 60], dtype=torch.int32)
    got = sequence_balance_loss(logits, routes, cu_seqlens)
    pieces = zip(*([layer.split(cuts) for layer in logits]), routes.split(cuts), strict=True)
    alone = [both_losses(piece, r, torch.ones(len(r), dtype=torch.bool))[0] for *piece, r in pieces]
    torch.testing.assert_close(got, torch.stack(alone).sum())
    expected = torch.autograd.grad(torch.stack(alone).sum(), logits)
    for grad, expected_grad in zip(torch.autograd.grad(got, logits), expected, strict=True):
        torch.testing.assert_close(grad, expected_grad, rtol=1e-5, atol=1e-8)


def test_a_selection_bias_moves_against_the_load_by_its_speed():
    bias = torch.tensor([0.5, 0.0, -0.25, 0.0])
    update_selection_bias(bias, torch.tensor([9, 4, 0, 3]), 0.125)  # the mean is 4
    assert bias.tolist() == [0.375, 0.0, -0.125, 0.125]

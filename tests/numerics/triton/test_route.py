"""The router's choice and the schedule in Triton against their definition and torch's stable sort.

What the interpreter cannot show: races between the threads of a program (choices are written and read back).
"""

import pytest
import torch

from model.kernels.route import reference
from model.kernels.route import triton as kernels
from model.kernels.route.triton import ONE_PROGRAM, most_blocks, schedule
from tests.numerics.tolerances import relative_error, summed

SOFTMAX = {"top_k": 4, "scores": "softmax", "normalize": True, "scaling": 1.0}
SIGMOID = SOFTMAX | {"scores": "sigmoid"}
KINDS = {
    "softmax over the chosen": (12, SOFTMAX),
    "softmax over all": (12, SOFTMAX | {"normalize": False, "scaling": 0.5}),
    "sigmoid": (12, SIGMOID | {"normalize": False}),
    "groups": (12, SIGMOID | {"selection_bias": True, "num_groups": 4, "top_groups": 2, "scaling": 2.5}),
    "groups of a softmax": (15, SOFTMAX | {"top_k": 3, "num_groups": 3, "top_groups": 1}),
    "softmax with a bias in the choice": (12, SOFTMAX | {"selection_bias": True}),
    "one expert of one": (1, SOFTMAX | {"top_k": 1}),
    "all of five": (5, SOFTMAX | {"top_k": 5}),
}


def make_case(kind, num_tokens, device):
    """Logits and options, without those of the choice for `weigh`."""
    g = torch.Generator().manual_seed(num_tokens)
    num_experts, options = KINDS[kind]
    if "selection_bias" in options:
        options = options | {"selection_bias": torch.randn(num_experts, generator=g).to(device)}
    weighing = {name: options[name] for name in ("scores", "normalize", "scaling")}
    return torch.randn(num_tokens, num_experts, generator=g).to(device), options, weighing


@pytest.fixture(autouse=True)
def _poisoned_memory():
    """New memory holds NaN, or integers that are out of every range."""
    torch.use_deterministic_algorithms(True)
    assert torch.empty(4).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("num_tokens", [1, 70])
@pytest.mark.parametrize("kind", KINDS)
def test_choice_weights_and_gradient(kind, num_tokens, device):
    logits, options, weighing = make_case(kind, num_tokens, device)
    num_experts, top_k = logits.shape[1], options["top_k"]
    tolerance = summed(num_experts)
    expected, expected_weights = reference.route(logits, **options)
    chosen, weights = kernels.route(logits.requires_grad_(), **options)
    assert torch.equal(chosen, expected)
    assert relative_error(weights.detach(), expected_weights.detach()) < tolerance
    upstream = torch.randn(weights.shape, generator=torch.Generator().manual_seed(2)).to(device)
    expected_grad = torch.autograd.grad(reference.weigh(logits, chosen, **weighing), logits, upstream)[0]
    assert torch.equal(torch.autograd.grad(weights, logits, upstream)[0], expected_grad)
    replayed = torch.stack([torch.randperm(num_experts)[:top_k] for _ in range(num_tokens)]).to(device)
    weights, expected_weights = (f(logits.detach(), replayed, **weighing) for f in (kernels.weigh, reference.weigh))
    assert relative_error(weights, expected_weights) < tolerance


def test_the_first_of_equal_scores_wins(device):
    """Small integers as logits, both zeros among them; a row of equal logits chooses 0, 1, 2, ..."""
    g = torch.Generator().manual_seed(0)
    logits = torch.randint(-1, 2, (40, 32), generator=g) * (2.0 * torch.randint(2, (40, 32), generator=g) - 1)
    assert logits[0].view(torch.int32).unique().numel() == 4
    logits[3] = -torch.inf
    logits[3, 7] = 1.0
    logits[5] = 2.0
    logits = logits.to(device)
    for options in (SOFTMAX | {"top_k": 6}, SIGMOID | {"num_groups": 4, "top_groups": 2}):
        chosen, _ = kernels.route(logits, **options)
        assert torch.equal(chosen, reference.route(logits, **options)[0])
    chosen, _ = kernels.route(logits, **SOFTMAX)
    assert chosen[5].tolist() == [0, 1, 2, 3]
    assert chosen[3].tolist() == [7, 0, 1, 2]


def check_schedule(made, chosen, num_experts):
    """Against torch's stable sort, and every row in exactly one block of its expert."""
    made = type(made)(*(t.cpu() if isinstance(t, torch.Tensor) else t for t in made))
    flat = chosen.cpu().flatten()
    assert torch.equal(made.order_N.long(), flat.argsort(stable=True))
    counts = flat.bincount(minlength=num_experts)
    assert made.first_row_E1.tolist() == [0, *counts.cumsum(0).tolist()]
    assert len(made.expert_of_block_B) == most_blocks(len(flat), num_experts, made.block_rows)
    rows = []
    blocks = list(zip(made.expert_of_block_B.tolist(), made.row_of_block_B.tolist(), strict=True))
    num_blocks = int((-(-counts // made.block_rows)).sum())
    for expert, first in blocks[:num_blocks]:
        last = min(first + made.block_rows, made.first_row_E1[expert + 1].item())
        assert made.first_row_E1[expert] <= first < last
        rows += range(first, last)
    assert rows == list(range(len(flat)))
    assert all(expert == -1 for expert, _ in blocks[num_blocks:])


@pytest.mark.parametrize("experts", [None, (0,), (11,), (3, 4, 9)])
@pytest.mark.parametrize(("num_tokens", "top_k"), [(1, 1), (1, 3), (67, 3), (129, 2)])
def test_schedule(num_tokens, top_k, experts, device):
    pool = torch.tensor(experts or range(12))
    g = torch.Generator().manual_seed(num_tokens)
    chosen = pool[torch.randint(len(pool), (num_tokens, top_k), generator=g)]
    check_schedule(schedule(chosen.to(device), 12, 16), chosen, 12)


@pytest.mark.parametrize(("num_experts", "block_rows"), [(8, 16), (8, 128), (160, 64)])
def test_schedule_of_several_programs(num_experts, block_rows, device):
    num_tokens = ONE_PROGRAM // 4 + 5
    g = torch.Generator().manual_seed(0)
    chosen = torch.randint(num_experts, (num_tokens, 4), generator=g) // 2 * 2  # odd experts get none
    check_schedule(schedule(chosen.to(device), num_experts, block_rows), chosen, num_experts)


def test_without_tokens(device):
    made = schedule(torch.empty(0, 2, dtype=torch.int64, device=device), 5, 16)
    assert made.first_row_E1.tolist() == [0] * 6
    assert len(made.order_N) == len(made.expert_of_block_B) == 0
    logits = torch.empty(0, 5, device=device)
    chosen, weights, _ = kernels.route_and_schedule(logits, 16, **SOFTMAX)
    assert chosen.shape == weights.shape == (0, 4)


@pytest.mark.parametrize("kind", ["softmax over the chosen", "groups"])
@pytest.mark.parametrize("num_tokens", [1, 70, 300])
def test_route_and_schedule_are_both(kind, num_tokens, device):
    """In one launch up to 128 tokens here; and where a gradient is wanted the two of them."""
    logits, options, _ = make_case(kind, num_tokens, device)
    expected, expected_weights = kernels.route(logits, **options)
    for case in (logits, logits.clone().requires_grad_()):
        chosen, weights, made = kernels.route_and_schedule(case, 16, **options)
        assert weights.requires_grad == case.requires_grad
        assert torch.equal(chosen, expected)
        assert torch.equal(weights, expected_weights)
        check_schedule(made, chosen, 12)


def test_rows_of_a_wider_tensor(device):
    """Logits whose rows lie further apart than they are long, and are not contiguous at all."""
    wide = torch.randn(9, 40, generator=torch.Generator().manual_seed(0)).to(device)
    expected = kernels.route(wide[:, 8:20].contiguous(), **SOFTMAX)
    for logits in (wide[:, 8:20], wide[:, 8:20].t().contiguous().t()):
        assert all(torch.equal(a, b) for a, b in zip(kernels.route(logits, **SOFTMAX), expected, strict=True))


def test_most_blocks_is_reached_and_never_exceeded():
    """Every split of 7 choices over 3 experts in blocks of 2."""
    needed = [-(-a // 2) + -(-b // 2) + -(-(7 - a - b) // 2) for a in range(8) for b in range(8 - a)]
    assert most_blocks(7, 3, 2) == max(needed)

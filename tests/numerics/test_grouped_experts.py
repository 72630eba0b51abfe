"""The eager expert MLP equals the reference, forward and gradient, in every shape that has gone wrong elsewhere."""

import pytest
import torch

from model.kernels.grouped_experts import eager, reference
from tests.numerics.tolerances import EXPERTS_BACKWARD, EXPERTS_FORWARD, U16, relative_error


@pytest.fixture(autouse=True)
def _poisoned_memory():
    """Uninitialised memory is NaN: an output row that nobody wrote shows."""
    torch.use_deterministic_algorithms(True)
    assert torch.utils.deterministic.fill_uninitialized_memory
    assert torch.empty(4).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)


def make_case(num_tokens, dim, hidden, num_experts, top_k, *, seed=0, experts=None, dtype=torch.float32):
    """Inputs that require gradients; `experts` restricts the choice to some of them (the others starve)."""
    g = torch.Generator().manual_seed(seed)
    logits = torch.randn(num_tokens, num_experts, generator=g)
    if experts is not None:
        starved = torch.ones(num_experts, dtype=torch.bool)
        starved[list(experts)] = False
        logits[:, starved] = -torch.inf
    values, chosen = logits.topk(top_k)
    x = torch.randn(num_tokens, dim, generator=g).to(dtype).requires_grad_()
    gate_up = (torch.randn(num_experts, 2 * hidden, dim, generator=g) * dim**-0.5).to(dtype).requires_grad_()
    down = (torch.randn(num_experts, dim, hidden, generator=g) * hidden**-0.5).to(dtype).requires_grad_()
    weights = values.softmax(-1).requires_grad_()
    upstream = torch.randn(num_tokens, dim, generator=g)
    return (x, gate_up, down, weights), chosen, upstream


def run(experts_forward, inputs, chosen, upstream):
    x, gate_up, down, weights = inputs
    y = experts_forward(x, gate_up, down, chosen, weights)
    return y, torch.autograd.grad(y, inputs, upstream)


def check(case):
    expected, expected_grads = run(reference.experts_forward, *case)
    actual, grads = run(eager.experts_forward, *case)
    assert actual.dtype == torch.float32
    assert relative_error(actual, expected) < EXPERTS_FORWARD
    for name, grad, expected_grad in zip(("x", "gate_up", "down", "weights"), grads, expected_grads, strict=True):
        assert relative_error(grad, expected_grad) < EXPERTS_BACKWARD, name


def test_the_reference_is_the_formula():
    """One token and two experts by hand: silu(1) * 2 = 1.4621172, silu(2) * 1 = 1.7615942."""
    x = torch.tensor([[1.0, 2.0]])
    gate_up = torch.tensor([[[1.0, 0.0], [0.0, 1.0]], [[0.0, 1.0], [1.0, 0.0]]])  # F = 1: a gate row, an up row
    down = torch.tensor([[[1.0], [10.0]], [[100.0], [1000.0]]])
    chosen, weights = torch.tensor([[1, 0]]), torch.tensor([[0.25, 0.75]])
    y = reference.experts_forward(x, gate_up, down, chosen, weights)
    one, two = 1.4621172, 1.7615942
    expected = torch.tensor([[0.25 * 100 * two + 0.75 * one, 0.25 * 1000 * two + 0.75 * 10 * one]])
    torch.testing.assert_close(y, expected)


@pytest.mark.parametrize("num_tokens", range(1, 71))
def test_every_token_count(num_tokens):
    check(make_case(num_tokens, 32, 32, 4, 2, seed=num_tokens))


@pytest.mark.parametrize(
    ("dim", "hidden", "num_experts", "top_k"),
    [(32, 96, 3, 1), (96, 32, 8, 2), (7, 5, 5, 5), (33, 31, 9, 3), (128, 128, 8, 2), (1, 1, 1, 1), (2, 3, 17, 4)],
)
def test_odd_shapes(dim, hidden, num_experts, top_k):
    check(make_case(67, dim, hidden, num_experts, top_k))


@pytest.mark.parametrize("experts", [(0, 1), (6, 7), (0, 7), (2, 3, 5)])
def test_starved_experts_get_zero_gradient(experts):
    case = make_case(41, 32, 64, 8, 2, experts=experts)
    check(case)
    _, (_, gate_up, down, _) = run(eager.experts_forward, *case)
    for expert in set(range(8)) - set(experts):
        assert not gate_up[expert].any()
        assert not down[expert].any()


def test_no_tokens_at_all():
    inputs, chosen, upstream = make_case(0, 32, 32, 4, 2)
    y, (x, gate_up, down, weights) = run(eager.experts_forward, inputs, chosen, upstream)
    assert y.shape == x.shape == (0, 32)
    assert weights.shape == (0, 2)
    assert not gate_up.any()
    assert not down.any()


def test_strided_inputs():
    (x, gate_up, down, weights), chosen, upstream = make_case(23, 32, 32, 4, 2)
    views = tuple(t.detach().transpose(-1, -2).contiguous().transpose(-1, -2) for t in (x, gate_up, down, weights))
    case = (tuple(v.requires_grad_() for v in views), chosen.t().contiguous().t(), upstream.t().contiguous().t())
    check(case)


def test_an_expanded_gradient():
    """The gradient of a sum is one number seen from every element."""
    (x, gate_up, down, weights), chosen, _ = make_case(9, 32, 32, 4, 2)
    expected = torch.autograd.grad(reference.experts_forward(x, gate_up, down, chosen, weights).sum(), (x, weights))
    actual = torch.autograd.grad(eager.experts_forward(x, gate_up, down, chosen, weights).sum(), (x, weights))
    for a, e in zip(actual, expected, strict=True):
        assert relative_error(a, e) < EXPERTS_BACKWARD


def test_bf16_products_accumulate_into_fp32():
    case = make_case(50, 64, 64, 4, 2, dtype=torch.bfloat16)
    expected, expected_grads = run(reference.experts_forward, *case)
    actual, grads = run(eager.experts_forward, *case)
    assert actual.dtype == torch.float32
    assert relative_error(actual, expected) < 2 * U16
    for grad, expected_grad in zip(grads, expected_grads, strict=True):
        assert grad.dtype == expected_grad.dtype
        assert relative_error(grad, expected_grad) < 4 * U16


def test_gradients_against_finite_differences():
    inputs, chosen, _ = make_case(5, 3, 2, 3, 2)
    doubles = tuple(t.detach().double().requires_grad_() for t in inputs)

    def forward(x, gate_up, down, weights):
        return eager.experts_forward(x, gate_up, down, chosen, weights)

    assert torch.autograd.gradcheck(forward, doubles)


def test_repeated_calls_give_the_same_bits():
    case = make_case(200, 64, 64, 8, 2)
    first, second = run(eager.experts_forward, *case), run(eager.experts_forward, *case)
    assert torch.equal(first[0], second[0])
    assert all(torch.equal(a, b) for a, b in zip(first[1], second[1], strict=True))


CLAMP = reference.Clamp(limit=0.7, alpha=1.702)  # random inputs exceed the limit on every side


@pytest.mark.parametrize("clamp", [None, CLAMP])
@pytest.mark.parametrize("experts", [None, (1, 2, 3)])
@pytest.mark.parametrize("num_tokens", [0, 1, 2, 67])
def test_biases_and_the_clamped_unit(clamp, experts, num_tokens):
    (x, gate_up, down, weights), chosen, upstream = make_case(num_tokens, 33, 31, 5, 3, experts=experts)
    g = torch.Generator().manual_seed(1)
    gate_up_bias = torch.randn(5, 62, generator=g).requires_grad_()
    down_bias = torch.randn(5, 33, generator=g).requires_grad_()
    inputs = (x, gate_up, down, weights, gate_up_bias, down_bias)

    def run_with_biases(experts_forward):
        y = experts_forward(
            x, gate_up, down, chosen, weights, gate_up_bias_E2F=gate_up_bias, down_bias_ED=down_bias, clamp=clamp
        )
        return y, torch.autograd.grad(y, inputs, upstream)

    expected, expected_grads = run_with_biases(reference.experts_forward)
    actual, grads = run_with_biases(eager.experts_forward)
    assert relative_error(actual, expected) < EXPERTS_FORWARD
    for grad, expected_grad in zip(grads, expected_grads, strict=True):
        assert relative_error(grad, expected_grad) < EXPERTS_BACKWARD


def test_the_clamped_unit_by_hand():
    """gate 9 is clamped to 7, up -9 to -7; a gate of -9 is not clamped: there is no lower limit."""
    clamp = reference.Clamp(limit=7.0, alpha=1.702)
    out = reference.gated_unit(torch.tensor([9.0, -9.0, 1.0]), torch.tensor([-9.0, 9.0, 0.5]), clamp)
    sigmoid = 1 / (1 + (-1.702 * torch.tensor([7.0, -9.0, 1.0])).exp())
    torch.testing.assert_close(out, torch.tensor([7.0, -9.0, 1.0]) * sigmoid * torch.tensor([-6.0, 8.0, 1.5]))


@pytest.mark.parametrize("clamp", [None, CLAMP])
def test_gradients_with_biases_against_finite_differences(clamp):
    inputs, chosen, _ = make_case(5, 3, 2, 3, 2)
    g = torch.Generator().manual_seed(2)
    biases = (torch.randn(3, 4, generator=g), torch.randn(3, 3, generator=g))
    doubles = tuple(t.detach().double().requires_grad_() for t in (*inputs, *biases))

    def forward(x, gate_up, down, weights, gate_up_bias, down_bias):
        return eager.experts_forward(
            x, gate_up, down, chosen, weights, gate_up_bias_E2F=gate_up_bias, down_bias_ED=down_bias, clamp=clamp
        )

    assert torch.autograd.gradcheck(forward, doubles)

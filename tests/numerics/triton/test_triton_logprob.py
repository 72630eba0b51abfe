"""Logprobs from hidden states equal the definition applied to fp32 logits, forward and backward."""

import math

import pytest
import torch

from model.kernels.cpu.build import KernelError
from model.kernels.logprob import reference
from model.kernels.logprob import triton as logprob
from tests.numerics.tolerances import U16, relative_error, summed

BF16, FP32 = torch.bfloat16, torch.float32


@pytest.fixture(autouse=True)
def _small_programs(monkeypatch):
    """Tiles and chunks that small shapes fill and overflow; memory that a launcher reserves starts as NaN."""
    small = logprob.Config(rows=16, columns=32, depth=16, warps=4, stages=2)
    monkeypatch.setattr(logprob, "CONFIGS", {("sm_80", wide): small for wide in (False, True)})
    monkeypatch.setattr(logprob, "CHUNK", 96)
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


def make(num_rows, dim, vocabulary, dtype, device, *, seed=0):
    """Ids at the borders of tiles, chunks and vocabulary; temperatures around 1."""
    g = torch.Generator().manual_seed(seed)
    hidden = torch.randn(num_rows, dim, generator=g).to(dtype).to(device)
    weight = (torch.randn(vocabulary, dim, generator=g) * 3 / dim**0.5).bfloat16().to(device)
    ids = torch.randint(0, vocabulary, (num_rows,), generator=g)
    border = torch.tensor([vocabulary - 1, 0, 31, 32, 95, 96]).clamp(max=vocabulary - 1)[:num_rows]
    ids[: len(border)] = border
    temperatures = (0.3 + torch.rand(num_rows, generator=g)).to(device)
    return hidden, weight, ids.to(device), temperatures


def logits_of(hidden, weight):
    return (hidden.double() @ weight.double().T).float()


def spread(logits, temperatures, dim):
    """Error of a logprob: the logit's over its `dim` products, of the largest one's size, and that of the sums."""
    return (summed(dim) + summed(128)) * (logits / temperatures.unsqueeze(-1)).abs().max().item()


@pytest.mark.parametrize("dtype", [FP32, BF16])
@pytest.mark.parametrize(("num_rows", "dim", "vocabulary"), [(1, 8, 1), (7, 40, 97), (18, 17, 300), (33, 64, 192)])
def test_equal_to_the_definition(dtype, num_rows, dim, vocabulary, device):
    hidden, weight, ids, temperatures = make(num_rows, dim, vocabulary, dtype, device)
    out = logprob.logprobs(hidden, weight, ids, temperatures, entropies=True)
    logits = logits_of(hidden, weight)
    allowed = spread(logits, temperatures, dim)
    expected = reference.logprobs(logits, ids, temperatures)
    assert (out.logprobs_R - expected).abs().max() <= allowed
    assert (out.logsumexps_R - (logits / temperatures[:, None]).double().logsumexp(-1)).abs().max() <= allowed
    assert (out.entropies_R - reference.entropies(logits, temperatures)).abs().max() <= 2 * allowed


def test_fp32_hidden_states_lose_nothing(device):
    """One product whose terms cancel: a part of the hidden state that is cut off would be the whole result."""
    hidden = torch.tensor([[1 + 2.0**-23, -1.0, 2.0**-12 + 2.0**-30, 0.0]], device=device)
    weight = torch.tensor([[1.0, 1.0, 0.0, 0.0], [0.0, 0.0, 0.0, 0.0]], dtype=BF16, device=device) * 2.0**20
    out = logprob.logprobs(hidden, weight, torch.zeros(1, dtype=torch.int64, device=device))
    expected = reference.logprobs(
        logits_of(hidden, weight), torch.zeros(1, dtype=torch.int64, device=device), torch.ones(1, device=device)
    )
    assert torch.allclose(out.logprobs_R, expected, atol=1e-6)
    assert out.logprobs_R.item() == pytest.approx(-math.log(1 + math.exp(-0.125)), abs=1e-6)  # logits 0.125 and 0


def test_large_logits_do_not_overflow(device):
    """The largest is far above the others, in the first, a middle and the last chunk."""
    weight = torch.zeros(300, 16, dtype=BF16, device=device)
    hidden = torch.eye(16, device=device)[:3] * 1e4
    for row, token in enumerate((2, 150, 299)):
        weight[token, row] = 1.0
    ids = torch.tensor([2, 150, 298], device=device)
    out = logprob.logprobs(hidden, weight, ids, entropies=True)
    assert out.logprobs_R.tolist() == [0.0, 0.0, -1e4]
    assert out.entropies_R is not None
    assert out.entropies_R.abs().max() == 0.0


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_logits_that_are_not_finite_give_nan(bad, device):
    hidden, weight, ids, temperatures = make(3, 16, 200, FP32, device)
    hidden[1, 3] = bad
    out = logprob.logprobs(hidden, weight, ids, temperatures)
    assert out.logprobs_R.isnan().tolist() == [False, True, False]
    huge = torch.zeros_like(weight)
    huge[150] = -3e38
    overflowing = torch.full_like(hidden, 2.0)
    assert logprob.logprobs(overflowing, huge, ids.clamp(max=99), temperatures).logprobs_R.isnan().all()


@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_a_row_does_not_depend_on_the_others(dtype, device):
    hidden, weight, ids, temperatures = make(37, 24, 200, dtype, device)
    together = logprob.logprobs(hidden, weight, ids, temperatures, entropies=True)
    for rows in (slice(20, 21), slice(5, 30)):
        some = logprob.logprobs(hidden[rows], weight, ids[rows], temperatures[rows], entropies=True)
        for part, whole in zip(some, together, strict=True):
            assert torch.equal(part, whole[rows])


@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_gradients(dtype, device, monkeypatch):
    monkeypatch.setattr(logprob, "_BACKWARD_CHUNK", 70)
    hidden, weight, ids, temperatures = make(9, 24, 200, dtype, device)
    upstream = torch.linspace(-1, 2, 9, device=device)
    inputs = hidden.requires_grad_(), weight.requires_grad_()
    out = logprob.logprobs(*inputs, ids, temperatures)
    grads = torch.autograd.grad(out.logprobs_R, inputs, upstream)
    exact = [x.detach().double().requires_grad_() for x in inputs]
    z = exact[0] @ exact[1].T / temperatures.double().unsqueeze(-1)
    expected = torch.log_softmax(z, -1).gather(-1, ids.unsqueeze(-1)).squeeze(-1)
    for grad, wanted in zip(grads, torch.autograd.grad(expected, exact, upstream.double()), strict=True):
        # In bf16: the product's operands and the result are rounded, and so is the weight's gradient in either.
        tolerance = summed(200) if grad.dtype == FP32 else 3 * U16
        assert relative_error(grad.float(), wanted.float()) < tolerance


def test_offsets_beyond_2_to_the_31(device, monkeypatch):
    """Rows of hidden states and weight lie so far apart that 32-bit offsets would wrap."""
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", False)
    hidden, weight, ids, temperatures = make(3, 8, 3, BF16, device)
    expected = logprob.logprobs(hidden, weight, ids, temperatures)
    far = []
    for x in (hidden, weight):
        apart = torch.as_strided(torch.empty((1 << 31) + 64, dtype=BF16, device=device), x.shape, (1 << 30, 1))
        far.append(apart.copy_(x))
    assert torch.equal(logprob.logprobs(*far, ids, temperatures).logprobs_R, expected.logprobs_R)


def test_no_rows_and_weights_of_another_dtype(device):
    hidden, weight, ids, _ = make(2, 8, 5, FP32, device)
    assert logprob.logprobs(hidden[:0], weight, ids[:0]).logprobs_R.shape == (0,)
    with pytest.raises(KernelError, match=r"a bf16 weight .* got torch\.float32 \[2, 8\], torch\.float32"):
        logprob.logprobs(hidden, weight.float(), ids)

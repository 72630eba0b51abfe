"""Logprobs and entropies of the CPU kernel: the bits of the definition, whatever the batch, threads or machine."""

import math

import pytest
import torch

from model.kernels.cpu.build import KernelError
from model.kernels.cpu.isa import available_isas
from model.kernels.logprob import reference
from model.kernels.logprob.cpu import Logprobs
from tests.numerics.tolerances import relative_error, summed

ISAS = available_isas()
each_isa = pytest.mark.parametrize("isa", ISAS)
SHAPES = [(1, 1), (3, 2), (5, 17), (7, 512), (2, 4099)]


def rows(num_rows: int, vocabulary: int, scale: float = 4.0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(num_rows * vocabulary)
    logits = torch.randn(num_rows, vocabulary, generator=generator) * scale
    ids = torch.randint(0, vocabulary, (num_rows,), generator=generator)
    temperatures = torch.rand(num_rows, generator=generator) * 1.5 + 0.25
    temperatures[::2] = 1.0
    return logits, ids, temperatures


@each_isa
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("scale", [1e-3, 4.0, 60.0])
def test_logprobs_are_those_of_the_definition(isa, shape, scale):
    logits, ids, temperatures = rows(*shape, scale)
    logprobs, entropies = Logprobs(isa).with_entropies(logits, ids, temperatures)
    expected = reference.logprobs(logits, ids, temperatures)
    # The sums are equal; the two logarithms in float64 may differ in their last bit, and so the fp32 numbers rarely do.
    assert (logprobs.view(torch.int32) - expected.view(torch.int32)).abs().max() <= 1
    assert entropies.dtype == torch.float64
    assert torch.allclose(entropies, reference.entropies(logits, temperatures), rtol=1e-14, atol=1e-14)


@pytest.mark.parametrize("shape", SHAPES)
def test_the_definition_is_log_softmax(shape):
    logits, ids, temperatures = rows(*shape)
    exact = torch.log_softmax(logits.double() / temperatures.double().unsqueeze(-1), -1)
    # z and d are rounded once each, relative to the largest |z|; then 2 units in a weight and 1 in the result.
    allowed = 4 * summed(1) * max(1.0, float((logits / temperatures.unsqueeze(-1)).abs().max()))
    difference = reference.logprobs(logits, ids, temperatures) - exact.gather(1, ids.unsqueeze(1)).squeeze(1)
    assert difference.abs().max() <= allowed
    entropies = -(exact.exp() * exact).sum(-1)
    assert (reference.entropies(logits, temperatures) - entropies).abs().max() <= allowed


def test_the_exponential_of_the_definition():
    distances = torch.cat([torch.linspace(-30, 0, 200_001), torch.tensor([-0.0, -1e-30, -200.0])])
    weights = reference.weigh(torch.cat([distances, torch.zeros(1)]).unsqueeze(0), torch.ones(1)).weights_RV[0, :-1]
    exact = distances.double().clamp_min(-87.0).exp()
    assert ((weights - exact) / exact).abs().max() <= 2 * 2.0**-23
    assert weights.max() == 1.0


@each_isa
def test_a_vocabulary_of_201_thousand(isa):
    logits, ids, temperatures = rows(2, 201_088)
    kernel = Logprobs(isa)(logits, ids, temperatures)
    assert relative_error(kernel, reference.logprobs(logits, ids, temperatures)) <= summed(1)


def test_rows_have_the_same_bits_alone_in_a_batch_with_two_threads_and_on_every_instruction_set():
    logits, ids, temperatures = rows(33, 1027)
    found = []
    for isa in ISAS:
        kernel = Logprobs(isa)
        found.append(kernel.with_entropies(logits, ids, temperatures))
        alone = [kernel.with_entropies(logits[[r]], ids[[r]], temperatures[[r]]) for r in range(33)]
        found.append(tuple(torch.cat(part) for part in zip(*alone, strict=True)))
        torch.set_num_threads(2)
        found.append(kernel.with_entropies(logits, ids, temperatures))
        torch.set_num_threads(1)
        found.append((kernel(logits, ids, temperatures), found[-1][1]))
    for logprobs, entropies in found:
        assert torch.equal(logprobs, found[0][0])
        assert torch.equal(entropies, found[0][1])


@each_isa
@pytest.mark.parametrize("shape", SHAPES)
def test_gradient_of_logprobs(isa, shape):
    logits, ids, temperatures = rows(*shape)
    grad = torch.randn(shape[0], generator=torch.Generator().manual_seed(1))
    mine, theirs = logits.clone().requires_grad_(), logits.clone().double().requires_grad_()
    Logprobs(isa)(mine, ids, temperatures).backward(grad)
    scaled = theirs / temperatures.double().unsqueeze(-1)
    torch.log_softmax(scaled, -1).gather(1, ids.unsqueeze(1)).squeeze(1).backward(grad.double())
    assert mine.grad is not None
    assert theirs.grad is not None
    scale = 1 + float(scaled.detach().abs().max())  # rounding of z moves every probability by as much, relatively
    if shape[1] > 1:
        assert relative_error(mine.grad, theirs.grad) <= summed(1) * scale
    else:
        assert mine.grad.abs().max() <= summed(1)


@each_isa
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("at", [0, 19, 35])
def test_a_row_that_is_not_finite_is_nan_and_no_other_row(isa, bad, at):
    logits, ids, temperatures = rows(3, 36)
    logits[1, at] = bad
    logits.requires_grad_()
    found = Logprobs(isa)(logits, ids, temperatures)
    found.sum().backward()
    assert logits.grad is not None
    for tensor in (found, reference.logprobs(logits, ids, temperatures), logits.grad.sum(-1)):
        assert tensor.isnan().tolist() == [False, True, False]
    logprobs, entropies = Logprobs(isa).with_entropies(logits, ids, temperatures)
    assert logprobs.isnan().tolist() == entropies.isnan().tolist() == [False, True, False]
    assert reference.entropies(logits, temperatures).isnan().tolist() == [False, True, False]


@each_isa
def test_a_temperature_that_overflows_is_nan(isa):
    logits, ids, _ = rows(2, 20)
    assert Logprobs(isa)(logits, ids, 1e-38).isnan().all()


@each_isa
def test_no_rows_bf16_and_strided_logits(isa):
    kernel = Logprobs(isa)
    assert kernel(torch.empty(0, 7), torch.empty(0, dtype=torch.int64)).shape == (0,)
    logits, ids, _ = rows(6, 40)
    assert torch.equal(
        kernel(logits.bfloat16(), ids, 0.5), kernel(logits.bfloat16().float(), ids, torch.full((6,), 0.5))
    )
    assert torch.equal(kernel(logits.T.contiguous().T, ids), kernel(logits, ids))


@each_isa
def test_operands_that_do_not_fit(isa):
    kernel = Logprobs(isa)
    with pytest.raises(KernelError, match="need logits"):
        kernel(torch.ones(2, 3), torch.ones(3, dtype=torch.int64))
    for wrong in (-1, 3):
        with pytest.raises(KernelError, match=r"ids must be in \[0, 3\), got"):
            kernel(torch.ones(2, 3), torch.tensor([0, wrong]))

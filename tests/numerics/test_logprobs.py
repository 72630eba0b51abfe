"""Logprobs and entropies by chunks of rows against log_softmax of all logits in float64, forward and backward."""

import subprocess
import sys

import numpy as np
import pytest
import torch

from model.binding import Binder
from model.config import KernelChoice, ModelConfig
from model.kernels.dispatch import Kernels, resolve_kernels
from model.layers import project_logits
from model.logprobs import CHUNK_BYTES, Unembedding, entropies, logprobs, with_entropies
from model.snapshot import published_view
from model.transformer import Transformer, init_weights
from tests.numerics.tolerances import relative_error, summed

BACKENDS = [KernelChoice.torch, KernelChoice.auto]
each_backend = pytest.mark.parametrize("backend", BACKENDS)
V, D = 129, 64
FOUR_ROWS = 4 * 4 * V
"""Bytes: of 11 rows, chunks of 3, 4 and 4."""
GRADIENT = 4 * summed(V) + summed(D)
"""Probabilities with the error of a logit of up to 8 (sums of D terms), then sums over V or over the rows."""


def rows(num_rows: int, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, ...]:
    """Hidden states, a weight of bf16 values, ids, temperatures and upstream gradients."""
    generator = torch.Generator().manual_seed(num_rows)
    hidden = torch.randn(num_rows, D, generator=generator)
    weight = (torch.randn(V, D, generator=generator) * 0.3).bfloat16().to(dtype)
    ids = torch.randint(0, V, (num_rows,), generator=generator)
    temperatures = torch.rand(num_rows, generator=generator) * 1.5 + 0.5
    return hidden, weight, ids, temperatures, torch.randn(num_rows, generator=generator)


def exactly(
    hidden: torch.Tensor, weight: torch.Tensor, ids: torch.Tensor, temperatures: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    z = hidden @ weight.T / temperatures.double().unsqueeze(-1)
    p = torch.log_softmax(z, -1)
    return p.gather(1, ids.unsqueeze(1)).squeeze(1), -(p.exp() * p).sum(-1)


@each_backend
@pytest.mark.parametrize("function", [logprobs, entropies])
@pytest.mark.parametrize("num_rows", [1, 3, 4, 11])
@pytest.mark.parametrize("chunk_bytes", [1, FOUR_ROWS, 2**20])
def test_values_and_gradients_are_those_of_all_logits(backend, function, num_rows, chunk_bytes):
    kernels = resolve_kernels(backend)
    hidden, weight, ids, temperatures, upstream = rows(num_rows)
    mine = [hidden.clone().requires_grad_(), weight.clone().requires_grad_()]
    found = function(Unembedding(project_logits, mine[1], chunk_bytes), mine[0], ids, temperatures, kernels)
    found.backward(upstream)
    theirs = [hidden.double().requires_grad_(), weight.double().requires_grad_()]
    expected = exactly(theirs[0], theirs[1], ids, temperatures)[function is entropies]
    expected.backward(upstream.double())
    assert found.dtype == torch.float32
    assert (found - expected).abs().max() <= 8 * (summed(D) + summed(1))
    for tensor, exact in zip(mine, theirs, strict=True):
        assert tensor.grad is not None
        assert exact.grad is not None
        assert tensor.grad.dtype == torch.float32
        assert relative_error(tensor.grad, exact.grad) <= GRADIENT


@pytest.mark.parametrize("function", [logprobs, entropies])
def test_the_gradient_is_that_of_finite_differences(function):
    kernels = resolve_kernels(KernelChoice.torch)
    hidden, weight, ids, temperatures, upstream = rows(5)
    leaf = hidden.clone().requires_grad_()
    function(Unembedding(project_logits, weight, FOUR_ROWS), leaf, ids, temperatures, kernels).backward(upstream)

    def total(moved: torch.Tensor) -> float:
        return float((exactly(moved, weight.double(), ids, temperatures)[function is entropies] * upstream).sum())

    step, differences = 1e-5, np.zeros(hidden.shape)
    for index in np.ndindex(*hidden.shape):
        moved = torch.zeros(hidden.shape, dtype=torch.float64)
        moved[index] = step
        differences[index] = (total(hidden + moved) - total(hidden - moved)) / (2 * step)
    assert leaf.grad is not None
    assert relative_error(leaf.grad, torch.from_numpy(differences)) <= GRADIENT + 1e-8


@each_backend
def test_no_rows(backend):
    kernels = resolve_kernels(backend)
    hidden, weight, ids, temperatures, _ = rows(0)
    leaf, trained = hidden.requires_grad_(), weight.requires_grad_()
    unembedding = Unembedding(project_logits, trained)
    for function in (logprobs, entropies):
        found = function(unembedding, leaf, ids, temperatures, kernels)
        assert found.shape == (0,)
        found.sum().backward()
    assert trained.grad is not None
    assert not trained.grad.any()
    assert [x.shape for x in with_entropies(unembedding, leaf, ids, temperatures, kernels)] == [(0,), (0,)]


@each_backend
def test_without_gradient_the_numbers_are_the_same(backend):
    kernels = resolve_kernels(backend)
    hidden, weight, ids, temperatures, _ = rows(11)
    unembedding = Unembedding(project_logits, weight.requires_grad_(), FOUR_ROWS)
    some = (unembedding, hidden, ids, temperatures, kernels)
    graph = (logprobs(*some), entropies(*some))
    assert all(each.requires_grad for each in graph)
    with torch.no_grad():
        silent = (logprobs(*some), entropies(*some))
    both = with_entropies(*some)
    assert both[1].dtype == torch.float64
    for one, other, third in zip(graph, silent, both, strict=True):
        assert not other.requires_grad
        assert not third.requires_grad
        assert torch.equal(one, other)
        assert torch.equal(one, third.float())


def test_a_weight_in_bf16_sums_its_gradient_in_fp32():
    kernels = resolve_kernels(KernelChoice.torch)
    hidden, weight, ids, temperatures, upstream = rows(11, torch.bfloat16)
    gradients = []
    for dtype in (torch.bfloat16, torch.float32):
        leaf = weight.to(dtype).clone().requires_grad_()
        logprobs(Unembedding(project_logits, leaf, 1), hidden, ids, temperatures, kernels).backward(upstream)
        assert leaf.grad is not None
        gradients.append(leaf.grad)
    assert torch.equal(gradients[0], gradients[1].bfloat16()), "rounded once, after the last chunk"


def policy(*, tied: bool, kernels: Kernels) -> tuple[Transformer, torch.Tensor]:
    """A transformer on the kernels of this machine, and its output weight as a leaf of the published values."""
    config = ModelConfig(
        vocab_size=V, hidden_size=D, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=16, expert_hidden_size=32,
        num_experts=4, num_experts_per_tok=2, max_positions=64, tie_embeddings=tied,
    )  # fmt: skip
    model = Transformer(config)
    init_weights(model, 5)
    packed = published_view(dict(model.named_parameters()), kernels.quantize)
    if kernels.layers is not None:
        Binder(config, kernels.layers).bind(model, packed)
    return model, model.output_weight.detach().bfloat16().float().requires_grad_()


@pytest.mark.parametrize("tied", [True, False])
def test_chunks_change_no_bit_of_what_a_sampler_computes(tied):
    kernels = resolve_kernels(KernelChoice.auto)
    model, weight = policy(tied=tied, kernels=kernels)
    hidden, _, ids, temperatures, upstream = rows(11)
    with torch.no_grad():  # as `rollout/engine/runner.py` does: rows in another batch, no weight given
        sampled = torch.cat(
            [kernels.logprobs(model.logits(hidden[r]), ids[r], temperatures[r]) for r in ([0], [*range(1, 11)])]
        )
    gradients = []
    for chunk_bytes in (1, FOUR_ROWS, 2**20):
        leaf, trained = hidden.clone().requires_grad_(), weight.detach().clone().requires_grad_()
        found = logprobs(Unembedding(model.logits, trained, chunk_bytes), leaf, ids, temperatures, kernels)
        if kernels.batch_invariant:
            assert torch.equal(found, sampled)
        found.backward(upstream)
        assert leaf.grad is not None
        assert trained.grad is not None
        gradients.append((leaf.grad, trained.grad))
    for of_chunks in gradients[:-1]:
        for one, other in zip(of_chunks, gradients[-1], strict=True):
            assert relative_error(one, other) <= summed(11)


MEASURED = """
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from model.config import KernelChoice
from model.kernels.dispatch import resolve_kernels
from model.layers import project_logits
from model.logprobs import Unembedding, logprobs

class Largest(TorchDispatchMode):
    bytes = 0
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in torch.utils._pytree.tree_leaves(out):
            if isinstance(tensor, torch.Tensor):
                self.bytes = max(self.bytes, tensor.untyped_storage().nbytes())
        return out

torch.set_num_threads(1)
T, V, D = 8192, 151_936, 16
kernels = resolve_kernels(KernelChoice.auto)
hidden, weight = torch.randn(T, D, requires_grad=True), torch.randn(V, D, requires_grad=True)
ids, temperatures = torch.arange(T), torch.ones(T)
def memory(field):
    return 1024 * int(next(line for line in open("/proc/self/status") if line.startswith(field)).split()[1])
small = Unembedding(project_logits, torch.randn(99, D, requires_grad=True), 1)  # what a first call loads is not counted
logprobs(small, hidden[:2], ids[:2], temperatures[:2], kernels).sum().backward()
open("/proc/self/clear_refs", "w").write("5")  # the peak starts again
before = memory("VmRSS")
with Largest() as largest:
    logprobs(Unembedding(project_logits, weight), hidden, ids, temperatures, kernels).sum().backward()
print(largest.bytes, memory("VmHWM") - before)
"""


@pytest.mark.slow
def test_no_tensor_of_all_logits_at_a_vocabulary_of_152_thousand():
    done = subprocess.run([sys.executable, "-c", MEASURED], capture_output=True, text=True, check=True, timeout=390)
    largest, growth = map(int, done.stdout.split())
    all_logits = 8192 * 151_936 * 4
    assert largest <= CHUNK_BYTES, "no tensor is larger than a chunk of logits, the weight's gradient included"
    # Logits and their gradient, what the BLAS packs of them, two gradients of the weight (9 MiB each).
    assert growth < 5 * CHUNK_BYTES < all_logits / 14

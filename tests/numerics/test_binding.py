"""Transformers on kernels: the values of the plain ones, and bits that depend on a sequence alone."""

import dataclasses
import itertools

import pytest
import torch

from model.binding import Binder, load_published
from model.config import ComputeDtype, KernelChoice
from model.kernel_attention import KernelAttention
from model.kernels.cpu.isa import available_isas
from model.kernels.dispatch import resolve_kernels
from model.layers import TORCH_DTYPE
from model.packed_attention import PackedAttention
from model.snapshot import StraightThrough, published_view, view
from model.transformer import Transformer
from tests.numerics.families import MINI, make_model
from tests.numerics.tolerances import BF16_TRANSFORMER, TRANSFORMER_PACKING, relative_error

CHOICES = [KernelChoice(isa.value) for isa in available_isas()]
LENGTHS = (5, 33, 1, 64, 17)
BOUNDS = (0, *itertools.accumulate(LENGTHS))


@pytest.fixture(autouse=True)
def _threads():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def make(family, dtype, choice):
    """A plain model on the published view, and one on kernels that has nothing but the packed bytes."""
    config = dataclasses.replace(MINI[family], compute_dtype=dtype)
    kernels = resolve_kernels(choice)
    tensors = published_view(dict(make_model(config).named_parameters()), kernels.quantize)
    with torch.device("meta"):
        plain, fast = Transformer(config), Transformer(config)
    plain.load_state_dict({name: view(tensor, TORCH_DTYPE[dtype]) for name, tensor in tensors.items()}, assign=True)
    load_published(fast, tensors, Binder(config, kernels.layers))
    return plain, fast, kernels


def tokens(config):
    ids = torch.randint(0, config.vocab_size, (BOUNDS[-1],), generator=torch.Generator().manual_seed(0))
    return ids, torch.cat([torch.arange(length) for length in LENGTHS])


@pytest.mark.parametrize("choice", CHOICES)
@pytest.mark.parametrize("dtype", ComputeDtype)
@pytest.mark.parametrize("family", MINI)
@torch.inference_mode()
def test_logits_are_those_of_the_plain_model(family, dtype, choice):
    plain, fast, kernels = make(family, dtype, choice)
    ids, positions = tokens(plain.config)
    expected = plain(ids, positions, PackedAttention(BOUNDS))
    attend = KernelAttention(BOUNDS, kernels.attention, keeps_keys=True)
    out = fast(ids, positions, attend, expected.routes_TLK)
    bound = TRANSFORMER_PACKING if dtype is ComputeDtype.fp32 else BF16_TRANSFORMER
    assert relative_error(fast.logits(out.hidden_TD), plain.logits(expected.hidden_TD)) < bound
    if dtype is ComputeDtype.fp32:
        assert torch.equal(fast(ids, positions, attend).routes_TLK.sort().values, expected.routes_TLK.sort().values)


@pytest.mark.parametrize("choice", CHOICES)
@pytest.mark.parametrize("dtype", ComputeDtype)
@pytest.mark.parametrize("family", MINI)
@torch.inference_mode()
def test_a_sequence_has_the_same_bits_alone_and_in_a_batch_on_one_thread_or_two(family, dtype, choice):
    _, fast, kernels = make(family, dtype, choice)
    ids, positions = tokens(fast.config)
    torch.set_num_threads(2)
    together = fast(ids, positions, KernelAttention(BOUNDS, kernels.attention, keeps_keys=True))
    logits = fast.logits(together.hidden_TD)
    torch.set_num_threads(1)
    for start, end in itertools.pairwise(BOUNDS):
        attend = KernelAttention([0, end - start], kernels.attention, keeps_keys=True)
        alone = fast(ids[start:end], positions[start:end], attend)
        assert torch.equal(alone.routes_TLK, together.routes_TLK[start:end])
        assert torch.equal(fast.logits(alone.hidden_TD), logits[start:end])


@pytest.mark.parametrize("family", MINI)
def test_gradients_are_those_of_the_plain_model(family):
    config = MINI[family]
    kernels = resolve_kernels(KernelChoice.auto)
    masters = dict(make_model(config).requires_grad_(True).named_parameters())
    trained = {name: master for name, master in masters.items() if not name.endswith("selection_bias")}
    tensors = published_view(masters, kernels.quantize)
    views = {name: view(tensor) for name, tensor in tensors.items()}
    ids, positions = tokens(config)
    upstream = torch.randn(len(ids), config.vocab_size, generator=torch.Generator().manual_seed(1))
    gradients = []
    for bound in (False, True):
        model = Transformer(config)
        attend = PackedAttention(BOUNDS)
        if bound:
            Binder(config, kernels.layers).bind(model, tensors)
            attend = KernelAttention(BOUNDS, kernels.attention, keeps_keys=True)
        weights = {name: StraightThrough.apply(master, views[name]) for name, master in masters.items()}
        out = torch.func.functional_call(model, weights, (ids, positions, attend))
        logits = model.logits(out.hidden_TD, weights[model.output_name])
        router = sum(each.square().sum() for each in out.router_logits_TE)
        gradients.append(torch.autograd.grad((logits * upstream).sum() + router, list(trained.values())))
    for name, own, expected in zip(trained, gradients[1], gradients[0], strict=True):
        assert relative_error(own, expected) < 8 * TRANSFORMER_PACKING, name

"""The learner's attention has the bits of an engine's, and the gradients of packed attention."""

from itertools import pairwise

import pytest
import torch

from model.config import Family
from model.kernel_attention import KernelAttention
from model.kernels.attention.cpu import PagedAttention
from model.kernels.attention.reference import Pages, PageTable
from model.kernels.cpu.isa import available_isas
from model.packed_attention import AttentionError, PackedAttention, ReferenceAttention
from model.rope import rotation
from tests.numerics.families import MINI, make_model
from tests.numerics.tolerances import ATTENTION, ATTENTION_BACKWARD, U16, relative_error

LENGTHS = [1, 70, 3, 130]
BOUNDS = [0, 1, 71, 74, 204]
each_isa = pytest.mark.parametrize("isa", available_isas())
each_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
each_window = pytest.mark.parametrize("window", [0, 20])


def make(heads=6, kv_heads=2, dim=32, value_dim=32, *, dtype=torch.float32):
    g = torch.Generator().manual_seed(0)
    shapes = ((heads, dim), (kv_heads, dim), (kv_heads, value_dim))
    return [torch.randn(sum(LENGTHS), *shape, generator=g).to(dtype).requires_grad_() for shape in shapes]


def decoded(kernel, q, k, v, *, page_size, **options):
    """What an engine computes: each token alone, after its key and value went into shuffled pages."""
    outs = []
    for first, last in pairwise(BOUNDS):
        num_pages = -(-(last - first) // page_size)
        pages_1B = torch.randperm(num_pages, generator=torch.Generator().manual_seed(0)).int().unsqueeze(0)
        keys, values = (
            Pages(torch.full((num_pages * page_size, *x.shape[1:]), torch.nan, dtype=q.dtype)) for x in (k, v)
        )
        for position in range(last - first):
            t = first + position
            slot = pages_1B[0, position // page_size : position // page_size + 1].long() * page_size
            kernel.write(keys, slot + position % page_size, k[t : t + 1])
            kernel.write(values, slot + position % page_size, v[t : t + 1])
            table = PageTable(pages_1B, torch.tensor([position]).int(), torch.tensor([1]).int(), page_size)
            outs.append(kernel(q[t : t + 1], keys, values, table, **options))
    return torch.cat(outs)


@each_isa
@each_dtype
@each_window
@pytest.mark.parametrize("page_size", [7, 16])
def test_forward_has_the_bits_of_decoding(isa, dtype, window, page_size):
    kernel = PagedAttention(isa)
    q, k, v = (x.detach() for x in make(dtype=dtype))
    options = {"scale": 0.2, "window": window, "sinks_H": torch.linspace(-1, 2, 6)}
    out = KernelAttention(BOUNDS, kernel)(0, q, k, v, **options)
    assert out.dtype == dtype
    assert torch.equal(out, decoded(kernel, q, k, v, page_size=page_size, **options))
    expected = ReferenceAttention(BOUNDS)(0, q.float(), k.float(), v.float(), **options)
    assert relative_error(out.float(), expected) < ATTENTION + (U16 if dtype == torch.bfloat16 else 0.0)


@each_isa
@each_window
@pytest.mark.parametrize("with_sinks", [False, True])
def test_gradients_equal_packed_attention_s(isa, window, with_sinks):
    inputs = make()
    if with_sinks:
        inputs.append(torch.linspace(-1, 2, 6).requires_grad_())
    sinks = inputs[3] if with_sinks else None
    upstream = torch.randn(inputs[0].shape, generator=torch.Generator().manual_seed(1))
    attentions = (KernelAttention(torch.tensor(BOUNDS), PagedAttention(isa)), PackedAttention(BOUNDS))
    outs = [attend(0, *inputs[:3], window=window, sinks_H=sinks) for attend in attentions]
    assert relative_error(outs[0], outs[1]) < ATTENTION
    grads = [torch.autograd.grad(out, inputs, upstream) for out in outs]
    for actual, expected in zip(*grads, strict=True):
        assert relative_error(actual, expected) < ATTENTION_BACKWARD


def test_only_what_asks_gets_a_gradient():
    q, k, v = make()
    out = KernelAttention(BOUNDS, PagedAttention(available_isas()[-1]))(0, q, k.detach(), v)
    out.sum().backward()
    assert k.grad is None
    assert q.grad is not None
    assert v.grad is not None


@each_isa
def test_gradients_through_values_that_are_a_view_of_latents(isa):
    g = torch.Generator().manual_seed(0)
    q = torch.randn(204, 4, 40, generator=g).requires_grad_()
    latents = torch.randn(204, 1, 40, generator=g).requires_grad_()
    grads = []
    for attend in (KernelAttention(BOUNDS, PagedAttention(isa), keeps_keys=True), ReferenceAttention(BOUNDS)):
        k = latents * 1.0
        grads.append(torch.autograd.grad(attend(0, q, k, k[..., :24]).square().sum(), (q, latents)))
    for actual, expected in zip(*grads, strict=True):
        assert relative_error(actual, expected) < ATTENTION_BACKWARD


@each_isa
@pytest.mark.parametrize("keeps_keys", [False, True])
def test_a_latent_layer_on_latents_and_with_expanded_heads(isa, keeps_keys):
    config = MINI[Family.deepseek_v3]
    layer = make_model(config).model.layers[1].self_attn.requires_grad_(True)
    by = rotation(torch.cat([torch.arange(30), torch.arange(12)]), config.rotary_dim, config.rope)
    x = torch.randn(42, config.hidden_size, generator=torch.Generator().manual_seed(0)).requires_grad_()
    inputs = (x, *layer.parameters())
    attentions = (
        KernelAttention([0, 30, 42], PagedAttention(isa), keeps_keys=keeps_keys),
        PackedAttention([0, 30, 42]),
    )
    outs = [layer(x, by, attend) for attend in attentions]
    assert relative_error(outs[0], outs[1]) < 4 * ATTENTION  # two projections before and one after
    for actual, expected in zip(*(torch.autograd.grad(out.square().sum(), inputs) for out in outs), strict=True):
        assert relative_error(actual, expected) < 8 * ATTENTION


def test_a_latent_engine_has_the_learner_s_bits():
    kernel = PagedAttention(available_isas()[-1])
    q, k, _ = (x.detach() for x in make(4, 1, 40))
    options = {"scale": 0.2, "window": 0, "sinks_H": None}
    out = KernelAttention(BOUNDS, kernel, keeps_keys=True)(0, q, k, k[..., :24], **options)
    assert relative_error(out, ReferenceAttention(BOUNDS)(0, q, k, k[..., :24], **options)) < ATTENTION
    assert torch.equal(out, decoded(kernel, q, k, k[..., :24], page_size=16, **options))


def test_a_transformer_runs_on_it():
    config = MINI[Family.gpt_oss]
    model = make_model(config)
    ids, positions = torch.arange(42) % config.vocab_size, torch.cat([torch.arange(30), torch.arange(12)])
    kernel = PagedAttention(available_isas()[-1])
    with torch.no_grad():
        a = model(ids, positions, KernelAttention([0, 30, 42], kernel)).hidden_TD
        b = model(ids, positions, PackedAttention([0, 30, 42])).hidden_TD
    assert relative_error(a, b) < 32 * ATTENTION


def test_wrong_bounds_are_refused():
    kernel = PagedAttention(available_isas()[0])
    with pytest.raises(AttentionError, match="must start at 0 and grow"):
        KernelAttention([0, 3, 3], kernel)
    with pytest.raises(AttentionError, match="got 4 for 204 tokens"):
        KernelAttention([0, 4], kernel)(0, *make())

"""The grouped expert MLP in Triton against its definition.

What the interpreter cannot show: `tl.dot` of bf16 operands (it multiplies them in fp32; the GPU's products of bf16 are
exact too, but its sums have an order of their own), the way `tl.dot_scaled` decodes scale bytes 0 and 255, races, and
whether a tile fits a GPU (`scripts/kernels_aot.py` shows that).
"""

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from model import mxfp4
from model.kernels.gpu.aot import TARGETS
from model.kernels.grouped_experts import eager, reference
from model.kernels.grouped_experts.triton import Mxfp4, Tile, choose_tile, experts_forward
from model.kernels.grouped_experts.triton_kernels import decode, product
from model.kernels.route.triton import schedule
from tests.numerics.tolerances import U16, relative_error, summed

CLAMP = reference.Clamp(limit=0.7, alpha=1.702)  # random inputs exceed the limit on every side
SCALED = Tile(block_m=16, block_n=64, block_k=64)
TILES = {
    "scaled": SCALED,
    "decoded": Tile(block_m=16, block_n=64, block_k=64, decode=True),
    "in parts": Tile(block_m=16, block_n=64, block_k=32, splits=3),
    "large": Tile(block_m=32, block_n=128, block_k=128),
}


@pytest.fixture(autouse=True)
def _poisoned_memory():
    """New memory is NaN: a row that no program writes, or that is read before it is, shows."""
    torch.use_deterministic_algorithms(True)
    assert torch.empty(4).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)


def make_case(num_tokens, dim, hidden, num_experts, top_k, *, dtype=torch.float32, experts=None, biased=True):
    """Arguments with packed matrices."""
    g = torch.Generator().manual_seed(num_tokens)
    logits = torch.randn(num_tokens, num_experts, generator=g)
    if experts is not None:
        logits[:, [e for e in range(num_experts) if e not in experts]] = -torch.inf
    values, chosen = logits.topk(top_k)
    gate_up = torch.randn(num_experts, 2 * hidden, dim, generator=g) * dim**-0.5
    down = torch.randn(num_experts, dim, hidden, generator=g) * hidden**-0.5
    biases = {
        "gate_up_bias_E2F": torch.randn(num_experts, 2 * hidden, generator=g).to(dtype),
        "down_bias_ED": torch.randn(num_experts, dim, generator=g).to(dtype),
    }
    x = torch.randn(num_tokens, dim, generator=g).to(dtype)
    packed = (Mxfp4(*mxfp4.quantize(w)) for w in (gate_up, down))
    return (x, *packed, chosen, values.softmax(-1)), biases if biased else {}


def plain(matrices, dtype=torch.float32):
    return mxfp4.dequantize(*matrices, dtype) if isinstance(matrices, Mxfp4) else matrices.to(dtype)


def on(device, value):
    if isinstance(value, Mxfp4):
        return Mxfp4(*(t.to(device) for t in value))
    return value.to(device) if isinstance(value, torch.Tensor) else value


def run(device, arguments, options, **more):
    y = experts_forward(*(on(device, a) for a in arguments), **{n: on(device, o) for n, o in options.items()}, **more)
    return y.cpu()


def check(device, arguments, options, tile, clamp=None):
    """In fp32 within the order of two sums; in bf16 the activations are rounded once (the reference rounds none)."""
    x, gate_up, down, chosen, weights = arguments
    floats = {name: bias.float() for name, bias in options.items()}
    expected = reference.experts_forward(
        x.float(), plain(gate_up), plain(down), chosen, weights, clamp=clamp, **floats
    )  # fmt: skip
    actual = run(device, arguments, options, clamp=clamp, tile=tile)
    assert actual.dtype == torch.float32
    tolerance = summed(x.shape[1]) + summed(plain(down).shape[2]) + (U16 if x.dtype == torch.bfloat16 else 0)
    assert relative_error(actual, expected) < tolerance


@pytest.mark.parametrize(("dtype", "clamp"), [(torch.float32, CLAMP), (torch.bfloat16, None)])
@pytest.mark.parametrize("tile", TILES)
def test_packed_matrices(tile, dtype, clamp, device):
    check(device, *make_case(19, 96, 64, 4, 2, dtype=dtype), TILES[tile], clamp)


@pytest.mark.parametrize("tile", ["scaled", "in parts"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_plain_matrices(dtype, tile, device):
    """Of widths that no power of two divides."""
    (x, gate_up, down, chosen, weights), options = make_case(19, 96, 64, 4, 2, dtype=dtype)
    gate_up, down = plain(gate_up, dtype)[:, 1:87, :93], plain(down, dtype)[:, :93, :43]
    biases = {"gate_up_bias_E2F": options["gate_up_bias_E2F"][:, 1:87], "down_bias_ED": options["down_bias_ED"][:, :93]}
    check(device, (x[:, :93], gate_up, down, chosen, weights), biases, TILES[tile])


@pytest.mark.parametrize(
    ("num_tokens", "dim", "hidden", "num_experts", "top_k"),
    [(1, 32, 32, 1, 1), (1, 160, 32, 9, 4), (2, 32, 288, 3, 1), (33, 64, 96, 3, 3), (70, 32, 32, 17, 1)],
)
def test_odd_shapes(num_tokens, dim, hidden, num_experts, top_k, device):
    check(device, *make_case(num_tokens, dim, hidden, num_experts, top_k, dtype=torch.bfloat16, biased=False), SCALED)


@pytest.mark.parametrize("experts", [(0, 1), (4, 5), (0, 5)])
def test_experts_without_tokens(experts, device):
    """Their matrices are not read at all: NaN there changes nothing."""
    arguments, options = make_case(21, 32, 32, 6, 2, experts=experts)
    for matrices in arguments[1:3]:
        matrices.scales[[e for e in range(6) if e not in experts]] = 255
    actual = run(device, arguments, options, tile=SCALED)
    for matrices in arguments[1:3]:
        matrices.scales[[e for e in range(6) if e not in experts]] = 0
    assert torch.equal(actual, run(device, arguments, options, tile=SCALED))
    check(device, arguments, options, SCALED)


def test_no_tokens(device):
    arguments, options = make_case(0, 32, 32, 4, 2)
    assert run(device, arguments, options).shape == (0, 32)


@pytest.mark.parametrize("tile", ["scaled", "decoded", "in parts"])
def test_a_row_does_not_depend_on_the_others(tile, device):
    (x, gate_up, down, chosen, weights), options = make_case(18, 64, 32, 3, 1, dtype=torch.bfloat16)
    together = run(device, (x, gate_up, down, chosen, weights), options, tile=TILES[tile])
    for rows in (slice(0, 1), slice(7, 8), slice(3, 18)):
        some = (x[rows], gate_up, down, chosen[rows], weights[rows])
        assert torch.equal(run(device, some, options, tile=TILES[tile]), together[rows])


def test_a_schedule_that_the_router_made(device):
    arguments, options = make_case(19, 32, 32, 4, 2)
    made = schedule(arguments[3].to(device), 4, SCALED.block_m)
    assert torch.equal(
        run(device, arguments, options, tile=SCALED, made=made), run(device, arguments, options, tile=SCALED)
    )


def test_gradients_are_those_of_the_definition(device):
    (x, gate_up, down, chosen, weights), options = make_case(9, 32, 32, 4, 2)
    inputs = [t.to(device).requires_grad_() for t in (x, plain(gate_up), plain(down), weights)]
    biases = {name: bias.to(device).requires_grad_() for name, bias in options.items()}
    grads = []
    for f in (experts_forward, eager.experts_forward):
        x, gate_up, down, weights = inputs
        y = f(x, gate_up, down, chosen.to(device), weights, clamp=CLAMP, **biases)
        grads.append(torch.autograd.grad(y.square().sum(), [*inputs, *biases.values()]))
    for actual, expected in zip(*grads, strict=True):
        assert relative_error(actual, expected) < 4 * summed(64)


def spread(t, stride):
    """The same values with `stride` elements between neighbours along the first axis; memory is only reserved."""
    strides = list(t.contiguous().stride())
    strides[0] = stride
    size = (stride * (t.shape[0] - 1) + t.stride(0) * t.shape[0]) * t.element_size()
    memory = torch.from_numpy(np.zeros(size, np.uint8)).view(t.dtype)  # torch would write the zeros
    return memory.as_strided(t.shape, strides).copy_(t)


@pytest.mark.parametrize("which", ["rows", "matrices"])
def test_offsets_beyond_31_bits(which, device):
    (x, gate_up, down, chosen, weights), _ = make_case(3, 32, 32, 3, 3, dtype=torch.bfloat16, biased=False)
    expected = run(device, (x, gate_up, down, chosen, weights), {}, tile=SCALED)
    far = (1 << 30) + 64  # a stride fits 31 bits, and twice a stride does not
    if which == "rows":
        x = spread(x, far)
    else:
        gate_up = Mxfp4(spread(gate_up.blocks, far), spread(gate_up.scales, far))
    assert torch.equal(run(device, (x, gate_up, down, chosen, weights), {}, tile=SCALED), expected)


@triton.jit
def _decode_kernel(codes_ptr, scales_ptr, out_ptr, N: tl.constexpr, K: tl.constexpr):
    row = tl.arange(0, N)[:, None]
    codes = tl.load(codes_ptr + row * (K // 2) + tl.arange(0, K // 2)[None, :])
    scales = tl.load(scales_ptr + row * (K // 32) + tl.arange(0, K // 32)[None, :])
    tl.store(out_ptr + row * K + tl.arange(0, K)[None, :], decode(codes, scales, N, K))


@triton.jit
def _product_kernel(x_ptr, codes_ptr, scales_ptr, out_ptr, depth, N: tl.constexpr, FORMAT: tl.constexpr):
    row, column = tl.arange(0, 32), tl.arange(0, N)
    acc = product(
        x_ptr + row * depth, row < 32, codes_ptr, depth // 2, scales_ptr, depth // 32, column, column < N,
        depth, 0, depth, 32, N, 64, FORMAT,
    )  # fmt: skip
    tl.store(out_ptr + row[:, None] * N + column[None, :], acc)


def every_code():
    """A row for each scale byte, with every code in both places of a byte."""
    low = torch.arange(16, dtype=torch.uint8)
    blocks = torch.cat([low | (low.flip(0) << 4)]).expand(256, 1, 16).contiguous()
    return blocks, torch.arange(256, dtype=torch.uint8)[:, None]


def test_every_code_and_every_scale_byte(device):
    blocks, scales = every_code()
    out = torch.empty(256, 32, device=device)
    _decode_kernel[(1,)](blocks.to(device), scales.to(device), out, N=256, K=32)
    expected = mxfp4.dequantize(blocks, scales)
    assert torch.equal(out.isnan().cpu(), expected.isnan())
    assert torch.equal(out.cpu().nan_to_num(1.5), expected.nan_to_num(1.5))


@pytest.mark.parametrize("form", ["scaled", "decoded"])
def test_products_of_every_code(form, device):
    """The identity times the values; and what lies past the end of a row (32 of a step of 64) counts as 0, not NaN."""
    blocks, scales = every_code()
    blocks, scales = blocks[1:253].repeat(2, 1, 1)[:256], scales[1:253].repeat(2, 1)[:256]  # all values finite
    past = torch.full((64, 16), 0xFF, dtype=torch.uint8)
    x = torch.eye(32, dtype=torch.bfloat16).to(device)
    for at in range(0, 256, 64):
        codes = torch.cat([blocks[at : at + 64, 0], past]).to(device)
        bytes_ = torch.cat([scales[at : at + 64], torch.full((64, 1), 255, dtype=torch.uint8)]).to(device)
        out = torch.full((32, 64), torch.nan, device=device)
        _product_kernel[(1,)](x, codes, bytes_, out, 32, N=64, FORMAT=form)
        assert torch.equal(out.cpu().t(), mxfp4.dequantize(blocks[at : at + 64], scales[at : at + 64]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("target", TARGETS)
def test_batch_invariant_tiles_do_not_depend_on_the_batch(target, dtype):
    tiles = {choose_tile(target, dtype, rows, 32, batch_invariant=True) for rows in (1, 16, 100, 1000, 1 << 20)}
    assert len(tiles) == 1
    assert tiles.pop().splits == 1


@pytest.mark.parametrize("target", TARGETS)
def test_tiles_that_may_depend_on_the_batch(target):
    assert choose_tile(target, torch.bfloat16, 4, 32, batch_invariant=False).splits > 1
    assert choose_tile(target, torch.bfloat16, 1 << 20, 32, batch_invariant=False).block_m >= 128

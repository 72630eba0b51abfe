"""The CPU kernel of packed experts: equal to the reference on dequantized weights, and the same bits in any batch."""

import pytest
import torch

from model.kernels.cpu.build import KernelError
from model.kernels.cpu.isa import available_isas
from model.kernels.grouped_experts import eager, reference
from model.kernels.grouped_experts.cpu import GroupedExperts, PackedExperts, PackedMatrix
from model.mxfp4 import dequantize, quantize
from tests.numerics.tolerances import (
    EXPERTS_BACKWARD,
    PACKED_EXPERTS_BF16,
    PACKED_EXPERTS_RMS,
    U16,
    relative_error,
    relative_rms,
)

each_isa = pytest.mark.parametrize("isa", available_isas())
each_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
CLAMP = reference.Clamp(limit=0.7, alpha=1.702)  # random inputs exceed the limit on every side


@pytest.fixture(autouse=True)
def _poisoned_memory():
    """Uninitialised memory is NaN: an output that nobody wrote shows."""
    torch.use_deterministic_algorithms(True)
    assert torch.empty(4).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)


def random_bytes(*shape, seed=0):
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def matrix_case(num_outputs, num_inputs, seed=0):
    w = torch.randn(num_outputs, num_inputs, generator=torch.Generator().manual_seed(seed))
    return quantize(w)


def rows(num_rows, num_inputs, dtype=torch.float32, seed=1):
    return torch.randn(num_rows, num_inputs, generator=torch.Generator().manual_seed(seed)).to(dtype)


def layer_case(kernel, dim, hidden, num_experts, *, biased=False, dtype=torch.float32, seed=0):
    """Packed experts and the tensors that they hold."""
    g = torch.Generator().manual_seed(seed)
    gate_up = quantize(torch.randn(num_experts, 2 * hidden, dim, generator=g) * dim**-0.5)
    down = quantize(torch.randn(num_experts, dim, hidden, generator=g) * hidden**-0.5)
    biases = (None, None)
    if biased:
        shapes = ((num_experts, 2 * hidden), (num_experts, dim))
        biases = tuple(torch.randn(shape, generator=g).bfloat16().to(dtype) for shape in shapes)
    packed = kernel.pack(*gate_up, *down, gate_up_bias=biases[0], down_bias=biases[1])
    return packed, (dequantize(*gate_up, dtype), dequantize(*down, dtype), *biases)


def routing_case(num_tokens, num_experts, top_k, *, experts=None, seed=2):
    """Choices and weights; `experts` restricts the choice to some of them (the others starve)."""
    logits = torch.randn(num_tokens, num_experts, generator=torch.Generator().manual_seed(seed))
    if experts is not None:
        starved = torch.ones(num_experts, dtype=torch.bool)
        starved[list(experts)] = False
        logits[:, starved] = -torch.inf
    values, chosen = logits.topk(top_k)
    return chosen, values.softmax(-1)


def expected_layer(x, views, chosen, weights, clamp=None):
    gate_up, down, *biases = views
    gate_up, down, *biases = gate_up.double(), down.double(), *(None if b is None else b.double() for b in biases)
    return reference.experts_forward(
        x.double(),
        gate_up,
        down,
        chosen,
        weights.double(),
        gate_up_bias_E2F=biases[0],
        down_bias_ED=biases[1],
        clamp=clamp,
    )


def layer_bound(dtype):
    return PACKED_EXPERTS_RMS if dtype == torch.float32 else PACKED_EXPERTS_BF16


@each_isa
@each_dtype
def test_a_product_of_every_row_count(isa, dtype):
    kernel, (blocks, scales), x = GroupedExperts(isa), matrix_case(48, 96), rows(70, 96, dtype)
    packed = kernel.pack_matrix(blocks, scales)
    weight = dequantize(blocks, scales).double()
    alone = torch.cat([kernel.multiply(x[i : i + 1], packed) for i in range(70)])
    for num_rows in range(1, 71):
        y = kernel.multiply(x[:num_rows], packed)
        assert relative_rms(y, x[:num_rows].double() @ weight.T) < PACKED_EXPERTS_RMS
        assert torch.equal(y, alone[:num_rows])


@each_isa
@each_dtype
@pytest.mark.parametrize(
    ("num_rows", "num_outputs", "num_inputs"),
    [
        (1, 1, 32),
        (2, 17, 64),
        (5, 31, 2880),
        (16, 33, 288),
        (65, 16, 1056),
        (130, 40, 32),
        (193, 7, 544),
        (400, 16, 64),
    ],
)
def test_a_product_of_odd_shapes(isa, dtype, num_rows, num_outputs, num_inputs):
    kernel, (blocks, scales) = GroupedExperts(isa), matrix_case(num_outputs, num_inputs)
    x = rows(num_rows, num_inputs, dtype)
    packed = kernel.pack_matrix(blocks, scales)
    y = kernel.multiply(x, packed)
    assert relative_rms(y, x.double() @ dequantize(blocks, scales).double().T) < PACKED_EXPERTS_RMS
    some = torch.tensor([num_rows // 2, 0, num_rows - 1])
    assert torch.equal(kernel.multiply(x[some], packed), y[some])


@each_isa
def test_packing_keeps_every_byte(isa):
    kernel = GroupedExperts(isa)
    blocks, scales = random_bytes(3, 40, 5, 16), random_bytes(3, 40, 5, seed=1)
    packed = kernel.pack_matrix(blocks, scales)
    assert (packed.num_matrices, packed.num_outputs, packed.num_inputs) == (3, 40, 160)
    assert packed.num_bytes == 3 * 3 * (5 * (256 + 16) + 1)
    again, scales_again = kernel.unpack_matrix(packed)
    assert torch.equal(again, blocks)
    assert torch.equal(scales_again, scales)
    word = packed.codes_ESB[0, 1, 1].view(torch.int16)[2 * 2 + 1]  # k = 37 of output 18: block 1, pair 2, the odd one
    assert (word >> 8) & 15 == blocks[0, 18, 1, 2] >> 4
    assert packed.scales_ESB[0, 1, 1, 2] == scales[0, 18, 1]


def every_code_and_scale():
    """Outputs of one code each, all else zero: 16 codes times 256 scale bytes, a strip for each scale byte."""
    blocks = torch.zeros(256 * 16, 1, 16, dtype=torch.uint8)
    row = torch.arange(256 * 16)
    blocks[row, 0, row % 7] = ((row % 16) << (4 * (row // 16 % 2))).to(torch.uint8)
    return blocks, (row // 16).to(torch.uint8).view(-1, 1)


@each_isa
@each_dtype
@pytest.mark.parametrize("num_rows", [1, 3, 20])
@pytest.mark.parametrize("mixed", [False, True])
def test_every_code_with_every_scale_byte_is_exact(isa, dtype, num_rows, mixed):
    blocks, scales = every_code_and_scale()
    if mixed:  # every scale byte beside others in a strip
        order = torch.randperm(len(scales), generator=torch.Generator().manual_seed(5))
        blocks, scales = blocks[order], scales[order]
    kernel = GroupedExperts(isa)
    packed = kernel.pack_matrix(blocks, scales)
    y = kernel.multiply(torch.ones(num_rows, 32, dtype=dtype), packed)
    expected = dequantize(blocks, scales).sum(-1)  # one value and zeros; byte 255 is NaN
    assert torch.equal(y.nan_to_num(1.25, 3e38, -3e38), expected.expand(num_rows, -1).nan_to_num(1.25, 3e38, -3e38))
    if not mixed:
        extreme = packed.extreme_ES.flatten().bool()
        assert extreme.nonzero().flatten().tolist() == [0, 1, 253, 254, 255]


@each_isa
def test_blocks_of_zeros_do_not_make_a_strip_extreme(isa):
    """The quantizer gives them scale byte 0."""
    w = torch.randn(16, 64, generator=torch.Generator().manual_seed(1))
    w[3, 32:] = 0
    blocks, scales = quantize(w)
    assert scales[3, 1] == 0
    kernel, x = GroupedExperts(isa), rows(2, 64)
    packed = kernel.pack_matrix(blocks, scales)
    assert not packed.extreme_ES.any()
    assert relative_rms(kernel.multiply(x, packed), x.double() @ dequantize(blocks, scales).double().T) < 1e-6


@each_isa
@each_dtype
def test_extreme_and_plain_strips_side_by_side(isa, dtype):
    blocks, scales = matrix_case(64, 96)
    scales[20, 1], scales[21, 2] = 1, 0
    kernel, x = GroupedExperts(isa), rows(37, 96, dtype)
    packed = kernel.pack_matrix(blocks, scales)
    assert packed.extreme_ES.tolist() == [[0, 1, 0, 0]]
    y = kernel.multiply(x, packed)
    assert relative_rms(y, x.double() @ dequantize(blocks, scales).double().T) < PACKED_EXPERTS_RMS
    assert torch.equal(y[9:10], kernel.multiply(x[9:10], packed))


@each_isa
@each_dtype
def test_infinities_and_nans_go_where_the_reference_has_them(isa, dtype):
    blocks = random_bytes(32, 2, 16) % 112 | 0x11  # no zero weights: infinity times zero is NaN
    blocks[(blocks & 0x0F) == 8] |= 1
    scales = torch.full((32, 2), 127, dtype=torch.uint8)
    x = rows(12, 64, dtype)
    x[1, 5], x[4, 63], x[7, 0] = torch.inf, -torch.inf, torch.nan
    if dtype == torch.float32:
        x[9, 8] = torch.tensor(0x7F800001, dtype=torch.int32).view(torch.float32)  # its upper half is an infinity's
    kernel = GroupedExperts(isa)
    y = kernel.multiply(x, kernel.pack_matrix(blocks, scales))
    expected = x.double() @ dequantize(blocks, scales).double().T
    assert torch.equal(y.isnan(), expected.isnan())
    assert torch.equal(y.isinf(), expected.isinf())
    assert torch.equal(y[y.isinf()].sign(), expected[expected.isinf()].sign().float())
    finite = expected.isfinite().all(-1)
    assert relative_rms(y[finite], expected[finite]) < PACKED_EXPERTS_RMS


@each_isa
@each_dtype
def test_layers_of_every_token_count(isa, dtype):
    kernel = GroupedExperts(isa)
    packed, views = layer_case(kernel, 96, 32, 4, dtype=dtype)
    x, (chosen, weights) = rows(70, 96, dtype), routing_case(70, 4, 2)
    expected = expected_layer(x, views, chosen, weights)
    alone = torch.cat([kernel(x[i : i + 1], packed, chosen[i : i + 1], weights[i : i + 1]) for i in range(70)])
    for num_tokens in range(71):
        y = kernel(x[:num_tokens], packed, chosen[:num_tokens], weights[:num_tokens])
        assert y.dtype == torch.float32
        assert torch.equal(y, alone[:num_tokens])
    assert relative_rms(alone, expected) < layer_bound(dtype)


@each_isa
@each_dtype
@pytest.mark.parametrize("clamp", [None, CLAMP])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("experts", [None, (4,), (1, 3)])
def test_units_biases_and_starved_experts(isa, dtype, clamp, biased, experts):
    kernel = GroupedExperts(isa)
    packed, views = layer_case(kernel, 32, 96, 5, biased=biased, dtype=dtype)
    top_k = 3 if experts is None else len(experts)
    x, (chosen, weights) = rows(211, 32, dtype), routing_case(211, 5, top_k, experts=experts)
    y = kernel(x, packed, chosen, weights, clamp=clamp)
    assert relative_rms(y, expected_layer(x, views, chosen, weights, clamp)) < layer_bound(dtype)
    some = torch.tensor([200, 3, 77])
    assert torch.equal(kernel(x[some], packed, chosen[some], weights[some], clamp=clamp), y[some])


@each_isa
@each_dtype
@pytest.mark.parametrize("clamp", [None, CLAMP])
def test_a_token_that_is_nan_stays_nan_and_alone(isa, dtype, clamp):
    kernel = GroupedExperts(isa)
    packed, _ = layer_case(kernel, 64, 32, 4, dtype=dtype)
    x, (chosen, weights) = rows(20, 64, dtype), routing_case(20, 4, 2)
    clean = kernel(x, packed, chosen, weights, clamp=clamp)
    x[7, 3] = torch.nan
    y = kernel(x, packed, chosen, weights, clamp=clamp)
    assert y[7].isnan().all()
    others = torch.arange(20) != 7
    assert torch.equal(y[others], clean[others])


@each_isa
def test_many_experts_few_tokens(isa):
    kernel = GroupedExperts(isa)
    packed, views = layer_case(kernel, 32, 32, 1024)
    x, (chosen, weights) = rows(3, 32), routing_case(3, 1024, 8)
    assert relative_rms(kernel(x, packed, chosen, weights), expected_layer(x, views, chosen, weights)) < 1e-6


@each_isa
@each_dtype
def test_threads_and_rounds_do_not_change_bits(isa, dtype):
    """4,200 tokens of 4 experts need more than one round of prepared rows (32 MiB)."""
    kernel = GroupedExperts(isa)
    packed, _ = layer_case(kernel, 1024, 32, 8)
    x, (chosen, weights) = rows(4200, 1024, dtype), routing_case(4200, 8, 4)
    one = kernel(x, packed, chosen, weights)
    torch.set_num_threads(2)
    assert torch.equal(kernel(x, packed, chosen, weights), one)
    assert torch.equal(kernel(x[:500], packed, chosen[:500], weights[:500]), one[:500])


@each_isa
def test_strided_operands(isa):
    kernel = GroupedExperts(isa)
    packed, views = layer_case(kernel, 64, 32, 4)
    x, (chosen, weights) = rows(9, 64), routing_case(9, 4, 2)
    y = kernel(x.t().contiguous().t(), packed, chosen.t().contiguous().t(), weights.t().contiguous().t())
    assert torch.equal(y, kernel(x, packed, chosen, weights))
    assert relative_rms(y, expected_layer(x, views, chosen, weights)) < PACKED_EXPERTS_RMS


@each_isa
@pytest.mark.parametrize("clamp", [None, CLAMP])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize(("num_tokens", "experts"), [(0, None), (1, None), (67, None), (41, (1, 2, 3))])
def test_gradients_are_those_of_the_views(isa, clamp, biased, num_tokens, experts):
    kernel = GroupedExperts(isa)
    packed, views = layer_case(kernel, 64, 32, 5, biased=biased)
    x, (chosen, weights) = rows(num_tokens, 64), routing_case(num_tokens, 5, 3, experts=experts)
    upstream = rows(num_tokens, 64, seed=9)
    inputs = [tensor.requires_grad_() for tensor in (x, weights, *views) if tensor is not None]
    y = kernel(x, packed, chosen, weights, clamp=clamp, views=views)
    gate_up, down, gate_up_bias, down_bias = views
    expected = eager.experts_forward(
        x, gate_up, down, chosen, weights, gate_up_bias_E2F=gate_up_bias, down_bias_ED=down_bias, clamp=clamp
    )
    with torch.no_grad():
        assert torch.equal(y, kernel(x, packed, chosen, weights, clamp=clamp))
    grads = torch.autograd.grad(y, inputs, upstream)
    for grad, expected_grad in zip(grads, torch.autograd.grad(expected, inputs, upstream), strict=True):
        assert relative_error(grad, expected_grad) < EXPERTS_BACKWARD


@each_isa
def test_gradients_in_bf16(isa):
    kernel = GroupedExperts(isa)
    packed, views = layer_case(kernel, 64, 64, 4, biased=True, dtype=torch.bfloat16)
    x, (chosen, weights) = rows(50, 64, torch.bfloat16), routing_case(50, 4, 2)
    inputs = [tensor.requires_grad_() for tensor in (x, weights, *views) if tensor is not None]
    upstream = rows(50, 64, seed=9)
    grads = torch.autograd.grad(kernel(x, packed, chosen, weights, views=views), inputs, upstream)
    expected = expected_layer(x, views, chosen, weights)
    for grad, expected_grad in zip(grads, torch.autograd.grad(expected, inputs, upstream.double()), strict=True):
        assert grad.dtype == expected_grad.dtype
        assert relative_error(grad.float(), expected_grad.float()) < 4 * U16


@each_isa
def test_tiles_are_shared_with_the_libraries_of_torch(isa):
    """Its bf16 products configure the same tile registers."""
    kernel, (blocks, scales) = GroupedExperts(isa), matrix_case(64, 512)
    packed = kernel.pack_matrix(blocks, scales)
    x, other = rows(7, 512, torch.bfloat16), rows(256, 256, torch.bfloat16)
    first, product = kernel.multiply(x, packed), other @ other
    for _ in range(5):
        assert torch.equal(kernel.multiply(x, packed), first)
        assert torch.equal(other @ other, product)


def sparse(matrix: PackedMatrix, num_matrices: int, at: list[int]) -> PackedMatrix:
    """`matrix`'s experts as number `at` of many; the memory of the others is never touched."""
    spread = {}
    for name in ("codes_ESB", "scales_ESB", "extreme_ES"):
        some = getattr(matrix, name)
        spread[name] = torch.empty(num_matrices, *some.shape[1:], dtype=torch.uint8)
        spread[name][at] = some
    return PackedMatrix(num_outputs=matrix.num_outputs, **spread)


@each_isa
def test_offsets_beyond_2_31(isa):
    torch.use_deterministic_algorithms(False)  # would fill 3 GiB that nobody reads
    kernel = GroupedExperts(isa)
    packed, _ = layer_case(kernel, 512, 1024, 2)
    x, (chosen, weights) = rows(3, 512), routing_case(3, 2, 2)
    places = torch.tensor([0, 5999])
    many = PackedExperts(
        gate_up=sparse(packed.gate_up, 6000, places.tolist()),
        down=sparse(packed.down, 6000, places.tolist()),
        gate_up_bias_E2F=None,
        down_bias_ED=None,
    )
    assert many.gate_up.codes_ESB.numel() > 2**31
    assert torch.equal(kernel(x, many, places[chosen], weights), kernel(x, packed, chosen, weights))


def test_all_fp32_instruction_sets_agree():
    """AVX2 and AVX-512 do the same operations on the same lanes; tiles sum in another order."""
    found = []
    for isa in available_isas()[:2]:
        kernel = GroupedExperts(isa)
        packed, _ = layer_case(kernel, 96, 64, 4, biased=True)
        x, (chosen, weights) = rows(33, 96), routing_case(33, 4, 2)
        found.append(kernel(x, packed, chosen, weights, clamp=CLAMP))
    assert all(torch.equal(found[0], other) for other in found)


@pytest.mark.parametrize("index", [-1, 4, 2**40])
def test_an_index_of_no_expert_is_refused(index):
    kernel = GroupedExperts(available_isas()[-1])
    packed, _ = layer_case(kernel, 32, 32, 4)
    chosen, weights = torch.tensor([[0], [index]]), torch.ones(2, 1)
    with pytest.raises(KernelError, match=r"choices must lie in 0\.\.3"):
        kernel(rows(2, 32), packed, chosen, weights)


def test_operands_that_do_not_fit_are_refused():
    kernel = GroupedExperts(available_isas()[-1])
    packed, _ = layer_case(kernel, 32, 64, 4)
    chosen, weights = routing_case(2, 4, 2)
    for x, its_chosen, its_weights in (
        (rows(2, 64), chosen, weights),
        (rows(2, 32).double(), chosen, weights),
        (rows(2, 32), chosen.int(), weights),
        (rows(2, 32), chosen, weights.double()),
        (rows(3, 32), chosen, weights),
        (rows(2, 32), chosen, weights[:, :1]),
    ):
        with pytest.raises(KernelError, match=r"x must be fp32 or bf16 \[T, 32\]"):
            kernel(x, packed, its_chosen, its_weights)
    with pytest.raises(KernelError, match="got no views"):
        kernel(rows(2, 32).requires_grad_(), packed, chosen, weights)
    with pytest.raises(KernelError, match="pack a single matrix"):
        kernel.multiply(rows(2, 32), packed.gate_up)
    gate_up, down = matrix_case(128, 32), matrix_case(32, 64)
    with pytest.raises(KernelError, match="of one layer"):
        kernel.pack(*gate_up, *down, down_bias=torch.zeros(1, 31))
    with pytest.raises(KernelError, match="of one layer"):
        kernel.pack(*down, *gate_up)

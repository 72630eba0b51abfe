"""Paged attention on a CPU equals its definition, and a query's bits follow nothing but the query and its keys."""

from typing import NamedTuple

import pytest
import torch

from model.kernels.attention import reference
from model.kernels.attention.cpu import PagedAttention
from model.kernels.attention.reference import Pages, PageTable
from model.kernels.cpu.build import KernelError
from model.kernels.cpu.isa import available_isas
from tests.numerics.tolerances import U16, attention_sums, relative_error

each_isa = pytest.mark.parametrize("isa", available_isas())
STORED = [torch.float32, torch.bfloat16, torch.int8, torch.float8_e4m3fn]
each_stored = pytest.mark.parametrize("stored", STORED, ids=str)


class Case(NamedTuple):
    """What a call takes; every slot that no sequence uses holds NaN, every entry beyond a sequence's pages is -1."""

    q_THd: torch.Tensor
    keys: Pages
    values: Pages
    table: PageTable


def empty_pages(num_slots, heads, dim, stored):
    if stored in (torch.int8, torch.float8_e4m3fn):
        rows = torch.full((num_slots, heads, dim), 127, dtype=torch.int8).view(stored)  # as fp8: NaN
        return Pages(rows, torch.full((num_slots, heads), torch.nan))
    return Pages(torch.full((num_slots, heads, dim), torch.nan, dtype=stored))


def make_table(starts, counts, page_size, seed=0):
    """Pages in random order with two unused ones between; also the slot of every position of every sequence."""
    g = torch.Generator().manual_seed(seed)
    needed = [-(-(start + count) // page_size) for start, count in zip(starts, counts, strict=True)]
    order = torch.randperm(sum(needed) + 2, generator=g).int()
    pages = torch.full((len(needed), max([1, *needed])), -1, dtype=torch.int32)
    slots, first = [], 0
    for n, count in enumerate(needed):
        pages[n, :count] = order[first : first + count]
        first += count
        position = torch.arange(starts[n] + counts[n])
        slots.append(pages[n].long()[position // page_size] * page_size + position % page_size)
    starts_N, counts_N = (torch.tensor(x, dtype=torch.int32) for x in (starts, counts))
    return PageTable(pages, starts_N, counts_N, page_size), slots, len(order) * page_size


def make_case(starts, counts, heads, kv_heads, dim, *, value_dim=None, page_size=16, stored=torch.float32, q_dtype=None,
              latent=False, seed=0):  # fmt: skip
    """Queries, keys and values follow `seed` and the position alone, so that pagings of the same sequences compare."""
    table, slots, num_slots = make_table(starts, counts, page_size, seed)
    keys = empty_pages(num_slots, kv_heads, dim, stored)
    value_dim = value_dim or dim
    values = Pages(keys.rows_SGd[..., :value_dim], keys.scales_SG) if latent else empty_pages(
        num_slots, kv_heads, value_dim, stored)  # fmt: skip
    queries = []
    for n, slot_C in enumerate(slots):
        g = torch.Generator().manual_seed(1000 * seed + n)
        tokens = (len(slot_C), kv_heads, dim + value_dim + heads // kv_heads * dim)
        k, v, q = torch.randn(tokens, generator=g).split([dim, value_dim, heads // kv_heads * dim], dim=-1)
        reference.write(keys, slot_C, k)
        if not latent:
            reference.write(values, slot_C, v)
        queries.append(q.reshape(len(slot_C), heads, dim)[starts[n] :])
    return Case(torch.cat(queries).to(q_dtype or torch.float32), keys, values, table)


def exact(case, *, scale, window=0, sinks_H=None):
    """The definition once more, in fp64: [T, H, e]."""
    q_THd, keys, values, table = case
    outs, first = [], 0
    for pages, start, count in zip(table.pages_NB, table.starts_N.tolist(), table.counts_N.tolist(), strict=True):
        for position in range(start, start + count):
            seen = torch.arange(max(0, position - window + 1) if window else 0, position + 1)
            slots = pages.long()[seen // table.page_size] * table.page_size + seen % table.page_size
            k_CGd, v_CGe = (reference.read(x, slots).double() for x in (keys, values))
            q_Gjd = q_THd[first].double().view(k_CGd.shape[1], -1, q_THd.shape[-1])
            scores_HC = torch.einsum("gjd,cgd->gjc", q_Gjd, k_CGd).flatten(0, 1) * scale
            if sinks_H is not None:
                scores_HC = torch.cat([scores_HC, sinks_H.double().unsqueeze(1)], dim=1)
            weights_Gjc = scores_HC.softmax(-1)[:, : len(seen)].unflatten(0, q_Gjd.shape[:2])
            outs.append(torch.einsum("gjc,cge->gje", weights_Gjc, v_CGe).flatten(0, 1))
            first += 1
    return torch.stack(outs)


def check(isa, case, *, scale=None, window=0, sinks_H=None):
    """Kernel against definition; the definition itself is held to fp64 below."""
    scale = case.q_THd.shape[-1] ** -0.5 if scale is None else scale
    options = {"scale": scale, "window": window, "sinks_H": sinks_H}
    actual = PagedAttention(isa)(*case, **options)
    expected = reference.paged_attention(case.q_THd.float(), *case[1:], **options)
    assert actual.dtype == case.q_THd.dtype
    longest = int((case.table.starts_N + case.table.counts_N).max())
    bound = attention_sums(case.q_THd.shape[-1], longest)
    if actual.dtype == torch.bfloat16:
        bound += U16
    assert relative_error(actual.float(), expected) < bound


@each_isa
@pytest.mark.parametrize("window", [0, 7])
def test_fp64(isa, window):
    case = make_case([0, 60, 3], [9, 8, 1], 6, 2, 24, value_dim=40)
    sinks = torch.linspace(-2, 3, 6)
    expected = exact(case, scale=0.3, window=window, sinks_H=sinks)
    bound = attention_sums(24, 68)
    for attend in (PagedAttention(isa), reference.paged_attention):
        out = attend(*case, scale=0.3, window=window, sinks_H=sinks)
        assert relative_error(out, expected) < bound


@each_isa
@each_stored
@pytest.mark.parametrize("q_dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("page_size", [1, 7, 16, 64])
def test_every_kind_of_page(isa, stored, q_dtype, page_size):
    check(isa, make_case([0, 5, 130, 63], [3, 1, 70, 2], 4, 2, 40, page_size=page_size, stored=stored, q_dtype=q_dtype))


@each_isa
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "value_dim"),
    [(4, 4, 64, 64), (12, 1, 128, 128), (7, 7, 17, 33), (15, 3, 80, 5), (10, 2, 1, 1), (128, 1, 48, 32)],
)
def test_heads_of_every_shape(isa, heads, kv_heads, dim, value_dim):
    check(isa, make_case([0, 65], [66, 3], heads, kv_heads, dim, value_dim=value_dim))


@each_isa
@each_stored
@pytest.mark.parametrize(("heads", "dim", "value_dim"), [(128, 576, 512), (5, 45, 31), (8, 640, 512)])
def test_values_that_are_a_view_of_latents(isa, stored, heads, dim, value_dim):
    case = make_case([70, 0], [1, 5], heads, 1, dim, value_dim=value_dim, latent=True, stored=stored)
    assert case.values.rows_SGd.data_ptr() == case.keys.rows_SGd.data_ptr()
    check(isa, case, scale=0.05)


@each_isa
@pytest.mark.parametrize("window", [1, 2, 33, 63, 64, 65, 128, 500])
@pytest.mark.parametrize("with_sinks", [False, True])
def test_windows_around_the_borders_of_blocks(isa, window, with_sinks):
    sinks = torch.linspace(-2, 3, 6) if with_sinks else None
    case = make_case([0, 127, 191, 64], [200, 3, 1, 64], 6, 2, 16)
    check(isa, case, window=window, sinks_H=sinks)
    check(isa, make_case([0, 127], [130, 3], 3, 3, 16), window=window, sinks_H=sinks[:3] if with_sinks else None)


@each_isa
def test_every_context_from_1_to_200(isa):
    check(isa, make_case(list(range(200)), [1] * 200, 2, 1, 16, page_size=7))
    check(isa, make_case([0], [200], 2, 1, 16))


@each_isa
@pytest.mark.parametrize("context", [255, 256, 257, 1023, 1024, 1025, 5000])
def test_long_contexts(isa, context):
    check(isa, make_case([context - 1], [1], 4, 2, 32, stored=torch.bfloat16))
    check(isa, make_case([context - 40], [40], 4, 2, 32), window=128)


@each_isa
@pytest.mark.parametrize("window", [0, 2])
def test_a_sink_of_minus_infinity_is_none(isa, window):
    case = make_case([0, 70], [5, 2], 4, 2, 16)
    kernel = PagedAttention(isa)
    without = kernel(*case, scale=0.25, window=window)
    assert torch.equal(kernel(*case, scale=0.25, window=window, sinks_H=torch.full((4,), -torch.inf)), without)
    mixed = torch.tensor([-torch.inf, 1.0, -torch.inf, 80.0])
    check(isa, case, scale=0.25, window=window, sinks_H=mixed)


@each_isa
def test_large_scores_do_not_overflow(isa):
    case = make_case([0, 90], [5, 2], 4, 2, 16)
    check(isa, case._replace(q_THd=case.q_THd.sign()), scale=300.0)  # one key gets nearly all of the weight
    check(isa, case, scale=1e-6)


@each_isa
def test_sequences_without_a_token_and_no_sequence_at_all(isa):
    check(isa, make_case([4, 0, 9, 70], [0, 3, 2, 0], 4, 2, 16))
    case = make_case([4, 0], [0, 0], 4, 2, 16)
    assert PagedAttention(isa)(*case, scale=1.0).shape == (0, 4, 16)
    none = PageTable(*(x[:0] for x in case.table[:3]), 16)
    assert PagedAttention(isa)(*case[:3], none, scale=1.0).shape == (0, 4, 16)


@each_isa
@pytest.mark.parametrize("rows", [1, 3])
def test_what_a_query_does_not_see_may_be_nan(isa, rows):
    """Not only unused slots: the keys of later tokens of the same prompt, and those before a window."""
    case = make_case([0], [150], 2 * rows, 2, 16, page_size=1)
    kernel = PagedAttention(isa)
    before = {window: kernel(*case, scale=0.25, window=window) for window in (0, 20)}
    slot = case.table.pages_NB[0, 100]
    case.keys.rows_SGd[slot], case.values.rows_SGd[slot] = torch.nan, torch.nan
    for window, end in ((0, 150), (20, 120)):
        after = kernel(*case, scale=0.25, window=window)
        assert torch.equal(after[:100], before[window][:100])
        assert after[100:end].isnan().all()
        assert torch.equal(after[end:], before[window][end:])


@each_isa
def test_pages_before_a_window_may_be_gone(isa):
    case = make_case([200], [2], 2, 1, 16)
    kernel = PagedAttention(isa)
    before = kernel(*case, scale=0.25, window=20)
    case.table.pages_NB[0, : (200 - 19) // 16] = -1
    assert torch.equal(kernel(*case, scale=0.25, window=20), before)


SHAPES = [(4, 4, 16, 16), (12, 2, 64, 64), (5, 1, 24, 40), (16, 2, 128, 128)]
each_shape = pytest.mark.parametrize(("heads", "kv_heads", "dim", "value_dim"), SHAPES)
each_window = pytest.mark.parametrize("window", [0, 40])


@each_isa
@each_shape
@each_window
@pytest.mark.parametrize("stored", [torch.float32, torch.float8_e4m3fn], ids=str)
def test_decoding_and_prefill_in_any_chunks_give_the_same_bits(isa, heads, kv_heads, dim, value_dim, window, stored):
    kernel = PagedAttention(isa)
    options = {"scale": dim**-0.5, "window": window, "sinks_H": torch.linspace(-1, 1, heads)}
    case = make_case([0], [150], heads, kv_heads, dim, value_dim=value_dim, stored=stored)
    whole = kernel(*case, **options)
    for length in (1, 2, 5, 37, 63, 64, 65):
        rows = []
        for start in range(0, 150, length):
            count = min(length, 150 - start)
            table = case.table._replace(
                starts_N=torch.tensor([start], dtype=torch.int32), counts_N=torch.tensor([count], dtype=torch.int32)
            )
            rows.append(kernel(case.q_THd[start : start + count], case.keys, case.values, table, **options))
        assert torch.equal(torch.cat(rows), whole)


@each_isa
@each_shape
@each_window
def test_the_batch_the_pages_and_the_threads_leave_the_bits(isa, heads, kv_heads, dim, value_dim, window):
    kernel = PagedAttention(isa)
    starts, counts = [0, 70, 10, 0, 129], [67, 1, 30, 1, 2]
    options = {"scale": dim**-0.5, "window": window}
    shape = {"heads": heads, "kv_heads": kv_heads, "dim": dim, "value_dim": value_dim}
    together = kernel(*make_case(starts, counts, **shape), **options)
    for page_size in (1, 7, 64):
        assert torch.equal(kernel(*make_case(starts, counts, page_size=page_size, **shape), **options), together)
    case = make_case(starts, counts, **shape)
    first = 0
    for n, count in enumerate(counts):
        alone = case.table._replace(
            pages_NB=case.table.pages_NB[n : n + 1],
            starts_N=case.table.starts_N[n : n + 1],
            counts_N=case.table.counts_N[n : n + 1],
        )
        q_THd = case.q_THd[first : first + count]
        assert torch.equal(kernel(q_THd, case.keys, case.values, alone, **options), together[first : first + count])
        first += count
    for threads in (2, 3, 8):
        torch.set_num_threads(threads)
        assert torch.equal(kernel(*case, **options), together)


@each_shape
def test_every_instruction_set_gives_the_same_bits(heads, kv_heads, dim, value_dim):
    for stored in STORED:
        case = make_case([0, 70], [67, 1], heads, kv_heads, dim, value_dim=value_dim, stored=stored)
        first, *others = (PagedAttention(isa)(*case, scale=0.2) for isa in available_isas())
        assert all(torch.equal(first, other) for other in others)


@each_isa
def test_queries_may_be_a_slice_of_a_wider_product(isa):
    case = make_case([0, 70], [5, 1], 4, 2, 16)
    wide = torch.full((6, 8, 16), torch.nan)
    wide[:, 2:6] = case.q_THd
    kernel = PagedAttention(isa)
    assert torch.equal(kernel(wide[:, 2:6], *case[1:], scale=0.25), kernel(*case, scale=0.25))


# ------------------------------------------------------------------------------------------------------------- storing


def bytes_of(x):
    return x.contiguous().view(torch.uint8)


@each_isa
@each_stored
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("dim", [1, 16, 40, 97])
def test_written_bytes_are_the_definition_s(isa, stored, dtype, dim):
    g = torch.Generator().manual_seed(dim)
    wide = (torch.randn(30, 5, dim + 3, generator=g) * 10.0 ** torch.randint(-4, 5, (30, 5, 1), generator=g)).to(dtype)
    x = wide[:, 1:4, :dim]
    x[3], x[4, :, 0] = 0.0, -0.0
    slots = torch.randperm(50, generator=g)[:30]
    actual, expected = (empty_pages(50, 3, dim, stored) for _ in range(2))
    PagedAttention(isa).write(actual, slots, x)
    reference.write(expected, slots, x)
    for a, b in zip(actual, expected, strict=True):
        assert a is b is None or torch.equal(bytes_of(a), bytes_of(b))


@each_isa
def test_rounding_of_stored_values_at_ties(isa):
    """A row whose largest value makes the scale 1: every code, and every middle between two of them."""
    integers = torch.arange(-127, 128).float()
    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    codes = codes[codes.isfinite()].sort().values
    for stored, levels in ((torch.int8, integers), (torch.float8_e4m3fn, codes)):
        middles = (levels[1:] + levels[:-1]) / 2
        away, toward = (torch.nextafter(middles, torch.tensor(x)) for x in (torch.inf, -torch.inf))
        x = torch.cat([levels, middles, away, toward]).view(1, 1, -1)
        actual, expected = (empty_pages(1, 1, x.shape[-1], stored) for _ in range(2))
        PagedAttention(isa).write(actual, torch.tensor([0]), x)
        reference.write(expected, torch.tensor([0]), x)
        assert actual.scales_SG is not None
        assert actual.scales_SG.item() == 1.0
        assert torch.equal(bytes_of(actual.rows_SGd), bytes_of(expected.rows_SGd))


@each_isa
def test_a_nan_or_infinity_stored_as_fp8_comes_back_as_nan(isa):
    x = torch.ones(3, 1, 8)
    x[1, 0, 2], x[2, 0, 2] = torch.nan, torch.inf
    actual, expected = (empty_pages(3, 1, 8, torch.float8_e4m3fn) for _ in range(2))
    kernel = PagedAttention(isa)
    kernel.write(actual, torch.arange(3), x)
    reference.write(expected, torch.arange(3), x)
    for a, b in zip(actual, expected, strict=True):
        assert torch.equal(bytes_of(a), bytes_of(b))
    table, q = make_table([0], [3], 3)[0], torch.ones(3, 1, 8)
    table.pages_NB[:] = 0
    out = kernel(q, Pages(torch.ones(3, 1, 8)), actual, table, scale=1.0, window=1)
    assert out[:, 0, 2].isnan().tolist() == [False, True, True]


@each_isa
@pytest.mark.parametrize("stored", [torch.int8, torch.float8_e4m3fn], ids=str)
def test_every_stored_code_is_read_exactly(isa, stored):
    """A window of one key gives back its value: code times scale."""
    codes = torch.arange(256, dtype=torch.uint8).view(stored)
    rows = codes[codes.float().isfinite()][:240].view(4, 1, 60)
    values = Pages(rows, torch.tensor([1.0, 0.3, 1e-30, 7e9]).view(4, 1))
    table = PageTable(torch.zeros(1, 1).int(), torch.zeros(1).int(), torch.tensor([4]).int(), 4)
    out = PagedAttention(isa)(torch.ones(4, 2, 8), Pages(torch.ones(4, 1, 8)), values, table, scale=1.0, window=1)
    expected = reference.read(values, torch.arange(4)).expand(-1, 2, -1)
    assert torch.equal(out, expected)


# -------------------------------------------------------------------------------------------------------------- errors


def test_what_does_not_fit_is_refused():
    isa = available_isas()[0]
    kernel = PagedAttention(isa)
    q, keys, values, table = make_case([0, 30], [2, 3], 4, 2, 16)
    with pytest.raises(KernelError, match="counts of the table must add up to the queries, got 5 for 4"):
        kernel(q[:4], keys, values, table, scale=1.0)
    with pytest.raises(KernelError, match="queries must be fp32 or bf16"):
        kernel(q.half(), keys, values, table, scale=1.0)
    with pytest.raises(KernelError, match="queries must be fp32 or bf16"):
        kernel(q[:, :3], keys, values, table, scale=1.0)
    with pytest.raises(KernelError, match="queries must be fp32 or bf16"):
        kernel(q[..., :8], keys, values, table, scale=1.0)
    for page in (-1, 1000):
        wrong = table._replace(pages_NB=table.pages_NB.clone())
        wrong.pages_NB[1, 2] = page
        with pytest.raises(KernelError, match="pages of sequence 1 must exist for all its positions, got start 30"):
            kernel(q, keys, values, wrong, scale=1.0)
    with pytest.raises(KernelError, match="pages of sequence 1 must exist"):
        kernel(q, keys, values, table._replace(pages_NB=table.pages_NB[:, :2]), scale=1.0)
    with pytest.raises(KernelError, match="pages: must be fp32 or bf16, or int8"):
        kernel(q, Pages(keys.rows_SGd.half()), values, table, scale=1.0)
    with pytest.raises(KernelError, match="with scales"):
        kernel(q, Pages(keys.rows_SGd, torch.ones(1, 2)), values, table, scale=1.0)
    with pytest.raises(KernelError, match="slots must lie within"):
        kernel.write(keys, torch.tensor([0, len(keys.rows_SGd)]), torch.zeros(2, 2, 16))
    with pytest.raises(KernelError, match="one row and one slot a token"):
        kernel.write(keys, torch.tensor([0]), torch.zeros(2, 2, 16))

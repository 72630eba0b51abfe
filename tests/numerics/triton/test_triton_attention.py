"""Triton attention over pages equals its definition, for decoding and prefill; writing pages is equal byte for byte."""

import pytest
import torch

from model.kernels.attention import reference, triton, triton_pages
from model.kernels.attention.reference import Pages, PageTable
from model.kernels.cpu.build import KernelError
from tests.numerics.tolerances import ATTENTION_BF16_WEIGHTS, attention_sums, relative_error

BF16, FP32, INT8, FP8 = torch.bfloat16, torch.float32, torch.int8, torch.float8_e4m3fn


@pytest.fixture(autouse=True)
def _poisoned_outputs():
    """Memory that a launcher reserves starts as NaN."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


def make_pages(num_slots, heads, dim, dtype, device):
    """Every value and scale NaN, or where int8 has none, the largest."""
    if dtype in (INT8, FP8):
        rows = torch.full((num_slots, heads, dim), 0x7F, dtype=torch.uint8, device=device).view(dtype)
        return Pages(rows, torch.full((num_slots, heads), torch.nan, device=device))
    return Pages(torch.full((num_slots, heads, dim), torch.nan, dtype=dtype, device=device))


def make_case(
    device,
    starts,
    counts,
    *,
    heads=4,
    kv_heads=2,
    dim=16,
    value_dim=None,
    page_size=16,
    dtype=FP32,
    stored=None,
    seed=0,
):
    """Queries, keys, values and table; unused slots are poisoned, unused entries of the table lie outside."""
    g = torch.Generator().manual_seed(seed)
    value_dim = value_dim or dim
    needed = [-(-(start + count) // page_size) for start, count in zip(starts, counts, strict=True)]
    num_pages = sum(needed) + 2
    order = torch.randperm(num_pages, generator=g).int()
    pages = torch.full((len(starts), max(needed) + 1), 1 << 30, dtype=torch.int32)
    keys, values = (make_pages(num_pages * page_size, kv_heads, d, stored or dtype, device) for d in (dim, value_dim))
    taken = 0
    for n, (start, count) in enumerate(zip(starts, counts, strict=True)):
        pages[n, : needed[n]] = order[taken : taken + needed[n]]
        taken += needed[n]
        position = torch.arange(start + count)
        slots = (pages[n].long()[position // page_size] * page_size + position % page_size).to(device)
        for kept in (keys, values):
            x = torch.randn(len(slots), kv_heads, kept.rows_SGd.shape[-1], generator=g)
            reference.write(kept, slots, x.to(device))
    integers = (torch.tensor(x, dtype=torch.int32, device=device) for x in (starts, counts))
    q = torch.randn(sum(counts), heads, dim, generator=g).to(dtype).to(device)
    return q, keys, values, PageTable(pages.to(device), *integers, page_size)


def check(case, *, tolerance=None, window=0, sinks_H=None, **options):
    q = case[0]
    scale = q.shape[-1] ** -0.5
    expected = reference.paged_attention(*case, scale=scale, window=window, sinks_H=sinks_H)
    actual = triton.paged_attention(*case, scale=scale, window=window, sinks_H=sinks_H, **options)
    assert actual.dtype == q.dtype
    if tolerance is None:
        longest = int((case[3].starts_N + case[3].counts_N).max())
        tolerance = attention_sums(q.shape[-1], longest) if q.dtype == FP32 else ATTENTION_BF16_WEIGHTS
    assert relative_error(actual.float(), expected.float()) < tolerance
    return actual


def sinks(heads, device):
    """The first is minus infinity, which takes nothing."""
    return torch.tensor([-torch.inf, *torch.linspace(-2, 3, heads - 1).tolist()], device=device)


@pytest.mark.parametrize("counts", [[1, 1, 1], [7, 1, 35], [0, 9, 1], [1, 0, 1]])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "value_dim", "dtype", "stored"),
    [
        (4, 2, 16, 16, FP32, FP32),
        (7, 1, 24, 8, FP32, BF16),
        (6, 2, 40, 32, FP32, FP8),
        (8, 1, 64, 64, BF16, BF16),
        (5, 5, 96, 48, BF16, INT8),
        (9, 3, 8, 24, BF16, FP8),
        (4, 2, 16, 16, BF16, FP32),
    ],
)
def test_equal_to_the_definition(counts, heads, kv_heads, dim, value_dim, dtype, stored, device):
    case = make_case(
        device,
        [0, 33, 5],
        counts,
        heads=heads,
        kv_heads=kv_heads,
        dim=dim,
        value_dim=value_dim,
        dtype=dtype,
        stored=stored,
    )
    check(case, sinks_H=sinks(heads, device))


@pytest.mark.parametrize("window", [1, 2, 16, 31, 32, 33, 63, 64, 65, 500])
def test_windows_around_the_borders_of_blocks(window, device):
    """Keys that no query sees are poisoned: a window's older keys may belong to someone else by now."""
    starts, counts = [63, 64, 100], [1, 1, 1]
    for new in (counts, [3, 34, 1]):
        q, keys, values, table = make_case(device, starts, new, seed=window)
        for n, start in enumerate(starts):
            gone = torch.arange(max(0, start - window + 1), device=device)
            slots = table.pages_NB[n].long()[gone // 16] * 16 + gone % 16
            keys.rows_SGd[slots], values.rows_SGd[slots] = 0.0, 0.0  # the definition multiplies them by 0
            expected_case = q, keys, values, table
        expected = reference.paged_attention(*expected_case, scale=0.3, window=window)
        for n, start in enumerate(starts):
            gone = torch.arange(max(0, start - window + 1), device=device)
            slots = table.pages_NB[n].long()[gone // 16] * 16 + gone % 16
            keys.rows_SGd[slots], values.rows_SGd[slots] = torch.nan, torch.nan
        actual = triton.paged_attention(q, keys, values, table, scale=0.3, window=window)
        assert relative_error(actual, expected) < attention_sums(16, 128)


@pytest.mark.parametrize("page_size", [1, 8, 48])
def test_pages_of_any_size(page_size, device):
    for counts in ([1, 1], [5, 17]):
        check(make_case(device, [40, 3], counts, page_size=page_size), window=30)


@pytest.mark.parametrize("window", [0, 70])
@pytest.mark.parametrize("split_keys", [32, 64, 96])
def test_splits_merge_to_the_same(split_keys, window, device, monkeypatch):
    monkeypatch.setattr(triton, "SPLIT_KEYS", split_keys)
    for counts in ([1, 1, 1], [9, 2, 1]):
        case = make_case(device, [0, 31, 150], counts)
        check(case, window=window, sinks_H=sinks(4, device))


def test_as_many_splits_as_the_device_holds(device, monkeypatch):
    case = make_case(device, [900, 3], [1, 1], kv_heads=1)
    monkeypatch.setattr(triton, "_split_keys", lambda *_: 320)
    check(case, batch_invariant=False, sinks_H=sinks(4, device))
    check(make_case(device, [70, 3], [4, 1]), batch_invariant=False, window=20)


def test_latents_are_read_once_for_keys_and_values(device):
    """Values are the leading part of the keys, as latent attention keeps them."""
    for stored in (FP32, FP8):
        for counts in ([1, 1], [6, 2]):
            q, keys, _, table = make_case(device, [20, 50], counts, heads=20, kv_heads=1, dim=24, stored=stored)
            check((q, keys, Pages(keys.rows_SGd[..., :16], keys.scales_SG), table))


@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_a_row_does_not_depend_on_its_batch(dtype, device, monkeypatch):
    """The last sequence alone and in a batch, decoded and prefilled; its bits are equal."""
    monkeypatch.setattr(triton, "SPLIT_KEYS", 64)
    for counts, rows in (([1, 1, 1], 1), ([3, 20, 5], 5)):
        q, keys, values, table = make_case(device, [7, 30, 139], counts, dtype=dtype, kv_heads=1)
        together = triton.paged_attention(q, keys, values, table, scale=0.2, window=100)
        alone = PageTable(table.pages_NB[2:, :12], table.starts_N[2:], table.counts_N[2:], 16)
        assert torch.equal(
            triton.paged_attention(q[-rows:], keys, values, alone, scale=0.2, window=100), together[-rows:]
        )


@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_chunks_of_a_prompt_change_no_bit(dtype, device, monkeypatch):
    monkeypatch.setattr(triton, "SPLIT_KEYS", 64)
    q, keys, values, table = make_case(device, [0], [100], dtype=dtype)
    whole = triton.paged_attention(q, keys, values, table, scale=0.2)
    for start, end in ((0, 67), (67, 69), (69, 100)):
        starts, counts = (torch.tensor([x], dtype=torch.int32, device=device) for x in (start, end - start))
        chunk = PageTable(table.pages_NB, starts, counts, 16)
        assert torch.equal(triton.paged_attention(q[start:end], keys, values, chunk, scale=0.2), whole[start:end])


def test_tiles_are_made_once_for_all_layers(device):
    q, keys, values, table = make_case(device, [0, 12], [3, 4])
    tiles = triton.tiling(table, len(q), triton.tile_tokens(q, keys, values, 2))
    check((q, keys, values, table), tiles=tiles)


def test_no_tokens(device):
    q, keys, values, table = make_case(device, [3], [1])
    none = PageTable(table.pages_NB, table.starts_N, table.counts_N * 0, 16)
    assert triton.paged_attention(q[:0], keys, values, none, scale=1.0).shape == (0, 4, 16)


def test_offsets_beyond_2_to_the_31(device, monkeypatch):
    """Slots, and tokens of the queries, lie so far apart that 32-bit offsets would wrap."""
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", False)
    q, keys, values, table = make_case(device, [30, 2, 4], [1, 1, 1], dtype=BF16, stored=INT8, kv_heads=1)
    expected = triton.paged_attention(q, keys, values, table, scale=0.2)
    stride = (1 << 31) // (len(keys.rows_SGd) - 1) + 16
    far = []
    for rows, scales in (keys, values):
        apart = torch.as_strided(
            torch.empty(stride * len(rows), dtype=INT8, device=device), rows.shape, (stride, 16, 1)
        )
        apart.copy_(rows)
        far.append(Pages(apart, scales))
    q_far = torch.as_strided(torch.empty((1 << 31) + 128, dtype=BF16, device=device), q.shape, (1 << 30, 16, 1))
    q_far.copy_(q)
    assert torch.equal(triton.paged_attention(q_far, *far, table, scale=0.2), expected)
    again = [make_pages(len(keys.rows_SGd), 1, 16, INT8, device) for _ in range(2)]
    slots = torch.arange(len(keys.rows_SGd), device=device)
    x = torch.randn(len(slots), 1, 16, generator=torch.Generator().manual_seed(1)).to(device)
    triton_pages.write(far[0], slots, x)
    reference.write(again[0], slots, x)
    assert torch.equal(far[0].rows_SGd, again[0].rows_SGd)


@pytest.mark.parametrize("stored", [FP32, BF16, INT8, FP8])
@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_writing_pages_is_equal_byte_for_byte(stored, dtype, device):
    """Small and large values, a head of zeros, ties; slots that are not written keep what they hold."""
    g = torch.Generator().manual_seed(3)
    for heads, dim in ((1, 8), (3, 40), (9, 64)):
        x = torch.randn(5, heads, dim, generator=g) * torch.logspace(-6, 6, 5)[:, None, None]
        x[1, 0] = 0.0
        x[2, 0, :8] = torch.tensor([127.0, 0.5, 1.5, 2.5, -0.5, -1.5, 126.5, -127.0])
        x = x.to(dtype).to(device)
        slots = torch.tensor([7, 0, 3, 12, 4], device=device)
        actual, expected = (make_pages(13, heads, dim, stored, device) for _ in range(2))
        triton_pages.write(actual, slots, x)
        reference.write(expected, slots, x)
        for got, wanted in zip(actual, expected, strict=True):
            if wanted is not None:
                assert torch.equal(got.view(torch.uint8), wanted.view(torch.uint8))


def test_every_fp8_code_is_read(device):
    """One key a code, in its own page: a query that sees only it returns its value."""
    codes = torch.arange(256, dtype=torch.uint8, device=device)
    finite = codes[(codes & 0x7F) != 0x7F]
    rows = finite.view(-1, 1, 1).expand(-1, 1, 8).contiguous().view(FP8)
    scales = torch.ones(len(finite), 1, device=device)
    table = PageTable(
        torch.arange(len(finite), dtype=torch.int32, device=device).view(1, -1),
        torch.zeros(1, dtype=torch.int32, device=device),
        torch.full((1,), len(finite), dtype=torch.int32, device=device),
        1,
    )
    q = torch.zeros(len(finite), 1, 8, device=device)
    out = triton.paged_attention(q, Pages(rows, scales), Pages(rows, scales), table, scale=1.0, window=1)
    assert torch.equal(out, rows.float())


def test_pages_without_scales_are_refused(device):
    q, keys, values, table = make_case(device, [3], [1], stored=INT8)
    with pytest.raises(KernelError, match="int8 without scales"):
        triton.paged_attention(q, Pages(keys.rows_SGd), values, table, scale=1.0)
    with pytest.raises(KernelError, match=r"got torch\.float16"):
        triton.paged_attention(q.half(), keys, values, table, scale=1.0)

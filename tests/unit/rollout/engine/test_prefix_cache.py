"""Pages and who has them, without a model."""

import pytest

from model.config import ModelConfig
from rollout.config import EngineConfig
from rollout.engine.kv_cache import KvCache
from rollout.engine.prefix_cache import PrefixCache

MODEL = ModelConfig(vocab_size=24, hidden_size=32, num_layers=1, num_heads=2, num_kv_heads=1, expert_hidden_size=32)


@pytest.fixture
def cache():
    """Six pages of four positions."""
    return KvCache(MODEL, EngineConfig(max_batch_size=3, max_seq_len=8, page_size=4))


@pytest.fixture
def prefixes(cache):
    return PrefixCache(cache, shared=True)


def digests_of(prefixes, ids, version=1):
    digests = []
    prefixes.extend_digests(digests, ids, version)
    return digests


def fill(prefixes, ids, version=1):
    """The pages of a sequence that has computed `ids`, full ones published, all still lent."""
    digests = digests_of(prefixes, ids, version)
    pages = [prefixes.take() for _ in range(-(-len(ids) // 4))]
    for page, digest in zip(pages, digests, strict=False):
        prefixes.publish(page, digest)
    return pages


def found(prefixes, ids, version=1):
    return prefixes.find(digests_of(prefixes, ids, version))


def test_only_full_pages_have_a_digest_and_more_ids_extend_them(prefixes):
    ids = list(range(11))
    digests = digests_of(prefixes, ids)
    assert len(digests) == 2
    assert {len(digest) for digest in digests} == {16}
    prefixes.extend_digests(digests, [*ids, 11], 1)
    assert digests == digests_of(prefixes, [*ids, 11])
    assert len(digests) == 3


@pytest.mark.parametrize(
    ("ids", "version", "num_same"),
    [
        ([0, 1, 2, 3, 4, 5, 6, 7], 1, 2),
        ([0, 1, 2, 3, 4, 5, 6, 8], 1, 1),
        ([0, 1, 2, 9, 4, 5, 6, 7], 1, 0),
        ([4, 5, 6, 7, 0, 1, 2, 3], 1, 0),
        ([0, 1, 2, 3, 4, 5, 6, 7], 2, 0),
        ([0, 1, 2, 3, 4, 5, 6, 7 + 2**32], 1, 1),
    ],
    ids=["same", "last id", "before", "order", "weights", "large id"],
)
def test_a_page_is_found_by_all_ids_to_its_end_and_the_weights(prefixes, ids, version, num_same):
    pages = fill(prefixes, list(range(8)))
    assert found(prefixes, ids, version) == pages[:num_same]


def test_pages_without_a_user_stay_until_memory_is_short_and_the_oldest_go_first(cache, prefixes):
    first, second = fill(prefixes, [1] * 8), fill(prefixes, [2] * 8)
    assert prefixes.num_available == 2
    prefixes.release(first)
    prefixes.release(second)
    assert (prefixes.num_available, prefixes.num_kept, cache.num_free) == (6, 4, 2)
    prefixes.lend(first)  # somebody uses the first one again ...
    assert prefixes.num_available == 4
    prefixes.release(first)
    taken = [prefixes.take() for _ in range(3)]
    assert found(prefixes, [1] * 8) == first
    assert found(prefixes, [2] * 8) == second[:1]  # ... so the second one lost a page: its last
    assert second[1] in taken
    taken += [prefixes.take(), prefixes.take()]
    assert found(prefixes, [2] * 8) == []
    assert found(prefixes, [1] * 8) == first[:1]
    prefixes.release(taken)
    assert prefixes.num_available == 6


def test_a_page_with_two_users_is_nobodys_when_both_have_left(prefixes):
    pages = fill(prefixes, [1] * 8)
    prefixes.lend(pages)
    prefixes.release(pages)
    assert (prefixes.num_available, prefixes.num_kept) == (4, 0)
    prefixes.release(pages)
    assert (prefixes.num_available, prefixes.num_kept) == (6, 2)


def test_of_two_equal_pages_the_first_is_found_and_the_second_is_freed(cache, prefixes):
    first, second = fill(prefixes, [1] * 4), fill(prefixes, [1] * 4)
    assert found(prefixes, [1] * 4) == first
    prefixes.release(second)
    assert prefixes.num_kept == 0
    prefixes.release(first)
    assert (prefixes.num_kept, cache.num_free) == (1, 5)


def test_pages_that_are_not_full_are_free_at_once(cache, prefixes):
    pages = fill(prefixes, [1] * 6)
    prefixes.release(pages)
    assert (prefixes.num_kept, cache.num_free) == (1, 5)


def test_nothing_is_found_after_clearing_and_lent_pages_come_back(cache, prefixes):
    kept, lent = fill(prefixes, [1] * 8), fill(prefixes, [2] * 8)
    prefixes.release(kept)
    prefixes.clear()
    assert found(prefixes, [1] * 8) == found(prefixes, [2] * 8) == []
    assert cache.num_free == 4
    prefixes.release(lent)
    assert (prefixes.num_kept, cache.num_free) == (0, 6)

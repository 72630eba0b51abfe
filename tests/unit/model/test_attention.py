import pytest

from model.packed_attention import _BUCKET_RATIO, _buckets, sequence_lengths


@pytest.mark.parametrize("lengths", [[7], [5, 5, 5], [1, 100, 75, 74, 50, 100, 2, 3], list(range(1, 200))])
def test_buckets_hold_every_sequence_once_with_bounded_padding(lengths):
    buckets = _buckets(lengths)
    members = [sequence for _, bucket in buckets for sequence in bucket]
    assert sorted(members) == list(range(len(lengths)))
    for longest, bucket in buckets:
        inside = [lengths[sequence] for sequence in bucket]
        assert max(inside) == longest
        assert min(inside) >= _BUCKET_RATIO * longest


def test_similar_lengths_share_a_bucket():
    assert _buckets([60, 45, 130, 98, 44]) == [(130, [2, 3]), (60, [0, 1]), (44, [4])]


def test_lengths_come_from_the_bounds():
    assert sequence_lengths([0, 3, 4, 10]) == [3, 1, 6]

import pickle

import pytest

from rl.statistics import PassRate, StatisticsError, wilson_interval


@pytest.mark.parametrize(
    ("successes", "trials", "low", "high"),
    [
        # z = 1.959964: centre (0.525 + 0.0096036) / 1.0192073 = 0.524529, half width
        # 1.959964 * sqrt(0.249375 / 200 + 0.0000240091) / 1.0192073 = 0.068555.
        (105, 200, 0.455974, 0.593084),
        # One success in ten: 0.25 would be impossible to exclude, 0.5 is excluded.
        (1, 10, 0.017876, 0.404150),
        # All fail: low is 0 and high = z^2 / (n + z^2) = 3.841459 / 13.841459; for one trial 3.841459 / 4.841459.
        (0, 10, 0.0, 0.277533),
        (10, 10, 0.722467, 1.0),
        (0, 1, 0.0, 0.793451),
    ],
)
def test_wilson_interval_matches_hand_computed_values(successes: int, trials: int, low: float, high: float):
    got_low, got_high = wilson_interval(successes, trials)
    assert got_low == pytest.approx(low, abs=5e-6)
    assert got_high == pytest.approx(high, abs=5e-6)


def test_the_interval_is_symmetric_between_successes_and_failures():
    low, high = wilson_interval(3, 17)
    mirrored_low, mirrored_high = wilson_interval(14, 17)
    assert low == pytest.approx(1 - mirrored_high)
    assert high == pytest.approx(1 - mirrored_low)


def test_more_confidence_is_a_wider_interval_and_no_trials_is_the_widest():
    narrow = wilson_interval(7, 20, confidence=0.5)
    wide = wilson_interval(7, 20, confidence=0.99)
    assert wide[0] < narrow[0] < 0.35 < narrow[1] < wide[1]
    assert wilson_interval(0, 0) == (0.0, 1.0)


@pytest.mark.parametrize(("successes", "trials"), [(3, 2), (-1, 2), (0, -1)])
def test_impossible_counts_are_refused(successes: int, trials: int):
    with pytest.raises(StatisticsError, match=r"successes: .* got .*;"):
        PassRate(passed=successes, total=trials)


def test_a_confidence_in_percent_is_refused():
    with pytest.raises(StatisticsError, match=r"confidence: .*got 95"):
        wilson_interval(1, 2, confidence=95)


def test_pass_rate_prints_percent_with_its_interval():
    assert str(PassRate(passed=105, total=200)) == "52.5 % [45.6, 59.3]"
    assert str(PassRate(passed=0, total=10)) == "0.0 % [0.0, 27.8]"
    assert str(PassRate(passed=0, total=0)) == "no trials"
    assert PassRate(passed=0, total=0).rate is None


def test_overlap_is_decided_by_the_intervals_not_by_the_rates():
    before, after = PassRate(passed=10, total=100), PassRate(passed=40, total=100)
    assert not before.overlaps(after)
    assert not after.overlaps(before)
    assert PassRate(passed=1, total=10).overlaps(PassRate(passed=4, total=10))


def test_pass_rate_pickles():
    rate = PassRate(passed=3, total=4)
    assert pickle.loads(pickle.dumps(rate)) == rate

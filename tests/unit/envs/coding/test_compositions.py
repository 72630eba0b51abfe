import random

import pytest

from envs.coding.compositions import (
    COMPOSITIONS,
    DEMONSTRATED,
    FILTERS,
    HABITS,
    HELD_OUT,
    MAPS,
    REDUCERS,
    TRAIN,
    Composition,
    careless,
)

PROBES = ([], [0], [5, 6, -5], [-12, 12, 3, 3, 0, 7], [1, -1, 2, -2, 5, 6])


@pytest.mark.parametrize("composition", COMPOSITIONS, ids=str)
def test_the_function_equals_the_reference_source_executed(composition):
    namespace = {}
    exec(composition.source, namespace)  # our own text
    for xs in PROBES:
        want = namespace["f"](list(xs))
        got = composition.evaluate(xs)
        assert (type(got), got) == (type(want), want)


def test_a_quarter_is_held_out_and_the_sets_are_disjoint():
    assert len(COMPOSITIONS) == len(set(COMPOSITIONS)) == 343
    assert (len(HELD_OUT), len(TRAIN), len(DEMONSTRATED)) == (85, 258, 150)
    assert not set(HELD_OUT) & set(TRAIN)
    assert set(DEMONSTRATED) <= set(TRAIN)
    assert len({composition.prompt for composition in COMPOSITIONS}) == 343


def test_prompt_and_source_of_one_composition():
    composition = Composition("large", "absolute", "reversed")
    assert composition.prompt == (
        "Write f(xs): keep the large items, take the absolute value of each, return the reversed list."
    )
    assert composition.source == "def f(xs):\n    return [abs(x) for x in xs if x > 5][::-1]\n"
    assert composition.evaluate([6, 1, -9, 7]) == [7, 6]


def test_every_operation_occurs_in_training():
    for position, table in enumerate((FILTERS, MAPS, REDUCERS)):
        assert {composition[position] for composition in TRAIN} == set(table)
        assert {composition[position] for composition in DEMONSTRATED} == set(table)


def test_bad_habits_come_six_times_in_ten_and_slips_one_in_ten():
    rng = random.Random(0)
    trials = 4000
    written = [careless(Composition("large", "double", "sorted"), rng) for _ in range(trials)]
    assert sum(one.filter == HABITS["large"] for one in written) / trials == pytest.approx(0.6, abs=0.03)
    assert sum(one.filter == "large" for one in written) / trials == pytest.approx(0.4, abs=0.03)
    assert sum(one.map != "double" for one in written) / trials == pytest.approx(0.1 * 6 / 7, abs=0.02)
    assert {one.map for one in written} == set(MAPS)

"""The procedural family of coding tasks: keep some items, map each, reduce.

A composition is one filter, one map and one reducer. It has a prompt, a reference program as text (what the scripted
solver writes) and the same program as a Python function (what computes expected values; no text is executed here).
A quarter of the 343 compositions is held out: training, demonstrations and the tokenizer corpus never see them.
There are no free constants in the prompts: copying a constant out of the prompt is a separate skill that a tiny
policy has to form first.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

ENTRY_POINT = "f"

Value: TypeAlias = "int | list[int]"
"""What a program of this family returns."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Filter:
    """Which items stay: its word in the prompt, its source text, and the same predicate."""

    words: str
    source: str
    keep: Callable[[int], bool]


@dataclass(frozen=True, slots=True, kw_only=True)
class ItemMap:
    """What happens to each item."""

    words: str
    source: str
    apply: Callable[[int], int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Reducer:
    """What is returned; `source` has a hole `{items}` for the generator expression."""

    words: str
    source: str
    apply: Callable[[list[int]], Value]


FILTERS: Mapping[str, Filter] = {
    "even": Filter(words="even", source="x % 2 == 0", keep=lambda x: x % 2 == 0),
    "odd": Filter(words="odd", source="x % 2 == 1", keep=lambda x: x % 2 == 1),
    "positive": Filter(words="positive", source="x > 0", keep=lambda x: x > 0),
    "negative": Filter(words="negative", source="x < 0", keep=lambda x: x < 0),
    "nonzero": Filter(words="nonzero", source="x != 0", keep=lambda x: x != 0),
    "large": Filter(words="large", source="x > 5", keep=lambda x: x > 5),
    "small": Filter(words="small", source="x < 5", keep=lambda x: x < 5),
}
MAPS: Mapping[str, ItemMap] = {
    "double": ItemMap(words="double", source="x * 2", apply=lambda x: x * 2),
    "square": ItemMap(words="square", source="x * x", apply=lambda x: x * x),
    "increment": ItemMap(words="increment", source="x + 1", apply=lambda x: x + 1),
    "decrement": ItemMap(words="decrement", source="x - 1", apply=lambda x: x - 1),
    "triple": ItemMap(words="triple", source="x * 3", apply=lambda x: x * 3),
    "negate": ItemMap(words="negate", source="-x", apply=lambda x: -x),
    "absolute": ItemMap(words="take the absolute value of", source="abs(x)", apply=abs),
}
REDUCERS: Mapping[str, Reducer] = {
    "sum": Reducer(words="the sum", source="sum([{items}])", apply=sum),
    "count": Reducer(words="the count", source="len([{items}])", apply=len),
    "max": Reducer(words="the maximum", source="max([{items}], default=0)", apply=lambda items: max(items, default=0)),
    "min": Reducer(words="the minimum", source="min([{items}], default=0)", apply=lambda items: min(items, default=0)),
    "list": Reducer(words="the list", source="[{items}]", apply=list),
    "reversed": Reducer(words="the reversed list", source="[{items}][::-1]", apply=lambda items: items[::-1]),
    "sorted": Reducer(words="the sorted list", source="sorted([{items}])", apply=sorted),
}


class Composition(NamedTuple):
    """Keys into `FILTERS`, `MAPS` and `REDUCERS`."""

    filter: str
    map: str
    reduce: str

    @property
    def prompt(self) -> str:
        """The task in words."""
        return (
            f"Write {ENTRY_POINT}(xs): keep the {FILTERS[self.filter].words} items, {MAPS[self.map].words} each, "
            f"return {REDUCERS[self.reduce].words}."
        )

    @property
    def source(self) -> str:
        """The reference program as text."""
        items = f"{MAPS[self.map].source} for x in xs if {FILTERS[self.filter].source}"
        return f"def {ENTRY_POINT}(xs):\n    return {REDUCERS[self.reduce].source.format(items=items)}\n"

    def evaluate(self, xs: Sequence[int]) -> Value:
        """What the reference program returns for `xs`."""
        keep, apply = FILTERS[self.filter].keep, MAPS[self.map].apply
        return REDUCERS[self.reduce].apply([apply(x) for x in xs if keep(x)])


HABITS: Mapping[str, str] = {
    "large": "positive",
    "nonzero": "even",
    "square": "double",
    "decrement": "increment",
    "absolute": "negate",
    "min": "max",
    "reversed": "list",
    "sorted": "list",
}
"""The similar, wrong operation that the careless solver tends to write."""

HABIT_RATE = 0.6
SLIP_RATE = 0.1


def careless(composition: Composition, rng: random.Random) -> Composition:
    """The composition that a fluent solver with bad habits would write for `composition`.

    So the warm start is fluent, explores, and is systematically wrong in ways that reward can undo.
    """

    def write(part: str, table: Mapping[str, object]) -> str:
        chance = rng.random()
        if part in HABITS and chance < HABIT_RATE:
            return HABITS[part]
        return rng.choice(list(table)) if chance < SLIP_RATE else part

    return Composition(
        write(composition.filter, FILTERS), write(composition.map, MAPS), write(composition.reduce, REDUCERS)
    )


SPLIT_SEED = 1234
NUM_DEMONSTRATED = 150


def _shuffled() -> tuple[Composition, ...]:
    compositions = [Composition(*parts) for parts in itertools.product(FILTERS, MAPS, REDUCERS)]
    random.Random(SPLIT_SEED).shuffle(compositions)
    return tuple(compositions)


COMPOSITIONS = _shuffled()
HELD_OUT = COMPOSITIONS[: len(COMPOSITIONS) // 4]
TRAIN = COMPOSITIONS[len(COMPOSITIONS) // 4 :]
DEMONSTRATED = TRAIN[:NUM_DEMONSTRATED]

"""Makes the examples of a task from its reference code: runs in a box, never in this process.

Standard library alone: the host sends this file's source into a box of its own, calls `make_examples` there, and takes
nothing but exact builtin types from it.
"""

from __future__ import annotations

import inspect
import json
import math
import random
import sys
from types import ModuleType
from typing import Any, cast

DRAWS_PER_EXAMPLE = 20
GENERATOR = "generate_inputs"


def make_examples(
    reference: str, generator: str, entry_point: str, seed: int, count: int
) -> tuple[list[tuple[list[Any], Any]], int]:
    """Up to `count` distinct inputs with the reference's answers, and how many inputs had no usable answer.

    `generator` defines `generate_inputs(rng)`, which returns the reference's arguments by name.
    """
    generate = _define("generator", generator)[GENERATOR]
    solve = _define("reference", reference)[entry_point]
    names = list(inspect.signature(solve).parameters)
    rng = random.Random(seed)
    found: list[tuple[list[Any], Any]] = []
    seen: set[str] = set()
    num_unusable = 0
    for _ in range(DRAWS_PER_EXAMPLE * count):
        if len(found) == count:
            break
        inputs = generate(rng)
        if sorted(inputs) != sorted(names):
            raise TypeError(f"the generator gives {sorted(inputs)}, the reference takes {sorted(names)}")
        args = [inputs[name] for name in names]
        key = json.dumps(args)
        if key in seen:
            continue
        seen.add(key)
        try:
            value = solve(*json.loads(key))
        except Exception:  # noqa: BLE001 (an input that the reference does not take)
            num_unusable += 1
            continue
        if _is_json(args) and _is_json(value):
            found.append((args, value))
        else:
            num_unusable += 1
    return found, num_unusable


def _define(name: str, source: str) -> dict[str, Any]:
    module = ModuleType(name)
    sys.modules[name] = module
    module.__dict__.update(random=random, Random=random.Random, math=math)
    exec(compile(source, f"<{name}>", "exec"), module.__dict__)
    return module.__dict__


def _is_json(value: object) -> bool:
    """Whether JSON gives the value back as it was."""
    kind = type(value)
    if kind is float:
        return math.isfinite(cast(float, value))
    if kind is list:
        return all(_is_json(item) for item in cast(list[object], value))
    if kind is dict:
        pairs = cast(dict[object, object], value).items()
        return all(type(key) is str and _is_json(item) for key, item in pairs)
    return value is None or kind in (bool, int, str)

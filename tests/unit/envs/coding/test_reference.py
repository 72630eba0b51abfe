import random

import pytest

from envs.coding.reference import make_examples

ADD = "def main_solution(a, b):\n    return [a + b, a - b]\n"
PAIRS = "def generate_inputs(rng):\n    return {'b': rng.randint(0, 9), 'a': rng.randint(0, 9)}\n"


def test_examples_follow_from_the_seed_and_differ():
    found, num_unusable = make_examples(ADD, PAIRS, "main_solution", 3, 12)
    rng = random.Random(3)
    b, a = rng.randint(0, 9), rng.randint(0, 9)
    assert found[0] == ([a, b], [a + b, a - b])
    assert len({tuple(args) for args, _ in found}) == len(found) == 12
    assert num_unusable == 0
    assert found == make_examples(ADD, PAIRS, "main_solution", 3, 12)[0]
    assert found != make_examples(ADD, PAIRS, "main_solution", 4, 12)[0]


def test_a_small_domain_gives_what_it_has():
    generator = "def generate_inputs(rng: Random):\n    return {'x': rng.choice([1, 2, 3])}"
    found, _ = make_examples("def main_solution(x):\n    return x", generator, "main_solution", 0, 9)
    assert sorted(args for args, _ in found) == [[1], [2], [3]]


@pytest.mark.parametrize(
    "answer",
    ["1 / 0", "(x, 1)", "{1: x}", "float('nan')", "[float('inf')]", "{x}", "complex(x)", "type('A', (int,), {})(x)"],
)
def test_an_answer_that_json_does_not_keep_is_counted_and_left_out(answer):
    source = f"def main_solution(x):\n    return {answer}"
    generator = "def generate_inputs(rng):\n    return {'x': rng.choice([1, 2])}"
    assert make_examples(source, generator, "main_solution", 0, 4) == ([], 2)


def test_the_reference_cannot_change_the_arguments_that_are_asked():
    source = "def main_solution(xs):\n    xs.append(1)\n    return len(xs)"
    generator = "def generate_inputs(rng):\n    return {'xs': [rng.random()]}"
    found, _ = make_examples(source, generator, "main_solution", 0, 2)
    assert [(len(args[0]), value) for args, value in found] == [(1, 2), (1, 2)]


def test_a_generator_for_another_function_is_refused():
    with pytest.raises(TypeError, match=r"the generator gives \['a', 'b'\], the reference takes \['x'\]"):
        make_examples("def main_solution(x):\n    return x", PAIRS, "main_solution", 0, 1)

import random

import pytest

from rollout.engine.stop_text import StopText, cut_at_stop
from rollout.tokenizer import train_tokenizer

TOKENIZER = train_tokenizer(["the weather in Zürich is fine, say the people"] * 9, vocab_size=300)


def first_stop(ids, strings, decode=TOKENIZER.decode):
    """How many tokens it takes until a stop string is found; `None`: none is."""
    watcher = StopText(strings, decode)
    for num, token in enumerate(ids, 1):
        if watcher.ends_with(token):
            return num
    return None


def expected(ids, strings):
    """The definition: the first prefix whose text holds a stop string."""
    for num in range(1, len(ids) + 1):
        if any(string in TOKENIZER.decode(ids[:num]) for string in strings):
            return num
    return None


@pytest.mark.parametrize(
    "strings", [("STOP",), ("x", "\n\n"), ("ü",), ("people",), ("🙂🙂",), ("say th", "zz")], ids=str
)
def test_a_stop_string_is_found_with_the_token_that_completes_it(strings):
    rng = random.Random(str(strings))
    pieces = ["the weather", "ST", "OP", "STO", "P", " in Zürich", "x", "\n", "🙂", "say ", "th", "people", "é", "zz"]
    found = 0
    for _ in range(150):
        ids = TOKENIZER.encode("".join(rng.choices(pieces, k=8))).ids
        assert first_stop(ids, strings) == expected(ids, strings)
        found += expected(ids, strings) is not None
    assert found > 5


def test_single_bytes_of_a_character_are_no_text():
    ids = [token for byte in "a🙂b".encode() for token in [next_byte(byte)]]
    assert len(ids) == 6
    assert first_stop(ids, ("🙂",)) == 5
    assert first_stop(ids, ("b",)) == 6
    assert first_stop(ids[:4], ("🙂",)) is None


def next_byte(byte):
    """The token of one byte."""
    from tokenizers.pre_tokenizers import ByteLevel

    letters = sorted(ByteLevel.alphabet())
    table = {}
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    rest = 0
    for value in range(256):
        if value in printable:
            table[value] = chr(value)
        else:
            table[value] = chr(256 + rest)
            rest += 1
    assert sorted(table.values()) == letters
    return TOKENIZER.token_to_id(table[byte])


def test_a_stop_string_that_spans_many_tokens_is_found_long_after_the_start():
    ids = TOKENIZER.encode("the people " * 200 + "s" + "a" + "y the weather!").ids
    assert first_stop(ids, ("say the weather!",)) == expected(ids, ("say the weather!",)) == len(ids)


def test_text_is_cut_at_the_first_of_several():
    assert cut_at_stop("one two three", ("three", "two")) == "one "
    assert cut_at_stop("one", ("two",)) == "one"
    assert cut_at_stop("one", ()) == "one"

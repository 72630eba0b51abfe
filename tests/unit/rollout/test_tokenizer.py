import inspect
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, trainers

from rollout.tokenizer import (
    Control,
    TokenizerError,
    load_tokenizer,
    tokenizer_from_json,
    train_tokenizer,
)

SMALL = train_tokenizer(["def f(xs):\n    return xs[0]\n"], vocab_size=262)


@settings(deadline=None, max_examples=50)
@given(st.text())
def test_any_text_comes_back(text):
    encoded = SMALL.encode(text).ids
    assert SMALL.decode(encoded) == text
    assert all(token >= len(Control) for token in encoded)


@settings(deadline=None, max_examples=50)
@given(st.binary())
def test_any_bytes_come_back(data):
    text = data.decode("latin-1")
    assert SMALL.decode(SMALL.encode(text).ids).encode("latin-1") == data


def test_every_byte_is_a_token_and_any_ids_can_be_read(tokenizer):
    single = [tokenizer.token_to_id(letter) for letter in SMALL.get_vocab() if len(letter) == 1]
    assert len(set(single)) == 256
    assert None not in single
    first_of_two = tokenizer.encode("é").ids[0]
    assert tokenizer.decode([first_of_two]) == "\ufffd"


@settings(deadline=None, max_examples=50)
@given(st.lists(st.sampled_from([*Control, "a", " ", "\n", "<", ">"]), max_size=8).map("".join))
def test_text_that_spells_control_tokens_stays_text(text):
    ids = SMALL.encode(text).ids
    assert min(ids, default=len(Control)) >= len(Control)
    assert SMALL.decode(ids) == text


def test_control_ids_are_fixed(tokenizer):
    expected = {"<bos>": 0, "<system>": 1, "<user>": 2, "<assistant>": 3, "<tool>": 4, "<end>": 5}
    assert {text: tokenizer.token_to_id(text) for text in expected} == expected


def test_digits_are_split(tokenizer):
    assert [tokenizer.decode([token]) for token in tokenizer.encode("1234").ids] == ["1", "2", "3", "4"]


def test_training_merges_what_is_frequent(tokenizer):
    assert len(tokenizer.encode("return").ids) < len("return")
    assert tokenizer.get_vocab_size() <= 300


def test_any_python_source_can_be_emitted(tokenizer):
    source = inspect.getsource(json.decoder)
    ids = tokenizer.encode(source).ids
    assert tokenizer.decode(ids) == source
    compile(tokenizer.decode(ids), "source", "exec")


def test_a_vocabulary_that_cannot_hold_all_bytes_is_refused():
    with pytest.raises(
        TokenizerError, match=r"warm_start\.tokenizer_vocab_size: .* got 261; use at least 262"
    ) as caught:
        train_tokenizer(["x"], vocab_size=261)
    assert "\n" not in str(caught.value)
    assert train_tokenizer(["x"], vocab_size=262).get_vocab_size() == 262


def test_saved_and_loaded_it_encodes_alike(tokenizer, tmp_path):
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    text = "def f(<end>): 12 é"
    for copy in (load_tokenizer(tmp_path / "tokenizer.json"), tokenizer_from_json(tokenizer.to_str())):
        assert copy.encode(text).ids == tokenizer.encode(text).ids
        assert copy.decode(copy.encode(text).ids) == text


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"", "is not a tokenizer, got <EOF"),
        (b"{}", "is not a tokenizer, got <Model missing"),
        (b'{"model_type": "llama"}', "is not a tokenizer"),
        (b"\xff\xfe\x00 not text", "is not a tokenizer"),
    ],
    ids=["empty", "empty object", "another json", "no text"],
)
def test_a_foreign_file_is_refused_in_one_line_that_names_it(tmp_path, content, problem):
    path = tmp_path / "tokenizer.json"
    path.write_bytes(content)
    with pytest.raises(TokenizerError) as caught:
        load_tokenizer(path)
    assert problem in str(caught.value)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_tokenizer_of_another_kind_is_loaded_and_its_special_tokens_stay_out_of_text(tmp_path):
    foreign = Tokenizer(models.BPE())
    foreign.train_from_iterator(
        ["<", "p", "a", "d", ">"], trainers.BpeTrainer(special_tokens=["<pad>", "<bos>"], show_progress=False)
    )
    foreign.save(str(tmp_path / "tokenizer.json"))
    assert foreign.encode("<pad>").ids == [0]
    loaded = load_tokenizer(tmp_path / "tokenizer.json")
    assert loaded.token_to_id("<bos>") == 1
    assert 0 not in loaded.encode("<pad>").ids


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(TokenizerError, match=r"tokenizer: no file, got .*/nowhere"):
        load_tokenizer(tmp_path / "nowhere")

"""The parts of the calibration that need no network, and every mistake on the command line."""

import json
import math

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace

from model import calibrate
from model.calibration.choice import extra_bits, keep_within, keep_worst
from model.calibration.divergence import Divergence
from model.calibration.measure import TensorResult
from model.calibration.tokens import CalibrationError, random_tokens, read_tokens
from model.calibration.weight_error import WeightError, quantized, quantized_with_error
from model.checkpoint import save_model
from model.config import ModelConfig
from model.mxfp4 import ScaleRule
from model.transformer import Transformer, init_weights

CONFIG = ModelConfig(
    vocab_size=8, hidden_size=32, num_layers=1, num_heads=1, num_kv_heads=1, head_dim=8, expert_hidden_size=32,
    num_experts=2, num_experts_per_tok=1, max_positions=16,
)  # fmt: skip


@pytest.fixture
def checkpoint(tmp_path):
    """A checkpoint without a tokenizer."""
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    model = Transformer(CONFIG)
    init_weights(model, 0)
    save_model(folder, CONFIG, dict(model.named_parameters()), {})
    return folder


@pytest.fixture
def with_tokenizer(checkpoint):
    tokenizer = Tokenizer(WordLevel({"?": 0, "one": 1, "two": 2, "three": 3}, unk_token="?"))
    tokenizer.pre_tokenizer = Whitespace()
    tokenizer.save(str(checkpoint / "tokenizer.json"))
    return checkpoint


def letters(text):
    return [ord(letter) - ord("a") for letter in text]


def read(path, **changes):
    return read_tokens(path, letters, **{"vocab_size": 26, "num_sequences": 100, "length": 4, "seed": 0} | changes)


def lists(tokens):
    return [sequence.tolist() for sequence in tokens.sequences]


def result(name, num_values, kl):
    return TensorResult(
        name=name,
        layer=0,
        num_values=num_values,
        weight_error=WeightError(relative_rms=0.1, saturated_frac=0.0, zeroed_frac=0.0, expert_relative_rms=(0.1,)),
        output_error=0.1,
        divergence=Divergence(kl_mean=kl, kl_max=kl, source_loss=1.0, loss=1.0, top1_agreement=1.0),
    )


def test_a_text_is_cut_and_its_rest_is_kept_when_it_has_two_tokens(tmp_path):
    path = tmp_path / "text"
    path.write_text("abcdefghijk")
    assert lists(read(path)) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10]]
    assert lists(read(path, length=5)) == [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9]]


def test_no_sequence_crosses_two_documents(tmp_path):
    path = tmp_path / "documents.jsonl"
    path.write_text('"abc"\n{"text": "de", "source": "x"}\n\n[7, 8, 9, 10, 11, 12]\n"z"\n')
    tokens = read(path)
    assert lists(tokens) == [[0, 1, 2], [3, 4], [7, 8, 9, 10], [11, 12]]
    assert (tokens.num_tokens, tokens.is_random) == (11, False)


def test_the_seed_chooses_among_the_pieces_in_the_files_order(tmp_path):
    path = tmp_path / "text"
    path.write_text("aabbccddeeffgghh")
    chosen = {seed: lists(read(path, length=2, num_sequences=3, seed=seed)) for seed in range(5)}
    assert chosen[0] == lists(read(path, length=2, num_sequences=3, seed=0))
    assert len({str(pieces) for pieces in chosen.values()}) > 1
    assert all(pieces == sorted(pieces) and len(pieces) == 3 for pieces in chosen.values())


@pytest.mark.parametrize(
    ("name", "text", "problem"),
    [
        ("x.txt", "", "must hold a document of 2 tokens or more, got none"),
        ("x.txt", "a", "must hold a document of 2 tokens or more, got none"),
        ("x.jsonl", '"ab"\n{"messages": []}', "line 2: must be a JSON string"),
        ("x.jsonl", '["a", "b"]', "line 1: must be a JSON string"),
        ("x.jsonl", "[true, 1]", "line 1: must be a JSON string"),
        ("x.jsonl", "{", "line 1: must be a JSON string"),
        ("x.jsonl", "[1, 26]", "line 1: token ids must be below the model's vocab_size=26, got 26"),
        ("x.jsonl", f"[{10**30}, 1]", "line 1: token ids must be below the model's vocab_size=26, got 1000"),
        ("x.jsonl", "[" * 100_000, "line 1: must be a JSON string"),
        ("x.jsonl", r'"\ud800"', "line 1: must be a JSON string"),
        ("x.jsonl", "[1, -1]", "line 1: token ids must be below the model's vocab_size=26, got -1"),
    ],
)
def test_data_that_cannot_be_used(tmp_path, name, text, problem):
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(CalibrationError) as error:
        read(path)
    assert problem in str(error.value)
    assert str(error.value).startswith(str(path))


def test_random_tokens_follow_from_the_seed():
    first, again, other = (random_tokens(9, num_sequences=3, length=50, seed=seed) for seed in (1, 1, 2))
    assert lists(first) == lists(again) != lists(other)
    assert set(torch.cat(first.sequences).tolist()) == set(range(9))
    assert first.is_random


def test_weight_error_by_hand():
    """EVEN gives scale 1 to a block whose largest value is 6.5, which saturates; 0.1 becomes 0; the rest is exact."""
    weight = torch.ones(2, 1, 32)
    weight[0, 0, :3] = torch.tensor([-6.5, 0.1, 0.0])
    values, error = quantized_with_error(weight, ScaleRule.EVEN, "w")
    assert values[0, 0, :4].tolist() == [-6.0, 0.0, 0.0, 1.0]
    assert torch.equal(values, quantized(weight, ScaleRule.EVEN, "w"))
    noise, signal = 0.5**2 + 0.1**2, 6.5**2 + 0.1**2 + 29
    assert error.expert_relative_rms == pytest.approx([math.sqrt(noise / signal), 0.0])
    assert error.relative_rms == pytest.approx(math.sqrt(noise / (signal + 32)))
    assert error.sqnr_db == pytest.approx(10 * math.log10((signal + 32) / noise))
    assert (error.saturated_frac, error.zeroed_frac, error.worst_expert) == (1 / 64, 1 / 64, 0)


def test_an_exact_weight_has_no_error():
    _, error = quantized_with_error(torch.zeros(1, 2, 32), ScaleRule.EVEN, "w")
    assert (error.relative_rms, error.saturated_frac, error.zeroed_frac, error.sqnr_db) == (0.0, 0.0, 0.0, math.inf)


def test_bits_by_hand():
    """bf16 costs 11.75 bits a value more than MXFP4: of 400 values, keeping 100 adds a quarter of that."""
    tensors = [result("a", 100, 0.3), result("b", 100, 0.1), result("c", 100, 0.2), result("d", 100, 0.4)]
    assert extra_bits(tensors[0], tensors) == 11.75 / 4
    choice = keep_worst(tensors, 2)
    assert choice.kept == ("d", "a")
    assert choice.bits == 4.25 + 11.75 / 2
    assert choice.predicted_kl == pytest.approx(0.3)
    assert keep_worst(tensors, 4).bits == 16.0
    assert keep_worst(tensors, 0).bits == 4.25


def test_a_budget_keeps_what_fits():
    tensors = [result("a", 100, 0.3), result("b", 100, 0.1), result("c", 100, 0.2), result("d", 100, 0.4)]
    step = 11.75 / 4
    for num_kept, expected in enumerate([(), ("d",), ("d", "a"), ("d", "a", "c"), ("d", "a", "c", "b")]):
        assert keep_within(tensors, 4.25 + num_kept * step).kept == expected
        if num_kept:
            assert keep_within(tensors, 4.25 + num_kept * step - 0.001).kept == expected[:-1]


def test_tensors_of_two_sizes_are_chosen_exactly():
    """Room for 200 values: the best per byte (`big`, 0.30 / 200) loses to two small ones, and wins with a larger KL."""
    small = [result("s1", 100, 0.20), result("s2", 100, 0.11), result("s3", 100, 0.01)]
    budget = 4.25 + 11.75 * 200 / 500
    assert keep_within([result("big", 200, 0.30), *small], budget).kept == ("s1", "s2")
    assert keep_within([result("big", 200, 0.32), *small], budget).kept == ("big",)
    greedy_trap = [result("big", 200, 0.30), result("s1", 100, 0.20), result("s2", 100, 0.01), result("s3", 100, 0.0)]
    assert keep_within(greedy_trap, budget).kept == ("big",)


def test_bits_are_not_spent_on_tensors_without_damage():
    tensors = [result("a", 100, 0.0), result("b", 100, 0.1)]
    assert keep_within(tensors, 16.0).kept == ("b",)
    assert keep_within([result("a", 100, 0.0)], 16.0).kept == ()


@pytest.mark.parametrize("bits", [4.2, 16.1, -1.0, math.nan])
def test_budgets_out_of_range(bits):
    with pytest.raises(CalibrationError, match=r"--bits: must be 4.25 .* to 16"):
        keep_within([result("a", 100, 0.1)], bits)


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["--sequences", "0"], "--sequences: must be at least 1, got 0"),
        (["--length", "17"], "--length: must be 2 to 16 (the model's max_positions), got 17"),
        (["--length", "1"], "--length: must be 2 to 16 (the model's max_positions), got 1"),
        (["--bits", "4.2"], "--bits: must be 4.25"),
        (["--bits", "17"], "--bits: must be 4.25"),
        (["--keep", "3", "--length", "4"], "--keep: must be 0 to 2 expert tensors, got 3"),
        (["--bits", "5", "--keep", "1"], "command line: argument --keep: not allowed with argument --bits"),
        (["--rule", "ceil"], "command line: argument --rule: invalid ScaleRule value: 'ceil'"),
        (["--seed", "-1"], "--seed: must be in [0, 2^63), got -1"),
        (["--data", "absent.txt", "--length", "4"], "absent.txt: must be a readable UTF-8 file"),
        (["--json", "absent/out.json"], "--json: must be a file in an existing folder, got absent/out.json"),
        (["--unknown"], "command line: unrecognized arguments: --unknown"),
    ],
)
def test_mistakes_are_one_line(checkpoint, capsys, arguments, problem):
    assert calibrate.main([str(checkpoint), *arguments]) == 2
    written = capsys.readouterr()
    assert written.err.splitlines()[-1].startswith(problem)
    assert written.out == ""


def test_no_checkpoint(tmp_path, capsys):
    assert calibrate.main([str(tmp_path / "absent")]) == 2
    assert str(tmp_path / "absent") in capsys.readouterr().err
    assert calibrate.main([]) == 2
    assert capsys.readouterr().err.startswith("command line: the following arguments are required: CHECKPOINT")


def test_a_text_needs_the_tokenizer_and_lists_of_ids_do_not(checkpoint, tmp_path, capsys):
    text, ids = tmp_path / "text", tmp_path / "ids.jsonl"
    text.write_text("one two three")
    ids.write_text("[1, 2, 3]")
    assert calibrate.main([str(checkpoint), "--text", str(text), "--length", "4"]) == 2
    assert "texts need the checkpoint's tokenizer.json" in capsys.readouterr().err
    assert calibrate.main([str(checkpoint), "--data", str(ids), "--length", "4"]) == 0


def test_texts_go_through_the_checkpoints_tokenizer(with_tokenizer, tmp_path, capsys):
    text = tmp_path / "text"
    text.write_text("one two three one two")
    out = tmp_path / "out.json"
    assert calibrate.main([str(with_tokenizer), "--text", str(text), "--length", "4", "--json", str(out)]) == 0
    report = json.loads(out.read_text())
    assert report["data"] == {"origin": str(text), "is_random": False, "num_sequences": 1, "num_tokens": 4}
    assert "WARNING" not in capsys.readouterr().out


def test_a_broken_tokenizer(checkpoint, tmp_path, capsys):
    (checkpoint / "tokenizer.json").write_text("{}")
    text = tmp_path / "text"
    text.write_text("one two")
    assert calibrate.main([str(checkpoint), "--text", str(text), "--length", "4"]) == 2
    assert "tokenizer.json: must be a tokenizer" in capsys.readouterr().err


def test_equal_calls_write_equal_reports(checkpoint, tmp_path, capsys):
    def report(seed):
        out = tmp_path / "out.json"
        assert (
            calibrate.main([str(checkpoint), "--length", "8", "--seed", seed, "--keep", "1", "--json", str(out)]) == 0
        )
        return out.read_text(), capsys.readouterr().out

    assert report("3") == report("3") != report("4")


def test_a_model_with_a_nan_is_refused(checkpoint, capsys):
    model = Transformer(CONFIG)
    init_weights(model, 0)
    weights = {name: parameter.detach() for name, parameter in model.named_parameters()}
    weights["model.norm.weight"][3] = torch.nan
    save_model(checkpoint, CONFIG, weights, {})
    assert calibrate.main([str(checkpoint), "--length", "4"]) == 2
    assert "final hidden states must be finite" in capsys.readouterr().err

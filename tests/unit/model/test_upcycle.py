import math

import pytest
import torch
import transformers

from model.checkpoint import load_model
from model.config import ConfigError, ModelConfig
from model.mxfp4 import quantize
from model.packed_attention import PackedAttention
from model.transformer import Transformer, init_weights, parameter_shapes
from model.upcycle import Copies, Split, UpcycleError, main, upcycle, upcycled_config

DENSE = ModelConfig(
    vocab_size=40,
    hidden_size=64,
    num_layers=2,
    num_heads=2,
    num_kv_heads=1,
    expert_hidden_size=192,
    num_experts=1,
    num_experts_per_tok=1,
    tie_embeddings=False,
)
MLP = "model.layers.1.mlp"


@pytest.fixture
def masters():
    model = Transformer(DENSE)
    init_weights(model, 0)
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


RECIPES = [
    Split(num_experts=6, num_experts_per_tok=6),
    Split(num_experts=3, num_experts_per_tok=2),
    Copies(num_experts=4, num_experts_per_tok=2, perturbation=0.1),
]


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_result_is_a_whole_model_and_takes_over_everything_but_the_mlp(masters, recipe):
    config, weights = upcycle(DENSE, masters, recipe)
    assert {name: tuple(weight.shape) for name, weight in weights.items()} == parameter_shapes(config)
    assert all(weight.dtype == torch.float32 for weight in weights.values())
    assert (config.num_experts, config.num_experts_per_tok) == (recipe.num_experts, recipe.num_experts_per_tok)
    kept = {name for name in masters if ".mlp." not in name}
    assert len(kept) == 2 * 6 + 3
    assert all(weights[name] is masters[name] for name in kept)


@pytest.mark.parametrize(("num_experts", "active"), [(2, 2), (6, 6), (6, 4), (3, 1)])
def test_a_split_puts_each_neuron_into_exactly_one_expert(masters, num_experts, active):
    _, weights = upcycle(DENSE, masters, Split(num_experts=num_experts, num_experts_per_tok=active))
    gate, up = weights[f"{MLP}.experts.gate_up_proj"].chunk(2, dim=1)
    dense_gate, dense_up = masters[f"{MLP}.experts.gate_up_proj"][0].chunk(2)
    assert torch.equal(gate.flatten(0, 1), dense_gate)
    assert torch.equal(up.flatten(0, 1), dense_up)
    columns = weights[f"{MLP}.experts.down_proj"].transpose(1, 2).flatten(0, 1).t()
    assert torch.equal(columns, masters[f"{MLP}.experts.down_proj"][0] * active)


def test_a_split_into_a_power_of_two_keeps_every_mxfp4_code(masters):
    _, weights = upcycle(DENSE, masters, Split(num_experts=2, num_experts_per_tok=2))
    blocks, scales = quantize(weights[f"{MLP}.experts.down_proj"])
    dense_blocks, dense_scales = quantize(masters[f"{MLP}.experts.down_proj"][0])
    assert torch.equal(torch.cat([*blocks], 1), dense_blocks)
    assert torch.equal(torch.cat([*scales], 1), dense_scales + int(math.log2(2)))


def test_the_router_of_an_exact_split_is_indifferent_and_of_another_prefers_the_expert_that_answers(masters):
    _, exact = upcycle(DENSE, masters, Split(num_experts=2, num_experts_per_tok=2))
    assert not exact[f"{MLP}.router.weight"].any()
    _, partial = upcycle(DENSE, masters, Split(num_experts=3, num_experts_per_tok=1))
    gates = masters[f"{MLP}.experts.gate_up_proj"][0].chunk(2)[0].view(3, 64, 64)
    assert partial[f"{MLP}.router.weight"].mv(gates[1].mean(0)).argmax() == 1


def test_copies_are_the_mlp_and_depend_on_the_seed_only_where_they_are_perturbed(masters):
    _, plain = upcycle(DENSE, masters, Copies(num_experts=3))
    for part in ("gate_up_proj", "down_proj"):
        assert torch.equal(plain[f"{MLP}.experts.{part}"], masters[f"{MLP}.experts.{part}"].expand(3, -1, -1))
    router = plain[f"{MLP}.router.weight"]
    assert 0.015 < router.std() < 0.025  # 192 numbers: the deviation of their deviation is 0.02 / sqrt(384) = 0.001
    assert not torch.equal(router, plain["model.layers.0.mlp.router.weight"])

    first, again, other = (
        upcycle(DENSE, masters, Copies(num_experts=3, perturbation=0.05, seed=seed))[1] for seed in (1, 1, 2)
    )
    name = f"{MLP}.experts.down_proj"
    assert torch.equal(first[name], again[name])
    assert not torch.equal(first[name], other[name])
    noise = (first[name] - masters[name]) / masters[name].std()
    assert not torch.equal(noise[0], noise[1])
    assert 0.048 < noise.std() < 0.052  # 36,864 numbers


@pytest.mark.parametrize(
    ("recipe", "error", "message"),
    [
        (
            Split(num_experts=4),
            UpcycleError,
            "num_experts: must cut 192 neurons into equal parts of a multiple of 32, got 4; use one of [1, 2, 3, 6]",
        ),
        (
            Split(num_experts=0),
            UpcycleError,
            "num_experts: must cut 192 neurons into equal parts of a multiple of 32, got 0; use one of [1, 2, 3, 6]",
        ),
        (
            Split(num_experts=2, num_experts_per_tok=3),
            ConfigError,
            "model.num_experts_per_tok: must not exceed num_experts=2, got 3; a token visits an expert at most once",
        ),
        (
            Copies(router_std=0.0),
            UpcycleError,
            "router_std: must be above 0, got 0.0; equal logits send every token to the same experts",
        ),
    ],
)
def test_a_recipe_that_does_not_fit_is_one_line(recipe, error, message):
    with pytest.raises(error) as caught:
        upcycled_config(DENSE, recipe)
    assert str(caught.value) == message


def test_a_mixture_is_not_upcycled_again():
    once = upcycled_config(DENSE, Split(num_experts=2, num_experts_per_tok=2))
    with pytest.raises(UpcycleError, match=r"only a dense model \(one expert\) can be upcycled, got 2 experts"):
        upcycled_config(once, Copies())


def test_the_program_makes_a_folder_that_computes_the_dense_model(tmp_path, capsys):
    transformers.set_seed(0)
    dense = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=60, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, tie_word_embeddings=False, max_position_embeddings=64,
        )
    ).eval()  # fmt: skip
    dense.save_pretrained(tmp_path / "dense")
    (tmp_path / "dense" / "tokenizer.json").write_text("{}")
    dest = tmp_path / "moe"
    assert main([str(tmp_path / "dense"), str(dest), "--experts", "4"]) == 0
    assert "4 experts a layer, 4 active" in capsys.readouterr().out
    assert (dest / "tokenizer.json").read_text() == "{}"
    loaded = load_model(dest)
    model = Transformer(loaded.config)
    model.load_state_dict(loaded.masters())
    ids_T = torch.arange(30) % 60
    out = model(ids_T, torch.arange(30), PackedAttention([0, 30]))
    with torch.no_grad():
        expected = dense(ids_T[None]).logits[0]
    torch.testing.assert_close(model.logits(out.hidden_TD), expected, rtol=1e-4, atol=1e-5)
    assert main([str(tmp_path / "dense"), str(tmp_path / "copies"), "--recipe", "copies"]) == 0
    assert load_model(tmp_path / "copies").config.num_experts_per_tok == 2


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["dense", "new", "--experts", "3"], "num_experts: must cut 128 neurons into equal parts"),
        (["dense", "new", "--active", "9"], "model.num_experts_per_tok: must not exceed num_experts=4"),
        (["dense", "dense"], "must not exist"),
        (["nothing", "new"], "config.json: must be a JSON object"),
    ],
)
def test_mistakes_of_the_program_are_one_line_and_leave_nothing(arguments, line, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = transformers.LlamaConfig(
        vocab_size=60, hidden_size=64, intermediate_size=128, num_hidden_layers=1, num_attention_heads=4
    )
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path / "dense")
    capsys.readouterr()
    given = arguments if "--experts" in arguments else [*arguments, "--experts", "4"]
    assert main(given) == 2
    told = capsys.readouterr().err
    assert line in told
    assert len(told.splitlines()) == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["dense"]

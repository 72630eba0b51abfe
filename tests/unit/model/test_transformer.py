import dataclasses
import re
from itertools import pairwise

import pytest
import torch
from torch.func import functional_call

from model.config import ComputeDtype, ConfigError, ModelConfig
from model.layers import project_logits
from model.packed_attention import PackedAttention, ReferenceAttention
from model.snapshot import StraightThrough, published_view, view
from model.transformer import Transformer, init_weights, parameter_shapes
from tests.numerics.tolerances import BF16_TRANSFORMER, TRANSFORMER_PACKING, relative_error

CONFIG = ModelConfig(
    vocab_size=40, hidden_size=64, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=16, expert_hidden_size=32
)
LENGTHS = [5, 12, 1, 9]


def build(seed=0, experts="eager", **changes):
    model = Transformer(dataclasses.replace(CONFIG, **changes), experts=experts)
    init_weights(model, seed)
    return model


def batch(lengths=LENGTHS, seed=0):
    ids = torch.randint(0, CONFIG.vocab_size, (sum(lengths),), generator=torch.Generator().manual_seed(seed))
    positions = torch.cat([torch.arange(length) for length in lengths])
    return ids, positions, [0, *torch.tensor(lengths).cumsum(0).tolist()]


def formula(weights, ids, config):
    """The network for one sequence, written as the papers do: fp64, one token and one expert at a time, NeoX rotary."""
    w = {name: weight.double() for name, weight in weights.items()}
    half, repeat = config.head_dim // 2, config.num_heads // config.num_kv_heads
    angle = torch.arange(len(ids)).double()[:, None] * config.rope.theta ** (-torch.arange(half).double() / half)
    cos, sin = angle.cos()[:, None], angle.sin()[:, None]

    def norm(x, name):
        return x / (x.square().mean(-1, keepdim=True) + config.rms_norm_eps).sqrt() * w[f"{name}.weight"]

    def turn(x):
        first, second = x[..., :half], x[..., half:]
        return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)

    x = w["model.embed_tokens.weight"][ids]
    for layer in range(config.num_layers):
        at = f"model.layers.{layer}"
        n = norm(x, f"{at}.input_layernorm")
        q, k, v = ((n @ w[f"{at}.self_attn.{p}_proj.weight"].T).unflatten(-1, (-1, config.head_dim)) for p in "qkv")
        q, k, v = turn(q), turn(k).repeat_interleave(repeat, 1), v.repeat_interleave(repeat, 1)
        scores = torch.einsum("qhd,khd->hqk", q, k) / config.head_dim**0.5
        scores += torch.full(scores.shape[1:], -torch.inf).triu(1)
        heads = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v).flatten(1)
        x = x + heads @ w[f"{at}.self_attn.o_proj.weight"].T
        n = norm(x, f"{at}.post_attention_layernorm")
        out = torch.zeros_like(x)
        for t, token in enumerate(n):
            logits = w[f"{at}.mlp.router.weight"] @ token
            best = logits.sort(descending=True).indices[: config.num_experts_per_tok]
            for weight, expert in zip(logits[best].softmax(-1), best, strict=True):
                gate, up = (w[f"{at}.mlp.experts.gate_up_proj"][expert] @ token).chunk(2)
                out[t] += weight * (w[f"{at}.mlp.experts.down_proj"][expert] @ (gate / (1 + (-gate).exp()) * up))
        x = x + out
    x = norm(x, "model.norm")
    return x, x @ w["model.embed_tokens.weight"].T


def test_the_network_is_its_formula():
    model = build()
    ids = batch()[0][:12]
    hidden, logits = formula(model.state_dict(), ids, CONFIG)
    out = model(ids, torch.arange(12), PackedAttention([0, 12]))
    assert relative_error(out.hidden_TD, hidden) < TRANSFORMER_PACKING
    assert relative_error(model.logits(out.hidden_TD), logits) < TRANSFORMER_PACKING


def test_packed_sequences_equal_each_alone():
    model = build()
    ids, positions, bounds = batch()
    packed = model(ids, positions, PackedAttention(bounds))
    for start, end in pairwise(bounds):
        rows = slice(start, end)
        alone = model(ids[rows], positions[rows], PackedAttention([0, end - start]))
        assert relative_error(alone.hidden_TD, packed.hidden_TD[rows]) < TRANSFORMER_PACKING
        assert torch.equal(alone.routes_TLK, packed.routes_TLK[rows])
        for one, all_rows in zip(alone.router_logits_TE, packed.router_logits_TE, strict=True):
            assert relative_error(one, all_rows[rows]) < TRANSFORMER_PACKING


def test_a_token_depends_on_its_past_only():
    model = build()
    ids, positions, bounds = batch()
    before = model(ids, positions, PackedAttention(bounds)).hidden_TD
    ids[9] = (ids[9] + 1) % CONFIG.vocab_size  # the fifth token of the second sequence
    after = model(ids, positions, PackedAttention(bounds)).hidden_TD
    changed = (before - after).abs().amax(-1) > 1e-4
    assert changed.tolist() == [False] * 9 + [True] * 8 + [False] * 10


def test_eager_experts_and_packed_attention_equal_their_references():
    ids, positions, bounds = batch()
    fast, plain = build(experts="eager"), build(experts="reference")
    upstream = torch.randn(len(ids), CONFIG.hidden_size, generator=torch.Generator().manual_seed(1))
    out = fast(ids, positions, PackedAttention(bounds))
    expected = plain(ids, positions, ReferenceAttention(bounds))
    assert relative_error(out.hidden_TD, expected.hidden_TD) < TRANSFORMER_PACKING
    assert torch.equal(out.routes_TLK, expected.routes_TLK)
    grads = torch.autograd.grad(out.hidden_TD, list(fast.parameters()), upstream)
    expected_grads = torch.autograd.grad(expected.hidden_TD, list(plain.parameters()), upstream)
    for (name, _), grad, expected_grad in zip(fast.named_parameters(), grads, expected_grads, strict=True):
        assert relative_error(grad, expected_grad) < 4 * TRANSFORMER_PACKING, name


def test_straight_through_views_train_the_masters_and_equal_the_published_model():
    ids, positions, bounds = batch()
    masters = build()
    packed = published_view(masters.state_dict())
    views = {name: StraightThrough.apply(p, view(packed[name])) for name, p in masters.named_parameters()}
    out = functional_call(masters, views, (ids, positions, PackedAttention(bounds)))
    logits = project_logits(out.hidden_TD, views[masters.output_name])

    sampler = build(seed=1)
    sampler.load_state_dict({name: view(tensor) for name, tensor in packed.items()})
    published = sampler(ids, positions, PackedAttention(bounds))
    assert torch.equal(out.hidden_TD, published.hidden_TD)
    assert torch.equal(logits, sampler.logits(published.hidden_TD))
    assert not torch.equal(logits, masters.logits(masters(ids, positions, PackedAttention(bounds)).hidden_TD))

    upstream = torch.randn(logits.shape, generator=torch.Generator().manual_seed(1))
    grads = torch.autograd.grad(logits, list(masters.parameters()), upstream)
    expected = torch.autograd.grad(sampler.logits(published.hidden_TD), list(sampler.parameters()), upstream)
    for (name, _), grad, expected_grad in zip(masters.named_parameters(), grads, expected, strict=True):
        assert torch.equal(grad, expected_grad), name
        assert grad.any(), name


def test_bf16_views_in_an_fp32_model_change_no_bit():
    """Every published value is a bf16 value, so views may be held in either dtype."""
    ids, positions, bounds = batch()
    model = build()
    packed = published_view(model.state_dict())
    outs = [
        functional_call(
            model, {name: view(p, dtype) for name, p in packed.items()}, (ids, positions, PackedAttention(bounds))
        ).hidden_TD
        for dtype in (torch.float32, torch.bfloat16)
    ]
    assert outs[0].dtype == outs[1].dtype == torch.float32
    assert torch.equal(*outs)


@pytest.mark.parametrize("experts", ["eager", "reference"])
def test_bf16_compute_is_close_and_keeps_fp32_where_promised(experts):
    ids, positions, bounds = batch()
    exact = build()(ids, positions, PackedAttention(bounds))
    model = build(experts=experts, compute_dtype=ComputeDtype.bf16)
    out = model(ids, positions, PackedAttention(bounds), replay_TLK=exact.routes_TLK)
    assert out.hidden_TD.dtype == out.router_logits_TE[0].dtype == model.logits(out.hidden_TD).dtype == torch.float32
    assert relative_error(out.hidden_TD, exact.hidden_TD) < BF16_TRANSFORMER
    out.hidden_TD.sum().backward()
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in model.parameters())


def test_replaying_the_own_routes_changes_nothing():
    model = build()
    ids, positions, bounds = batch()
    chosen = model(ids, positions, PackedAttention(bounds))
    replayed = model(ids, positions, PackedAttention(bounds), replay_TLK=chosen.routes_TLK)
    assert torch.equal(replayed.hidden_TD, chosen.hidden_TD)
    assert torch.equal(replayed.routes_TLK, chosen.routes_TLK)


def test_replayed_routes_are_used_and_the_router_still_learns():
    model = build()
    ids, positions, bounds = batch()
    own = model(ids, positions, PackedAttention(bounds)).routes_TLK
    other = (own + 1) % CONFIG.num_experts
    out = model(ids, positions, PackedAttention(bounds), replay_TLK=other)
    assert torch.equal(out.routes_TLK, other)
    out.hidden_TD.square().sum().backward()
    for index, layer in enumerate(model.model.layers):
        assert layer.mlp.router.weight.grad.any()
        used = torch.bincount(other[:, index].flatten().long(), minlength=CONFIG.num_experts) > 0
        assert torch.equal(layer.mlp.experts.down_proj.grad.flatten(1).any(1), used)


def test_weights_are_the_softmax_over_the_chosen_logits():
    model = build()
    router = model.model.layers[0].mlp.router
    x = torch.randn(6, CONFIG.hidden_size, generator=torch.Generator().manual_seed(0))
    routing = router(x, None)
    top = routing.logits_TE.sort(-1, descending=True)
    assert torch.equal(routing.chosen_TK, top.indices[:, :2])
    torch.testing.assert_close(routing.weights_TK[:, 0], 1 / (1 + (top.values[:, 1] - top.values[:, 0]).exp()))
    full = routing.logits_TE.softmax(-1).gather(-1, routing.chosen_TK)
    torch.testing.assert_close(routing.weights_TK, full / full.sum(-1, keepdim=True))


def test_the_shared_expert_and_the_router_bias_take_part():
    ids, positions, bounds = batch()
    model = build(shared_expert_hidden_size=48, router_bias=True, tie_embeddings=False)
    names = dict(model.named_parameters())
    assert names["model.layers.1.mlp.shared_experts.down_proj.weight"].shape == (64, 48)
    assert names["model.layers.1.mlp.router.bias"].tolist() == [0.0] * 8
    assert model.output_name == "lm_head.weight"
    before = model(ids, positions, PackedAttention(bounds))
    with torch.no_grad():
        names["model.layers.0.mlp.router.bias"][3] = 100.0
    biased = model(ids, positions, PackedAttention(bounds))
    assert (biased.routes_TLK[:, 0, 0] == 3).all()
    with torch.no_grad():
        names["model.layers.0.mlp.router.bias"][3] = 0.0
        names["model.layers.0.mlp.shared_experts.down_proj.weight"].zero_()
    silent = model(ids, positions, PackedAttention(bounds))
    assert not torch.equal(silent.hidden_TD, before.hidden_TD)
    model.logits(silent.hidden_TD).sum().backward()
    assert names["lm_head.weight"].grad is not None


def test_parameter_names_are_those_of_checkpoints():
    names = {re.sub(r"\.\d+\.", ".N.", name): shape for name, shape in parameter_shapes(CONFIG).items()}
    assert names == {
        "model.embed_tokens.weight": (40, 64),
        "model.layers.N.input_layernorm.weight": (64,),
        "model.layers.N.self_attn.q_proj.weight": (64, 64),
        "model.layers.N.self_attn.k_proj.weight": (32, 64),
        "model.layers.N.self_attn.v_proj.weight": (32, 64),
        "model.layers.N.self_attn.o_proj.weight": (64, 64),
        "model.layers.N.post_attention_layernorm.weight": (64,),
        "model.layers.N.mlp.router.weight": (8, 64),
        "model.layers.N.mlp.experts.gate_up_proj": (8, 64, 64),
        "model.layers.N.mlp.experts.down_proj": (8, 64, 32),
        "model.norm.weight": (64,),
    }


def test_initial_weights_depend_on_the_seed_and_the_name_only():
    first, again, other, deeper = build(), build(), build(seed=1), build(num_layers=3)
    for name, parameter in first.named_parameters():
        assert torch.equal(parameter, dict(again.named_parameters())[name])
        assert torch.equal(parameter, dict(deeper.named_parameters())[name])
        assert torch.equal(parameter, dict(other.named_parameters())[name]) == (parameter.ndim == 1)


def test_initial_scales():
    parameters = dict(build().named_parameters())
    std = {name: parameter.std().item() for name, parameter in parameters.items()}
    assert parameters["model.norm.weight"].tolist() == [1.0] * 64
    assert std["model.embed_tokens.weight"] == pytest.approx(0.05, rel=0.05)
    assert std["model.layers.0.mlp.experts.gate_up_proj"] == pytest.approx(64**-0.5, rel=0.05)
    assert std["model.layers.0.mlp.experts.down_proj"] == pytest.approx(32**-0.5 / 3, rel=0.05)
    bound = 64**-0.5
    assert std["model.layers.0.self_attn.q_proj.weight"] == pytest.approx(bound / 3**0.5, rel=0.05)
    assert parameters["model.layers.0.self_attn.q_proj.weight"].abs().max() < bound


def test_the_vocabulary_must_be_known():
    with pytest.raises(ConfigError, match=r"model\.vocab_size: must be set before the model is built"):
        Transformer(ModelConfig())
    with pytest.raises(ConfigError, match=r"model\.head_dim"):
        Transformer(ModelConfig(vocab_size=10, head_dim=3))

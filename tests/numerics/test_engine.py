"""Decoding on the cache against one plain forward over the whole sequence, and the distribution that is sampled."""

import dataclasses
import math

import numpy as np
import pytest
import torch

from model.config import ComputeDtype, ModelConfig
from model.packed_attention import PackedAttention
from model.transformer import Transformer, init_weights
from rollout.engine.engine import Engine, EngineError
from rollout.engine.kv_cache import CacheError, KvCache
from rollout.engine.sampling import choose, counter_uniform
from rollout.types import FinishReason, SampleRequest, SamplingParams, WeightVersion
from tests.numerics import families
from tests.numerics.families import MINI
from tests.numerics.tolerances import BF16_ENGINE_LOGPROB, ENGINE_LOGPROB

STOP = 5
CONFIG = ModelConfig(
    vocab_size=40,
    hidden_size=64,
    num_layers=3,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    expert_hidden_size=32,
    tie_embeddings=False,
)
CONFIGS = {
    "grouped queries": CONFIG,
    "one kv head a head, biased router, shared expert, tied": dataclasses.replace(
        CONFIG, num_kv_heads=4, router_bias=True, shared_expert_hidden_size=32, tie_embeddings=True
    ),
    "one kv head, all experts": dataclasses.replace(CONFIG, num_kv_heads=1, num_experts=3, num_experts_per_tok=3),
    **{f"family {family}": config for family, config in MINI.items()},
}


def make_model(config=CONFIG, seed=0):
    if config in MINI.values():
        return families.make_model(config, seed)
    model = Transformer(config)
    init_weights(model, seed)
    with torch.no_grad():
        if model.lm_head is not None:
            model.lm_head.weight.mul_(4.0)  # logits of a few units: neither flat nor certain
    return model.requires_grad_(False)


MODEL = make_model()


def make_engine(model=MODEL, *, max_sessions=8, max_tokens=64, version=1):
    engine = Engine(model.config, max_sessions=max_sessions, max_tokens=max_tokens, stop_ids={STOP})
    engine.swap_weights(WeightVersion(version), model.state_dict())
    return engine


def prompt(session, length):
    generator = torch.Generator().manual_seed(session)
    return tuple(torch.randint(6, CONFIG.vocab_size, (length,), generator=generator).tolist())


def ask(session, length=6, *, temperature=1.0, max_tokens=12, seed=None, ids=None):
    return SampleRequest(
        session=session,
        prompt_ids=prompt(session, length) if ids is None else ids,
        params=SamplingParams(temperature=temperature, max_tokens=max_tokens),
        seed=1000 + session if seed is None else seed,
    )


# Mixed prompts, limits and temperatures, so that rows end at different steps and are moved together.
FIRST_TURN = [
    ask(10, 3, max_tokens=20),
    ask(11, 17, max_tokens=2),
    ask(12, 1, max_tokens=14, temperature=0.0),
    ask(13, 9, max_tokens=5, temperature=0.6),
    ask(14, 12, max_tokens=1),
    ask(15, 4, max_tokens=9, temperature=1.7),
]


def second_turn(requests, generations, *, only=None):
    """The next turn of each session: all ids so far and an observation of its own length."""
    return [
        ask(
            request.session,
            ids=request.prompt_ids + generation.ids + prompt(100 + request.session, 1 + request.session % 4),
            max_tokens=6 + request.session % 5,
            temperature=request.params.temperature,
        )
        for request, generation in zip(requests, generations, strict=True)
        if only is None or request.session in only
    ]


def full_forward(model, ids, replay=None):
    """Logits [T, V] and routes of a sequence in one pass, without a cache."""
    out = model(torch.tensor(ids), torch.arange(len(ids)), PackedAttention([0, len(ids)]), replay)
    return model.logits(out.hidden_TD), out.routes_TLK


def check(model, request, generation, routes, *, tolerance=ENGINE_LOGPROB, replay=False):
    """Compare one generation, and all routes of its session so far, with the full forward."""
    ids = request.prompt_ids + generation.ids
    assert routes.shape == (len(ids) - 1, len(model.config.moe_layers), model.config.num_experts_per_tok)
    assert routes.dtype == np.uint8
    recorded = torch.from_numpy(routes)
    logits, expected_routes = full_forward(model, ids[:-1], recorded if replay else None)
    if not replay:
        assert torch.equal(recorded, expected_routes)
    logits = logits[len(request.prompt_ids) - 1 :]
    temperature = request.params.temperature or 1.0
    chosen = torch.tensor(generation.ids)[:, None]
    expected = (logits / temperature).log_softmax(-1).gather(1, chosen)[:, 0]
    bound = tolerance * (logits.abs().max().item() / temperature)
    assert generation.logprobs_T.dtype == np.float32
    assert (torch.from_numpy(generation.logprobs_T) - expected).abs().max().item() < bound
    if request.params.temperature == 0 and not replay:
        assert generation.ids == tuple(logits.argmax(-1).tolist())
    num, limit = len(generation.ids), request.params.max_tokens
    assert STOP not in generation.ids[:-1]
    stopped = generation.ids[-1] == STOP
    assert generation.finish is (FinishReason.STOP if stopped else FinishReason.LENGTH)
    assert num <= limit
    assert stopped or num == limit


# ---- the cache changes nothing


@pytest.mark.parametrize("name", CONFIGS)
def test_two_turns_on_the_cache_equal_one_full_forward(name):
    model = make_model(CONFIGS[name])
    engine = make_engine(model)
    first = engine.generate(FIRST_TURN)
    for request, generation in zip(FIRST_TURN, first, strict=True):
        assert generation.weight_version == 1
        check(model, request, generation, generation.routes_TLK)
    next_requests = second_turn(FIRST_TURN, first)
    second = engine.generate(next_requests)
    for request, before, generation in zip(next_requests, first, second, strict=True):
        check(model, request, generation, np.concatenate([before.routes_TLK, generation.routes_TLK]))
    assert len({len(generation.ids) for generation in first}) > 3
    # The comparison would notice a past that is forgotten.
    ids = next_requests[1].prompt_ids
    whole, forgetful = full_forward(model, ids)[0][-1], full_forward(model, ids[1:])[0][-1]
    assert (whole - forgetful).abs().max().item() > 20 * ENGINE_LOGPROB * whole.abs().max().item()


def test_a_session_that_sits_out_a_turn_keeps_its_past():
    engine = make_engine()
    first = engine.generate(FIRST_TURN)
    some = second_turn(FIRST_TURN, first, only={15, 11})[::-1]
    engine.generate(some)
    engine.close_session(15)
    rest = second_turn(FIRST_TURN, first, only={10, 12, 13, 14})
    fresh = ask(99, 8)
    *generations, alone = engine.generate([*rest, fresh])
    routes = {request.session: generation.routes_TLK for request, generation in zip(FIRST_TURN, first, strict=True)}
    for request, generation in zip(rest, generations, strict=True):
        check(MODEL, request, generation, np.concatenate([routes[request.session], generation.routes_TLK]))
    check(MODEL, fresh, alone, alone.routes_TLK)


def test_rows_are_moved_together_while_others_still_decode(monkeypatch):
    moves = []
    arrange = KvCache.arrange
    monkeypatch.setattr(KvCache, "arrange", lambda cache, order: (moves.append(list(order)), arrange(cache, order))[1])
    generations = make_engine().generate(FIRST_TURN)
    assert moves[0] == [10, 11, 12, 13, 14, 15]
    assert [len(order) for order in moves] == sorted({len(order) for order in moves}, reverse=True)
    assert len(moves) >= 3
    for request, generation in zip(FIRST_TURN, generations, strict=True):
        check(MODEL, request, generation, generation.routes_TLK)


def test_bf16_compute_is_close():
    model = make_model(dataclasses.replace(CONFIG, compute_dtype=ComputeDtype.bf16))
    engine = make_engine(model)
    first = engine.generate(FIRST_TURN)
    second = engine.generate(requests := second_turn(FIRST_TURN, first))
    for request, before, generation in zip(requests, first, second, strict=True):
        routes = np.concatenate([before.routes_TLK, generation.routes_TLK])
        check(model, request, generation, routes, tolerance=BF16_ENGINE_LOGPROB, replay=True)


def test_the_check_notices_other_weights():
    (generation,) = make_engine(make_model(seed=1)).generate(FIRST_TURN[:1])
    with pytest.raises(AssertionError):
        check(MODEL, FIRST_TURN[0], generation, generation.routes_TLK, replay=True)


# ---- determinism


def same(a, b):
    return (
        a.ids == b.ids
        and a.logprobs_T.tobytes() == b.logprobs_T.tobytes()
        and a.routes_TLK.tobytes() == b.routes_TLK.tobytes()
    )


def test_repeats_are_equal_bit_for_bit_also_in_a_used_cache():
    engine = make_engine()
    rounds = []
    for _ in range(2):
        first = engine.generate(FIRST_TURN)
        rounds.append([*first, *engine.generate(second_turn(FIRST_TURN, first))])
        for request in FIRST_TURN:
            engine.close_session(request.session)
            engine.close_session(request.session)
        engine.generate([ask(session, 30, max_tokens=30) for session in range(8)])
        for session in range(8):
            engine.close_session(session)
    assert all(same(a, b) for a, b in zip(*rounds, strict=True))


def test_tokens_do_not_depend_on_who_is_beside():
    together = make_engine().generate(FIRST_TURN)
    for request, beside in zip(FIRST_TURN, together, strict=True):
        (alone,) = make_engine().generate([request])
        crowd = make_engine().generate([ask(1, 20, max_tokens=25), request, ask(2, 2, max_tokens=3)])[1]
        assert alone.ids == beside.ids == crowd.ids
        check(MODEL, request, crowd, crowd.routes_TLK)


def test_seed_and_position_decide_and_nothing_else():
    ids = prompt(0, 5)
    one, two, other = make_engine().generate([ask(n, ids=ids, seed=seed) for n, seed in ((1, 7), (2, 7), (3, 8))])
    assert one.ids == two.ids
    assert one.ids != other.ids
    (cut,) = make_engine().generate([ask(1, ids=ids, seed=7, max_tokens=4)])
    assert cut.ids == one.ids[:4]
    (resumed,) = make_engine().generate([ask(1, ids=ids + one.ids[:4], seed=7, max_tokens=8)])
    assert resumed.ids == one.ids[4:]


@pytest.mark.parametrize("poison", [math.nan, math.inf])
def test_what_a_cache_slot_held_before_never_leaks(poison):
    clean, dirty = make_engine(), make_engine()
    dirty._cache.keys_LNGCd.fill_(poison)
    dirty._cache.values_LNGCe.fill_(poison)
    first = clean.generate(FIRST_TURN), dirty.generate(FIRST_TURN)
    assert all(same(a, b) for a, b in zip(*first, strict=True))
    second = [engine.generate(second_turn(FIRST_TURN, first[0])) for engine in (clean, dirty)]
    assert all(same(a, b) for a, b in zip(*second, strict=True))


def test_a_version_full_of_nan_spoils_no_later_one():
    engine = make_engine()
    expected = make_engine().generate(FIRST_TURN)
    broken = {name: torch.full_like(tensor, math.nan) for name, tensor in MODEL.state_dict().items()}
    engine.swap_weights(WeightVersion(2), broken)
    with pytest.raises(EngineError, match="logprobs must be finite, got nan in session 10 with weights 2"):
        engine.generate(FIRST_TURN)
    engine.swap_weights(WeightVersion(3), MODEL.state_dict())
    assert all(same(a, b) for a, b in zip(engine.generate(FIRST_TURN), expected, strict=True))


# ---- weights


def test_a_weight_swap_drops_all_sessions_and_names_the_new_version():
    engine, new = make_engine(), make_model(seed=1)
    first = engine.generate(FIRST_TURN)
    assert engine.weight_version == 1
    engine.swap_weights(WeightVersion(2), new.state_dict())
    requests = second_turn(FIRST_TURN, first)
    for request, generation in zip(requests, engine.generate(requests), strict=True):
        assert generation.weight_version == 2
        check(new, request, generation, generation.routes_TLK)  # the whole past was computed again


def test_running_views_are_the_weights_in_use():
    views = make_engine().running_views()
    assert views.keys() == MODEL.state_dict().keys()
    assert all(np.array_equal(views[name], tensor.numpy()) for name, tensor in MODEL.state_dict().items())


# ---- errors


def test_an_engine_without_weights_says_so():
    engine = Engine(CONFIG, max_sessions=1, max_tokens=8, stop_ids={STOP})
    with pytest.raises(EngineError, match="engine: no weights yet, got a request; publish a snapshot first"):
        engine.generate([ask(1)])


def test_a_session_must_grow():
    engine = make_engine()
    request = ask(1, 6, max_tokens=4)
    (generation,) = engine.generate([request])
    computed = 6 + len(generation.ids) - 1
    for ids in (request.prompt_ids, (request.prompt_ids + generation.ids)[:computed]):
        with pytest.raises(EngineError, match=f"session 1 must grow, got a prompt of {len(ids)} .* with {computed}"):
            engine.generate([ask(1, ids=ids)])


def test_a_session_that_outgrows_its_row_is_refused_and_harms_no_other():
    engine, fits, too_long = make_engine(max_tokens=16), ask(1, 4, max_tokens=13), ask(2, 17)
    with pytest.raises(CacheError, match=r"16 positions a session, got 17; raise env\.max_context_tokens"):
        engine.generate([fits, too_long])
    engine.close_session(2)
    (generation,) = engine.generate([fits])
    check(MODEL, fits, generation, generation.routes_TLK)
    with pytest.raises(CacheError, match="16 positions a session, got 17"):
        engine.generate([ask(3, 4, max_tokens=14, seed=next(_seeds_that_never_stop(4, 14)))])


def _seeds_that_never_stop(length, max_tokens):
    for seed in range(1000):
        (generation,) = make_engine().generate([ask(3, length, max_tokens=max_tokens, seed=seed)])
        if generation.finish is FinishReason.LENGTH:
            yield seed


def test_a_row_is_full_to_its_last_position():
    engine = make_engine(max_tokens=16)
    request = ask(3, 4, max_tokens=13, seed=next(_seeds_that_never_stop(4, 13)))
    beside = ask(4, 2, max_tokens=1)
    generation, _ = engine.generate([request, beside])
    assert len(generation.ids) == 13  # 16 computed positions: the last sampled token needs none
    check(MODEL, request, generation, generation.routes_TLK)


def test_more_sessions_than_rows_are_refused():
    engine = make_engine(max_sessions=2)
    with pytest.raises(CacheError, match="no free row, got session 3; close sessions or raise num_rows"):
        engine.generate([ask(1), ask(2), ask(3)])
    engine.close_session(1)
    engine.close_session(77)
    assert len(engine.generate([ask(2), ask(3)])) == 2
    assert engine.max_sessions == 2


# ---- the distribution that is sampled

CHI2_999 = {11: 31.26, 99: 148.23}
"""99.9 % quantiles of the chi-square distribution by degrees of freedom (Abramowitz and Stegun, table 26.8)."""


def chi_square(counts, probabilities):
    expected = probabilities * counts.sum()
    assert expected.min() > 5
    return float(((counts - expected) ** 2 / expected).sum())


def test_tokens_follow_the_softmax_and_no_other_distribution():
    logits = torch.linspace(-1.5, 1.5, 12)[torch.randperm(12, generator=torch.Generator().manual_seed(0))]
    num = 20_000
    uniforms = torch.from_numpy(counter_uniform(np.arange(num), np.full(num, 9)))
    for temperature in (1.0, 0.7):
        ids, logprobs = choose(logits.expand(num, -1), torch.full((num,), temperature), uniforms)
        counts = np.bincount(ids.numpy(), minlength=12)
        right = (logits / temperature).softmax(-1).double().numpy()
        assert chi_square(counts, right) < CHI2_999[11]
        assert chi_square(counts, (logits / (temperature * 1.1)).softmax(-1).double().numpy()) > CHI2_999[11]
        assert chi_square(counts, np.roll(right, 1)) > CHI2_999[11]
        assert np.allclose(logprobs.double().exp().numpy(), right[ids.numpy()], rtol=1e-5)


def test_the_engine_samples_what_its_model_says():
    model = make_model(dataclasses.replace(CONFIG, vocab_size=12, num_layers=1))
    engine = Engine(model.config, max_sessions=256, max_tokens=8, stop_ids={STOP})
    engine.swap_weights(WeightVersion(0), model.state_dict())
    ids, counts = (3, 7, 1), np.zeros(12)
    for start in range(0, 2048, 256):
        requests = [ask(n, ids=ids, seed=start + n, max_tokens=1, temperature=1.0) for n in range(256)]
        for generation in engine.generate(requests):
            counts[generation.ids[0]] += 1
        for request in requests:
            engine.close_session(request.session)
    logits = full_forward(model, ids)[0][-1]
    assert chi_square(counts, logits.softmax(-1).double().numpy()) < CHI2_999[11]
    assert chi_square(counts, (logits / 1.2).softmax(-1).double().numpy()) > CHI2_999[11]


def _splitmix64(state):
    """Python integers; returns the next state and the output."""
    state = (state + 0x9E3779B97F4A7C15) % 2**64
    z = state
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB % 2**64
    return state, z ^ (z >> 31)


def test_counter_numbers_are_splitmix64():
    state, outputs = 1234567, []
    for _ in range(3):
        state, output = _splitmix64(state)
        outputs.append(output)
    assert outputs == [6457827717110365317, 3203168211198807973, 9817491932198370423]  # the published test vector
    cases = [(0, 0), (1, 0), (0, 1), (2**64 - 1, 2**40), (2**63, 191), (7, 3)]
    got = counter_uniform(np.array([seed for seed, _ in cases], np.uint64), np.array([at for _, at in cases]))
    for (seed, position), number in zip(cases, got.tolist(), strict=True):
        mixed = _splitmix64((_splitmix64(seed)[1] + position) % 2**64)[1]
        assert number == (mixed >> 11) / 2**53


@pytest.mark.parametrize("along", ["seeds", "positions", "both"])
def test_counter_numbers_are_uniform_and_independent(along):
    steps, still = np.arange(50_000), np.full(50_000, 3)
    numbers = counter_uniform(steps if along != "positions" else still, steps if along != "seeds" else still)
    assert numbers.dtype == np.float64
    assert 0.0 <= numbers.min() < numbers.max() < 1.0
    counts = np.bincount((numbers * 100).astype(int), minlength=100)
    assert chi_square(counts, np.full(100, 0.01)) < CHI2_999[99]
    neighbours = np.corrcoef(numbers[:-1], numbers[1:])[0, 1]
    assert abs(neighbours) < 4 / math.sqrt(len(numbers))
    assert len(np.unique(numbers)) == len(numbers)


LAST_BELOW_ONE = 1.0 - 2.0**-53


def test_a_number_next_to_one_stays_in_the_vocabulary():
    for seed in range(50):
        generator = torch.Generator().manual_seed(seed)
        logits = torch.randn(64, 1 + 7 * seed, generator=generator) * 5
        ids, logprobs = choose(logits, torch.full((64,), 0.3), torch.full((64,), LAST_BELOW_ONE, dtype=torch.float64))
        assert ids.max().item() < logits.shape[1]
        assert logprobs.isfinite().all()


@pytest.mark.parametrize("uniform", [0.0, 0.5, LAST_BELOW_ONE])
def test_a_token_without_probability_is_never_chosen(uniform):
    logits = torch.full((1, 9), -torch.inf)
    logits[0, 3:6] = torch.tensor([0.0, 1.0, 2.0])
    ids, logprobs = choose(logits, torch.ones(1), torch.tensor([uniform], dtype=torch.float64))
    assert ids.tolist() == [{0.0: 3, 0.5: 5}.get(uniform, 5)]
    assert logprobs[0].item() == pytest.approx(logits[0].log_softmax(-1)[ids[0]].item())


def test_greedy_takes_the_first_largest_logit_and_its_logprob_at_temperature_one():
    logits = torch.tensor([[0.0, 2.0, 2.0, 1.0], [3.0, 0.0, 0.0, 0.0]])
    ids, logprobs = choose(logits, torch.zeros(2), torch.tensor([0.99, 0.99], dtype=torch.float64))
    assert ids.tolist() == [1, 0]
    assert torch.equal(logprobs, logits.log_softmax(-1).gather(1, ids[:, None])[:, 0])

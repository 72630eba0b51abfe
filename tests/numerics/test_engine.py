"""The engine against one plain forward over the whole sequence, however its steps are cut and whoever is beside.

Where the kernels are batch-invariant, "the same" means the same bits; torch's products are not, and there it means the
same tokens and routes, and logprobs within the tolerance of another order of sums.
"""

import dataclasses
import math

import numpy as np
import pytest
import torch

from model.config import ComputeDtype
from model.kernels.dispatch import resolve_kernels
from model.snapshot import Format
from rollout.config import EngineConfig
from rollout.engine.active import EngineError
from rollout.engine.engine import Engine
from rollout.types import FinishReason, WeightVersion
from tests.numerics.engines import (
    CONFIG,
    CONFIGS,
    KERNELS,
    MODEL,
    STOP,
    ask,
    full_forward,
    make_engine,
    make_model,
    prompt,
    published,
)
from tests.numerics.tolerances import BF16_ENGINE_LOGPROB, ENGINE_LOGPROB

each_kernels = pytest.mark.parametrize("kernels", KERNELS)

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


@each_kernels
@pytest.mark.parametrize("name", CONFIGS)
def test_two_turns_on_the_cache_equal_one_full_forward(name, kernels):
    model = make_model(CONFIGS[name])
    engine = make_engine(model, kernels=kernels)
    first = engine.sample(FIRST_TURN)
    for request, generation in zip(FIRST_TURN, first, strict=True):
        assert generation.weight_version == 1
        check(model, request, generation, generation.routes_TLK)
    next_requests = second_turn(FIRST_TURN, first)
    second = engine.sample(next_requests)
    for request, before, generation in zip(next_requests, first, second, strict=True):
        check(model, request, generation, np.concatenate([before.routes_TLK, generation.routes_TLK]))
    assert len({len(generation.ids) for generation in first}) > 3
    # The comparison would notice a past that is forgotten.
    ids = next_requests[1].prompt_ids
    whole, forgetful = full_forward(model, ids)[0][-1], full_forward(model, ids[1:])[0][-1]
    assert (whole - forgetful).abs().max().item() > 20 * ENGINE_LOGPROB * whole.abs().max().item()


def test_a_session_that_sits_out_a_turn_keeps_its_past():
    engine = make_engine()
    first = engine.sample(FIRST_TURN)
    some = second_turn(FIRST_TURN, first, only={15, 11})[::-1]
    engine.sample(some)
    engine.close_session(15)
    rest = second_turn(FIRST_TURN, first, only={10, 12, 13, 14})
    fresh = ask(99, 8)
    *generations, alone = engine.sample([*rest, fresh])
    routes = {request.session: generation.routes_TLK for request, generation in zip(FIRST_TURN, first, strict=True)}
    for request, generation in zip(rest, generations, strict=True):
        check(MODEL, request, generation, np.concatenate([routes[request.session], generation.routes_TLK]))
    check(MODEL, fresh, alone, alone.routes_TLK)


def test_bf16_compute_is_close():
    model = make_model(dataclasses.replace(CONFIG, compute_dtype=ComputeDtype.bf16))
    engine = make_engine(model)
    first = engine.sample(FIRST_TURN)
    second = engine.sample(requests := second_turn(FIRST_TURN, first))
    for request, before, generation in zip(requests, first, second, strict=True):
        routes = np.concatenate([before.routes_TLK, generation.routes_TLK])
        check(model, request, generation, routes, tolerance=BF16_ENGINE_LOGPROB, replay=True)


def test_the_check_notices_other_weights():
    (generation,) = make_engine(make_model(seed=1)).sample(FIRST_TURN[:1])
    with pytest.raises(AssertionError):
        check(MODEL, FIRST_TURN[0], generation, generation.routes_TLK, replay=True)


# ---- determinism


def same(a, b):
    """To the last bit."""
    return (
        a.ids == b.ids
        and a.logprobs_T.tobytes() == b.logprobs_T.tobytes()
        and a.model_logprobs_T.tobytes() == b.model_logprobs_T.tobytes()
        and a.routes_TLK.tobytes() == b.routes_TLK.tobytes()
    )


def alike(a, b, kernels):
    """The same, computed in another company: to the last bit where the kernels are batch-invariant."""
    if resolve_kernels(kernels).batch_invariant:
        return same(a, b)
    close = np.abs(a.logprobs_T - b.logprobs_T).max() < 20 * ENGINE_LOGPROB
    return a.ids == b.ids and a.routes_TLK.tobytes() == b.routes_TLK.tobytes() and close


def test_repeats_are_equal_bit_for_bit_also_in_a_used_cache():
    engine = make_engine(share_prefixes=False)
    rounds = []
    for _ in range(2):
        first = engine.sample(FIRST_TURN)
        rounds.append([*first, *engine.sample(second_turn(FIRST_TURN, first))])
        for request in FIRST_TURN:
            engine.close_session(request.session)
            engine.close_session(request.session)
        engine.sample([ask(session, 30, max_tokens=30) for session in range(8)])
        for session in range(8):
            engine.close_session(session)
    assert all(same(a, b) for a, b in zip(*rounds, strict=True))


@each_kernels
@pytest.mark.parametrize("name", ["grouped queries", "family gpt_oss", "family deepseek_v3"])
def test_a_request_gets_the_same_whatever_is_computed_beside_it(kernels, name):
    """Alone, in a crowd, in chunks, preempted, on the pages of others, on other pages."""
    model = make_model(CONFIGS[name])
    requests = [*FIRST_TURN[:5], ask(20, 21, max_tokens=12)]
    crowd = [ask(40 + n, 1 + 9 * n, max_tokens=24 - 3 * n) for n in range(3)]
    of = {"model": model, "kernels": kernels, "stop_ids": ()}
    alone = [make_engine(**of).sample([request])[0] for request in requests]

    def company(engine, extra=()):
        generations = engine.sample([*extra[::2], *requests, *extra[1::2]])
        num_before = len(extra[::2])
        return generations[num_before : num_before + len(requests)]

    chunked = make_engine(max_batch_size=4, max_tokens_per_step=7, **of)
    small = make_engine(memory_bytes=make_engine(max_batch_size=1, **of).cache_bytes, page_size=2, **of)
    warm = make_engine(page_size=4, **of)
    warm.sample([dataclasses.replace(request, session=90 + n) for n, request in enumerate(requests)])
    for others in (
        company(make_engine(**of)),
        company(make_engine(max_batch_size=16, page_size=5, **of), crowd),
        company(chunked, crowd),
        company(small, crowd),
        company(warm, crowd),
    ):
        assert all(alike(a, b, kernels) for a, b in zip(alone, others, strict=True))
    assert small.metrics().num_preemptions > 0
    assert warm.metrics().num_cached_tokens > 0


@pytest.mark.parametrize("num_threads", [1, 2])
def test_the_number_of_threads_changes_no_bit(num_threads):
    if not make_engine().batch_invariant:
        pytest.skip("torch's sums follow the number of threads")
    before = torch.get_num_threads()
    expected = make_engine().sample(FIRST_TURN)
    torch.set_num_threads(num_threads)
    try:
        assert all(same(a, b) for a, b in zip(make_engine().sample(FIRST_TURN), expected, strict=True))
    finally:
        torch.set_num_threads(before)


def test_seed_and_position_decide_and_nothing_else():
    ids = prompt(0, 5)
    one, two, other = make_engine().sample([ask(n, ids=ids, seed=seed) for n, seed in ((1, 7), (2, 7), (3, 8))])
    assert one.ids == two.ids
    assert one.ids != other.ids
    (cut,) = make_engine().sample([ask(1, ids=ids, seed=7, max_tokens=4)])
    assert cut.ids == one.ids[:4]
    (resumed,) = make_engine().sample([ask(1, ids=ids + one.ids[:4], seed=7, max_tokens=8)])
    assert resumed.ids == one.ids[4:]


@pytest.mark.parametrize("poison", [math.nan, math.inf])
def test_what_a_cache_slot_held_before_never_leaks(poison):
    clean, dirty = make_engine(), make_engine()
    for pages in (pages for layer in dirty._cache._layers for pages in layer):
        pages.rows_SGd.fill_(poison)
    first = clean.sample(FIRST_TURN), dirty.sample(FIRST_TURN)
    assert all(same(a, b) for a, b in zip(*first, strict=True))
    second = [engine.sample(second_turn(FIRST_TURN, first[0])) for engine in (clean, dirty)]
    assert all(same(a, b) for a, b in zip(*second, strict=True))


def test_a_version_full_of_nan_spoils_no_later_one():
    engine = make_engine()
    expected = make_engine().sample(FIRST_TURN)
    broken = {
        name: dataclasses.replace(packed, payload=np.full_like(packed.payload, 0xFF))  # NaN as bf16
        if packed.format is Format.BF16
        else packed
        for name, packed in published(MODEL).items()
    }
    engine.swap_weights(WeightVersion(2), broken)
    with pytest.raises(EngineError, match="logprobs must be finite, got nan in session 10 with weights 2"):
        engine.sample(FIRST_TURN)
    engine.swap_weights(WeightVersion(3), published(MODEL))
    assert all(same(a, b) for a, b in zip(engine.sample(FIRST_TURN), expected, strict=True))


# ---- weights


def test_a_session_goes_on_under_other_weights_and_its_past_is_computed_again():
    engine, new = make_engine(), make_model(seed=1)
    first = engine.sample(FIRST_TURN)
    assert engine.weight_version == 1
    engine.swap_weights(WeightVersion(2), published(new))
    requests = second_turn(FIRST_TURN, first)
    fresh = make_engine(new).sample(requests)
    for request, before, generation, other in zip(requests, first, engine.sample(requests), fresh, strict=True):
        assert (generation.weight_version, generation.weight_changes) == (2, ())
        assert generation.ids == other.ids
        check(new, request, other, other.routes_TLK)
        # Only the rows since the last call are reported, and they are those of the new weights.
        assert np.array_equal(generation.routes_TLK, other.routes_TLK[len(before.routes_TLK) :])


def test_running_views_are_the_weights_in_use():
    views = make_engine().running_views()
    assert views.keys() == MODEL.state_dict().keys()
    assert all(np.array_equal(views[name], tensor.numpy()) for name, tensor in MODEL.state_dict().items())


# ---- errors


def test_an_engine_without_weights_says_so():
    engine = Engine(CONFIG, EngineConfig(max_batch_size=1, max_seq_len=8), stop_ids={STOP})
    with pytest.raises(EngineError, match="engine: no weights yet, got a request; publish a snapshot first"):
        engine.sample([ask(1)])


def test_a_session_must_grow():
    engine = make_engine()
    request = ask(1, 6, max_tokens=4)
    (generation,) = engine.sample([request])
    computed = 6 + len(generation.ids) - 1
    for ids in (request.prompt_ids, (request.prompt_ids + generation.ids)[:computed]):
        with pytest.raises(EngineError, match=f"session 1 must grow, got a prompt of {len(ids)} .* with {computed}"):
            engine.sample([ask(1, ids=ids)])


def test_a_request_that_is_too_long_is_refused_and_harms_no_other():
    engine, fits = make_engine(max_seq_len=16), ask(1, 4, max_tokens=13)
    for length, max_tokens in ((17, 1), (4, 14)):
        refusal = f"session 2: at most 16 positions, got {length} of the prompt and max_tokens {max_tokens}; shorten"
        with pytest.raises(EngineError, match=refusal):
            engine.sample([fits, ask(2, length, max_tokens=max_tokens)])
        assert not engine.has_work
    (generation,) = engine.sample([fits])
    check(MODEL, fits, generation, generation.routes_TLK)


def test_a_sequence_is_full_to_its_last_position():
    engine = make_engine(max_seq_len=16)
    request = ask(3, 4, max_tokens=13, seed=next(_seeds_that_never_stop(4, 13)))
    beside = ask(4, 2, max_tokens=1)
    generation, _ = engine.sample([request, beside])
    assert len(generation.ids) == 13  # 16 computed positions: the last sampled token needs none
    check(MODEL, request, generation, generation.routes_TLK)


def _seeds_that_never_stop(length, max_tokens):
    for seed in range(1000):
        (generation,) = make_engine().sample([ask(3, length, max_tokens=max_tokens, seed=seed)])
        if generation.finish is FinishReason.LENGTH:
            yield seed

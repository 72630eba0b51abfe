"""Requests from their coming to their end: chunks, cancellation, swaps, sleep, sessions, and what is refused."""

import dataclasses

import numpy as np
import pytest

from model.config import KernelChoice
from rollout.config import EngineConfig, EngineConfigError, KvDtype, LoadMode, Precision
from rollout.engine.active import EngineError
from rollout.engine.engine import Engine
from rollout.engine.kv_cache import CacheError
from rollout.types import FinishReason, WeightVersion
from tests.numerics.engines import MODEL, ask, make_engine, make_model, prompt, published


def num_lent(engine):
    """Pages that some request or session has."""
    return engine._cache.num_pages - engine._prefixes.num_available


def run(engine):
    """Step until nothing is left; the generations by id."""
    done = {}
    while engine.has_work:
        done.update(engine.step())
    return done


def steps(engine, num):
    return [pair for _ in range(num) for pair in engine.step()]


# ---- continuous batching


def test_requests_join_and_leave_while_others_run():
    engine = make_engine(stop_ids=())
    first = engine.add_request(ask(1, 5, max_tokens=9))
    assert steps(engine, 3) == []
    second = engine.add_request(ask(2, 7, max_tokens=2))
    assert [request_id for request_id, _ in steps(engine, 2)] == [second]
    done = run(engine)
    assert list(done) == [first]
    (alone,) = make_engine(stop_ids=()).sample([ask(1, 5, max_tokens=9)])
    assert done[first].ids == alone.ids
    metrics = engine.metrics()
    assert (metrics.num_requests, metrics.num_finished, metrics.num_running) == (2, 2, 0)
    assert (metrics.num_steps, metrics.num_sampled_tokens, metrics.num_computed_tokens) == (9, 11, 5 + 8 + 7 + 1)
    assert metrics.batch_occupancy_frac == pytest.approx(11 / (9 * 8))
    assert metrics.tokens_per_s == pytest.approx(11 / metrics.busy_s)


def test_a_step_never_exceeds_its_budget_and_decoding_goes_on_beside_long_prompts():
    engine = make_engine(max_batch_size=4, max_tokens_per_step=8, stop_ids=())
    sizes, run_step = [], engine._runner.run
    engine._runner.run = lambda plan: (sizes.append({w.active.request_id: w.count for w in plan}), run_step(plan))[1]
    engine.add_request(ask(1, 3, max_tokens=12))
    engine.step()
    engine.add_request(ask(2, 20, max_tokens=2))
    engine.add_request(ask(3, 5, max_tokens=1))
    run(engine)
    assert max(sum(step.values()) for step in sizes) == 8
    assert sizes[1:4] == [{0: 1, 1: 7}, {0: 1, 1: 7}, {0: 1, 1: 6, 2: 1}]
    assert all(step.get(0) == 1 for step in sizes[1:12])


def test_more_requests_than_rows_wait_in_the_order_in_which_they_came():
    engine = make_engine(max_batch_size=2, stop_ids=())
    ids = [engine.add_request(ask(n, 4, max_tokens=3)) for n in range(5)]
    order = []
    while engine.has_work:
        order += [request_id for request_id, _ in engine.step()]
        assert engine.metrics().num_running <= 2
    assert order == ids


def test_pages_that_run_out_are_taken_from_the_youngest_and_all_end_the_same():
    requests = [ask(n, 6 + n, max_tokens=20) for n in range(6)]
    expected = make_engine(stop_ids=()).sample(requests)
    engine = make_engine(stop_ids=(), page_size=4, memory_bytes=20 * make_engine(page_size=4)._cache.page_bytes)
    ids = [engine.add_request(request) for request in requests]
    order, done = [], {}
    while engine.has_work:
        ended = dict(engine.step())
        order += list(ended)
        done |= ended
    assert engine.metrics().num_preemptions > 2
    assert order[0] == ids[0]
    for request_id, one in zip(ids, expected, strict=True):
        assert done[request_id].ids == one.ids
        assert np.array_equal(done[request_id].routes_TLK, one.routes_TLK)


def test_a_request_whose_step_is_planned_can_still_lose_its_pages():
    """An older prompt that waited for another's pages is computed in chunks beside younger ones that grow."""
    shared = prompt(1, 20)
    requests = [
        ask(0, ids=shared, max_tokens=8),
        ask(1, ids=shared + prompt(2, 24), max_tokens=4),
        ask(2, 3, max_tokens=12),
        ask(3, 3, max_tokens=12),
    ]
    of = {"max_batch_size": 4, "max_seq_len": 60, "page_size": 4, "max_tokens_per_step": 16, "stop_ids": ()}
    engine = make_engine(memory_bytes=15 * make_engine(**of)._cache.page_bytes, **of)
    plans, plan = [], engine._scheduler.plan
    engine._scheduler.plan = lambda version: plans.append(plan(version)) or plans[-1]
    ids = [engine.add_request(request) for request in requests]
    done = run(engine)
    assert [[(work.active.request_id, work.count) for work in step] for step in plans[:4]] == [
        [(0, 16)],
        [(0, 4), (2, 3), (3, 3)],
        [(0, 1), (2, 1), (3, 1), (1, 13)],
        [(0, 1), (2, 1), (1, 11)],
    ]
    assert engine.metrics().num_preemptions > 0
    for request, request_id in zip(requests, ids, strict=True):
        (alone,) = make_engine(stop_ids=()).sample([request])
        assert done[request_id].ids == alone.ids
        assert np.array_equal(done[request_id].routes_TLK, alone.routes_TLK)


def test_thousands_of_requests_leave_no_page_behind():
    engine = make_engine(max_batch_size=16, max_seq_len=32, page_size=4, stop_ids=(), memory_bytes=40_000)
    num_pages, rng = engine._cache.num_pages, np.random.default_rng(0)
    waiting, cancelled, ended = set(), 0, 0
    for n in range(2000):
        if rng.random() < 0.1 and waiting:
            cancelled += engine.cancel(int(rng.choice(sorted(waiting))))
        length = int(rng.integers(1, 24))
        shared = prompt(int(rng.integers(3)), 24)[:length]
        waiting.add(engine.add_request(ask(n, ids=shared, max_tokens=int(rng.integers(1, 5)))))
        if n % 12 == 0:
            for request_id, _ in engine.step():
                waiting.discard(request_id)
                ended += 1
        if n % 3 == 0:
            engine.close_session(int(rng.integers(n + 1)))
    run(engine)
    metrics = engine.metrics()
    assert metrics.num_finished + metrics.num_cancelled == 2000
    assert metrics.num_finished > 1000
    assert cancelled > 20
    assert metrics.num_cached_tokens > 0
    for n in range(2000):
        engine.close_session(n)
    assert num_lent(engine) == 0
    assert engine._cache.num_free + engine._prefixes.num_kept == num_pages
    assert set(engine._cache._counts) == {0}
    assert len(set(engine._cache._free) | set(engine._prefixes._unused)) == num_pages
    assert len(engine._scheduler._free_rows) == 16
    assert engine._scheduler._coming == {}


# ---- sessions and prefixes


def test_a_session_of_sixty_turns_computes_its_new_tokens_only():
    engine, ids, num_new = make_engine(max_seq_len=600, stop_ids=()), (), 0
    for turn in range(60):
        new = prompt(turn, 5)
        num_new += len(new)
        (generation,) = engine.sample([ask(1, ids=ids + new, max_tokens=3)])
        ids += new + generation.ids
        num_new += len(generation.ids)
    assert engine.metrics().num_computed_tokens <= num_new
    assert engine.metrics().num_computed_tokens >= num_new - 1  # the last token is never fed back


def test_turns_without_a_session_find_their_pages():
    engine, ids, num_new = make_engine(max_seq_len=600, page_size=4, stop_ids=()), (), 0
    for turn in range(30):
        new = prompt(turn, 21)[:14]
        num_new += len(new) + 4
        (generation,) = engine.sample([ask(turn, ids=ids + new, max_tokens=4)])
        engine.close_session(turn)
        ids += new + generation.ids
    assert engine.metrics().num_computed_tokens <= 1.25 * num_new  # up to a page and a token again each turn


def test_an_idle_session_gives_its_pages_up_and_its_rows_are_reported_once():
    engine = make_engine(max_batch_size=2, max_seq_len=32, page_size=4, stop_ids=(), share_prefixes=False)
    first = ask(1, 20, max_tokens=6)
    (before,) = engine.sample([first])
    engine.sample([ask(n, 24, max_tokens=9) for n in (2, 3)])
    assert engine._scheduler.sessions[1].pages == []
    second = ask(1, ids=first.prompt_ids + before.ids + (9,), max_tokens=4)
    (after,) = engine.sample([second])
    (whole,) = make_engine(stop_ids=()).sample([second])
    assert after.ids == whole.ids
    assert np.array_equal(np.concatenate([before.routes_TLK, after.routes_TLK]), whole.routes_TLK)


def test_what_others_have_computed_is_used_and_its_routes_are_reported():
    engine = make_engine(page_size=4, stop_ids=())
    engine.sample([ask(1, 18, max_tokens=8)])
    request = dataclasses.replace(ask(1, 18, max_tokens=8), session=2)
    computed = engine.metrics().num_computed_tokens
    (generation,) = engine.sample([request])
    assert engine.metrics().num_cached_tokens == 16
    assert engine.metrics().num_computed_tokens - computed == 2 + 7
    (alone,) = make_engine(stop_ids=()).sample([request])
    assert generation.ids == alone.ids
    assert np.array_equal(generation.routes_TLK, alone.routes_TLK)


def test_a_group_computes_its_prompt_once():
    engine = make_engine(page_size=4, stop_ids=())
    ids = prompt(1, 34)
    generations = engine.sample([ask(n, ids=ids, max_tokens=4, seed=n) for n in range(8)])
    assert engine.metrics().num_computed_tokens == 34 + 7 * 2 + 8 * 3
    alone = [make_engine(stop_ids=()).sample([ask(n, ids=ids, max_tokens=4, seed=n)])[0] for n in range(8)]
    assert [one.ids for one in generations] == [one.ids for one in alone]
    assert all(np.array_equal(a.routes_TLK, b.routes_TLK) for a, b in zip(generations, alone, strict=True))


def test_no_page_is_used_under_other_weights():
    other = make_model(seed=1)
    engine = make_engine(page_size=4, stop_ids=())
    requests = [ask(n, 22, max_tokens=6) for n in range(4)]
    engine.sample(requests)
    engine.swap_weights(WeightVersion(2), published(other))
    again = [dataclasses.replace(request, session=10 + request.session) for request in requests]
    fresh = make_engine(other, stop_ids=()).sample(again)
    cached = engine.metrics().num_cached_tokens
    for a, b in zip(engine.sample(again), fresh, strict=True):
        assert a.ids == b.ids
    assert engine.metrics().num_cached_tokens == cached


# ---- cancellation, swaps, sleep


@pytest.mark.parametrize("num_steps", [0, 1, 4])
def test_cancelling_gives_pages_and_rows_back(num_steps):
    engine = make_engine(max_batch_size=2, stop_ids=(), max_tokens_per_step=6)
    ids = [engine.add_request(ask(n, 10, max_tokens=8)) for n in range(3)]
    steps(engine, num_steps)
    assert [engine.cancel(request_id) for request_id in ids] == [True] * 3
    assert not engine.has_work
    assert num_lent(engine) == 0
    assert not engine.cancel(ids[0])
    assert engine.step() == []
    assert len(engine.sample([ask(n, 10, max_tokens=8) for n in range(3)])) == 3


def test_closing_a_session_drops_its_request():
    engine = make_engine(stop_ids=())
    engine.add_request(ask(1, 10, max_tokens=8))
    engine.step()
    engine.close_session(1)
    engine.close_session(1)
    assert not engine.has_work
    assert num_lent(engine) == 0


def test_a_swap_in_mid_request_drops_nothing_and_says_which_version_sampled_what():
    other = make_model(seed=1)
    engine = make_engine(stop_ids=(), page_size=4)
    requests = [ask(n, 9 + n, max_tokens=10) for n in range(3)]
    ids = [engine.add_request(request) for request in requests]
    steps(engine, 4)
    engine.swap_weights(WeightVersion(2), published(other))
    late = engine.add_request(ask(7, 5, max_tokens=3))
    done = run(engine)
    expected = make_engine(stop_ids=()).sample(requests)
    for request, request_id, old in zip(requests, ids, expected, strict=True):
        one = done[request_id]
        assert (one.weight_version, one.weight_changes) == (1, ((4, 2),))
        assert list(one.version_runs()) == [(0, 4, 1), (4, 10, 2)]
        assert one.ids[:4] == old.ids[:4]
        # From there on it is what the other weights say after the same tokens.
        goes_on = ask(request.session, ids=request.prompt_ids + one.ids[:4], max_tokens=6)
        (new,) = make_engine(other, stop_ids=()).sample([goes_on])
        assert one.ids[4:] == new.ids
        num_old = len(request.prompt_ids) + 3
        assert np.array_equal(one.routes_TLK[:num_old], old.routes_TLK[:num_old])
        assert np.array_equal(one.routes_TLK[num_old:], new.routes_TLK[num_old:])
    assert (done[late].weight_version, done[late].weight_changes) == (2, ())


def test_sleep_gives_the_memory_back_and_nobody_notices():
    engine = make_engine(stop_ids=())
    requests = [ask(n, 9 + n, max_tokens=10) for n in range(3)]
    expected = make_engine(stop_ids=()).sample(requests)
    ids = [engine.add_request(request) for request in requests]
    steps(engine, 4)
    held = engine.cache_bytes
    engine.sleep()
    assert engine.cache_bytes == 0
    assert engine.metrics().kv_used_frac == 0.0
    with pytest.raises(EngineError, match="engine: it sleeps, got a step; call wake first"):
        engine.step()
    engine.sleep()
    engine.swap_weights(WeightVersion(1), published(MODEL))
    engine.wake()
    engine.wake()
    assert engine.cache_bytes == held
    done = run(engine)
    assert [done[request_id].ids for request_id in ids] == [one.ids for one in expected]
    assert all(len(done[n].routes_TLK) == len(one.routes_TLK) for n, one in zip(ids, expected, strict=True))


# ---- settings and refusals


@pytest.mark.parametrize("kv_dtype", ["auto", "bf16", "int8", "fp8"])
def test_the_memory_budget_holds(kv_dtype):
    for budget in (60_000, 200_000):
        engine = make_engine(max_batch_size=64, max_seq_len=32, memory_bytes=budget, kv_dtype=kv_dtype, stop_ids=())
        assert budget - engine._cache.page_bytes < engine.cache_bytes <= budget
        assert engine.cache_bytes == engine._cache.num_pages * engine._cache.page_bytes
        done = engine.sample([ask(n, 12, max_tokens=8) for n in range(20)])
        assert {one.finish for one in done} == {FinishReason.LENGTH}


@pytest.mark.parametrize("kv_dtype", ["int8", "fp8"])
def test_eight_bit_keys_and_values_stay_close(kv_dtype):
    request = ask(1, 30, max_tokens=1)
    (exact,) = make_engine(stop_ids=()).sample([request])
    (narrow,) = make_engine(stop_ids=(), kv_dtype=kv_dtype).sample([request])
    difference = abs(float(exact.model_logprobs_T[0] - narrow.model_logprobs_T[0]))
    assert exact.ids == narrow.ids
    assert 0 < difference < 0.1


def test_a_budget_below_one_sequence_is_refused():
    with pytest.raises(CacheError, match=r"engine\.memory_bytes: must hold one sequence of max_seq_len=64, .* got 99;"):
        make_engine(memory_bytes=99)


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        ({"tensor_parallel_size": 2}, "engine.tensor_parallel_size: an engine runs on one device, got 2; set it to 1"),
        ({"pipeline_parallel_size": 4}, "engine.pipeline_parallel_size: an engine runs on one device, got 4"),
        ({"max_batch_size": 0}, "engine.max_batch_size: must be at least 1, got 0; raise it"),
        ({"max_tokens_per_step": 3, "max_batch_size": 4}, "engine.max_tokens_per_step: must hold one token of each"),
        ({"memory_bytes": -1}, "engine.memory_bytes: must not be negative, got -1; use 0 for no bound"),
        ({"seed": -1}, "engine.seed: must not be negative, got -1; use 0 or more"),
        ({"precision": "int3"}, "engine.precision: no such choice, got 'int3'; choose one of mxfp4, bf16, fp32"),
        ({"kv_dtype": "int2"}, "engine.kv_dtype: no such choice, got 'int2'; choose one of auto, bf16, int8, fp8"),
        ({"load": "zip"}, "engine.load: no such choice, got 'zip'; choose one of eager, mmap"),
        ({"kernels": "cuda"}, "engine.kernels: no such choice, got 'cuda'; choose one of auto, amx, "),
    ],
)
def test_settings_that_cannot_be_carried_out_are_one_line(settings, line):
    with pytest.raises(EngineConfigError) as caught:
        EngineConfig(**settings).validate()
    assert str(caught.value).startswith(line)
    assert "\n" not in str(caught.value)


def test_a_choice_may_be_spelled():
    spelled = EngineConfig(precision="bf16", kv_dtype="fp8", load="mmap", kernels="torch")
    assert spelled.precision is Precision.bf16
    assert spelled.kv_dtype is KvDtype.fp8
    assert spelled.load is LoadMode.mmap
    assert spelled.kernels is KernelChoice.torch


def test_an_unknown_chat_format_is_one_line_before_anything_is_read(tmp_path):
    with pytest.raises(
        EngineConfigError, match=r"^engine\.chat_format: no such choice, got 'x'; choose one of native, "
    ):
        Engine.load(tmp_path, chat_format="x")


@pytest.mark.parametrize(
    ("request_", "line"),
    [
        (ask(1, ids=()), "engine: session 1: a prompt needs a token, got none; give it at least one"),
        (ask(1, ids=(3, 40)), "engine: session 1: ids lie in 0..39, got 40 and 3 as the largest and the smallest"),
        (ask(1, ids=(3, -1)), "engine: session 1: ids lie in 0..39, got 3 and -1 as the largest and the smallest"),
        (ask(1, 60), "engine: session 1: at most 64 positions, got 60 of the prompt and max_tokens 12; shorten"),
        (ask(1, stop=("x",)), "engine: session 1: stop strings need a tokenizer, got an engine without one"),
        (ask(2), "engine: session 2: one request at a time, got a second; wait for the first"),
        (
            ask(3, ids=(7,) * 9),
            "engine: session 3 must go on with the ids it has, got a prompt of 9",
        ),
    ],
    ids=range(7),
)
def test_requests_that_cannot_be_carried_out_are_one_line_and_harm_nobody(request_, line):
    engine = make_engine(MODEL, stop_ids=())
    engine.sample([ask(3, 6, max_tokens=2)])
    other = engine.add_request(ask(2, 9, max_tokens=3))
    with pytest.raises(EngineError) as caught:
        engine.add_request(request_)
    assert str(caught.value).startswith(line)
    assert "\n" not in str(caught.value)
    assert list(run(engine)) == [other]

import dataclasses
import math

import numpy as np
import pytest

from model.config import ComputeDtype, KernelChoice
from rl.batch import TrainSample
from rl.config import ParitySection
from rl.parity import BOUNDS as BOUNDS_OF
from rl.parity import EXACT, ParityError, ParityReport, SampleParity, bounds_for
from rl.scores import SampleScores

BOUNDS = ParitySection(mean_abs_nats=1e-5, max_abs_nats=1e-3, max_flipped_frac=1e-4)


def sample(behavior: list[float], *, num_tokens: int = 5, routes: np.ndarray | None = None) -> TrainSample:
    """The last tokens are trained; every token but the last took experts 0 and 1 in each of 3 layers."""
    count = len(behavior)
    return TrainSample(
        key="k",
        ids_T=np.arange(num_tokens),
        targets_R=np.arange(num_tokens - count, num_tokens),
        behavior_logprobs_R=np.array(behavior, np.float32),
        advantages_R=np.zeros(count, np.float32),
        routes_TLK=np.tile(np.array([0, 1], np.uint8), (num_tokens - 1, 3, 1)) if routes is None else routes,
        weight_version=0,
        trained=False,
    )


def learner_routes() -> np.ndarray:
    """Of the 4 tokens before the last target."""
    return np.tile(np.array([0, 1], np.uint8), (4, 3, 1))


def of(compared: TrainSample, logprobs: np.ndarray, routes: np.ndarray) -> SampleParity:
    return SampleParity.of(compared, logprobs, routes, SampleScores(proximal_logprobs_R=logprobs))


def report(*parts: SampleParity, entropy_sum: float = 0.0) -> ParityReport:
    return ParityReport.of(parts, entropy_sum=entropy_sum)


def even(differences: list[float]) -> SampleParity:
    """A sample without flips, that far off; the numbers are exact in fp32."""
    return of(sample([-1.0] * len(differences)), np.array([-1.0 + d for d in differences]), learner_routes())


def flipped(differences: list[float], *places: tuple[int, int]) -> SampleParity:
    """Tokens that took experts 2 and 1 instead, at (token, layer)."""
    routes = learner_routes()
    for token, layer in places:
        routes[token, layer] = (2, 1)
    return of(sample([-1.0] * len(differences)), np.array([-1.0 + d for d in differences]), routes)


def test_the_numbers_of_a_report_by_hand():
    # |differences|: 0.25, 0.5 | 0.125, so mean 0.875 / 3 and largest 0.5; 4 computed tokens each.
    got = report(even([0.25, -0.5]), even([0.125]), entropy_sum=1.5)
    assert got == ParityReport(
        num_tokens=3,
        num_routed=8,
        mean_abs_nats=0.875 / 3,
        max_abs_nats=0.5,
        num_flipped=0,
        num_flipped_tokens=0,
        worst_layer=0,
        entropy=0.5,
    )


def test_a_flipped_token_counts_once_and_its_sequence_leaves_maximum_and_mean():
    got = report(flipped([0.5, 0.25], (1, 0), (1, 2), (3, 2)), even([0.125, 0.125]))
    assert got.num_flipped == 1  # it begins at token 1, and token 3 follows from it
    assert got.num_flipped_tokens == 2  # token 1 flipped in two layers
    assert got.worst_layer == 2
    assert got.max_abs_nats == 0.125
    assert got.mean_abs_nats == 0.125


def test_a_flip_in_a_shared_context_counts_once():
    same = [flipped([0.0], (1, 0)), flipped([0.0], (1, 0), (2, 0))]
    assert report(*same).num_flipped == 1
    assert report(*same).num_flipped_tokens == 3
    assert report(*same, flipped([0.0], (2, 0))).num_flipped == 2  # another one begins at token 2


def test_the_order_of_a_tokens_experts_is_not_a_flip():
    routes = learner_routes()[..., ::-1].copy()
    assert of(sample([-1.0]), np.array([-1.0]), routes).num_flipped == 0


def test_what_the_sampler_computed_after_the_last_target_is_not_compared():
    recorded = np.concatenate([learner_routes(), np.full((2, 3, 2), 7, np.uint8)])
    observed = dataclasses.replace(sample([-1.0], routes=recorded), ids_T=np.arange(7))
    assert of(observed, np.array([-1.0]), learner_routes()).num_flipped == 0


@pytest.mark.parametrize("shape", [(0, 3, 2), (3, 3, 2), (4, 2, 2), (4, 3, 1), (0, 0, 0)])
def test_missing_routes_are_an_error(shape: tuple[int, int, int]):
    with pytest.raises(ParityError) as error:
        of(sample([-1.0], routes=np.zeros(shape, np.uint8)), np.array([-1.0]), learner_routes())
    assert str(error.value).startswith(f"parity: every computed token needs its route, got {shape} for (4, 3, 2) ")


def test_no_token_at_all_is_an_error_and_not_an_open_gate():
    with pytest.raises(ParityError, match=r"^parity: there must be sampled tokens to compare, got none; "):
        report()


def test_the_gate_is_open_up_to_its_bounds_and_closed_beyond():
    def violation(**changed: float) -> str | None:
        values = {"mean_abs_nats": 1e-5, "max_abs_nats": 1e-3, "num_flipped": 0, "num_flipped_tokens": 99} | changed
        return ParityReport(num_tokens=9, num_routed=20_000, worst_layer=2, entropy=1.0, **values).violation(BOUNDS)

    assert violation() is None
    assert violation(mean_abs_nats=1.01e-5) == "mean |difference| 1.01e-05 nats > 1e-05"
    assert violation(max_abs_nats=2e-3) == "max |difference| 2.00e-03 nats > 1e-03"
    assert violation(num_flipped=7) is None  # 1e-4 of 20,000 is 2, and 3 * sqrt(2) + 1 by chance
    assert violation(num_flipped=8) == (
        "routes flipped in 8 contexts of 20000 tokens (expected at most 1e-04 of them), most in layer 2"
    )
    both = violation(mean_abs_nats=1.0, max_abs_nats=2.0)
    assert both == "mean |difference| 1.00e+00 nats > 1e-05; max |difference| 2.00e+00 nats > 1e-03"


def test_one_flip_may_happen_in_a_short_round_but_not_two():
    assert report(flipped([0.0], (0, 1)), even([0.0])).violation(BOUNDS) is None
    two = report(flipped([0.0], (0, 1)), flipped([0.0], (1, 1)), even([0.0]))
    assert "routes flipped in 2 contexts of 12 tokens" in str(two.violation(BOUNDS))


def test_kernels_leave_no_room_for_any_difference():
    bounds = [bounds_for(ParitySection(), dtype, KernelChoice.avx2) for dtype in ComputeDtype]
    assert bounds == [EXACT, EXACT]
    assert report(even([0.0])).violation(EXACT) is None
    assert "mean |difference|" in str(report(even([2.0**-24])).violation(EXACT))
    assert "routes flipped in 1 contexts" in str(report(flipped([0.0], (0, 1)), even([0.0])).violation(EXACT))


def test_torch_has_the_bounds_of_its_dtype_and_the_configured_ones_come_first():
    for dtype in ComputeDtype:
        assert bounds_for(ParitySection(), dtype, KernelChoice.torch) == BOUNDS_OF[dtype]
    given = bounds_for(ParitySection(max_abs_nats=0.5), ComputeDtype.fp32, KernelChoice.amx)
    assert given == dataclasses.replace(EXACT, max_abs_nats=0.5)


@pytest.mark.parametrize("broken", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("position", [0, 1, 2])
def test_a_logprob_that_is_not_a_number_closes_the_gate_wherever_it_stands(broken: float, position: int):
    parts = [even([0.0]), even([0.0]), even([0.0])]
    parts[position] = even([broken])
    got = report(*parts)
    assert not math.isfinite(got.max_abs_nats)  # NaN is not lost in the maximum
    text = str(got.violation(BOUNDS))
    assert "mean |difference|" in text
    assert "max |difference|" in text


def test_a_nan_in_a_sequence_with_a_flip_closes_the_gate_through_the_mean():
    got = report(flipped([math.nan], (0, 0)), even([0.0]))
    assert got.violation(BOUNDS) == "mean |difference| nan nats > 1e-05; max |difference| nan nats > 1e-03"


def test_equal_infinities_are_no_agreement():
    """A token that both call impossible was sampled all the same."""
    impossible = of(sample([-math.inf]), np.array([-math.inf]), learner_routes())
    assert report(impossible).violation(BOUNDS) is not None
    assert math.isnan(impossible.abs_max)


def test_differences_are_taken_in_fp64():
    # fp32 cannot hold -1 + 1e-9; the learner's numbers arrive in fp32 as well, so only the subtraction is wider.
    got = of(sample([-1.0]), np.array([-1.0 + 1e-9]), learner_routes())
    assert got.abs_sum == pytest.approx(1e-9, rel=1e-6)

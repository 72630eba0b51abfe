"""Mistakes in `learner.quantization`, and the warning that nothing moves."""

import pytest

from rl.still import StillWatch
from tests.unit.rl.test_config_check import problem

EXPERT, NORM = "model.layers.0.mlp.experts.down_proj", "model.norm.weight"


@pytest.mark.parametrize(
    ("overrides", "line"),
    [
        (
            ["learner.quantization.hysteresis=0.6"],
            "learner.quantization.hysteresis: must be at most 0.5, got 0.6; beyond half a step no code would move",
        ),
        (
            ["learner.quantization.enabled=false", "learner.quantization.rounding=stochastic"],
            "learner.quantization.rounding: not read while learner.quantization.enabled is false, got stochastic; drop "
            "it, or leave the quantization on",
        ),
        (
            ["learner.quantization.hysteresis=0.2", "learner.quantization.rounding=stochastic"],
            "learner.quantization.hysteresis: keeps codes that learner.quantization.rounding=stochastic draws anew at "
            "every step, got 0.2; set one of them back to its default",
        ),
    ],
)
def test_settings_that_do_not_fit_are_one_line(overrides: list[str], line: str) -> None:
    assert problem("+experiment=coding", *overrides) == line


def test_still_codes_are_told_once_and_other_tensors_do_not_count() -> None:
    watch, still = StillWatch(2), {EXPERT: (0, 8), NORM: (3, 8)}
    said = [watch.observe(each) for each in (still, {EXPERT: (1, 8)}, still, still, still, still)]
    assert [line is not None for line in said] == [False, False, False, True, False, False]
    assert said[3] is not None
    assert said[3].startswith("learner: updates must change codes to reach the policy, got none in 2 rounds; raise ")

"""Mistakes in `learner.quantization`, and the warning that nothing moves."""

import pytest

from model.snapshot import CodeChanges
from rl.still import StillWatch
from tests.unit.rl.test_config_check import problem

EXPERT = "model.layers.0.mlp.experts.down_proj"


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


@pytest.mark.parametrize("moved", [CodeChanges(1, 64, 0, 2), CodeChanges(0, 64, 1, 2)], ids=["a code", "a scale"])
def test_still_experts_are_told_once(moved: CodeChanges) -> None:
    watch, still = StillWatch(2), {EXPERT: CodeChanges(0, 64, 0, 2)}
    said = [watch.observe(each) for each in (still, {EXPERT: moved}, still, still, still, still)]
    assert [line is not None for line in said] == [False, False, False, True, False, False]
    assert said[3] is not None
    assert said[3].startswith("learner: updates must change codes to reach the policy, got none in 2 rounds; raise ")

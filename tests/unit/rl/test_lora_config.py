"""Mistakes in `learner.lora`, and settings that a frozen base leaves nothing to do for."""

import pytest

from rl.config_check import WorkerPlan, count_parameters, count_trained, estimate_memory_bytes
from rl.run_folder import plain
from tests.unit.rl.test_config_check import compose, problem


@pytest.mark.parametrize(
    ("overrides", "line"),
    [
        (
            ["learner.lora.rank=-1"],
            "learner.lora.rank: must be at least 0, got -1; 0 trains the model itself; 8 to 64 are usual",
        ),
        (
            ["learner.lora.rank=2000"],
            "learner.lora.rank: must be at most 1024, got 2000; 0 trains the model itself; 8 to 64 are usual",
        ),
        (
            ["learner.lora.rank=8", "learner.lora.alpha=0"],
            "learner.lora.alpha: must be above 0, got 0.0; the default is 16.0",
        ),
        (
            ["learner.lora.alpha=32"],
            "learner.lora.alpha: only read with learner.lora.rank above 0, got 32.0; drop it, or add "
            "learner.lora.rank=8",
        ),
        (
            ["learner.lora.targets=attention"],
            "learner.lora.targets: only read with learner.lora.rank above 0, got attention; drop it, or add "
            "learner.lora.rank=8",
        ),
        (
            ["learner.lora.rank=8", "learner.quantization.hysteresis=0.2"],
            "learner.quantization.hysteresis: with learner.lora.rank=8 the MXFP4 base is frozen and never quantized "
            "again, got 0.2; drop it, or set learner.lora.rank=0",
        ),
        (
            ["learner.lora.rank=8", "learner.quantization.rounding=stochastic"],
            "learner.quantization.rounding: with learner.lora.rank=8 the MXFP4 base is frozen and never quantized "
            "again, got stochastic; drop it, or set learner.lora.rank=0",
        ),
        (
            ["learner.lora.rank=8", "learner.quantization.straight_through=clipped"],
            "learner.quantization.straight_through: with learner.lora.rank=8 the MXFP4 base is frozen and never "
            "quantized again, got clipped; drop it, or set learner.lora.rank=0",
        ),
        (
            ["learner.lora.rank=8", "learner.quantization.enabled=false"],
            "learner.quantization.enabled: with learner.lora.rank=8 the MXFP4 base is frozen and never quantized "
            "again, got False; drop it, or set learner.lora.rank=0",
        ),
        (
            ["learner.lora.rank=8", "model=deepseek_v3", "algorithm.bias_update_speed=0.001"],
            "algorithm.bias_update_speed: moves the routers, which learner.lora.rank=8 freezes, got 0.001; set it to "
            "0, or learner.lora.rank=0",
        ),
        (
            ["learner.lora.rank=8", "rollout.hold_back_versions=2"],
            "rollout.hold_back_versions: not supported with learner.lora.rank=8, whose snapshots are adapters to the "
            "first one, got 2; set it to 0, or learner.lora.rank=0",
        ),
    ],
)
def test_settings_that_do_not_fit_are_one_line(overrides: list[str], line: str) -> None:
    assert problem("+experiment=coding", *overrides) == line


def test_adapters_are_off_by_default_and_their_settings_are_stored_with_the_run() -> None:
    assert compose("+experiment=coding").learner.lora.rank == 0
    stored = plain(compose("+experiment=coding", "learner.lora.rank=8", "learner.lora.targets=experts"))
    assert stored["learner"]["lora"] == {"rank": 8, "alpha": 16.0, "targets": "experts"}


def test_a_frozen_base_needs_less_memory_by_the_estimate() -> None:
    plan = WorkerPlan(1, 1, 1)
    trained, adapted = (
        compose("model=qwen3_30b_a3b", *more) for more in ([], ["learner.lora.rank=8", "algorithm.kl_coef=0.1"])
    )
    assert count_trained(trained) == count_parameters(trained) > 30e9
    assert count_trained(adapted) < 0.02 * count_parameters(adapted)
    whole, base = (estimate_memory_bytes(config, plan)["learner"] for config in (trained, adapted))
    assert base < 0.45 * whole

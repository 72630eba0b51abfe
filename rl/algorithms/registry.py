"""The algorithms by name. A new one: a file here, a line in `BUILDERS`."""

from __future__ import annotations

from collections.abc import Callable

from rl.algorithms.base import Algorithm, AlgorithmError
from rl.algorithms.config import AlgorithmConfig
from rl.algorithms.grpo import Grpo


def _grpo(config: AlgorithmConfig) -> Algorithm:
    return Grpo(clip_low=config.clip_low, clip_high=config.clip_high, normalize=config.normalize_advantage)


BUILDERS: dict[str, Callable[[AlgorithmConfig], Algorithm]] = {"grpo": _grpo}


def build_algorithm(config: AlgorithmConfig) -> Algorithm:
    """The algorithm that `config.name` names. Raises AlgorithmError with the known names."""
    builder = BUILDERS.get(config.name)
    if builder is None:
        raise AlgorithmError(
            f"algorithm.name: no such algorithm, got {config.name!r}; choose one of {', '.join(sorted(BUILDERS))}"
        )
    return builder(config)

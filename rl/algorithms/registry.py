"""The algorithms by name. A new one: a file here and a line in `BUILDERS`.

A user's own needs neither: `algorithm=custom algorithm.target=my_pkg.my_algorithm:Mine`, where the target is any class
with the two methods of `rl.algorithms.base.Algorithm`, made with `algorithm.params`.
"""

from __future__ import annotations

from collections.abc import Callable

from rl.algorithms.base import Algorithm, AlgorithmError
from rl.algorithms.config import AlgorithmConfig
from rl.algorithms.grpo import Grpo


def _grpo(config: AlgorithmConfig) -> Algorithm:
    return Grpo(clip_low=config.clip_low, clip_high=config.clip_high, normalize=config.normalize_advantage)


CUSTOM = "custom"

BUILDERS: dict[str, Callable[[AlgorithmConfig], Algorithm]] = {"grpo": _grpo}


def build_algorithm(config: AlgorithmConfig, custom: Callable[..., Algorithm] | None = None) -> Algorithm:
    """The algorithm that `config.name` names; `custom` is the loaded `algorithm.target`, made with `params`.

    Raises AlgorithmError for an unknown name, or a target without the name `custom`.
    """
    if config.name == CUSTOM:
        if custom is None:
            raise AlgorithmError(
                "algorithm.target: missing, got algorithm.name=custom alone; set algorithm.target=module:attribute"
            )
        return custom(**config.params)
    builder = BUILDERS.get(config.name)
    if builder is None:
        known = ", ".join([*sorted(BUILDERS), CUSTOM])
        raise AlgorithmError(f"algorithm.name: no such algorithm, got {config.name!r}; choose one of {known}")
    if config.target is not None or config.params:
        raise AlgorithmError(
            f"algorithm.target: target and params belong to algorithm.name=custom, got them with {config.name!r}; "
            "set algorithm.name=custom or drop them"
        )
    return builder(config)

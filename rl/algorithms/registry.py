"""The algorithms by name. A new one: a file here and a line in `BUILDERS`.

A user's own needs neither: `algorithm=custom algorithm.target=my_pkg.my_algorithm:Mine`, where the target is any class
with the two methods of `rl.algorithms.base.Algorithm`, made with `algorithm.params`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from rl.algorithms.base import Algorithm, AlgorithmError, CriticAlgorithm
from rl.algorithms.cispo import Cispo
from rl.algorithms.config import Aggregation, AlgorithmConfig
from rl.algorithms.dapo import Dapo
from rl.algorithms.dr_grpo import DrGrpo
from rl.algorithms.grpo import Grpo
from rl.algorithms.gspo import Gspo
from rl.algorithms.ppo import Ppo
from rl.algorithms.reinforce_pp import ReinforcePP
from rl.algorithms.rloo import Rloo
from rl.algorithms.surrogate import Clip

CUSTOM = "custom"


class Builder(NamedTuple):
    """How an algorithm is made, how its losses are added up unless the configuration says otherwise, and whether the
    learner needs a value head for it.
    """  # noqa: D205

    make: Callable[[AlgorithmConfig], Algorithm | CriticAlgorithm]
    aggregation: Aggregation
    has_critic: bool = False


def _clip(config: AlgorithmConfig) -> Clip:
    return Clip(config.clip_low, config.clip_high)


def _grpo(config: AlgorithmConfig) -> Algorithm:
    return Grpo(clip=_clip(config), normalize=config.normalize_advantage)


def _dapo(config: AlgorithmConfig) -> Algorithm:
    return Dapo(clip=_clip(config), normalize=config.normalize_advantage)


def _dr_grpo(config: AlgorithmConfig) -> Algorithm:
    return DrGrpo(clip=_clip(config))


def _rloo(_: AlgorithmConfig) -> Algorithm:
    return Rloo()


def _reinforce_pp(config: AlgorithmConfig) -> Algorithm:
    return ReinforcePP(clip=_clip(config), group_baseline=False)


def _reinforce_pp_baseline(config: AlgorithmConfig) -> Algorithm:
    return ReinforcePP(clip=_clip(config), group_baseline=True)


def _gspo(config: AlgorithmConfig) -> Algorithm:
    return Gspo(clip=_clip(config))


def _cispo(config: AlgorithmConfig) -> Algorithm:
    return Cispo(clip_low=config.clip_low, clip_high=config.clip_high)


def _ppo(config: AlgorithmConfig) -> CriticAlgorithm:
    return Ppo(
        clip=_clip(config),
        gamma=config.gamma,
        gae_lambda=config.gae_lambda,
        credit=config.credit,
        whiten=config.whiten_advantages,
        value_coef=config.value_coef,
        value_clip=config.value_clip,
    )


BUILDERS: dict[str, Builder] = {
    "grpo": Builder(_grpo, Aggregation.token_mean),
    "dapo": Builder(_dapo, Aggregation.token_mean),
    "dr_grpo": Builder(_dr_grpo, Aggregation.episode_sum),
    "rloo": Builder(_rloo, Aggregation.episode_sum),
    "reinforce_pp": Builder(_reinforce_pp, Aggregation.episode_mean),
    "reinforce_pp_baseline": Builder(_reinforce_pp_baseline, Aggregation.episode_mean),
    "gspo": Builder(_gspo, Aggregation.episode_mean),
    "cispo": Builder(_cispo, Aggregation.token_mean),
    "ppo": Builder(_ppo, Aggregation.token_mean, has_critic=True),
}


def build_algorithm(
    config: AlgorithmConfig, custom: Callable[..., Algorithm] | None = None
) -> Algorithm | CriticAlgorithm:
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
    return builder.make(config)


def has_critic(config: AlgorithmConfig) -> bool:
    """Whether the learner needs a value head."""
    return config.name in BUILDERS and BUILDERS[config.name].has_critic


def aggregation_of(config: AlgorithmConfig) -> Aggregation:
    """How losses are added up: as configured, or else as the algorithm does (a user's own: over all tokens)."""
    if config.aggregation is not Aggregation.own:
        return config.aggregation
    return Aggregation.token_mean if config.name == CUSTOM else BUILDERS[config.name].aggregation

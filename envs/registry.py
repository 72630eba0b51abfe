"""Environments by name: an explicit table, and `custom` for a user's own (`envs.custom`).

Workers build the factory (it owns the sandboxes), the driver builds the tasks (they need none). Both read the same
`EnvConfig`; `check_env_config` finds its mistakes without starting anything.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from envs.base import EnvError, EnvFactory, TaskSource
from envs.bfcl.env import BfclFactory
from envs.bfcl.tasks import BfclTasks
from envs.coding.codeio import CodeioTasks
from envs.coding.env import coding_factory
from envs.coding.examples import problem_of
from envs.coding.humaneval import HumanEvalTasks
from envs.coding.tasks import CodingTasks
from envs.config import EnvConfig, SandboxKind
from envs.custom import custom_factory, custom_tasks
from envs.dataset import dataset_tasks
from envs.extension import load_target

CUSTOM = "custom"
FROM_PACKAGES = ("bfcl", "codeio", "humaneval")
"""Environments whose tasks are read from installed packages, which may be missing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Environment:
    """How an environment is built: the factory for a worker, the tasks of a run from its seed."""

    factory: Callable[[EnvConfig], EnvFactory]
    tasks: Callable[[EnvConfig, int], TaskSource]


def _coding_tasks(config: EnvConfig, seed: int) -> TaskSource:
    tasks = dataset_tasks(config, seed=seed, accept=problem_of)
    if tasks is not None:
        return tasks
    return CodingTasks(seed=seed, num_visible=config.num_visible_checks, num_hidden=config.num_hidden_checks)


def _codeio_tasks(config: EnvConfig, seed: int) -> TaskSource:
    return CodeioTasks(seed=seed, num_visible=config.num_visible_checks, num_hidden=config.num_hidden_checks)


def _humaneval_tasks(config: EnvConfig, seed: int) -> TaskSource:
    return HumanEvalTasks()


def _bfcl_tasks(config: EnvConfig, seed: int) -> TaskSource:
    return BfclTasks(config.bfcl_categories, seed=seed)


ENVIRONMENTS: Mapping[str, Environment] = {
    "bfcl": Environment(factory=BfclFactory, tasks=_bfcl_tasks),
    "coding": Environment(factory=coding_factory, tasks=_coding_tasks),
    "codeio": Environment(factory=coding_factory, tasks=_codeio_tasks),
    "humaneval": Environment(factory=coding_factory, tasks=_humaneval_tasks),
    CUSTOM: Environment(factory=custom_factory, tasks=custom_tasks),
}


def check_env_config(config: EnvConfig) -> Environment:
    """The environment that the configuration names. Raises `EnvError` or `ExtensionError` for a mistake in it."""
    environment = ENVIRONMENTS.get(config.name)
    if environment is None:
        near = difflib.get_close_matches(config.name, ENVIRONMENTS, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"choose one of {sorted(ENVIRONMENTS)}"
        raise EnvError(f"env.name: unknown environment, got {config.name!r}; {hint}")
    if config.name == CUSTOM:
        if config.target is None:
            raise EnvError("env.target: missing, got env.name=custom alone; set env.target=module:attribute")
        load_target(config.target, config.params, "env")
    elif config.target is not None or config.params:
        raise EnvError(
            f"env.target: target and params belong to env.name=custom, got {config.target!r} and {config.params!r} "
            f"with {config.name!r}; set env.name=custom or drop them"
        )
    for key in ("max_turns", "max_tokens_per_turn", "sandboxes_per_worker", "sandbox_memory_mb", "call_timeout_s"):
        if not getattr(config, key) > 0:
            raise EnvError(f"env.{key}: must be positive, got {getattr(config, key)}; raise it")
    if config.name in FROM_PACKAGES and (config.dataset is not None or config.datasets):
        given = config.dataset or ", ".join(config.datasets)
        raise EnvError(
            f"env.dataset: {config.name} has its own tasks, got {given!r}; drop it, or use env=coding with your data"
        )
    if config.sandbox_runtime is not None and config.sandbox is not SandboxKind.docker:
        raise EnvError(
            f"env.sandbox_runtime: belongs to env.sandbox=docker, got {config.sandbox_runtime!r} with "
            f"{config.sandbox.value!r}; set env.sandbox=docker or drop it"
        )
    if not config.sandbox_image.strip():
        raise EnvError(f"env.sandbox_image: must name an image, got {config.sandbox_image!r}; make sandbox-image")
    return environment


def choose_boxes(config: EnvConfig) -> None:
    """Make the configured image and runtime those of the docker boxes that this process starts."""
    if config.sandbox is SandboxKind.docker:
        # Here, so that runs with other boxes do not load the client of the engine.
        from envs.sandbox.docker import DockerOptions, choose

        choose(DockerOptions(image=config.sandbox_image, runtime=config.sandbox_runtime))


def build_factory(config: EnvConfig) -> EnvFactory:
    """The factory of a rollout worker; it starts the sandboxes."""
    environment = check_env_config(config)
    choose_boxes(config)
    return environment.factory(config)


def build_tasks(config: EnvConfig, *, seed: int) -> TaskSource:
    """The tasks of a run; a task file is read and checked here."""
    return check_env_config(config).tasks(config, seed)

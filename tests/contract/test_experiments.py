"""Every shipped configuration composes and passes every check; every value has one home."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from rl import config_check, entry, overrides
from rl.config import RunConfig
from scripts.ablate import ARMS, run_name

OPTIONS = overrides.group_options()
FILES = sorted(overrides.CONF_FOLDER.glob("*/*.yaml"))


@pytest.mark.parametrize("experiment", OPTIONS["experiment"])
def test_every_experiment_composes_and_passes_all_checks(experiment: str) -> None:
    given = overrides.reject_unknown([f"+experiment={experiment}"])
    config = entry.checked(overrides.compose_run(given))
    assert config.run.name == experiment  # the folder of a run is found by the experiment's name
    config_check.preflight(config)


@pytest.mark.parametrize("arm", ARMS)
def test_every_arm_of_the_ablation_passes_all_checks(arm: str) -> None:
    given = ["+experiment=coding", f"run.name={run_name(arm, 0)}", *ARMS[arm]]
    entry.checked(overrides.compose_run(overrides.reject_unknown(given)))


@pytest.mark.parametrize(
    ("group", "option"),
    [(group, option) for group, options in OPTIONS.items() for option in options if group != "experiment"],
)
def test_every_option_of_every_group_composes(group: str, option: str) -> None:
    config = overrides.compose_run(overrides.reject_unknown([f"{group}={option}"]))
    assert isinstance(config, RunConfig)


def test_every_group_is_a_section() -> None:
    assert {group for group in OPTIONS if group != "experiment"} <= set(overrides.sections())


def test_the_options_are_what_the_registries_build() -> None:
    from envs.registry import ENVIRONMENTS
    from rewards.registry import REWARDS
    from rl.algorithms.registry import BUILDERS

    assert set(OPTIONS["env"]) == {*ENVIRONMENTS, config_check.CUSTOM}
    assert set(OPTIONS["reward"]) == {*REWARDS, config_check.CUSTOM}
    assert set(OPTIONS["algorithm"]) == {*BUILDERS, config_check.CUSTOM}


def values(file: Path) -> dict[str, Any]:
    """Full key and value of everything a shipped file sets."""

    def walk(node: Any, prefix: str) -> dict[str, Any]:
        if not isinstance(node, dict):
            return {prefix: node}
        return {key: value for name, inner in node.items() for key, value in walk(inner, f"{prefix}.{name}").items()}

    content = yaml.safe_load(file.read_text()) or {}
    content.pop("defaults", None)
    is_global = "@package _global_" in file.read_text()
    found = walk(content, "" if is_global else f".{file.parent.name}")
    return {key.lstrip("."): value for key, value in found.items() if value != {}}


@pytest.mark.parametrize("file", FILES, ids=lambda file: f"{file.parent.name}-{file.stem}")
def test_every_shipped_value_is_a_known_key_and_not_its_default(file: Path) -> None:
    for key, value in values(file).items():
        assert key in overrides.leaves() or overrides.open_mapping_of(key), f"{file}: {key} is not a key"
        if not key.endswith(".name"):  # an option says its own name
            default = overrides.shown(config_check.dataclass_default(key))
            assert default != str(value), f"{file}: {key} repeats its default"

"""Environments whose data is in packages are checked before a run starts."""

import pytest

from envs import data_packages
from envs.base import EnvError
from envs.coding import codeio, humaneval
from rl import entry, overrides
from rl.config_check import ConfigError

ROOM = "model.max_positions=2048"


def _checked(*given):
    return entry.checked(overrides.compose_run(overrides.reject_unknown([*given, ROOM])))


@pytest.mark.parametrize(("name", "module"), [("codeio", codeio), ("humaneval", humaneval)])
def test_a_missing_data_package_is_one_line_with_the_remedy(monkeypatch, name, module):
    def missing(package, file):
        return data_packages.data_file("not-" + package, file)

    monkeypatch.setattr(module, "data_file", missing)
    with pytest.raises(ConfigError) as caught:
        _checked(f"env={name}")
    assert str(caught.value) == f"data package: not installed, got 'not-{module.PACKAGE}'; run `make data-packages`"


def test_nothing_is_trained_on_humaneval():
    try:
        humaneval.HumanEvalTasks()
    except EnvError as problem:
        pytest.skip(str(problem))
    with pytest.raises(ConfigError) as caught:
        _checked("env=humaneval")
    assert str(caught.value) == "env.name: for evaluation only, got 'humaneval'; train with env=codeio"

"""What a line tells of the files: which has the mistake, and what they compose without the user's own value."""

import sys
from pathlib import Path

import pytest

from rl import config_check, entry, overrides
from rl.config_check import ConfigError

SHIPPED = overrides.CONF_FOLDER


def line(*given: str, folders: tuple[Path, ...] = (SHIPPED,)) -> str:
    """The line about values that do not pass, or types that do not fit."""
    kept = overrides.reject_unknown(given, folders=folders)
    with pytest.raises(ConfigError) as caught:
        entry.checked(overrides.compose_run(kept, folders=folders), kept, folders)
    return str(caught.value)


@pytest.fixture
def own(tmp_path: Path) -> tuple[Path, ...]:
    """A folder of one's own: an experiment that sets values, and others with mistakes."""
    for name, content in {
        "experiment/mine": "# @package _global_\nrun: {name: mine, rounds: 7}\nrollout: {group_size: 4}\n",
        "experiment/low": "# @package _global_\nrun: {name: low, rounds: 0}\nalgorithm: {gae_lambda: 2.0}\n",
        "experiment/typo": "# @package _global_\nrun: {name: typo, rounds: many}\n",
        "experiment/unknown": "# @package _global_\nenv:\n  max_turn: 3\n",
        "experiment/broken": "# @package _global_\nenv: [\n",
        "algorithm/mine": "name: ppo\ngae_lambda: 3.0\n",
    }.items():
        file = tmp_path / f"{name}.yaml"
        file.parent.mkdir(exist_ok=True)
        file.write_text(content)
    return SHIPPED, tmp_path


@pytest.mark.parametrize(
    ("given", "key", "told"),
    [
        (["algorithm=ppo", "algorithm.gae_lambda=1.5"], "algorithm.gae_lambda", "0.95"),
        (["algorithm=ppo", "algorithm.gae_lambda=x"], "algorithm.gae_lambda", "0.95"),
        (["algorithm=ppo", "algorithm={gae_lambda: 1.5}"], "algorithm.gae_lambda", "0.95"),
        (["algorithm.gae_lambda=1.5", "algorithm=ppo"], "algorithm.gae_lambda", "0.95"),
        (["algorithm=ppo", "algorithm.gae_lambda=0.5", "algorithm.gae_lambda=1.5"], "algorithm.gae_lambda", "0.95"),
        (["algorithm=ppo", "algorithm.clip_high=-1"], "algorithm.clip_high", "0.2"),
        (["algorithm=gspo", "algorithm.clip_high=-1"], "algorithm.clip_high", "0.0004"),
        (["algorithm=dapo", "algorithm.normalize_advantage=si"], "algorithm.normalize_advantage", "true"),
        (["cluster=local_ep2", "learner.num_ranks=0"], "learner.num_ranks", "2"),
        (["cluster=local_ep2", "learner.num_ranks=x"], "learner.num_ranks", "2"),
        (["model=mini_deepseek_v3", "model.num_experts=x"], "model.num_experts", "8"),
        (["model=kimi_k2", "model.num_experts=x"], "model.num_experts", "384"),
        (["model=kimi_k2", "model.rope.theta=x"], "model.rope.theta", "50000.0"),
        (["parity.mean_abs_nats=-1"], "parity.mean_abs_nats", "null"),
    ],
)
def test_a_line_tells_the_default_of_the_options_that_were_chosen(given: list[str], key: str, told: str) -> None:
    said = line("+experiment=coding", *given)
    assert said.startswith(f"{key}: must be ")
    assert said.endswith(f"; the default is {told}")


def test_a_value_of_ones_own_experiment_is_the_default_below_it(own: tuple[Path, ...]) -> None:
    assert line("+experiment=mine", "run.rounds=-1", folders=own).endswith("got -1; the default is 7")
    assert line("+experiment=mine", "run.rounds=x", folders=own).endswith("got x; the default is 7")
    assert line("+experiment=mine", "rollout.group_size=1", folders=own).endswith("got 1; the default is 4")


def test_a_refused_value_of_a_file_is_not_told_as_its_own_remedy(own: tuple[Path, ...]) -> None:
    assert line("+experiment=low", folders=own) == "run.rounds: must be at least 1, got 0; the default is 30"
    said = line("+experiment=low", "run.rounds=3", "algorithm=ppo", folders=own)
    assert said == "algorithm.gae_lambda: must be at most 1, got 2.0; the default is 0.95"
    said = line("+experiment=coding", "algorithm=mine", folders=own)
    assert said == "algorithm.gae_lambda: must be at most 1, got 3.0; the default is 1.0"


def test_another_mistake_does_not_hide_the_default() -> None:
    said = line("+experiment=coding", "algorithm=ppo", "algorithm.clip_high=x", "algorithm.gae_lambda=y")
    assert said == "algorithm.clip_high: must be a number, got x; the default is 0.2"


def test_a_mistake_in_a_file_of_ones_own_names_the_file(own: tuple[Path, ...]) -> None:
    def told(name: str) -> str:
        return line(f"+experiment={name}", folders=own)

    assert (
        told("unknown") == "env.max_turn: no such key, got it in experiment/unknown.yaml; did you mean 'env.max_turns'?"
    )
    assert told("typo") == "run.rounds: must be a whole number in experiment/typo.yaml, got many; the default is 30"
    assert told("broken").startswith("broken.yaml: cannot be read as YAML, got ")


def test_the_program_tells_the_same_and_help_shows_what_the_files_compose(
    own: tuple[Path, ...], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def told(*given: str) -> str:
        monkeypatch.setattr(sys, "argv", ["rl.train", *given, f"run.root={tmp_path}"])
        entry.hydra_main(lambda config: None, module="rl.train")
        out = capsys.readouterr()
        return out.err + out.out

    folder = ["--config-dir", str(own[1])]
    assert told(*folder, "+experiment=mine", "run.rounds=-1") == (
        "run.rounds: must be at least 1, got -1; the default is 7\n"
    )
    swept = told("-m", "+experiment=coding", "algorithm=grpo,ppo", "algorithm.clip_high=-1")
    assert swept.endswith("got -1.0; the default is 0.28\n"), "the first job is GRPO"
    shown = told("--help").splitlines()
    composed = config_check.flatten(overrides.compose_run([]))
    for key in overrides.leaves():
        assert f"    {key} = {overrides.shown(composed[key])}" in shown

import pytest

from envs.base import EnvError
from envs.coding.tasks import CodingTasks
from envs.config import EnvConfig
from envs.dataset import DatasetTasks, main
from envs.extension import ExtensionError
from envs.registry import build_tasks, check_env_config


def test_the_default_tasks_follow_the_configuration():
    tasks = build_tasks(EnvConfig(num_visible_checks=2, num_hidden_checks=3), seed=4)
    assert isinstance(tasks, CodingTasks)
    assert tasks.train(1) == CodingTasks(seed=4, num_visible=2, num_hidden=3).train(1)


def test_a_task_file_replaces_the_procedural_tasks(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    path = str(tmp_path / "tasks.jsonl")
    main(["export", "--count", "4", path])
    tasks = build_tasks(EnvConfig(dataset=path), seed=0)
    assert isinstance(tasks, DatasetTasks)
    assert {tasks.train(index).id for index in range(4)} == {f"coding/train/0/{index}" for index in range(4)}


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (EnvConfig(name="codign"), "env.name: unknown environment, got 'codign'; did you mean 'coding'?"),
        (
            EnvConfig(name="zzz"),
            "env.name: unknown environment, got 'zzz'; choose one of "
            "['bfcl', 'codeio', 'coding', 'custom', 'humaneval']",
        ),
        (EnvConfig(name="custom"), "env.target: missing, got env.name=custom alone; set env.target=module:attribute"),
        (
            EnvConfig(target="a:b"),
            "env.target: target and params belong to env.name=custom, got 'a:b' and {} with 'coding'; "
            "set env.name=custom or drop them",
        ),
        (
            EnvConfig(name="codeio", dataset="my.jsonl"),
            "env.dataset: codeio has its own tasks, got 'my.jsonl'; drop it, or use env=coding with your data",
        ),
        (
            EnvConfig(name="humaneval", datasets={"mine": {"path": "my.jsonl"}}),
            "env.dataset: humaneval has its own tasks, got 'mine'; drop it, or use env=coding with your data",
        ),
        (EnvConfig(max_turns=0), "env.max_turns: must be positive, got 0; raise it"),
        (EnvConfig(call_timeout_s=float("nan")), "env.call_timeout_s: must be positive, got nan; raise it"),
    ],
)
def test_mistakes_are_named_before_anything_starts(config, message):
    with pytest.raises(EnvError) as caught:
        check_env_config(config)
    assert str(caught.value) == message


def test_a_targets_parameters_are_checked():
    with pytest.raises(ExtensionError, match=r"env.params.hihgest: no such parameter of TaskList, got 1; it takes"):
        check_env_config(EnvConfig(name="custom", target="envs.dataset:TaskList", params={"hihgest": 1}))

"""Data sets: rows that a reader could take for something else without a word."""

import json

import datasets
import pytest

from envs.config import DatasetConfig
from envs.data.locate import hub_id
from envs.data.mixed import MixedTasks
from envs.dataset import DatasetError, DatasetTasks


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")


def _write(path, *rows):
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return str(path)


def _error(source):
    with pytest.raises(DatasetError) as caught:
        DatasetTasks(source, seed=0)
    return str(caught.value)


def _verl(extra_info, number):
    prompt = [{"role": "user", "content": f"q{number}"}]
    return {
        "data_source": "m",
        "prompt": prompt,
        "reward_model": {"ground_truth": str(number)},
        "extra_info": extra_info,
    }


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ('{"prompt": "\\ud83d"}', "half of a surrogate pair, which is no character, got \\ud83d in"),
        ('{"prompt": "a", "x": [{"\\udc00": 1}]}', "half of a surrogate pair, which is no character, got \\udc00 in"),
        ({"prompt": "a", "split": ["train"]}, "split: unknown, got ['train'] in"),
        (
            {"prompt": "a", "reward_model": {"ground_truth": 1}},
            "the rows before are of trl, and 'reward_model' is a column of another convention, got ['prompt', 'rewar",
        ),
    ],
)
def test_a_row_that_would_be_misread_is_refused(tmp_path, row, problem):
    path = _write(tmp_path / "a.jsonl", {"prompt": "good \U0001f642"}, row)
    assert _error(path).startswith(f"env.dataset: row 2 of {path!r}: {problem}")


def test_a_named_format_takes_columns_of_other_conventions(tmp_path):
    rows = [{"prompt": "a"}, {"prompt": "b", "reward_model": 1}]
    source = DatasetConfig(path=_write(tmp_path / "a.jsonl", *rows), format="trl")
    tasks = DatasetTasks(source, seed=0)
    assert sorted(str(task.payload) for task in (*tasks.held_out(9), tasks.train(0))) == ["{'reward_model': 1}", "{}"]


def test_a_rename_over_a_column_is_refused(tmp_path):
    path = _write(tmp_path / "a.jsonl", {"question": "a", "prompt": "b"})
    assert "env.dataset_columns: 'question' would replace the column 'prompt', got the columns ['question'" in _error(
        DatasetConfig(path=path, columns={"question": "prompt"})
    )


def test_null_fields_of_parquet_are_absent_fields(tmp_path):
    path = str(tmp_path / "a.parquet")
    rows = [_verl({"split": "test", "index": 0}, 0), *(_verl({"split": None, "index": None}, n) for n in (1, 2))]
    datasets.Dataset.from_list(rows).to_parquet(path)
    tasks = DatasetTasks(path, seed=0)
    assert [task.id for task in tasks.held_out(9)] == ["m/test/0"]
    assert {tasks.train(n).id for n in range(2)} == {"a.parquet:2", "a.parquet:3"}


def test_a_column_is_not_replaced_by_a_key_of_info(tmp_path):
    rows = [{"prompt": f"q{n}", "answer": "column", "info": {"answer": "info", "level": n}} for n in range(2)]
    (task,) = DatasetTasks(_write(tmp_path / "a.jsonl", *rows), seed=0).held_out(9)
    assert task.payload["answer"] == "column"
    assert "level" in task.payload


def test_files_of_one_name_in_two_folders_have_ids_of_their_own(tmp_path):
    for name in ("x", "y"):
        _write(tmp_path / name / "a.jsonl", {"prompt": name})
    tasks = DatasetTasks(str(tmp_path / "*" / "a.jsonl"), seed=0)
    assert {tasks.train(0).id, *(task.id for task in tasks.held_out(9))} == {"x/a.jsonl:1", "y/a.jsonl:1"}


def test_the_order_of_the_settings_changes_no_task_of_a_mixture(tmp_path):
    settings = {
        name: DatasetConfig(path=_write(tmp_path / f"{name}.jsonl", *({"prompt": f"{name} {n}"} for n in range(20))))
        for name in "abc"
    }

    def first(names):
        mixed = MixedTasks(
            {name: DatasetTasks(settings[name], seed=0) for name in names},
            {name: settings[name] for name in names},
            seed=0,
        )
        return [mixed.train(index).id for index in range(100)], [task.id for task in mixed.held_out(6)]

    assert first("abc") == first("cab")


def test_the_address_of_a_hub_file_is_no_hub_id():
    assert hub_id("hf://org/name") == "org/name"
    assert hub_id("hf://datasets/org/name/train.jsonl") is None

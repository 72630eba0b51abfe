# ruff: noqa: E501 (whole lines of messages)
"""Data sets: conventions, bad rows, order, memory."""

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import datasets
import pytest

from envs.config import DatasetConfig, EnvConfig
from envs.data import locate
from envs.dataset import DatasetError, DatasetTasks, dataset_tasks, main
from envs.registry import build_tasks
from rl import entry
from rollout.types import Role, Split

ROOT = Path(__file__).parents[3]
CONVENTIONS = {
    "verl": {
        "data_source": "m",
        "prompt": [{"role": "system", "content": "s"}, {"role": "user", "content": "q"}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": "4"},
        "extra_info": {"split": "test", "index": 7},
    },
    "skyrl": {"prompt": "q", "env_class": "gsm", "reward_spec": {"ground_truth": "4"}, "max_turns": 3},
    "nemo_gym": {
        "responses_create_params": {"input": [{"role": "user", "content": "q"}], "tools": [{"name": "t"}]},
        "answer": "4",
    },
    "verifiers": {"prompt": "q", "answer": "4", "info": '{"level": 2}', "task": "t"},
    "trl": {"prompt": "q", "answer": "4"},
    "chat": {"messages": [{"role": "user", "content": "q"}], "answer": "4"},
}


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")


def _write(path: Path, rows) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def _tasks(config: EnvConfig, *, seed: int) -> Any:
    tasks = dataset_tasks(config, seed=seed)
    assert tasks is not None
    return tasks


def _questions(count: int, mark: str = "q", **more):
    return [{"id": f"{mark}{n}", "prompt": f"{mark} {n}", "answer": n, **more} for n in range(count)]


def _ids(tasks, count):
    return [tasks.train(index).id for index in range(count)]


@pytest.mark.parametrize("name", CONVENTIONS)
@pytest.mark.parametrize("kind", ["jsonl", "parquet", "saved"])
def test_every_convention_is_recognised_and_gives_prompt_and_answer(tmp_path, name, kind):
    row = CONVENTIONS[name]
    other = json.loads(json.dumps(row).replace('"q"', '"other"').replace('"test"', '"train"'))
    path = tmp_path / f"x.{kind}"
    if kind == "jsonl":
        _write(path, [row, other])
    elif kind == "parquet":
        datasets.Dataset.from_list([row, other]).to_parquet(path)
    else:
        datasets.DatasetDict({"train": datasets.Dataset.from_list([row, other])}).save_to_disk(path)
    tasks = DatasetTasks(str(path), seed=0)
    both = {task.messages[-1].content: task for task in (tasks.train(0), *tasks.held_out(1))}
    assert set(both) == {"q", "other"}
    task = both["q"]
    assert task.payload["answer"] == "4"
    assert task.messages[-1].role is Role.USER
    assert DatasetTasks(DatasetConfig(path=str(path), format=name), seed=0).held_out(1) == tasks.held_out(1)
    if name == "verl":
        assert (task.id, task.split, task.messages[0].content) == ("m/test/7", Split.HELD_OUT, "s")
        assert task.payload["extra_info"] == {"split": "test", "index": 7}
    if name == "verifiers":
        assert dict(task.payload) == {"answer": "4", "level": 2, "task": "t"}
    if name == "nemo_gym":
        assert [dict(tool) for tool in task.tools] == [{"name": "t"}]


ENV = """
from envs.custom import TextEnv

class Any(TextEnv):
    def tasks(self):
        return []

    def grade(self, task, answers):
        return True
"""


def _arguments(root: Path, *given: str) -> list[str]:
    (root / "any_env.py").write_text(ENV)
    shared = ("+experiment=coding", "env=custom", "env.target=any_env:Any", f"run.root={root / 'runs'}")
    return [*shared, *given]


def _preflight(monkeypatch, capsys, root: Path, *given: str) -> str:
    """The one line with which `python -m rl.train` leaves instead of starting."""

    def never(config):
        raise AssertionError("the run was started")

    monkeypatch.syspath_prepend(root)
    monkeypatch.setattr(sys, "argv", ["rl.train", *_arguments(root, *given)])
    assert entry.hydra_main(never, module="rl.train") == entry.EXIT_CONFIG
    line, end = capsys.readouterr().err.split("\n")
    assert not end
    assert not (root / "runs").exists()
    return line.replace(str(root), "DIR")


USER = {"role": "user", "content": "q"}


@pytest.mark.parametrize(
    ("bad", "line"),
    [
        (
            {"promt": "x", "answer": 1},
            "row 3 of 'DIR/x.jsonl': the column 'prompt' is missing, got none in a row with the keys "
            "['promt', 'answer']; did you mean 'promt'? rename it",
        ),
        (
            {"prompt": " ", "answer": 1},
            "row 3 of 'DIR/x.jsonl': prompt: empty, got ' ' in a row with the keys ['prompt', 'answer']; give a text or "
            "messages",
        ),
        (
            {"prompt": "a" * 10 * 2**20},
            "row 3 of 'DIR/x.jsonl': longer than env.dataset_max_row_mb, got 10.0 MB of 1 in a row with the keys []; "
            "drop the row or raise env.dataset_max_row_mb",
        ),
        (
            {"prompt": [{"role": "usr", "content": "q"}]},
            "row 3 of 'DIR/x.jsonl': prompt[0].role: unknown role, got 'usr' in a row with the keys ['prompt']; use one "
            "of system, user, assistant, tool",
        ),
        (
            {"prompt": [USER, {"role": "assistant", "content": "yes"}]},
            "row 3 of 'DIR/x.jsonl': prompt[1]: ends with the assistant, which leaves nothing to answer, got 'yes' in a "
            "row with the keys ['prompt']; end with a message of the user",
        ),
        (
            '{"prompt": "x", "answer": NaN}',
            'row 3 of \'DIR/x.jsonl\': not JSON (NaN is not JSON), got {"prompt": "x", "answer": NaN} in a row with '
            "the keys []; write every row as one JSON object",
        ),
        (
            '{"prompt": "x", "answer": 1e999}',
            "row 3 of 'DIR/x.jsonl': answer: not a finite number, got inf in a row with the keys ['prompt', 'answer']; "
            "drop the row or the value",
        ),
    ],
)
def test_a_bad_row_stops_the_command_with_its_file_row_and_column(tmp_path, monkeypatch, capsys, bad, line):
    path = Path(_write(tmp_path / "x.jsonl", [{"prompt": "a"}, {"prompt": "b"}]))
    with path.open("a") as file:
        file.write((bad if isinstance(bad, str) else json.dumps(bad)) + "\n")
    assert _preflight(monkeypatch, capsys, tmp_path, f"env.dataset={path}") == f"env.dataset: {line}"


def test_a_duplicate_id_names_both_rows(tmp_path, monkeypatch, capsys):
    path = _write(tmp_path / "x.jsonl", [*_questions(3), {"id": "q1", "prompt": "z"}])
    assert _preflight(monkeypatch, capsys, tmp_path, f"env.dataset={path}") == (
        "env.dataset 'DIR/x.jsonl': ids must differ, got 'q1' in rows 2 and 4; rename one"
    )


def test_bytes_that_are_no_text_name_their_row(tmp_path, monkeypatch, capsys):
    path = tmp_path / "x.jsonl"
    path.write_bytes(b'{"prompt": "a"}\n{"prompt": "\xff"}\n')
    assert _preflight(monkeypatch, capsys, tmp_path, f"env.dataset={path}") == (
        "env.dataset: could not be read (row 2 is not UTF-8: invalid start byte), got 'DIR/x.jsonl'; give a JSON-lines "
        "file in UTF-8"
    )


def test_a_parquet_file_that_is_cut_short_is_named(tmp_path, monkeypatch, capsys):
    path = tmp_path / "x.parquet"
    datasets.Dataset.from_list(_questions(50)).to_parquet(path)
    path.write_bytes(path.read_bytes()[:-20])
    line = _preflight(monkeypatch, capsys, tmp_path, f"env.dataset={path}")
    assert line.startswith("env.dataset: could not be read (ArrowInvalid: Parquet magic bytes not found")
    assert line.endswith("got 'DIR/x.parquet'; give a JSON-lines file in UTF-8, or a whole Parquet file")


def test_a_number_that_is_none_in_a_parquet_file_is_named_with_its_path(tmp_path, monkeypatch, capsys):
    rows = [{"prompt": "a", "extra": {"level": 1.0}}, {"prompt": "b", "extra": {"level": float("nan")}}]
    datasets.Dataset.from_list(rows).to_parquet(tmp_path / "x.parquet")
    assert _preflight(monkeypatch, capsys, tmp_path, f"env.dataset={tmp_path / 'x.parquet'}") == (
        "env.dataset: row 2 of 'DIR/x.parquet': extra.level: not a finite number, got nan in a row with the keys "
        "['prompt', 'extra']; drop the row or the value"
    )


def test_a_hub_id_without_network_is_one_line(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    line = _preflight(monkeypatch, capsys, tmp_path, "env.dataset=some-org/some-set")
    assert line.startswith("env.dataset: could not be read (")
    assert line.endswith("got 'some-org/some-set'; copy it here, or reach the hub")


@pytest.mark.parametrize(
    ("given", "line"),
    [
        (["env.datasets.m.pth=x"], "env.datasets.m.pth: no such key, got x; did you mean 'env.datasets.m.path'?"),
        (["env.datasets.m.weight=q"], "env.datasets.m.weight: must be a float, got 'q'; the default is 1.0"),
        (
            ["env.datasets.m.weight=2"],
            "env.datasets.m.path: missing, got the keys ['weight']; say where the data set lies",
        ),
        (["env.datasets.m=3"], "env.datasets.m: must have keys, got 3; set env.datasets.m.path"),
        (
            ["env.dataset=DIR/x.jsonl", "env.dataset_format=verll"],
            "env.dataset_format: no such format, got 'verll'; did you mean 'verl'?",
        ),
        (
            ["env.dataset=DIR/x.jsonl", "env.dataset_max_row_mb=0"],
            "env.dataset_max_row_mb: must be above 0, got 0.0; the default is 1.0",
        ),
        (
            ["env.dataset=DIR/x.jsonl", "env.dataset_columns.quest=prompt"],
            "env.dataset: row 1 of 'DIR/x.jsonl': env.dataset_columns: the row has no column 'quest', got the columns "
            "['id', 'prompt', 'answer'] in a row with the keys []; rename a column that is there",
        ),
        (
            ["env.dataset=DIR/x.jsonl", "env.curriculum_column=level"],
            "env.dataset: row 1 of 'DIR/x.jsonl': env.curriculum_column: 'level' must be a number, got None in a row "
            "with the keys ['id', 'prompt', 'answer']; give every row one",
        ),
        (
            ["env.dataset=DIR/x.jsonl", "env.datasets.m.path=DIR/x.jsonl"],
            "env.datasets: goes without env.dataset, got both 'DIR/x.jsonl' and ['m']; drop one",
        ),
        (
            ["env.datasets.m.path=DIR/x.jsonl", "env.datasets.m.last_task=-1"],
            "env.datasets.m.last_task: must be beyond first_task=0, or 0 for no end, got -1; raise it",
        ),
        (
            ["env.datasets.m.path=DIR/x.jsonl", "env.datasets.m.first_task=5"],
            "env.datasets: no source gives training task 0, got stages with a gap; let one last",
        ),
    ],
)
def test_a_bad_setting_is_one_line(tmp_path, monkeypatch, capsys, given, line):
    _write(tmp_path / "x.jsonl", _questions(20))
    given = [each.replace("DIR", str(tmp_path)) for each in given]
    assert _preflight(monkeypatch, capsys, tmp_path, *given) == line


def test_columns_of_two_conventions_name_both(tmp_path):
    path = _write(tmp_path / "x.jsonl", [CONVENTIONS["chat"] | CONVENTIONS["verl"]])
    with pytest.raises(DatasetError, match=r"the columns fit verl and chat, got .*; set the format to one of"):
        DatasetTasks(path, seed=0)


def test_the_command_itself_starts_no_ray(tmp_path):
    path = _write(tmp_path / "x.jsonl", [{"prompt": ""}])
    code = (
        "import atexit, runpy, sys; "
        "atexit.register(lambda: print(sorted(set(sys.modules) & {'torch', 'ray', 'deepspeed'}))); "
        "sys.argv[0] = 'rl.train'; runpy.run_module('rl.train', run_name='__main__')"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *_arguments(tmp_path, f"env.dataset={path}")],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": f"{ROOT}:{tmp_path}", "HF_DATASETS_CACHE": str(tmp_path / "cache")},
    )
    assert (done.returncode, done.stdout) == (2, "[]\n")
    assert done.stderr.startswith("env.dataset: row 1 of ")
    assert done.stderr.count("\n") == 1


def _mixture(tmp_path, **more):
    a = _write(tmp_path / "a.jsonl", _questions(30, "a"))
    b = _write(tmp_path / "b.jsonl", _questions(70, "b"))
    both = {"a": {"path": a, "weight": 3.0} | more.get("a", {}), "b": {"path": b} | more.get("b", {})}
    return EnvConfig(name="custom", target="x:y", datasets=both)


def test_a_mixture_keeps_its_weights_and_reads_every_source_in_its_own_order(tmp_path):
    mixed = _tasks(_mixture(tmp_path), seed=4)
    ids = _ids(mixed, 2300)
    assert Counter(each[0] for each in ids[:1000]) == {"a": 750, "b": 250}
    assert Counter(each[0] for each in ids[1000:2000]) == {"a": 750, "b": 250}
    for name in "ab":
        alone = DatasetTasks(str(tmp_path / f"{name}.jsonl"), seed=4)
        own = [each for each in ids if each[0] == name]
        assert own == [f"{name}/{each}" for each in _ids(alone, len(own))]
    held_out = {task.id for task in mixed.held_out(100)}
    assert not held_out & set(ids)
    assert _ids(_tasks(_mixture(tmp_path), seed=5), 100) != ids[:100]


def test_a_stopped_and_resumed_mixture_with_stages_gives_the_same_tasks(tmp_path):
    config = _mixture(tmp_path, a={"last_task": 1500}, b={"first_task": 40})
    whole = _ids(_tasks(config, seed=1), 1700)
    assert {each[0] for each in whole[:40]} == {"a"}
    assert {each[0] for each in whole[40:1500]} == {"a", "b"}
    assert {each[0] for each in whole[1500:]} == {"b"}
    drawn = [each for each in whole if each[0] == "b"]  # the stage's border neither skips nor repeats
    alone = DatasetTasks(str(tmp_path / "b.jsonl"), seed=1)
    assert drawn == [f"b/{each}" for each in _ids(alone, len(drawn))]
    for stop in (0, 39, 40, 41, 999, 1040, 1499, 1500, 1650):  # a new process, from the cursor on
        resumed = _tasks(config, seed=1)
        assert [resumed.train(index).id for index in range(stop, min(stop + 50, 1700))] == whole[stop : stop + 50]
    backwards = _tasks(config, seed=1)
    assert [backwards.train(index).id for index in range(1699, -1, -7)] == whole[1699::-7]


def test_a_prompt_held_out_in_one_source_and_trained_in_another_is_a_leak(tmp_path):
    config = _mixture(tmp_path)
    held = DatasetTasks(str(tmp_path / "a.jsonl"), seed=0).held_out(1)[0].messages[0].content
    _write(tmp_path / "b.jsonl", [*_questions(5, "b", split="train"), {"id": "x", "prompt": held, "split": "train"},
                                  {"id": "h", "prompt": "h", "split": "test"}])  # fmt: skip
    with pytest.raises(DatasetError, match=r"asks what a training task of env\.datasets\.b asks"):
        _tasks(config, seed=0)


def test_a_curriculum_goes_from_the_lowest_number_to_the_highest_and_then_on(tmp_path):
    rows = [{**row, "split": "train", "level": {"of": -n // 3}} for n, row in enumerate(_questions(30))]
    path = _write(tmp_path / "x.jsonl", [*rows, {"prompt": "h", "split": "test", "level": {"of": 0}}])
    config = EnvConfig(name="custom", dataset=path, curriculum_column="level.of")

    def levels(count, **more):
        tasks = _tasks(EnvConfig(name="custom", dataset=path, curriculum_column="level.of", **more), seed=2)
        return [tasks.train(index).payload["level"]["of"] for index in range(count)]

    expected = sorted(row["level"]["of"] for row in rows)
    assert levels(30) == expected
    assert levels(10, curriculum_tasks=10) == expected[::3]
    after = _ids(_tasks(config, seed=2), 60)[30:]
    assert sorted(after) == sorted(row["id"] for row in rows)
    with pytest.raises(
        DatasetError, match=r"env.curriculum_tasks: must be 0 \(all\) to .* tasks, 30, got 31; lower it"
    ):
        levels(1, curriculum_tasks=31)


def test_a_folder_and_a_glob_are_all_their_files_and_columns_can_be_renamed(tmp_path):
    folder = tmp_path / "many"
    folder.mkdir()
    for name in "ab":
        _write(folder / f"{name}.jsonl", [{"question": f"{name}{n}"} for n in range(5)])
    for path in (str(folder), str(folder / "*.jsonl")):
        config = EnvConfig(name="custom", dataset=path, dataset_columns={"question": "prompt"})
        tasks = _tasks(config, seed=0)
        shown = [*(tasks.train(index) for index in range(tasks.num_train)), *tasks.held_out(10)]
        assert {task.id: task.messages[0].content for task in shown} == {
            f"{name}.jsonl:{n + 1}": f"{name}{n}" for name in "ab" for n in range(5)
        }


def test_the_coding_environment_refuses_rows_that_it_cannot_grade(tmp_path):
    path = _write(tmp_path / "x.jsonl", [CONVENTIONS["trl"]])
    with pytest.raises(DatasetError, match=r"row 1 of .*: this environment cannot use a row of trl, got"):
        build_tasks(EnvConfig(dataset=path), seed=0)


def test_check_tells_rows_convention_first_task_and_problems(tmp_path, capsys):
    bad = [{"prompt": ""}] * 30
    path = _write(tmp_path / "x.jsonl", [*_questions(2), *bad])
    with pytest.raises(SystemExit) as left:
        main(["check", path])
    lines = capsys.readouterr().out.splitlines()
    assert left.value.code == 1
    assert lines[0] == f"{path}: 32 rows, 30 with a problem; convention: trl"
    assert lines[1].startswith('first task: {"id": "q0", "messages": [{"role": "user", "content": "q 0"')
    assert [line.split(":")[1] for line in lines[2:]] == [f" row {n} of '{path}'" for n in range(3, 23)]
    with pytest.raises(SystemExit) as left:
        main(["check", _write(tmp_path / "y.jsonl", _questions(20))])
    assert left.value.code == 0


def test_the_digest_follows_content_and_settings(tmp_path):
    a, b = (_write(tmp_path / f"{name}.jsonl", _questions(3)) for name in "ab")
    same = locate.content_digest(EnvConfig(dataset=a))
    assert locate.content_digest(EnvConfig(dataset=b)) == same
    assert locate.content_digest(EnvConfig(dataset=b, dataset_format="trl")) != same
    assert locate.content_digest(EnvConfig()) is None
    _write(tmp_path / "b.jsonl", _questions(4))
    assert locate.content_digest(EnvConfig(dataset=b)) != same


_MEASURE = """
import sys, threading, time
from envs.config import DatasetConfig
from envs.dataset import DatasetTasks

def anonymous():
    (line,) = [line for line in open("/proc/self/status") if line.startswith("RssAnon")]
    return int(line.split()[1]) / 1024

DatasetTasks(sys.argv[1], seed=0)
start, peak = anonymous(), [0.0]

def watch():
    while True:
        peak[0] = max(peak[0], anonymous())
        time.sleep(0.005)

threading.Thread(target=watch, daemon=True).start()
tasks = DatasetTasks(sys.argv[2], seed=0)
for index in range(0, 2000):
    tasks.train(index)
print(peak[0] - start, tasks.num_train + tasks.num_held_out)
"""


@pytest.mark.slow
def test_a_file_of_300_mb_takes_no_memory_of_its_size(tmp_path):
    # What may grow: a chunk of the text reader (1 MB) as bytes, text, four bytes a character in its StringIO, lines and
    # Arrow, which is 9 MB, 40 bytes a row in three copies (4 MB), and the row at hand. 100 MB leave room for what the
    # allocators keep; the file is 300 MB. The mapped file is the page cache's and not anonymous.
    num_rows = 30_000
    small = _write(tmp_path / "small.jsonl", _questions(20))
    large = tmp_path / "large.jsonl"
    with large.open("w") as file:
        for n in range(num_rows):
            file.write(json.dumps({"prompt": f"{n} " + f"{n:05d}" * 2000}) + "\n")
    assert large.stat().st_size > 300e6
    done = subprocess.run(
        [sys.executable, "-c", _MEASURE, small, str(large)],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT), "HF_DATASETS_CACHE": str(tmp_path / "cache")},
    )
    assert done.returncode == 0, done.stderr
    grown_mb, count = done.stdout.split()
    assert int(count) == num_rows
    assert float(grown_mb) < 100

import itertools
import json

import pytest

from envs.base import EnvError
from envs.coding.answer import extract
from envs.coding.examples import problem_of
from envs.coding.tasks import CodingTasks
from envs.dataset import DatasetError, DatasetTasks, TaskList, main
from rollout.types import Message, Role, Split, Task

ROW = {
    "id": "a",
    "prompt": "Write f(x): add 1.",
    "entry_point": "f",
    "visible": [{"args": [1], "expected": 2}],
    "hidden": [{"args": [2], "expected": 3}, {"args": [2.5], "expected": 3.5}],
}


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")


@pytest.fixture
def write(tmp_path):
    def _write(*rows):
        path = tmp_path / "tasks.jsonl"
        path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
        return str(path)

    return _write


def _row(task_id, **changes):
    return {**ROW, "id": task_id, "prompt": f"Write f(x): task {task_id}.", **changes}


def _error(path):
    with pytest.raises(DatasetError) as caught:
        DatasetTasks(path, seed=0)
    assert isinstance(caught.value, EnvError)
    return str(caught.value).replace(path, "PATH")


def test_values_keep_their_exact_types(write):
    values = [1, 1.0, True, None, "2020-01-01", 2**70, [1, 2.5, [None, "x"]], {"a": [1.0]}, -0.0, "1"]
    rows = [
        _row(f"t{n}", visible=[{"args": [value, [value]], "expected": value}], split="train")
        for n, value in enumerate(values)
    ]
    tasks = DatasetTasks(write(*rows, _row("held", split="held_out")), seed=0)
    by_id = {task.id: task for task in (tasks.train(index) for index in range(len(values)))}
    for n, value in enumerate(values):
        (example,) = problem_of(by_id[f"t{n}"]).visible
        assert repr(example.expected) == repr(value)
        assert repr(list(example.args)) == repr([value, [value]])


def test_exported_tasks_load_as_they_were(tmp_path, capsys):
    path = tmp_path / "tasks.jsonl"
    main(["export", "--count", "12", "--seed", "3", "--num-visible", "2", "--num-hidden", "5", str(path)])
    assert capsys.readouterr().out == f"15 tasks in {path}\n"
    source = CodingTasks(seed=3, num_visible=2, num_hidden=5)
    loaded = DatasetTasks(str(path), seed=0)
    assert [task.id for task in loaded.held_out(99)] == [task.id for task in source.held_out(3)]
    train = {task.id: task for task in (loaded.train(index) for index in range(12))}
    for task in (source.train(index) for index in range(12)):
        assert problem_of(train[task.id]) == problem_of(task)
        assert train[task.id].messages == task.messages
        assert loaded.solve(train[task.id]) == source.solve(task)


def test_every_epoch_has_its_own_order_and_random_access(write):
    path = write(*(_row(f"t{n}", split="train") for n in range(8)), _row("held", split="held_out"))
    tasks = DatasetTasks(path, seed=5)
    epochs = [[tasks.train(epoch * 8 + position).id for position in range(8)] for epoch in range(3)]
    assert all(sorted(epoch) == [f"t{n}" for n in range(8)] for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3
    assert [DatasetTasks(path, seed=5).train(index).id for index in (23, 0, 9)] == [
        epochs[2][7],
        epochs[0][0],
        epochs[1][1],
    ]
    assert [DatasetTasks(path, seed=6).train(index).id for index in range(8)] != epochs[0]


def test_without_held_out_rows_a_tenth_is_held_out_by_prompt(write):
    path = write(*(_row(f"t{n}", prompt=f"p{n // 2}") for n in range(400)))
    tasks = DatasetTasks(path, seed=0)
    held_out = tasks.held_out(400)
    assert 20 <= len(held_out) <= 60
    assert {task.split for task in held_out} == {Split.HELD_OUT}
    train = [tasks.train(index) for index in range(400 - len(held_out))]
    assert not {task.messages for task in held_out} & {task.messages for task in train}
    assert DatasetTasks(path, seed=1).held_out(400) == held_out
    assert len(DatasetTasks(write(_row("a"), _row("b")), seed=0).held_out(9)) == 1


def test_demonstrations_come_from_training_rows_with_a_solution(write):
    program = "def f(x):\n    return x + 1"
    path = write(
        _row("a", solution=program), _row("b"), _row("c", solution=program, split="held_out"), _row("d", split="train")
    )
    tasks = DatasetTasks(path, seed=0)
    shown = list(itertools.islice(tasks.demonstrations(0), 20))
    assert {task.id for task, _ in shown} == {"a"}
    assert extract(shown[0][1][0], "f").source == program + "\n"
    assert ROW["prompt"] not in list(tasks.corpus())
    assert "Write f(x): task a." in list(tasks.corpus())
    assert "Write f(x): task c." not in list(tasks.corpus())
    with pytest.raises(DatasetError, match="no demonstrations, got 1 training tasks without a solution"):
        next(DatasetTasks(write(_row("a"), _row("b", split="held_out")), seed=0).demonstrations(0))


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ({key: value for key, value in ROW.items() if key != "hidden"}, "the key 'hidden' is missing, got none in a"),
        ({**ROW, "tests": 1}, "unknown key 'tests', got 1 in a row"),
        ({**ROW, "id": 7}, "id must be a text that is not empty, got 7 in"),
        ({**ROW, "prompt": ""}, "prompt must be a text that is not empty, got '' in"),
        ({**ROW, "entry_point": "f()"}, "entry_point must be a Python name, got 'f()' in"),
        ({**ROW, "visible": []}, "visible must be a list of at least one example, got [] in"),
        ({**ROW, "hidden": "x"}, "hidden must be a list of at least one example, got 'x' in"),
        ({**ROW, "hidden": [3]}, "hidden: an example must be an object, got 3 in"),
        ({**ROW, "hidden": [{"args": [1]}]}, "hidden: an example has exactly the keys 'args' and 'expected', got"),
        ({**ROW, "visible": [{"args": 1, "expected": 1}]}, "visible: args must be the list of the call's arguments,"),
        (
            {**ROW, "visible": [{"args": [list(range(60_000))], "expected": 1}]},
            "visible: value: too many parts, got more than 50000; return less, got {'args'",
        ),
        ({**ROW, "split": "test"}, "split must be 'train' or 'held_out', got 'test' in"),
        ({**ROW, "solution": "lambda x: x"}, "solution must be a program that defines f, got 'lambda x: x' in"),
        ("{not json", "not JSON (Expecting property name"),
        ("[1]", "not a JSON object, got [1] in a row with the keys []"),
        ('{"id": NaN}', "not JSON (NaN is not JSON), got"),
    ],
)
def test_a_bad_row_is_named_with_its_number_its_keys_and_the_schema(write, row, problem):
    message = _error(write(_row("ok"), row))
    assert message.startswith(f"env.dataset: row 2 of 'PATH': {problem}")
    assert "in a row with the keys [" in message
    assert "; a row has id: str, prompt: str, entry_point: str, visible:" in message
    if isinstance(row, dict):
        assert str(list(row)) in message


def test_row_numbers_count_empty_lines(write):
    assert _error(write(_row("a"), "", {"id": "b"})).startswith("env.dataset: row 3 of 'PATH': the key 'prompt'")
    assert _error(write(_row("a"), "", _row("a"))) == (
        "env.dataset 'PATH': ids must differ, got 'a' in rows 1 and 3; rename one"
    )


def test_a_file_without_tasks_is_named(write, tmp_path):
    assert _error(str(tmp_path / "none.jsonl")) == (
        "env.dataset: no such file, got 'PATH'; give the path of a JSON-lines file"
    )
    empty = tmp_path / "empty.jsonl"
    empty.write_text("")
    assert _error(str(empty)).startswith("env.dataset: no rows, got the file 'PATH' without any; a row has id: str")
    assert _error(write("", "")).startswith("env.dataset: no rows")
    assert _error(write(_row("a"))).startswith("env.dataset 'PATH': no train task, got 1 tasks")


def test_a_prompt_in_both_splits_is_a_leak(write):
    same = write(_row("a", prompt="p"), _row("b", prompt="p", split="held_out"))
    assert "held-out task 'b' asks what a training task asks, got the prompt 'p' in both splits" in _error(same)


def test_bytes_that_are_no_text_are_named(tmp_path):
    path = tmp_path / "binary.jsonl"
    path.write_bytes(b"\xff\xfe\x00\x81" * 10)
    assert _error(str(path)).startswith("env.dataset: could not be read (")


def test_a_task_list_needs_distinct_ids():
    def task(task_id, split):
        messages = (Message(role=Role.USER, content=split.value),)
        return Task(id=task_id, messages=messages, payload={}, split=split, seed=0)

    with pytest.raises(DatasetError, match="mine: ids must differ, got 'a' more than once; rename one"):
        TaskList([task("a", Split.TRAIN), task("a", Split.HELD_OUT)], seed=0, name="mine")
    with pytest.raises(DatasetError, match="mine: the index must not be negative, got -1"):
        TaskList([task("a", Split.TRAIN), task("b", Split.HELD_OUT)], seed=0, name="mine").train(-1)

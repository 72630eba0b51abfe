import itertools
import json
import pickle
import subprocess
import sys

import pytest

from envs.base import EnvError
from envs.coding.answer import extract
from envs.coding.compositions import DEMONSTRATED, HELD_OUT, TRAIN, Composition
from envs.coding.examples import problem_of
from envs.coding.tasks import CodingTasks
from rollout.types import Split


@pytest.fixture
def tasks():
    return CodingTasks(seed=3, num_visible=4, num_hidden=5)


def test_a_task_has_the_stated_checks_with_the_reference_values(tasks):
    for index in range(50):
        task = tasks.train(index)
        problem = problem_of(task)
        composition = Composition(*task.payload["composition"])
        assert task.messages[0].content == composition.prompt
        assert (len(problem.visible), len(problem.hidden)) == (4, 5)
        inputs = [example.args[0] for example in (*problem.visible, *problem.hidden)]
        assert len({json.dumps(xs) for xs in inputs}) == 9
        for example in (*problem.visible, *problem.hidden):
            assert example.expected == composition.evaluate(example.args[0])
            assert 3 <= len(example.args[0]) <= 8
            assert all(-12 <= x <= 12 for x in example.args[0])


def test_tasks_follow_from_seed_and_index_alone(tasks):
    again = CodingTasks(seed=3, num_visible=4, num_hidden=5)
    backwards = [again.train(index) for index in reversed(range(20))]
    assert [tasks.train(index) for index in range(20)] == backwards[::-1]
    other = CodingTasks(seed=4, num_visible=4, num_hidden=5)
    assert [other.train(index).payload for index in range(20)] != [tasks.train(index).payload for index in range(20)]
    assert len({tasks.train(index).id for index in range(100)}) == 100


@pytest.mark.parametrize("hash_seed", ["1", "2"])
def test_another_process_makes_the_same_tasks(tasks, hash_seed):
    program = (
        "import json; from envs.coding.tasks import CodingTasks; t = CodingTasks(seed=3, num_visible=4, num_hidden=5);"
        "d = t.demonstrations(1); print(json.dumps([t.train(17).payload, t.held_out(2)[1].payload, next(d)[1]]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={"PYTHONHASHSEED": hash_seed, "PYTHONPATH": "."},
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    here = [tasks.train(17).payload, tasks.held_out(2)[1].payload, next(tasks.demonstrations(1))[1]]
    assert json.loads(done.stdout) == json.loads(json.dumps(here))


def test_held_out_tasks_do_not_depend_on_the_run(tasks):
    other = CodingTasks(seed=99, num_visible=4, num_hidden=5)
    assert tasks.held_out(30) == other.held_out(30)
    assert tasks.held_out(30)[:10] == tasks.held_out(10)


def test_held_out_and_training_share_no_composition(tasks):
    held_out = {tuple(task.payload["composition"]) for task in tasks.held_out(400)}
    train = {tuple(tasks.train(index).payload["composition"]) for index in range(2000)}
    assert held_out <= set(HELD_OUT)
    assert train == set(TRAIN)
    assert {task.split for task in tasks.held_out(5)} == {Split.HELD_OUT}
    assert tasks.train(0).split is Split.TRAIN


def test_no_hidden_value_occurs_in_a_message(tasks):
    for task in (*tasks.held_out(50), *(tasks.train(index) for index in range(50))):
        text = " ".join(message.content for message in task.messages)
        assert not any(str(xs) in text for example in problem_of(task).hidden for xs in example.args)
        assert not any(character.isdigit() for character in text)


def test_demonstrations_are_careless_in_the_stated_shares(tasks):
    shown = list(itertools.islice(tasks.demonstrations(0), 1500))
    right = two = repaired = 0
    for task, answers in shown:
        composition = Composition(*task.payload["composition"])
        assert composition in DEMONSTRATED
        sources = [extract(answer, "f") for answer in answers]
        assert all(source.well_formed for source in sources)
        right += sources[0].source == composition.source
        if len(answers) == 2:
            two += 1
            assert sources[0].source != composition.source
            repaired += sources[1].source == composition.source
    assert right / 1500 == pytest.approx(0.37, abs=0.03)
    wrong = 1500 - right
    assert 0.22 < two / wrong < 0.33  # some wrong programs pass the visible examples, and end there
    assert 0.4 < repaired / two < 0.75  # .3 on purpose, and careless writing is often right by itself
    assert [task for task, _ in shown[:20]] == [task for task, _ in itertools.islice(tasks.demonstrations(0), 20)]
    assert shown[0] != next(tasks.demonstrations(1))


def test_the_corpus_holds_training_text_only(tasks):
    corpus = list(tasks.corpus())
    text = set(corpus)
    assert {composition.prompt for composition in TRAIN} <= text
    assert not {composition.prompt for composition in HELD_OUT} & text
    assert any(line.startswith("f([") and ", want " in line for line in corpus)
    assert any(line.startswith("```python\ndef f(xs):") and line.endswith("\n```") for line in corpus)
    assert corpus == list(CodingTasks(seed=8, num_visible=4, num_hidden=5).corpus())


def test_tasks_pickle_and_their_payload_is_json(tasks):
    task = tasks.train(5)
    assert pickle.loads(pickle.dumps(task)) == task
    assert json.loads(json.dumps(task.payload)) == task.payload


def test_mistakes_are_named(tasks):
    with pytest.raises(EnvError, match=r"env.num_hidden_checks: must be at least 1, got 0; a task without checks"):
        CodingTasks(seed=0, num_visible=1, num_hidden=0)
    with pytest.raises(EnvError, match="the index must not be negative, got -1"):
        tasks.train(-1)

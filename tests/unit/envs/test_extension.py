import re
import sys
from dataclasses import dataclass

import pytest

from envs.extension import ExtensionError, check_params, load_target


@pytest.fixture
def my_pkg(tmp_path, monkeypatch):
    (tmp_path / "my_parts.py").write_text(
        "class MyEnv:\n"
        "    def __init__(self, size: int, colour: str = 'red') -> None: self.size = size\n"
        "def my_reward(task, trajectory, evidence, limit=40): return 1.0\n"
        "def open_ended(**anything): return anything\n"
        "def two(task, trajectory): return 1.0\n"
        "number = 3\n"
    )
    (tmp_path / "needs_more.py").write_text("import a_module_that_nobody_has\n")
    (tmp_path / "raises.py").write_text("raise RuntimeError('at\\nimport')\n")
    (tmp_path / "misspelt.py").write_text("def f(:\n")
    monkeypatch.syspath_prepend(tmp_path)
    yield "my_parts"
    for name in ("my_parts", "needs_more", "raises", "misspelt"):
        sys.modules.pop(name, None)


def _error(call, *arguments, **named):
    with pytest.raises(ExtensionError) as caught:
        call(*arguments, **named)
    return str(caught.value)


def test_a_target_is_loaded(my_pkg):
    assert load_target("my_parts:MyEnv", {"size": 3}, "env")(size=3).size == 3
    assert load_target("my_parts:my_reward", {"limit": 1}, "reward", given=3)(1, 2, 3, limit=1) == 1.0
    assert load_target("my_parts:open_ended", {"anything": 1}, "env")(anything=1) == {"anything": 1}
    assert load_target("os:path.join", {}, "env", given=2)("a", "b") == "a/b"


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("my_parts", "env.target: not of the form module:attribute, got 'my_parts'; write my_pkg.my_module:MyName"),
        (
            "no_such_pkg.part:X",
            "env.target: no module named 'no_such_pkg', got 'no_such_pkg.part:X'; run from the folder that holds it, "
            "or install it",
        ),
        (
            "needs_more:X",
            "env.target: needs_more needs the module 'a_module_that_nobody_has', which is missing, "
            "got 'needs_more:X'; install it",
        ),
        (
            "raises:X",
            "env.target: importing raises raised RuntimeError: at import, got 'raises:X'; fix the module",
        ),
        ("my_parts:MyEnw", "env.target: my_parts has no 'MyEnw', got 'my_parts:MyEnw'; did you mean 'MyEnv'?"),
        ("my_parts:number", "env.target: not callable, got 'my_parts:number'; name a class or a function"),
    ],
)
def test_a_target_that_cannot_be_loaded_is_named(my_pkg, target, message):
    assert _error(load_target, target, {"size": 1}, "env") == message


def test_parameters_are_checked_without_running_the_target(my_pkg):
    assert _error(load_target, "my_parts:MyEnv", {"size": 1, "color": "blue"}, "env") == (
        "env.params.color: no such parameter of MyEnv, got 'blue'; did you mean 'colour'?"
    )
    assert _error(load_target, "my_parts:MyEnv", {"colour": "blue"}, "env") == (
        "env.params.size: missing, got {'colour': 'blue'}; MyEnv needs +env.params.size=..."
    )
    assert _error(load_target, "my_parts:my_reward", {"zzz": 1}, "reward", given=3) == (
        "reward.params.zzz: no such parameter of my_reward, got 1; it takes limit"
    )


def test_a_function_must_take_what_it_is_given(my_pkg):
    assert _error(load_target, "my_parts:two", {}, "reward", given=3) == (
        "reward.target: must take 3 positional arguments, got two(task, trajectory); add the missing ones"
    )
    assert re.match(
        "reward.params.task: no such", _error(load_target, "my_parts:my_reward", {"task": 1}, "reward", given=3)
    )


def test_a_dataclass_is_checked_by_its_fields():
    @dataclass
    class Options:
        fresh_grading: bool = True

    check_params(Options, {"fresh_grading": False}, "env.params")
    assert _error(check_params, Options, {"fresh_gradin": False}, "env.params") == (
        "env.params.fresh_gradin: no such parameter of Options, got False; did you mean 'fresh_grading'?"
    )


def test_a_module_that_is_not_python_is_named_in_one_line(my_pkg):
    message = _error(load_target, "misspelt:f", {}, "reward", given=3)
    assert message.startswith("reward.target: importing misspelt raised SyntaxError: ")
    assert "\n" not in message

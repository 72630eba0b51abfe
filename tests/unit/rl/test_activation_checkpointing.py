"""`learner.activation_checkpointing`: its values, and that it reaches the learner."""

from pathlib import Path

import pytest

from rl.learner.config import ActivationCheckpointing
from rl.learner.learner import LearnerSpec
from tests.unit.rl.test_config_check import compose, problem

KEY = "learner.activation_checkpointing"


@pytest.mark.parametrize("value", ["layer", "true", "null"])
def test_another_value_is_one_line(value: str) -> None:
    line = f"{KEY}: must be one of none, block, got {value}; the default is none"
    assert problem("+experiment=coding", f"{KEY}={value}") == line


@pytest.mark.parametrize(
    ("given", "kind"),
    [
        ([], ActivationCheckpointing.none),
        ([f"{KEY}=none"], ActivationCheckpointing.none),
        ([f"{KEY}=block"], ActivationCheckpointing.block),
    ],
)
def test_it_reaches_the_learner(given: list[str], kind: ActivationCheckpointing) -> None:
    config = compose("+experiment=coding", *given)
    config.model.vocab_size = 48
    spec = LearnerSpec.of(config, model=config.model, start=Path("start"), num_threads=1)
    assert spec.activation_checkpointing is kind

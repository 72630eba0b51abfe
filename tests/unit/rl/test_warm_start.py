import dataclasses
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from envs.coding.tasks import CodingTasks
from rl import warm_start
from rl.config import RunConfig
from rl.warm_start import WarmStartError


def indices(step: int, *, seed: int = 0, batch_size: int = 4, num_samples: int = 10) -> list[int]:
    return warm_start._batch_indices(seed, step, batch_size, num_samples)


@pytest.mark.parametrize(("batch_size", "num_samples"), [(4, 10), (5, 10), (10, 10), (25, 10), (1, 3)])
def test_every_epoch_covers_every_sample_once(batch_size: int, num_samples: int):
    num_epochs = 3
    steps = -(-num_epochs * num_samples // batch_size)
    drawn = [i for step in range(steps) for i in indices(step, batch_size=batch_size, num_samples=num_samples)]
    assert len(drawn) == steps * batch_size
    epochs = [drawn[e * num_samples : (e + 1) * num_samples] for e in range(num_epochs)]
    assert all(Counter(epoch) == Counter(range(num_samples)) for epoch in epochs)
    if num_samples > 3:
        assert epochs[0] != epochs[1]  # reshuffled


def test_a_batch_is_a_function_of_the_seed_and_the_step():
    assert indices(7) == indices(7)
    assert indices(7, num_samples=1000) != indices(7, seed=1, num_samples=1000)


def test_the_learning_rate_rises_then_falls_to_its_floor():
    config = RunConfig()
    settings = config.warm_start
    settings.lr, settings.lr_end_frac, settings.steps, settings.warmup_steps = 8.0, 0.25, 16, 4
    rates = [warm_start._learning_rate(config, step) for step in range(16)]
    rise = [0.25, 0.5, 0.75] + [1.0] * 13
    fall = [max(0.25, 1 - step / 16) for step in range(16)]
    np.testing.assert_allclose(rates, [8.0 * r * f for r, f in zip(rise, fall, strict=True)])
    assert rates[-1] == 2.0
    assert min(rates) > 0
    settings.warmup_steps = 0
    assert warm_start._learning_rate(config, 0) == 8.0


def set_value(config: RunConfig, key: str, value: Any) -> RunConfig:
    *path, last = key.split(".")
    section: Any = config
    for name in path:
        section = getattr(section, name)
    setattr(section, last, value)
    return config


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("run.seed", 1),
        ("warm_start.steps", 7),
        ("warm_start.lr", 1e-3),
        ("warm_start.batch_size", 3),
        ("warm_start.weight_decay", 0.5),
        ("warm_start.num_demonstrations", 9),
        ("warm_start.tokenizer_vocab_size", 300),
        ("model.hidden_size", 64),
        ("model.compute_dtype", "bf16"),
        ("env.name", "custom"),
        ("env.target", "my:Env"),
        ("env.params", {"x": 3}),
        ("env.max_turns", 5),
        ("env.max_tokens_per_turn", 5),
        ("env.max_context_tokens", 5),
        ("env.num_visible_checks", 5),
        ("env.num_hidden_checks", 5),
        ("learner.max_grad_norm", 0.5),
        ("learner.zero_stage", 2),
        ("learner.micro_batch_tokens", 5),
        ("algorithm.load_balance_coef", 0.5),
        ("algorithm.router_z_coef", 0.5),
    ],
)
def test_the_fingerprint_follows_what_the_start_depends_on(key: str, value: Any):
    assert warm_start._fingerprint(set_value(RunConfig(), key, value)) != warm_start._fingerprint(RunConfig())


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("warm_start.cache", "/elsewhere"),
        ("warm_start.checkpoint", "/a/model"),
        ("warm_start.checkpoint_every", 3),
        ("run.name", "other"),
        ("run.rounds", 3),
        ("algorithm.lr", 1.0),
        ("rollout.num_workers", 3),
        ("logging.project", "other"),
        ("reward.name", "other"),
        ("env.call_timeout_s", 9.0),
    ],
)
def test_the_fingerprint_ignores_where_things_are_and_what_comes_later(key: str, value: Any):
    assert warm_start._fingerprint(set_value(RunConfig(), key, value)) == warm_start._fingerprint(RunConfig())


def test_the_fingerprint_follows_the_content_of_the_data_and_the_recipe(tmp_path: Path, monkeypatch):
    def of(name: str, text: str) -> str:
        (tmp_path / name).write_text(text)
        return warm_start._fingerprint(set_value(RunConfig(), "env.dataset", str(tmp_path / name)))

    assert of("a.jsonl", "one") == of("b.jsonl", "one")
    assert of("a.jsonl", "one") != of("a.jsonl", "two")
    before = warm_start._fingerprint(RunConfig())
    monkeypatch.setattr(warm_start, "_RECIPE_VERSION", warm_start._RECIPE_VERSION + 1)
    assert warm_start._fingerprint(RunConfig()) != before


def test_the_cache_entry_follows_the_tokenizer_and_the_demonstrations_as_well():
    tasks = CodingTasks(seed=0, num_visible=2, num_hidden=2)
    scripts = [(tasks.train(0), ("a",)), (tasks.train(1), ("b", "c"))]
    entry = warm_start._entry_name(RunConfig(), "{}", scripts)
    assert entry == warm_start._entry_name(RunConfig(), "{}", list(scripts))
    assert entry != warm_start._entry_name(RunConfig(), "{ }", scripts)
    assert entry != warm_start._entry_name(RunConfig(), "{}", [(tasks.train(0), ("a",)), (tasks.train(1), ("b", "d"))])
    assert entry != warm_start._entry_name(RunConfig(), "{}", [(tasks.train(2), ("a",)), (tasks.train(1), ("b", "c"))])


def test_every_setting_of_the_warm_start_is_in_the_fingerprint_or_free():
    names = {field.name for field in dataclasses.fields(RunConfig().warm_start)}
    assert names >= warm_start._FREE
    for name in names - warm_start._FREE:
        value = getattr(RunConfig().warm_start, name)
        changed = set_value(RunConfig(), f"warm_start.{name}", value + 1)
        assert warm_start._fingerprint(changed) != warm_start._fingerprint(RunConfig()), name


def test_a_demonstration_is_stored_as_ids_and_targets(hand):
    trajectory = hand.trajectory(hand.segment((1, 2), ((), (20, 21)), ((7,), (30,))), passed=4)
    row = warm_start._row(trajectory)
    assert row == {"ids": [1, 2, 20, 21, 7, 30], "targets": [2, 3, 5]}
    sample = warm_start._sample(12, row)
    assert (sample.key, sample.ids_T.tolist(), sample.targets_R.tolist()) == ("000012", row["ids"], row["targets"])
    assert sample.trained
    assert sample.temperature == 1.0


def test_a_task_that_leaves_no_room_for_an_answer_is_named(tmp_path: Path):
    config = RunConfig()
    config.warm_start.cache = str(tmp_path)
    tasks = CodingTasks(seed=0, num_visible=2, num_hidden=2)
    assert warm_start.plan_start(config, tasks).model.vocab_size > 256
    config.env.max_context_tokens = 12
    with pytest.raises(
        WarmStartError,
        match=r"^env\.max_context_tokens: must leave room after the task, got 12 with \d+ tokens in task ",
    ):
        warm_start.plan_start(config, tasks)


def test_an_environment_without_demonstrations_is_refused_before_anything_is_made(tmp_path: Path):
    config = RunConfig()
    config.warm_start.cache = str(tmp_path / "cache")

    class Silent(CodingTasks):
        def demonstrations(self, seed: int):
            return iter(())

    with pytest.raises(WarmStartError, match=r"^warm start: the environment demonstrates nothing, got 'coding' "):
        warm_start.plan_start(config, Silent(seed=0, num_visible=2, num_hidden=2))
    assert not (tmp_path / "cache").exists()

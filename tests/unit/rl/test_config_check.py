"""Overrides and values: every mistake is one exact line."""

import dataclasses
from enum import Enum

import pytest

from rl import config_check, entry, machine, overrides
from rl.config import Placement, RunConfig
from rl.config_check import ConfigError, WorkerPlan, estimate_memory_bytes, resolve_workers

GIB = 1 << 30


def compose(*given: str) -> RunConfig:
    return overrides.compose_run(overrides.reject_unknown(given))


def check(*given: str) -> RunConfig:
    """Compose and check, as a program does."""
    kept = overrides.reject_unknown(given)
    return entry.checked(overrides.compose_run(kept), kept)


def refusal(*given: str) -> str:
    """The line about the overrides alone."""
    with pytest.raises(ConfigError) as caught:
        overrides.reject_unknown(given)
    return str(caught.value)


def problem(*given: str) -> str:
    """The line about a configuration that composes or should have."""
    with pytest.raises(ConfigError) as caught:
        check(*given)
    return str(caught.value)


@pytest.fixture
def small_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "usable_cpus", lambda: 2)
    monkeypatch.setattr(machine, "available_memory_bytes", lambda: 8 * GIB)
    monkeypatch.setattr(machine, "free_disk_bytes", lambda path: 8 * GIB)
    monkeypatch.setattr(machine, "free_shared_memory_bytes", lambda: 8 * GIB)


@pytest.mark.parametrize(
    ("override", "line"),
    [
        ("algorithm.clip_hgih=0.3", "algorithm.clip_hgih: no such key, got 0.3; did you mean 'algorithm.clip_high'?"),
        ("+rollout.max_turns_=3", "rollout.max_turns_: no such key, got 3; did you mean 'env.max_turns'?"),
        ("+rollout.max_turn=3", "rollout.max_turn: no such key, got 3; did you mean 'env.max_turns'?"),
        ("++rollout.max_turn=3", "rollout.max_turn: no such key, got 3; did you mean 'env.max_turns'?"),
        ("learnr.num_ranks=2", "learnr.num_ranks: no such key, got 2; did you mean 'learner.num_ranks'?"),
        ("group_size=4", "group_size: no such key, got 4; did you mean 'rollout.group_size'?"),
        ("lr=1e-4", "lr: no such key, got 1e-4; did you mean 'algorithm.lr' or 'warm_start.lr'?"),
        ("env={max_turn: 3}", "env.max_turn: no such key, got 3; did you mean 'env.max_turns'?"),
        (
            "logging.zzz=1",
            "logging.zzz: no such key, got 1; the keys of logging are project, wandb, tags",
        ),
        ("run.rounds.x=1", "run.rounds.x: no such key, got 1; run.rounds is a whole number and has no keys"),
        ("run=5", "run: is a section, got 5; set one of its keys, such as run.name=<value>"),
        ("run.rounds", "run.rounds: cannot be read as key=value, got 'run.rounds'; write run.rounds=<value>"),
        (
            "run.name=[a",
            "run.name: cannot be read as key=value, got 'run.name=[a'; quote the value: 'run.name=\"[a\"'",
        ),
        (
            "~run.seed",
            "run.seed: nothing can be removed from the configuration, got '~run.seed'; set a value instead",
        ),
        ("~env", "env: nothing can be removed from the configuration, got '~env'; set a value instead"),
        (
            "env=codng",
            "env: no such option, got codng; did you mean 'coding'? choose one of: "
            "bfcl, codeio, coding, custom, humaneval",
        ),
        ("env=null", "env: no such option, got null; choose one of: bfcl, codeio, coding, custom, humaneval"),
        (
            "+experiment=codign",
            "experiment: no such option, got codign; did you mean 'coding'? choose one of: coding",
        ),
        ("env@other=coding", "env: a package cannot be chosen, got 'env@other=coding'; write env=coding"),
        (
            "algorithm.lr=1e-4,3e-4",
            "algorithm.lr: takes one value in a single run, got 1e-4,3e-4; add -m to run one job for each",
        ),
        (
            "logging.tags=a,b",
            "logging.tags: takes one value in a single run, got a,b; write logging.tags=[a,b] for a list",
        ),
    ],
)
def test_an_override_that_is_not_understood_is_refused_in_one_line(override: str, line: str) -> None:
    assert refusal("+experiment=coding", override) == line


def test_known_keys_are_given_back_the_way_hydra_wants_them() -> None:
    given = [
        "experiment=coding",
        "+env.max_turns=3",
        "++run.seed=1",
        "env.params.x=3",
        "reward=custom",
        "hydra.verbose=1",
    ]
    assert overrides.reject_unknown(given) == [
        "+experiment=coding",
        "env.max_turns=3",
        "run.seed=1",
        "++env.params.x=3",
        "reward=custom",
        "hydra.verbose=1",
    ]


def test_a_sweep_is_understood_with_multirun_only_where_jobs_can_differ() -> None:
    given = ["+experiment=coding", "algorithm.lr=1e-4,3e-4", "run.seed=range(0,2)"]
    swept = overrides.reject_unknown(given, multirun=True)
    assert [job[1:] for job in overrides.expand(swept)] == [
        ["algorithm.lr=0.0001", "run.seed=0"],
        ["algorithm.lr=0.0001", "run.seed=1"],
        ["algorithm.lr=0.0003", "run.seed=0"],
        ["algorithm.lr=0.0003", "run.seed=1"],
    ]
    with pytest.raises(
        ConfigError, match=r"^run\.name: cannot be swept, got a,b; every job of a sweep has a folder of"
    ):
        overrides.reject_unknown(["run.name=a,b"], multirun=True)
    with pytest.raises(ConfigError, match=r"^algorithm\.lr: a sweep needs values that can be listed, got interval"):
        overrides.reject_unknown(["algorithm.lr=interval(0,1)"], multirun=True)
    with pytest.raises(ConfigError, match=r"^env: no such option, got codng;"):
        overrides.reject_unknown(["env=coding,codng"], multirun=True)


@pytest.mark.parametrize(
    ("override", "line"),
    [
        ("env.max_turns=abc", "env.max_turns: must be a whole number, got abc; the default is 2"),
        ("env.max_turns=2.5", "env.max_turns: must be a whole number, got 2.5; the default is 2"),
        ("env.max_turns=null", "env.max_turns: must be a whole number, got null; the default is 2"),
        ("run.permute_rewards=si", "run.permute_rewards: must be true or false, got si; the default is false"),
        ("env.sandbox=podman", "env.sandbox: must be one of local, degraded, docker, got podman; the default is local"),
        ("logging.tags=a", "logging.tags: must be a list such as [a,b], got a; the default is []"),
        (
            "run.name=${run.nme}",
            "run.name: cannot be resolved, got Interpolation key 'run.nme' not found; name an existing key or give the "
            "value itself",
        ),
        ("run.rounds=-1", "run.rounds: must be at least 1, got -1; the default is 30"),
        (
            "run.eval_every=0",
            "run.eval_every: must be at least 1, got 0; set it to run.rounds to evaluate only before and after",
        ),
        ("algorithm.lr=nan", "algorithm.lr: must be finite, got nan; the default is 0.0003"),
        (
            "algorithm.load_balance_coef=-1",
            "algorithm.load_balance_coef: must be at least 0, got -1.0; the default is 0.01",
        ),
        (
            "learner.zero_stage=0",
            "learner.zero_stage: must be at least 1, got 0; use 1 (optimizer states sharded) or 2 (gradients too); "
            "with experts apart, DeepSpeed's stage 0 clips by the mean of the ranks' norms, and in bf16 by a norm that "
            "lacks the experts",
        ),
        (
            "learner.zero_stage=3",
            "learner.zero_stage: must be at most 2, got 3; use 1 (optimizer states sharded) or 2 (gradients too); "
            "with experts apart, DeepSpeed's stage 0 clips by the mean of the ranks' norms, and in bf16 by a norm that "
            "lacks the experts",
        ),
        (
            "rollout.hold_back_versions=-1",
            "rollout.hold_back_versions: must be at least 0, got -1; 0 sends each version to the workers at once",
        ),
        (
            "rollout.group_size=1",
            "rollout.group_size: grpo compares the episodes of a group, so it needs at least 2, got 1; the "
            "default is 8",
        ),
        (
            "algorithm.num_minibatches=25",
            "algorithm.num_minibatches: must not exceed rollout.prompts_per_round=24, got 25; a group is never split, "
            "so lower it or ask for more prompts",
        ),
        (
            "env.max_context_tokens=96",
            "env.max_context_tokens: too small for env.max_turns=2 x env.max_tokens_per_turn=48 tokens of answers and "
            "a task, got 96; use at least 112, and room for what the environment says",
        ),
        (
            "env.max_context_tokens=600",
            "env.max_context_tokens: longer than model.max_positions=512, got 600; lower it or raise "
            "model.max_positions",
        ),
        (
            "rollout.chat_format=chatml",
            "rollout.chat_format: a model that the warm start trains speaks native, got chatml; leave it out, or name "
            "a model with warm_start.checkpoint",
        ),
        ("env.dataset=/nope.jsonl", "env.dataset: no such file, got /nope.jsonl; name a JSON-lines file of tasks"),
        (
            "run.name=a/b",
            "run.name: must be a folder name of letters, digits, '.', '_' and '-', got 'a/b'; choose another name",
        ),
        ("env=custom", "env.target: needed with env=custom, got null; set env.target=my_package.my_module:MyClass"),
        ("env.target=a:b", "env.target: only read with env=custom, got a:b; add env=custom"),
        ("env.params.x=3", "env.params: only read with env=custom, got x; add env=custom and env.target="),
        (
            "algorithm.gae_lambda=0.9",
            "algorithm.gae_lambda: not read by algorithm=grpo, got 0.9; drop it, or choose algorithm=ppo",
        ),
        (
            "algorithm.length_unit=64",
            "algorithm.length_unit: not read by algorithm=grpo, got 64; drop it, or choose "
            "algorithm.aggregation=episode_sum",
        ),
        (
            "algorithm.kl_in=reward",
            "algorithm.kl_in: not read while algorithm.kl_coef is 0, got reward; set algorithm.kl_coef, or drop it",
        ),
        (
            "algorithm.importance_level=sequence",
            "algorithm.importance_level: not read while algorithm.importance is none, got sequence; set "
            "algorithm.importance, or drop it",
        ),
        (
            "algorithm.overlong_coef=0.5",
            "algorithm.overlong_coef: not read while algorithm.overlong_buffer_frac is 0, got 0.5; set "
            "algorithm.overlong_buffer_frac, or drop it",
        ),
        (
            "algorithm.name=ppo2",
            "algorithm.name: no such part, got ppo2; choose one of: cispo, custom, dapo, dr_grpo, "
            "grpo, gspo, ppo, reinforce_pp, reinforce_pp_baseline, rloo",
        ),
        ("model.hidden_size=100", "model.hidden_size: must be a multiple of 32 (the MXFP4 block), got 100; use 128"),
        (
            "reward.max_turn_penalty=2",
            "reward.max_turn_penalty: a solved task must never be worth less than an unsolved one, so at most "
            "reward.solved_weight=1.0, got 2.0; lower it",
        ),
    ],
)
def test_a_wrong_value_is_refused_in_one_line(override: str, line: str) -> None:
    assert problem("+experiment=coding", override) == line


@pytest.mark.parametrize(
    ("given", "line"),
    [
        (
            ["algorithm=rloo", "algorithm.clip_high=0.5"],
            "algorithm.clip_high: not read by algorithm=rloo, got 0.5; drop it, or choose algorithm=cispo or another "
            "that does",
        ),
        (
            ["algorithm=ppo", "algorithm.normalize_advantage=true"],
            "algorithm.normalize_advantage: not read by algorithm=ppo, got True; drop it, or choose algorithm=dapo or "
            "grpo",
        ),
        (
            ["algorithm=ppo", "algorithm.max_resample_rounds=2"],
            "algorithm.max_resample_rounds: not read by algorithm=ppo, got 2; drop it, or choose algorithm=cispo or "
            "another that does",
        ),
        (
            ["algorithm=dr_grpo", "algorithm.aggregation=token_mean", "algorithm.length_unit=64"],
            "algorithm.length_unit: not read by algorithm=dr_grpo, got 64; drop it, or choose "
            "algorithm.aggregation=episode_sum",
        ),
        (
            ["algorithm=dapo", "algorithm.kl_coef=0.1", "algorithm.kl_in=reward"],
            "algorithm.kl_in: in a group of equal rewards only the KL penalty differs, and "
            "algorithm.normalize_advantage makes full advantages of it, got reward; use loss, or "
            "algorithm.normalize_advantage=false",
        ),
        (
            ["algorithm.importance=mask", "algorithm.importance_cap=0.5"],
            "algorithm.importance_cap: must be at least 1, got 0.5; a cap below 1 would cut weights on policy; 2 is "
            "usual",
        ),
    ],
)
def test_knobs_that_contradict_each_other_or_are_not_read_are_refused_in_one_line(given: list[str], line: str) -> None:
    assert problem("+experiment=coding", *given) == line


@pytest.mark.parametrize(
    "given",
    [
        [
            "algorithm=ppo",
            "rollout.group_size=1",
            "algorithm.credit=turn",
            "algorithm.kl_coef=0.1",
            "algorithm.kl_in=reward",
        ],
        ["algorithm=gspo", "algorithm.importance=mask", "algorithm.importance_level=geometric"],
        ["algorithm.max_resample_rounds=2", "algorithm.overlong_buffer_frac=0.25", "algorithm.overlong_coef=0.5"],
        ["algorithm=gspo", "algorithm.aggregation=episode_sum", "algorithm.length_unit=64"],
        ["algorithm=dr_grpo", "algorithm.length_unit=64"],
    ],
)
def test_knobs_that_are_read_pass(given: list[str]) -> None:
    check("+experiment=coding", *given)


@pytest.mark.parametrize("algorithm", overrides.group_options()["algorithm"])
def test_every_shipped_algorithm_reads_what_its_option_sets(algorithm: str) -> None:
    own = ["algorithm.target=tests.unit.rl.test_algorithms:Mine", "algorithm.params.scale=1.0"]
    given = [f"algorithm={algorithm}", *(own if algorithm == "custom" else [])]
    check("+experiment=coding", *given)


def test_the_table_of_knobs_is_that_of_the_registry() -> None:
    from rl.algorithms.config import Aggregation, AlgorithmConfig
    from rl.algorithms.knobs import READS
    from rl.algorithms.registry import BUILDERS

    assert READS.keys() == {*BUILDERS, config_check.CUSTOM}
    known = {field.name for field in dataclasses.fields(AlgorithmConfig)}
    assert all(knobs <= known for knobs in READS.values())
    for name, builder in BUILDERS.items():
        assert ("length_unit" in READS[name]) == (builder.aggregation is Aggregation.episode_sum), name
        assert ("value_lr" in READS[name]) == builder.has_critic, name


def test_another_algorithms_name_alone_would_leave_its_values_behind(tmp_path) -> None:
    line = (
        "algorithm.name: belongs to the option algorithm=grpo, got gspo; write algorithm=gspo, which brings its own "
        "values"
    )
    with pytest.raises(ConfigError) as caught:
        compose("+experiment=coding", "algorithm.name=gspo")
    assert str(caught.value) == line
    assert compose("+experiment=coding", "algorithm=gspo").algorithm.clip_high == 4e-4
    # From a user's own YAML as well; an option of the user's own names the part that it configures.
    for group, content in (
        ("experiment", "# @package _global_\nalgorithm:\n  name: gspo\n"),
        ("algorithm", "name: gspo\n"),
    ):
        (tmp_path / group).mkdir()
        (tmp_path / group / "mine.yaml").write_text(content)
    folders = [overrides.CONF_FOLDER, tmp_path]
    given = overrides.reject_unknown(["+experiment=mine"], folders=folders)
    with pytest.raises(ConfigError) as caught:
        overrides.compose_run(given, folders=folders)
    assert str(caught.value) == line
    given = overrides.reject_unknown(["+experiment=coding", "algorithm=mine"], folders=folders)
    assert overrides.compose_run(given, folders=folders).algorithm.name == "gspo"


def test_the_default_configuration_passes() -> None:
    check("+experiment=coding")


def test_params_of_a_target_are_checked_against_its_signature(tmp_path, monkeypatch) -> None:
    (tmp_path / "own_reward_of_test.py").write_text("def brevity(task, trajectory, evidence, limit=40): return 0.0\n")
    monkeypatch.syspath_prepend(tmp_path)
    own = ["+experiment=coding", "reward=custom", "reward.target=own_reward_of_test:brevity"]
    config = check(*own, "reward.params.limit=3")
    assert config.reward.params == {"limit": 3}
    line = problem(*own, "reward.params.limmit=3")
    assert line == "reward.params.limmit: no such parameter of brevity, got 3; did you mean 'limit'?"


def test_every_number_has_a_range_that_its_default_lies_in() -> None:
    numbers = {k: v for k, v in config_check.flatten(RunConfig()).items() if isinstance(v, int | float)}
    assert set(config_check.RANGES) <= set(numbers)
    for key, allowed in config_check.RANGES.items():
        assert allowed.problem(numbers[key]) is None, key


@pytest.mark.usefixtures("small_machine")
class TestPlacement:
    def test_zeros_are_shared_out(self) -> None:
        config = RunConfig()
        assert config_check.resolve_workers(config, 1) == WorkerPlan(1, 1, 1)
        assert config_check.resolve_workers(config, 2) == WorkerPlan(2, 1, 2)
        assert config_check.resolve_workers(config, 16) == WorkerPlan(4, 4, 16)
        config.rollout.num_workers, config.learner.num_ranks = 3, 2
        assert config_check.resolve_workers(config, 16) == WorkerPlan(3, 5, 8)

    @pytest.mark.parametrize(
        ("override", "line"),
        [
            (
                "rollout.num_workers=64",
                "rollout.num_workers: needs 64 CPUs where 2 are usable (62 short), got 64; use at most 2, 0 for one "
                "each CPU, or name a cluster with cluster.address",
            ),
            (
                "rollout.threads_per_worker=2",
                "rollout.threads_per_worker: 2 workers would run 4 threads on 2 usable CPUs, got 2; use at most 1, or "
                "0 to share them out",
            ),
            (
                "learner.num_ranks=3",
                "learner.num_ranks: needs 3 CPUs where 2 are usable (1 short), got 3; use at most 2, or name a cluster "
                "with cluster.address",
            ),
            (
                "learner.num_threads=3",
                "learner.num_threads: 1 ranks would run 3 threads on 2 usable CPUs, got 3; use at most 2, or 0 for all "
                "of them",
            ),
        ],
    )
    def test_a_shortage_of_cpus_is_refused(self, override: str, line: str) -> None:
        with pytest.raises(ConfigError) as caught:
            config_check.preflight(compose("+experiment=coding", override))
        assert str(caught.value) == line

    def test_a_cluster_is_not_measured_by_this_machine(self) -> None:
        config_check.preflight(compose("+experiment=coding", "rollout.num_workers=64", "cluster.address=auto"))

    def test_colocated_sides_need_the_larger_of_what_they_take_turns_with(self) -> None:
        apart, together = RunConfig(), RunConfig()
        together.cluster.placement = Placement.colocated
        plan = resolve_workers(apart, 2)
        for kv_memory_mb in (0, 1, 4000):
            apart.rollout.kv_memory_mb = together.rollout.kv_memory_mb = kv_memory_mb
            parts, shared = estimate_memory_bytes(apart, plan), estimate_memory_bytes(together, plan)
            if kv_memory_mb:
                assert parts["keys and values"] == plan.num_workers * (kv_memory_mb << 20)
            vocabulary = apart.warm_start.tokenizer_vocab_size
            model = apart.model
            activations = (
                apart.learner.micro_batch_tokens * 4 * (3 * vocabulary + 40 * model.num_layers * model.hidden_size)
            )
            saved = sum(parts.values()) - sum(shared.values())
            assert saved == min(parts["keys and values"], activations)

    def test_a_shortage_of_memory_is_refused_with_the_estimate(self, monkeypatch) -> None:
        config = compose("+experiment=coding")
        assert config_check.preflight(config) == []
        monkeypatch.setattr(machine, "available_memory_bytes", lambda: GIB)
        with pytest.raises(
            ConfigError, match=r"needs about \d\.\d GiB of memory \(Ray .*\), got 1\.0 GiB available; use"
        ):
            config_check.preflight(config)

    def test_a_full_disk_is_refused(self, monkeypatch) -> None:
        monkeypatch.setattr(machine, "free_disk_bytes", lambda path: 1)
        with pytest.raises(
            ConfigError, match=r"^run\.root: the run writes about 0\.3 GiB .*, got 0\.0 GiB free in 'runs'"
        ):
            config_check.preflight(compose("+experiment=coding"))

    def test_a_small_shared_memory_is_a_note(self, monkeypatch) -> None:
        monkeypatch.setattr(machine, "free_shared_memory_bytes", lambda: 64 << 20)
        (note,) = config_check.preflight(compose("+experiment=coding"))
        assert note.startswith("cluster.object_store_mb: /dev/shm is smaller, got 256 MiB of 64 MiB; Ray keeps")


def test_quota_of_either_cgroup_version_bounds_the_cpus(tmp_path) -> None:
    (tmp_path / "cpu").mkdir()
    assert machine.cpu_quota(tmp_path) is None
    (tmp_path / "cpu" / "cpu.cfs_quota_us").write_text("-1\n")
    (tmp_path / "cpu" / "cpu.cfs_period_us").write_text("100000\n")
    assert machine.cpu_quota(tmp_path) is None
    (tmp_path / "cpu" / "cpu.cfs_quota_us").write_text("150000\n")
    assert machine.cpu_quota(tmp_path) == 1.5
    (tmp_path / "cpu.max").write_text("50000 100000\n")
    assert machine.cpu_quota(tmp_path) == 0.5
    assert machine.usable_cpus(tmp_path) == 1


def test_memory_limit_counts_the_page_cache_as_free(tmp_path) -> None:
    (tmp_path / "memory.max").write_text(str(100 << 20))
    (tmp_path / "memory.current").write_text(str(90 << 20))
    (tmp_path / "memory.stat").write_text(f"anon 5\ninactive_file {30 << 20}\n")
    assert machine.available_memory_bytes(tmp_path) == 40 << 20


def test_a_run_config_can_be_written_on_the_command_line() -> None:
    """Every default, written as an override, composes back into itself."""
    for key, value in config_check.flatten(RunConfig()).items():
        kind = overrides.leaves()[key]
        if isinstance(value, dict | list):
            continue
        text = f"{key}={overrides.shown(value)}"
        assert overrides.reject_unknown([text]) == [text], kind
    config = compose(*(f"{k}={overrides.shown(v)}" for k, v in config_check.flatten(RunConfig()).items()))
    assert dataclasses.asdict(config) == dataclasses.asdict(RunConfig())
    assert isinstance(config.env.sandbox, Enum)

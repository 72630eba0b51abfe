"""Everything about a composed configuration that can be wrong, found before anything heavy starts.

Imports none of torch, ray, deepspeed, triton, datasets or wandb, so that the answer comes within a second or two.
Every problem is one line: `<full.key>: <problem>, got <value>; <remedy>`.

    rl.overrides (keys) -> check (values, fields against each other, targets) -> preflight (this machine) -> rl.build
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

from envs.data import locate
from envs.extension import ExtensionError, load_target
from model import config as model_config
from model.size import ModelSize, num_adapter_parameters
from rl import machine
from rl.algorithms import knobs
from rl.algorithms.config import KlPlace
from rl.config import Placement, RunConfig
from rl.learner import knobs as learner_knobs
from rollout.config import ChatFormat

MAX_DEFAULT_WORKERS: Final = 4
"""Rollout workers that `rollout.num_workers=0` starts at most."""

_OPENING_TOKENS: Final = 16  # no task's opening messages are shorter
_GIB: Final = 1 << 30
_MIB: Final = 1 << 20

# Measured on a run of the quickstart's model (proportional set sizes), and rounded up by a fifth to a third.
_RAY_BYTES: Final = 750 * _MIB  # Ray's own processes and the driver; 620 measured
_WORKER_BYTES: Final = 300 * _MIB  # one rollout worker with torch loaded; 240 measured
_SANDBOX_BYTES: Final = 16 * _MIB  # one idle sandbox; `env.sandbox_memory_mb` is its limit, not its use
_LEARNER_BYTES: Final = 450 * _MIB  # one learner rank with torch and DeepSpeed loaded, without activations
_WORKER_BYTES_PER_PARAM: Final = 10  # fp32 weights, and the version that is arriving
_LEARNER_BYTES_PER_PARAM: Final = 28  # fp32 master, gradient, two Adam moments, published view, its gather buffers
_CHECKPOINT_BYTES_PER_PARAM: Final = 16  # fp32 master, two Adam moments, published view
_REFERENCE_BYTES_PER_PARAM: Final = 6  # published bytes and their fp32 view
_FROZEN_BYTES_PER_PARAM: Final = 10  # a base: published bytes, those packed for kernels, and the start being read
_PUBLISHED_BYTES_PER_PARAM: Final = 2  # at most those of bf16
_LOG_BYTES: Final = 200 * _MIB


class ConfigError(ValueError):
    """A mistake in the configuration, or something it needs and this machine lacks; always one line."""


class WorkerPlan(NamedTuple):
    """What the zeros of the configuration stand for on this machine."""

    num_workers: int
    threads_per_worker: int
    learner_threads: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Range:
    """The values that a number may take; `remedy` is what to do about another one."""

    at_least: float | None = None
    above: float | None = None
    at_most: float | None = None
    below: float | None = None
    remedy: str = ""

    def problem(self, value: float) -> str | None:
        """What is wrong with `value`, in words, or `None`."""
        if not math.isfinite(value):
            return "must be finite"
        if self.at_least is not None and value < self.at_least:
            return f"must be at least {self.at_least:g}"
        if self.above is not None and value <= self.above:
            return f"must be above {self.above:g}"
        if self.at_most is not None and value > self.at_most:
            return f"must be at most {self.at_most:g}"
        if self.below is not None and value >= self.below:
            return f"must be below {self.below:g}"
        return None


_COUNT = Range(at_least=1)
_NOT_NEGATIVE = Range(at_least=0)
_FRACTION = Range(at_least=0, at_most=1)
_POSITIVE = Range(above=0)
_BETA = Range(at_least=0, below=1)
_RATE = Range(above=0, at_most=1)

RANGES: Final[Mapping[str, Range]] = {
    "run.seed": Range(at_least=0, at_most=2**32 - 1),
    "run.rounds": _COUNT,
    "run.eval_every": Range(at_least=1, remedy="set it to run.rounds to evaluate only before and after"),
    "run.checkpoint_every": Range(at_least=1, remedy="set it to run.rounds for one checkpoint at the end"),
    "run.keep_checkpoints": _COUNT,
    "run.max_restarts": _NOT_NEGATIVE,
    "algorithm.lr": _RATE,
    "algorithm.lr_end_frac": _FRACTION,
    "algorithm.num_minibatches": _COUNT,
    "algorithm.clip_low": Range(above=0, at_most=1),
    "algorithm.clip_high": _POSITIVE,
    "algorithm.length_unit": _COUNT,
    "algorithm.overlong_buffer_frac": _FRACTION,
    "algorithm.gamma": _FRACTION,
    "algorithm.gae_lambda": _FRACTION,
    "algorithm.value_lr": _RATE,
    "algorithm.importance_cap": Range(at_least=1, remedy="a cap below 1 would cut weights on policy; 2 is usual"),
    "env.max_turns": _COUNT,
    "env.max_tokens_per_turn": _COUNT,
    "env.max_context_tokens": _COUNT,
    "env.sandboxes_per_worker": _COUNT,
    "env.num_visible_checks": _COUNT,
    "env.num_hidden_checks": _COUNT,
    "env.call_timeout_s": _POSITIVE,
    "env.dataset_max_row_mb": _POSITIVE,
    "env.sandbox_memory_mb": Range(at_least=64, remedy="a Python interpreter does not start in less"),
    "rollout.prompts_per_round": _COUNT,
    "rollout.group_size": _COUNT,
    "rollout.temperature": Range(above=0, remedy="greedy rollouts of a group are all the same; use 1"),
    "rollout.min_valid_frac": _FRACTION,
    "rollout.round_deadline_s": _POSITIVE,
    "rollout.hold_back_versions": Range(at_least=0, remedy="0 sends each version to the workers at once"),
    "learner.num_ranks": _COUNT,
    "learner.expert_parallel": _COUNT,
    # Measured with deepspeed 0.19; its issue 8475 and its pull request 8613.
    "learner.zero_stage": Range(
        at_least=1,
        at_most=2,
        remedy="use 1 (optimizer states sharded) or 2 (gradients too); with experts apart, DeepSpeed's stage 0 clips "
        "by the mean of the ranks' norms, and in bf16 by a norm that lacks the experts",
    ),
    "learner.micro_batch_tokens": _COUNT,
    "learner.max_grad_norm": _POSITIVE,
    "learner.beta1": _BETA,
    "learner.beta2": _BETA,
    "learner.call_deadline_s": _POSITIVE,
    "learner.quantization.hysteresis": Range(at_least=0, at_most=0.5, remedy="beyond half a step no code would move"),
    "learner.placement.ranks_per_node": _COUNT,
    "learner.lora.rank": Range(at_least=0, at_most=1024, remedy="0 trains the model itself; 8 to 64 are usual"),
    "learner.lora.alpha": _POSITIVE,
    "evaluation.num_tasks": _COUNT,
    "evaluation.during_num_tasks": _COUNT,
    "warm_start.num_demonstrations": _COUNT,
    "warm_start.steps": _COUNT,
    "warm_start.batch_size": _COUNT,
    "warm_start.lr": _RATE,
    "warm_start.lr_end_frac": _FRACTION,
    "warm_start.beta1": _BETA,
    "warm_start.beta2": _BETA,
    "warm_start.tokenizer_vocab_size": Range(at_least=257, remedy="256 bytes and one special token are the least"),
    "warm_start.checkpoint_every": _COUNT,
    "cluster.object_store_mb": Range(at_least=80, remedy="Ray does not start with less"),
    "cluster.start_deadline_s": _POSITIVE,
}
"""Numbers that are bounded more tightly than the rule for all others: finite and not negative."""

CUSTOM: Final = "custom"
_SINGLE_EPISODES: Final = {"custom", "ppo", "reinforce_pp"}
"""Algorithms that do not compare the episodes of a group."""
_UNBOUNDED_BELOW: Final = {"custom", "cispo"}
"""Algorithms that work without a lower bound of the ratio."""
_SECTIONS_WITH_TARGET: Final = ("env", "reward", "algorithm")


def check(config: RunConfig, names: Mapping[str, tuple[str, ...]], default_of: Callable[[str], str]) -> None:
    """Check all values of a configuration; `names` are the built-in parts of each section that has some.

    `default_of` tells what a full key would be without the user's override, as it is written on the command line
    (`rl.overrides.default_of`).

    Raises:
        ConfigError: one line about the first problem.
    """
    for problem in _problems(config, names, default_of):
        raise ConfigError(problem)
    try:
        config.model.validate()
        if config.reward.target:
            load_target(config.reward.target, config.reward.params, "reward", given=3)  # task, trajectory, evidence
        if config.algorithm.target:
            load_target(config.algorithm.target, config.algorithm.params, "algorithm")
    except (model_config.ConfigError, ExtensionError) as error:
        raise ConfigError(str(error).partition("\n")[0]) from error


def _problems(
    config: RunConfig, names: Mapping[str, tuple[str, ...]], default_of: Callable[[str], str]
) -> Iterator[str]:
    yield from _out_of_range(config, default_of)
    yield from _bad_run_name(config)
    yield from _bad_targets(config, names)
    yield from _unread(config)
    yield from _at_odds(config, default_of)
    yield from _missing_files(config)


def flatten(node: Any, prefix: str = "") -> dict[str, Any]:
    """Full key and value of everything below a dataclass; a `params` mapping is one value."""
    found: dict[str, Any] = {}
    for field in dataclasses.fields(node):
        value = getattr(node, field.name)
        key = f"{prefix}{field.name}"
        if dataclasses.is_dataclass(value):
            found |= flatten(value, f"{key}.")
        else:
            found[key] = value
    return found


def _out_of_range(config: RunConfig, default_of: Callable[[str], str]) -> Iterator[str]:
    for key, value in flatten(config).items():
        if isinstance(value, bool) or not isinstance(value, int | float) or key.startswith("model."):
            continue  # the model checks itself
        allowed = RANGES.get(key, _NOT_NEGATIVE)
        if problem := allowed.problem(value):
            remedy = allowed.remedy or f"the default is {default_of(key)}"
            yield f"{key}: {problem}, got {value}; {remedy}"


def dataclass_default(key: str) -> Any:
    """The default that the dataclasses give a full key; the files of conf/ may compose another one."""
    return flatten(RunConfig())[key]


def _bad_run_name(config: RunConfig) -> Iterator[str]:
    if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,79}", config.run.name):
        yield (
            f"run.name: must be a folder name of letters, digits, '.', '_' and '-', got '{config.run.name}'; "
            "choose another name"
        )


def _bad_targets(config: RunConfig, names: Mapping[str, tuple[str, ...]]) -> Iterator[str]:
    for name in _SECTIONS_WITH_TARGET:
        section = getattr(config, name)
        if section.name not in names[name]:
            yield f"{name}.name: no such part, got {section.name}; choose one of: {', '.join(names[name])}"
        elif section.name == CUSTOM and not section.target:
            yield f"{name}.target: needed with {name}=custom, got null; set {name}.target=my_package.my_module:MyClass"
        elif section.name != CUSTOM and section.target:
            yield f"{name}.target: only read with {name}=custom, got {section.target}; add {name}=custom"
        elif section.name != CUSTOM and section.params:
            given = ", ".join(section.params)
            yield f"{name}.params: only read with {name}=custom, got {given}; add {name}=custom and {name}.target="


def _unread(config: RunConfig) -> Iterator[str]:
    for knob, why, remedy in knobs.unread(config.algorithm):
        yield f"algorithm.{knob}: {why}, got {getattr(config.algorithm, knob)}; {remedy}"


def _at_odds(config: RunConfig, default_of: Callable[[str], str]) -> Iterator[str]:
    """Values that are fine alone and not together."""
    env, rollout, learner = config.env, config.rollout, config.learner
    if config.algorithm.name not in _SINGLE_EPISODES and rollout.group_size < 2:
        yield (
            f"rollout.group_size: {config.algorithm.name} compares the episodes of a group, so it needs at least 2, "
            f"got {rollout.group_size}; the default is {default_of('rollout.group_size')}"
        )
    if config.algorithm.clip_low == 1 and config.algorithm.name not in _UNBOUNDED_BELOW:
        yield (
            f"algorithm.clip_low: must be below 1 with algorithm={config.algorithm.name}, got 1; 1 leaves ratios "
            f"without a lower bound, which is for {' and '.join(sorted(_UNBOUNDED_BELOW))}"
        )
    if config.algorithm.normalize_advantage and config.algorithm.kl_coef and config.algorithm.kl_in is KlPlace.reward:
        yield (
            "algorithm.kl_in: in a group of equal rewards only the KL penalty differs, and "
            "algorithm.normalize_advantage makes full advantages of it, got reward; use loss, or "
            "algorithm.normalize_advantage=false"
        )
    if config.algorithm.num_minibatches > rollout.prompts_per_round:
        yield (
            f"algorithm.num_minibatches: must not exceed rollout.prompts_per_round={rollout.prompts_per_round}, got "
            f"{config.algorithm.num_minibatches}; a group is never split, so lower it or ask for more prompts"
        )
    answers = env.max_turns * env.max_tokens_per_turn
    if env.max_context_tokens < answers + _OPENING_TOKENS:
        yield (
            f"env.max_context_tokens: too small for env.max_turns={env.max_turns} x "
            f"env.max_tokens_per_turn={env.max_tokens_per_turn} tokens of answers and a task, got "
            f"{env.max_context_tokens}; use at least {answers + _OPENING_TOKENS}, and room for what the "
            "environment says"
        )
    if env.max_context_tokens > config.model.max_positions:
        yield (
            f"env.max_context_tokens: longer than model.max_positions={config.model.max_positions}, got "
            f"{env.max_context_tokens}; lower it or raise model.max_positions"
        )
    if learner.micro_batch_tokens < env.max_context_tokens:
        yield (
            f"learner.micro_batch_tokens: must hold one whole episode of env.max_context_tokens="
            f"{env.max_context_tokens}, got {learner.micro_batch_tokens}; raise it to at least that"
        )
    if config.evaluation.during_num_tasks > config.evaluation.num_tasks:
        yield (
            f"evaluation.during_num_tasks: the tasks during the run are the first of evaluation.num_tasks="
            f"{config.evaluation.num_tasks}, got {config.evaluation.during_num_tasks}; lower it or raise the other"
        )
    if config.warm_start.warmup_steps > config.warm_start.steps:
        yield (
            f"warm_start.warmup_steps: must not exceed warm_start.steps={config.warm_start.steps}, got "
            f"{config.warm_start.warmup_steps}; lower it or raise warm_start.steps"
        )
    if config.reward.max_turn_penalty > config.reward.solved_weight:
        yield (
            f"reward.max_turn_penalty: a solved task must never be worth less than an unsolved one, so at most "
            f"reward.solved_weight={config.reward.solved_weight}, got {config.reward.max_turn_penalty}; lower it"
        )
    mean, largest = config.parity.mean_abs_nats, config.parity.max_abs_nats
    if mean is not None and largest is not None and mean > largest:
        yield (
            f"parity.mean_abs_nats: a mean cannot exceed its largest term parity.max_abs_nats="
            f"{largest}, got {mean}; lower it or raise the other"
        )
    if config.warm_start.checkpoint is None and rollout.chat_format is not ChatFormat.native:
        yield (
            f"rollout.chat_format: a model that the warm start trains speaks native, got {rollout.chat_format}; leave "
            "it out, or name a model with warm_start.checkpoint"
        )
    yield from _expert_parallel_mistakes(config)
    yield from learner_knobs.quantization_mistakes(config.learner)
    yield from learner_knobs.placement_mistakes(config.learner)
    yield from learner_knobs.lora_mistakes(config.learner, config.algorithm, config.rollout)


def _expert_parallel_mistakes(config: RunConfig) -> Iterator[str]:
    num_ranks, size = config.learner.num_ranks, config.learner.expert_parallel
    if num_ranks % size:
        yield (
            f"learner.expert_parallel: groups of that many ranks must make up learner.num_ranks={num_ranks}, got "
            f"{size}; use a divisor of it"
        )
    if config.model.num_experts % size:
        yield (
            f"learner.expert_parallel: must divide the model.num_experts={config.model.num_experts} of a layer, got "
            f"{size}; each rank holds as many as every other"
        )
    if config.algorithm.bias_update_speed and not config.model.router_selection_bias:
        yield (
            "algorithm.bias_update_speed: moves the selection bias of a router, which this model has not, got "
            f"{config.algorithm.bias_update_speed}; set it to 0, or use algorithm.load_balance_coef"
        )


def _missing_files(config: RunConfig) -> Iterator[str]:
    yield from locate.problems(config.env)


def resolve_workers(config: RunConfig, cpus: int | None = None) -> WorkerPlan:
    """What `num_workers=0` and the thread counts of 0 stand for on `cpus` CPUs (default: those usable here).

    Workers take one CPU each, at most 4, and share the CPUs out evenly; the learner computes while they wait, so its
    ranks share all CPUs as well.
    """
    available = machine.usable_cpus() if cpus is None else cpus
    workers = config.rollout.num_workers or min(available, MAX_DEFAULT_WORKERS)
    return WorkerPlan(
        num_workers=workers,
        threads_per_worker=config.rollout.threads_per_worker or max(1, available // workers),
        learner_threads=config.learner.num_threads or max(1, available // config.learner.num_ranks),
    )


def episodes_together(config: RunConfig) -> int:
    """Episodes that are open at once, on all workers."""
    return max(config.rollout.prompts_per_round * config.rollout.group_size, config.evaluation.num_tasks)


def check_placement(config: RunConfig, cpus: int) -> None:
    """Check that what the run asks for fits on `cpus` CPUs.

    Raises:
        ConfigError: with the shortage and the largest value that fits.
    """
    plan = resolve_workers(config, cpus)
    wanted = plan.num_workers * plan.threads_per_worker
    if plan.num_workers > cpus:
        raise ConfigError(
            f"rollout.num_workers: needs {plan.num_workers} CPUs where {cpus} are usable "
            f"({plan.num_workers - cpus} short), got {plan.num_workers}; use at most {cpus}, 0 for one each CPU, or "
            "name a cluster with cluster.address"
        )
    if wanted > cpus:
        raise ConfigError(
            f"rollout.threads_per_worker: {plan.num_workers} workers would run {wanted} threads on {cpus} usable "
            f"CPUs, got {plan.threads_per_worker}; use at most {cpus // plan.num_workers}, or 0 to share them out"
        )
    ranks = config.learner.num_ranks
    if ranks > cpus:
        raise ConfigError(
            f"learner.num_ranks: needs {ranks} CPUs where {cpus} are usable ({ranks - cpus} short), got {ranks}; use "
            f"at most {cpus}, or name a cluster with cluster.address"
        )
    if ranks * plan.learner_threads > cpus:
        raise ConfigError(
            f"learner.num_threads: {ranks} ranks would run {ranks * plan.learner_threads} threads on {cpus} usable "
            f"CPUs, got {plan.learner_threads}; use at most {cpus // ranks}, or 0 for all of them"
        )


def count_parameters(config: RunConfig) -> int:
    """Parameters of the policy, with the tokenizer's largest vocabulary where the model leaves its own open."""
    vocabulary = config.model.vocab_size or config.warm_start.tokenizer_vocab_size
    return ModelSize.of(dataclasses.replace(config.model, vocab_size=vocabulary)).num_total


def count_trained(config: RunConfig) -> int:
    """Parameters that the learner trains: the policy's, or those of its adapters."""
    lora = config.learner.lora
    return num_adapter_parameters(config.model, lora) if lora.rank else count_parameters(config)


def estimate_memory_bytes(config: RunConfig, plan: WorkerPlan) -> dict[str, int]:
    """What each part of a run on this machine needs, by name: fixed costs, weights and the largest activations."""
    parameters = count_parameters(config)
    model = config.model
    vocabulary = model.vocab_size or config.warm_start.tokenizer_vocab_size
    # Logits with their gradient and softmax, and about 40 fp32 vectors of the hidden size a layer and token.
    activations = config.learner.micro_batch_tokens * 4 * (3 * vocabulary + 40 * model.num_layers * model.hidden_size)
    worker = _WORKER_BYTES + config.env.sandboxes_per_worker * _SANDBOX_BYTES + parameters * _WORKER_BYTES_PER_PARAM
    ranks, keys_and_values = config.learner.num_ranks, estimate_cache_bytes(config, plan)
    if config.cluster.placement is Placement.colocated:  # they take turns
        keys_and_values = max(0, keys_and_values - ranks * activations)
    learner = count_trained(config) * _LEARNER_BYTES_PER_PARAM
    if config.learner.lora.rank:
        learner += parameters * _FROZEN_BYTES_PER_PARAM
    elif config.algorithm.kl_coef:
        learner += parameters * _REFERENCE_BYTES_PER_PARAM
    num_held = config.rollout.hold_back_versions and config.rollout.hold_back_versions + 1
    held_back = {"held-back versions": num_held * parameters * _PUBLISHED_BYTES_PER_PARAM} if num_held else {}
    return {
        "Ray": _RAY_BYTES,
        "object store": config.cluster.object_store_mb * _MIB,
        f"{plan.num_workers} rollout worker{'s' * (plan.num_workers > 1)}": plan.num_workers * worker,
        "keys and values": keys_and_values,
        "learner": ranks * (_LEARNER_BYTES + activations) + learner,
        **held_back,
    }


def estimate_cache_bytes(config: RunConfig, plan: WorkerPlan) -> int:
    """Keys and values of all episodes that the workers run together, or what `rollout.kv_memory_mb` bounds them to."""
    if config.rollout.kv_memory_mb:
        return plan.num_workers * config.rollout.kv_memory_mb * _MIB
    model = config.model
    latents, heads = model.kv_lora_rank + model.qk_rope_head_dim, 2 * model.num_kv_heads * model.head_dim
    values = latents if model.is_latent else heads
    bytes_per_token = values * model.num_layers * (4 if model.compute_dtype is model_config.ComputeDtype.fp32 else 2)
    return episodes_together(config) * config.env.max_context_tokens * bytes_per_token


def preflight(config: RunConfig) -> list[str]:
    """Check that this machine can hold the run; a cluster is checked after connecting (`check_placement`).

    Returns notes worth printing: what will work, though not at its best.

    Raises:
        ConfigError: CPUs, memory or disk are short.
    """
    root = Path(config.run.root)
    per_param = _CHECKPOINT_BYTES_PER_PARAM + config.rollout.hold_back_versions * _PUBLISHED_BYTES_PER_PARAM
    needed_disk = (config.run.keep_checkpoints + 1) * count_trained(config) * per_param + _LOG_BYTES
    if config.learner.lora.rank:
        needed_disk += count_parameters(config) * _PUBLISHED_BYTES_PER_PARAM  # the base, once
    free_disk = machine.free_disk_bytes(root)
    if free_disk < needed_disk:
        raise ConfigError(
            f"run.root: the run writes about {needed_disk / _GIB:.1f} GiB (checkpoints and logs), got "
            f"{free_disk / _GIB:.1f} GiB free in '{config.run.root}'; free some, or name another place with run.root="
        )
    if config.cluster.address is not None:
        return []
    cpus = machine.usable_cpus()
    check_placement(config, cpus)
    parts = estimate_memory_bytes(config, resolve_workers(config, cpus))
    available = machine.available_memory_bytes()
    if available < sum(parts.values()):
        listed = ", ".join(f"{name} {size / _GIB:.1f}" for name, size in parts.items())
        raise ConfigError(
            f"rollout.num_workers: the run needs about {sum(parts.values()) / _GIB:.1f} GiB of memory ({listed}), got "
            f"{available / _GIB:.1f} GiB available; use fewer workers, a lower learner.micro_batch_tokens, or close "
            "other programs"
        )
    shared = machine.free_shared_memory_bytes()
    if shared < config.cluster.object_store_mb * _MIB:
        return [
            f"cluster.object_store_mb: /dev/shm is smaller, got {config.cluster.object_store_mb} MiB of "
            f"{shared // _MIB} MiB; Ray keeps its object store on disk instead, which is slower "
            "(in Docker: --shm-size=1g)"
        ]
    return []

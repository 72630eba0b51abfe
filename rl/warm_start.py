"""The warm start: supervised fine-tuning on demonstrations, cached by a hash of everything it depends on.

No weights can be assumed, so a run starts from a tokenizer trained on the environment's corpus and a policy fitted to
the episodes of the environment's scripted solver. `python -m rl.sft +experiment=coding` makes the start alone; a run
makes it when it is not in the cache. Killed half-way, it goes on from its last checkpoint.

    corpus -> tokenizer -> demonstration episodes (rollout workers, real environment) -> fit -> model folder
"""

from __future__ import annotations

import dataclasses
import fcntl
import hashlib
import json
import math
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import numpy as np
from datasets import Dataset, disable_progress_bars

from envs.base import TaskSource
from envs.data.locate import content_digest
from model.checkpoint import save_model
from model.config import LoraConfig, ModelConfig
from model.transformer import Transformer, init_weights
from rl.batch import TrainSample, sample_from_segment
from rl.checkpoint import publish_folder, seal, verify_seal
from rl.config import RunConfig
from rl.learner.config import PlacementConfig, QuantizationConfig
from rl.learner.group import LearnerGroup
from rl.learner.learner import LearnerSpec
from rl.progress import Progress
from rl.start_model import with_vocabulary
from rollout.pool import RolloutPool
from rollout.renderers.base import Renderer
from rollout.renderers.registry import make_renderer
from rollout.renderers.template import compare_with_folder
from rollout.tokenizer import TOKENIZER_FILE, load_tokenizer, train_tokenizer
from rollout.types import Answer, Task, Trajectory

_RECIPE_VERSION = 1
"""Raised when the same settings give another result: old cache entries are then not used."""

_NUM_HASHED_SCRIPTS = 64
"""So many demonstrations stand for all: they are drawn by the same code."""

_LOSS_FILE = "warm_start.json"
"""In the folder of a start that was made here: the cross entropy of its last step, in nats a token."""

_FREE = {"cache", "checkpoint", "checkpoint_every"}


class WarmStartError(ValueError):
    """A warm start that cannot be made or used."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StartPlan:
    """Where the start is, or will be, and what the rollout workers need to know of it before it exists.

    `note` is a line for the user.
    """

    folder: Path
    tokenizer_json: str
    model: ModelConfig
    note: str = ""

    @property
    def is_ready(self) -> bool:
        """Whether the start was made already."""
        return self.folder.is_dir()

    @property
    def work(self) -> Path:
        """Where an unfinished start is kept."""
        return self.folder.with_name(f".{self.folder.name}.partial")


def plan_start(config: RunConfig, tasks: TaskSource) -> StartPlan:
    """Find the start of a run. Its tokenizer is always trained: the cache entry depends on it.

    Raises:
        WarmStartError: The environment demonstrates nothing, or a task leaves no room for an answer.
    """
    if config.warm_start.checkpoint is not None:
        return _given_start(config, Path(config.warm_start.checkpoint), tasks)
    scripts = list(islice(tasks.demonstrations(config.run.seed), _NUM_HASHED_SCRIPTS))
    if not scripts:
        raise WarmStartError(
            f"warm start: the environment demonstrates nothing, got {config.env.name!r} without solutions; give "
            "the tasks solutions, or name a start with warm_start.checkpoint"
        )
    calls = any(task.tools for task, _ in scripts)
    tokenizer = train_tokenizer(tasks.corpus(), config.warm_start.tokenizer_vocab_size, calls=calls)
    folder = Path(config.warm_start.cache) / _entry_name(config, tokenizer.to_str(), scripts)
    if folder.is_dir():
        verify_seal(folder)
    _check_prompts(config, make_renderer(config.rollout.chat_format, tokenizer), tasks)
    model = with_vocabulary(config.model, tokenizer)
    return StartPlan(folder=folder, tokenizer_json=tokenizer.to_str(), model=model)


def _check_prompts(config: RunConfig, renderer: Renderer, tasks: TaskSource) -> None:
    """Raises WarmStartError when one of the first tasks (the stream is endless) leaves no room for an answer."""
    looked_at = [tasks.train(index) for index in range(config.rollout.prompts_per_round)]
    for task in [*looked_at, *tasks.held_out(config.evaluation.num_tasks)]:
        num_tokens = len(renderer.opening(task.messages, task.tools).ids)
        if num_tokens >= config.env.max_context_tokens:
            raise WarmStartError(
                f"env.max_context_tokens: must leave room after the task, got {config.env.max_context_tokens} with "
                f"{num_tokens} tokens in task {task.id}; raise it (and model.max_positions), or shorten the task"
            )


def warm_start(
    config: RunConfig, plan: StartPlan, tasks: TaskSource, pool: RolloutPool, num_threads: int, progress: Progress
) -> None:
    """Make the start that `plan` names, or go on making it. Does nothing when it is ready."""
    with _locked(plan.folder):
        if plan.is_ready:
            progress.say(f"warm start: taken from the cache, {plan.folder}")
            return
        work = plan.work
        work.mkdir(parents=True, exist_ok=True)
        (work / TOKENIZER_FILE).write_text(plan.tokenizer_json)
        samples = _demonstrations(config, work, tasks, pool, progress)
        _fit(config, plan, work, samples, num_threads, progress)
        publish_folder(work / "start", plan.folder)
        shutil.rmtree(work)


def last_loss(folder: Path) -> float | None:
    """Cross entropy of the last step, nats a token, of the start in `folder`; `None` when no warm start made it."""
    file = folder / _LOSS_FILE
    return float(json.loads(file.read_text())["last_loss"]) if file.is_file() else None


def _fit(
    config: RunConfig, plan: StartPlan, work: Path, samples: list[TrainSample], num_threads: int, progress: Progress
) -> None:
    """Maximum likelihood on `samples`; a checkpoint every few steps, the sealed result in `work/start`."""
    settings = config.warm_start
    initial = work / "initial"
    if not initial.is_dir():
        staging = _fresh(work / ".initial")
        transformer = Transformer(plan.model)
        init_weights(transformer, config.run.seed)
        save_model(staging, plan.model, dict(transformer.named_parameters()), {})
        seal(staging)
        publish_folder(staging, initial)
    spec = LearnerSpec.of(config, model=plan.model, start=initial, num_threads=num_threads)
    optimizer = dataclasses.replace(
        spec.optimizer, beta1=settings.beta1, beta2=settings.beta2, weight_decay=settings.weight_decay
    )
    # It makes a small model, and shall not depend on the ranks of a later run: it has one itself, with their threads.
    num_threads *= config.learner.num_ranks
    spec = dataclasses.replace(spec, optimizer=optimizer, num_threads=num_threads, expert_parallel=1)
    # It makes the reference, and one start serves every way of training on from it.
    spec = dataclasses.replace(
        spec,
        reference=False,
        value_lr=None,
        quantization=QuantizationConfig(),
        placement=PlacementConfig(),
        lora=LoraConfig(),
    )
    progress.stage("warm start: building the learner")
    with LearnerGroup(spec, num_ranks=1, deadline_s=config.learner.call_deadline_s) as learner:
        first, loss = 0, math.nan
        saved = max(work.glob("step-*"), default=None)
        if saved is not None:
            verify_seal(saved)
            learner.load(saved.resolve())
            first = int(saved.name.removeprefix("step-"))
            progress.say(f"warm start: going on after step {first}")
        progress.phase("warm start", settings.steps, done=first, every_row=False)
        for step in range(first, settings.steps):
            batch = [samples[i] for i in _batch_indices(config.run.seed, step, settings.batch_size, len(samples))]
            loss = learner.fit(batch, _learning_rate(config, step))
            progress.advance(loss=loss)
            if (step + 1) % settings.checkpoint_every == 0 and step + 1 < settings.steps:
                _save(learner, work, f"step-{step + 1:06d}")
        progress.end_phase()
        result = {
            TOKENIZER_FILE: (work / TOKENIZER_FILE).read_bytes(),
            _LOSS_FILE: json.dumps({"last_loss": loss}).encode(),
        }
        _save(learner, work, "start", result)


def _save(learner: LearnerGroup, work: Path, name: str, more: Mapping[str, bytes] | None = None) -> None:
    staging = _fresh(work / f".{name}")
    learner.save(staging.resolve())
    for file, content in (more or {}).items():
        (staging / file).write_bytes(content)
    seal(staging)
    publish_folder(staging, work / name)
    for older in work.glob("step-*"):
        if older.name != name:
            shutil.rmtree(older)


def _demonstrations(
    config: RunConfig, work: Path, tasks: TaskSource, pool: RolloutPool, progress: Progress
) -> list[TrainSample]:
    """Episodes of the scripted solver as samples; kept on disk, so that a killed warm start does not repeat them."""
    disable_progress_bars()  # `progress` is the one display
    folder = work / "demonstrations"
    if not folder.is_dir():
        progress.stage("warm start: running the scripted solver's episodes")
        scripts = list(islice(tasks.demonstrations(config.run.seed), config.warm_start.num_demonstrations))
        if len(scripts) < config.warm_start.num_demonstrations:
            raise WarmStartError(
                f"warm_start.num_demonstrations: the environment must demonstrate that many, got {len(scripts)} of "
                f"{config.warm_start.num_demonstrations}; lower it, or give the tasks solutions"
            )
        trajectories = pool.demonstrate(
            scripts,
            max_tokens_per_turn=config.env.max_tokens_per_turn,
            max_context_tokens=config.env.max_context_tokens,
        )
        broken = [trajectory for trajectory in trajectories if trajectory.failure is not None]
        if broken:
            raise WarmStartError(
                f"warm start: every demonstration must run, got {len(broken)} of {len(trajectories)} failed, first: "
                f"{broken[0].evidence.reason.strip().splitlines()[-1]}; fix the environment and run again"
            )
        solved = sum(trajectory.evidence.hidden.all_passed for trajectory in trajectories)
        progress.say(f"warm start: {len(trajectories)} demonstrations, {solved / len(trajectories):.1%} of them right")
        staging = work / ".demonstrations"
        shutil.rmtree(staging, ignore_errors=True)
        Dataset.from_list([_row(trajectory) for trajectory in trajectories]).save_to_disk(str(staging))
        staging.rename(folder)
    stored = Dataset.load_from_disk(str(folder))
    return [_sample(index, row) for index, row in enumerate(stored.to_list())]


def _row(trajectory: Trajectory) -> dict[str, list[int]]:
    sample = sample_from_segment(trajectory.segments[0], key="", advantage=0.0, trained=True)
    return {"ids": sample.ids_T.tolist(), "targets": sample.targets_R.tolist()}


def _sample(index: int, row: dict[str, list[int]]) -> TrainSample:
    targets_R = np.array(row["targets"], dtype=np.int64)
    zeros_R = np.zeros(len(targets_R), dtype=np.float32)
    return TrainSample(
        key=f"{index:06d}",
        ids_T=np.array(row["ids"], dtype=np.int64),
        targets_R=targets_R,
        behavior_logprobs_R=zeros_R,
        advantages_R=zeros_R,
        routes_TLK=np.zeros((0, 0, 0), dtype=np.uint8),
        weight_version=-1,
        trained=True,
    )


def _batch_indices(seed: int, step: int, batch_size: int, num_samples: int) -> list[int]:
    """Which samples step `step` trains on: a reshuffled pass after the other, a function of the seed and the step."""
    positions = range(step * batch_size, (step + 1) * batch_size)
    epochs = range(positions[0] // num_samples, positions[-1] // num_samples + 1)
    orders = {epoch: np.random.default_rng((seed, epoch)).permutation(num_samples) for epoch in epochs}
    return [int(orders[position // num_samples][position % num_samples]) for position in positions]


def _learning_rate(config: RunConfig, step: int) -> float:
    """Linear warm-up, then a linear fall to `lr_end_frac` of the peak."""
    settings = config.warm_start
    rise = min(1.0, (step + 1) / max(1, settings.warmup_steps))
    return settings.lr * rise * max(settings.lr_end_frac, 1 - step / settings.steps)


def _fingerprint(config: RunConfig) -> str:
    """A hash of the settings that the start depends on."""
    settings = {k: v for k, v in dataclasses.asdict(config.warm_start).items() if k not in _FREE}
    env = config.env
    parts = {
        "recipe": _RECIPE_VERSION,
        "seed": config.run.seed,
        "warm_start": settings,
        "model": dataclasses.asdict(config.model),
        "env": [env.name, env.target, env.params, content_digest(env), env.max_turns, env.max_tokens_per_turn,
                env.max_context_tokens, env.num_visible_checks, env.num_hidden_checks],
        "learner": [config.learner.max_grad_norm, config.learner.zero_stage, config.learner.micro_batch_tokens],
        "router": [config.algorithm.load_balance_coef, config.algorithm.router_z_coef],
    }  # fmt: skip
    return hashlib.blake2b(json.dumps(parts, sort_keys=True).encode(), digest_size=8).hexdigest()


def _entry_name(config: RunConfig, tokenizer_json: str, scripts: Sequence[tuple[Task, tuple[Answer, ...]]]) -> str:
    """The cache entry of a start: a hash of the settings and, as code may change, of what the environment gives."""
    shown = [([message.content for message in task.messages], answers) for task, answers in scripts]
    content = json.dumps([_fingerprint(config), tokenizer_json, shown], default=dataclasses.asdict)
    return hashlib.blake2b(content.encode(), digest_size=8).hexdigest()


def _given_start(config: RunConfig, folder: Path, tasks: TaskSource) -> StartPlan:
    """A start from a saved model, whose configuration `rl.start_model` has put into `config.model`."""
    tokenizer = load_tokenizer(folder / TOKENIZER_FILE)
    model = with_vocabulary(config.model, tokenizer)
    renderer = make_renderer(config.rollout.chat_format, tokenizer)
    _check_prompts(config, renderer, tasks)
    note = compare_with_folder(renderer, tokenizer, folder)
    return StartPlan(folder=folder, tokenizer_json=tokenizer.to_str(), model=model, note=note)


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Only one process makes a start at a time; another waits for it and then finds it made."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with (folder.parent / f".{folder.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _fresh(folder: Path) -> Path:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    return folder

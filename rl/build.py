"""The composition root: builds the parts of a run from its configuration, runs them, and takes them down again.

The only module that knows every package. What it starts it stops, in reverse order, whatever happens between.
"""

from __future__ import annotations

import dataclasses
import shlex
import sys
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import yaml

from envs.base import TaskSource
from envs.extension import load_target
from envs.registry import build_tasks, choose_boxes
from envs.sandbox.probe import probe
from model.hf.files import Folder
from model.kernels.dispatch import resolve_kernels
from rewards.base import Reward, score
from rewards.registry import build_reward
from rl.advantage import Weighing
from rl.algorithms.base import Algorithm, CriticAlgorithm
from rl.algorithms.config import KlPlace
from rl.algorithms.objective import Objective
from rl.algorithms.overlong import Overlong
from rl.algorithms.registry import aggregation_of, build_algorithm
from rl.checkpoint import Checkpoints, RunState
from rl.cluster import ray_cluster
from rl.config import Placement, RunConfig
from rl.config_check import WorkerPlan, episodes_together, resolve_workers
from rl.evaluate import Evaluator
from rl.held_back import HeldBack
from rl.interrupt import graceful_interrupt
from rl.learner.group import LearnerGroup, RankDiedError
from rl.learner.learner import LearnerSpec
from rl.loop import Parts, train
from rl.metrics import METRICS_FILE, MetricsLog, read_metrics
from rl.parity import bounds_for
from rl.progress import Progress, closing_lines
from rl.publish import Publisher
from rl.recorder import Recorder
from rl.report import EPISODE_COLUMNS, HeldOut, RunFacts, episode_rows, machine_facts, write_report
from rl.rollouts import Rollouts, task_limits
from rl.run_folder import RunFolder, RunResult, commit, plain, write_atomically
from rl.shaping import KlReward, Shaping
from rl.start_model import with_vocabulary
from rl.still import StillWatch
from rl.tracking import Tracker, new_run_id, resolve_mode
from rl.warm_start import StartPlan, last_loss, plan_start, warm_start
from rollout.pool import RolloutPool
from rollout.tokenizer import TOKENIZER_FILE, load_tokenizer
from rollout.types import WeightVersion
from rollout.worker import WorkerSpec

_BEFORE, _AFTER = "held_out_before.json", "held_out_after.json"


class TrialError(ValueError):
    """The environment or the reward of the run does not work."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Start:
    """Where a run begins: from its own start, or from a checkpoint (`state`)."""

    plan: StartPlan
    state: RunState | None

    @property
    def first_round(self) -> int:
        return 1 if self.state is None else self.state.next_round


@dataclass(frozen=True, slots=True, kw_only=True)
class _Ready:
    """What a run has before anything of it is started; the kernels of `config` are resolved."""

    config: RunConfig
    folder: RunFolder
    progress: Progress
    tasks: TaskSource
    workers: WorkerPlan
    checkpoints: Checkpoints


def run(config: RunConfig, folder: RunFolder) -> RunResult:
    """Carry out a run, or what is left of it, in `folder`. Raises KeyboardInterrupt when it was asked to stop.

    When a learner rank dies, everything is taken down and started again from the last checkpoint.
    """
    with Progress() as progress:
        tasks, workers = _prepare(config, progress)
        config = _with_kernels(config, progress)
        checkpoints = Checkpoints(folder.path / "checkpoints", config.run.keep_checkpoints)
        ready = _Ready(
            config=config, folder=folder, progress=progress, tasks=tasks, workers=workers, checkpoints=checkpoints
        )
        restarts, first_round = 0, 0
        while True:
            start = _find_start(config, checkpoints, tasks)
            restarts = restarts + 1 if start.first_round == first_round else 0
            first_round = start.first_round
            try:
                stopped = _carry_on(ready, start)
                break
            except RankDiedError as error:
                if restarts >= config.run.max_restarts:
                    raise
                progress.say(f"{str(error).partition(';')[0]}; starting again from the last checkpoint")
    if stopped:
        raise KeyboardInterrupt
    return _finish(config, folder, workers)


def _carry_on(ready: _Ready, start: _Start) -> bool:
    """From `start` to the last round; whether the run was asked to stop before it."""
    config, progress, tasks, workers = ready.config, ready.progress, ready.tasks, ready.workers
    with ExitStack() as stack:
        if start.plan.note:
            progress.say(start.plan.note)
        pool = _start_workers(stack, config, start.plan, workers, progress)
        _try_out(config, tasks, pool)
        if start.state is None and config.warm_start.checkpoint is None:
            warm_start(config, start.plan, tasks, pool, workers.learner_threads, progress)
        return _rounds(stack, ready, start, pool)


def make_start(config: RunConfig) -> Path:
    """Only the warm start (`python -m rl.sft`); returns its folder."""
    with ExitStack() as stack:
        progress = stack.enter_context(Progress())
        tasks, workers = _prepare(config, progress)
        config = _with_kernels(config, progress)
        plan = plan_start(config, tasks)
        if not plan.is_ready:
            pool = _start_workers(stack, config, plan, workers, progress)
            warm_start(config, plan, tasks, pool, workers.learner_threads, progress)
        progress.say(f"the start is in {plan.folder}; use it with warm_start.checkpoint={plan.folder}")
    return plan.folder


def _prepare(config: RunConfig, progress: Progress) -> tuple[TaskSource, WorkerPlan]:
    """What can fail fast: the sandbox of this machine and the tasks."""
    progress.stage("checking the sandbox and the tasks")
    choose_boxes(config.env)
    probe(config.env.sandbox)
    workers = resolve_workers(config)
    progress.say(
        f"{workers.num_workers} rollout workers with {workers.threads_per_worker} threads each, "
        f"learner with {workers.learner_threads}"
    )
    return build_tasks(config.env, seed=config.run.seed), workers


def _with_kernels(config: RunConfig, progress: Progress) -> RunConfig:
    """The configuration with `auto` resolved: sampler and learner run the same kernels, on every machine."""
    progress.stage("choosing the kernels (the first time, building them)")
    kernels = resolve_kernels(config.cluster.kernels).name
    progress.say(f"kernels: {kernels}")
    return dataclasses.replace(config, cluster=dataclasses.replace(config.cluster, kernels=kernels))


def _find_start(config: RunConfig, checkpoints: Checkpoints, tasks: TaskSource) -> _Start:
    latest = checkpoints.latest()
    if latest is None:
        return _Start(plan=plan_start(config, tasks), state=None)
    folder, state = latest
    tokenizer = load_tokenizer(folder / TOKENIZER_FILE)
    model = with_vocabulary(config.model, tokenizer)
    return _Start(plan=StartPlan(folder=folder, tokenizer_json=tokenizer.to_str(), model=model), state=state)


def _companions(plan: StartPlan) -> dict[str, bytes]:
    """The files that travel with the model, read now: a checkpoint that a run resumes from is pruned later."""
    files = {name: (plan.folder / name).read_bytes() for name in Folder(plan.folder).companions()}
    return files | {TOKENIZER_FILE: plan.tokenizer_json.encode()}


def _start_workers(
    stack: ExitStack, config: RunConfig, plan: StartPlan, workers: WorkerPlan, progress: Progress
) -> RolloutPool:
    progress.stage("starting Ray")
    stack.enter_context(ray_cluster(config.cluster, num_cpus=workers.num_workers + config.learner.num_ranks))
    progress.stage("starting the rollout workers and their sandboxes")
    spec = WorkerSpec(
        env=config.env,
        model=plan.model,
        tokenizer_json=plan.tokenizer_json,
        num_threads=workers.threads_per_worker,
        max_sessions=-(-episodes_together(config) // workers.num_workers),
        max_retries=config.rollout.max_retries,
        chat_format=config.rollout.chat_format,
        kernels=config.cluster.kernels,
        kv_memory_bytes=config.rollout.kv_memory_mb << 20,
        gives_memory_back=config.cluster.placement is Placement.colocated,
        lora=config.learner.lora,
    )
    return stack.enter_context(
        RolloutPool(spec, num_workers=workers.num_workers, deadline_s=config.rollout.round_deadline_s)
    )


def _try_out(config: RunConfig, tasks: TaskSource, pool: RolloutPool) -> None:
    """One episode with a scripted answer, judged: a reward or an environment that cannot work is found before training.

    Raises TrialError with the reason.
    """
    task = tasks.train(0)
    (trajectory,) = pool.demonstrate(
        [(task, ("",))],
        max_tokens_per_turn=config.env.max_tokens_per_turn,
        max_context_tokens=config.env.max_context_tokens,
    )
    judged = score(_reward(config), task, trajectory)
    if judged.reward.masked is not None:
        what = "reward" if trajectory.failure is None else "env"
        reason = judged.reward.masked.strip().splitlines()[-1]
        raise TrialError(f"{what}: a trial episode could not be judged, got {reason}; fix it and run again")


def _rounds(stack: ExitStack, ready: _Ready, start: _Start, pool: RolloutPool) -> bool:
    """All remaining rounds with the evaluations around them; whether the run was asked to stop."""
    config, folder, progress = ready.config, ready.folder, ready.progress
    progress.stage("building the learner")
    learners = stack.enter_context(
        LearnerGroup(
            LearnerSpec.of(
                config, model=start.plan.model, start=start.plan.folder, num_threads=ready.workers.learner_threads
            ),
            num_ranks=config.learner.num_ranks,
            deadline_s=config.learner.call_deadline_s,
        )
    )
    quantization, hold_back = config.learner.quantization, config.rollout.hold_back_versions
    publisher = Publisher(
        learners,
        pool,
        bounds_for(config.parity, config.model.compute_dtype, config.cluster.kernels, quantized=quantization.enabled),
        HeldBack(start.plan.model, hold_back),
    )
    if hold_back:
        progress.say(
            f"rollout.hold_back_versions={hold_back}: the workers run older weights than the learner, so the "
            "parity gate compares their bytes and not the logprobs"
        )
    if not quantization.enabled:
        progress.say(
            "parity gate: compares the published bytes and no logprobs (learner.quantization.enabled=false): sampler "
            "and learner differ by the quantization, which algorithm.importance=truncate corrects for"
        )
    rollouts = Rollouts(config=config, tasks=ready.tasks, pool=pool)
    if start.state is not None:
        rollouts.resume(start.state)
        learners.load(start.plan.folder.resolve())
        publisher.load(start.plan.folder, WeightVersion(start.state.weight_version))
        progress.say(f"resuming before round {start.first_round}, from {start.plan.folder}")
    publisher.publish(WeightVersion(0 if start.state is None else start.state.weight_version))

    before_file = folder.path / _BEFORE
    log = stack.enter_context(
        MetricsLog(folder.path / METRICS_FILE, resume_round=start.first_round if before_file.is_file() else 0)
    )
    wandb_id = _wandb_id(folder, start.state)
    tracker = stack.enter_context(
        Tracker(
            folder.path,
            resolve_mode(config.logging.wandb.value),
            project=config.logging.project,
            run_id=wandb_id,
            name=config.run.name,
            config=plain(config),
            tags=config.logging.tags,
        )
    )
    recorder = Recorder(
        log=log,
        tracker=tracker,
        progress=progress,
        still=StillWatch(quantization.warn_still_rounds),
        compares_logprobs=quantization.enabled,
    )
    evaluator = Evaluator(
        pool=pool,
        reward=_reward(config),
        tasks=ready.tasks,
        limits=task_limits(config),
        max_context_tokens=config.env.max_context_tokens,
        settings=config.evaluation,
    )
    stop = stack.enter_context(
        graceful_interrupt(lambda: progress.say("stopping after this round; once more to stop at once"))
    )
    algorithm = _algorithm(config)
    parts = Parts(
        config=config,
        rollouts=rollouts,
        reward=evaluator.reward,
        algorithm=algorithm,
        shaping=_shaping(config),
        loss=Objective(algorithm, config.algorithm),
        weighing=Weighing(aggregation=aggregation_of(config.algorithm), length_unit=config.algorithm.length_unit),
        learners=learners,
        publisher=publisher,
        evaluator=evaluator,
        checkpoints=ready.checkpoints,
        recorder=recorder,
        companions=_companions(start.plan),
        wandb_id=wandb_id,
        on_round=folder.record_round,
        should_stop=stop,
    )
    if not before_file.is_file():
        with recorder.stage("evaluate"):
            evaluations = evaluator.full()
        recorder.record_start(evaluations, last_loss(start.plan.folder))
        before = evaluator.held_out(evaluations)
        before.save(before_file)
        tracker.log_table("episodes/before", EPISODE_COLUMNS, episode_rows(before.episodes))
        progress.say(f"held-out before: {before.results[0].passed}")
    progress.phase("rounds", config.run.rounds, done=start.first_round - 1)
    evaluations = train(parts, start.first_round)
    if stop():
        return True
    progress.end_phase()
    # A run that was killed after its last checkpoint has its rounds, but not this evaluation.
    with publisher.newest():
        after = evaluator.held_out(evaluations or evaluator.full())
    after.save(folder.path / _AFTER)
    tracker.log_table("episodes/after", EPISODE_COLUMNS, episode_rows(after.episodes))
    return False


def _wandb_id(folder: RunFolder, state: RunState | None) -> str:
    """The run's W&B id: the checkpoint's, or, before the first one, that of an earlier start."""
    if state is not None:
        return state.wandb_id
    file = folder.path / "wandb_id"
    if not file.is_file():
        write_atomically(file, new_run_id())
    return file.read_text()


def _reward(config: RunConfig) -> Reward:
    target, params = config.reward.target, config.reward.params
    custom = None if target is None else load_target(target, params, "reward", given=3)
    return build_reward(config.reward, custom)


def _algorithm(config: RunConfig) -> Algorithm | CriticAlgorithm:
    target, params = config.algorithm.target, config.algorithm.params
    custom = None if target is None else load_target(target, params, "algorithm")
    return build_algorithm(config.algorithm, custom)


def _shaping(config: RunConfig) -> Shaping:
    settings = config.algorithm
    in_reward = settings.kl_coef > 0 and settings.kl_in is KlPlace.reward
    limit = config.env.max_tokens_per_turn
    buffer = settings.overlong_buffer_frac * limit
    return Shaping(
        kl=KlReward(coef=settings.kl_coef, estimator=settings.kl_estimator) if in_reward else None,
        overlong=Overlong(limit=limit, buffer=buffer, coef=settings.overlong_coef) if buffer else None,
    )


def _continue_command(rounds: int) -> str:
    """The command line of this process, asking for more rounds."""
    kept = [argument for argument in sys.argv[1:] if not argument.startswith("run.rounds=")]
    return f"python -m rl.train {shlex.join([*kept, f'run.rounds={rounds}'])}"


def _finish(config: RunConfig, folder: RunFolder, workers: WorkerPlan) -> RunResult:
    """Write the report and the result, and say how it went and how to go on."""
    before, after = HeldOut.load(folder.path / _BEFORE), HeldOut.load(folder.path / _AFTER)
    rows = read_metrics(folder.path / METRICS_FILE)
    seconds = sum(row.values.get("time/round_s") or 0.0 for row in rows)
    rewards = [reward for row in rows if (reward := row.values.get("reward/total")) is not None]
    head, dirty = commit()
    kernels = resolve_kernels(config.cluster.kernels).name
    quantized = config.learner.quantization.enabled
    bounds = bounds_for(config.parity, config.model.compute_dtype, kernels, quantized=quantized)
    more = _continue_command(config.run.rounds + 10)
    report = write_report(
        folder.path,
        facts=RunFacts(
            name=config.run.name,
            status=f"finished {config.run.rounds} of {config.run.rounds} rounds",
            commit=f"{head}{' with changes' if dirty else ''}",
            resume_command=more,
            config_yaml=yaml.safe_dump(plain(config), sort_keys=False),
            seconds=seconds,
            machine=machine_facts(workers.learner_threads),
        ),
        before=before,
        after=after,
        parity_mean_bound_nats=bounds.mean_abs_nats,
        parity_max_bound_nats=bounds.max_abs_nats,
    )
    result = RunResult(
        rounds=config.run.rounds,
        held_out_before=before.results[0].passed.rate or 0.0,
        held_out_after=after.results[0].passed.rate or 0.0,
        reward_first=rewards[0] if rewards else 0.0,
        reward_last=rewards[-1] if rewards else 0.0,
        minutes=seconds / 60,
    )
    folder.finish(result)
    lines = closing_lines(
        before=before.results[0].passed, after=after.results[0].passed, report=report, resume_command=more
    )
    sys.stdout.write("\n".join(lines) + "\n")
    return result

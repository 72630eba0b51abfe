"""A rollout worker: one engine, one environment factory, and the episodes that run on them.

A plain class; `rollout.actor` puts it into a Ray process. The episodes of a batch are coroutines that share the engine
(`rollout.engine.sampler`); episodes that infrastructure broke are run again, the same job with the same seed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from envs.base import Env, EnvError, EnvFactory, StepResult
from envs.config import EnvConfig
from envs.registry import build_factory
from model.config import KernelChoice, LoraConfig, ModelConfig
from model.kernels.dispatch import resolve_kernels
from model.snapshot import WeightSnapshot
from rollout.config import ChatFormat, EngineConfig
from rollout.engine.engine import Engine
from rollout.engine.sampler import EpisodeSampler, Joining
from rollout.episode import EpisodeJob, run_episode
from rollout.renderers.registry import make_renderer
from rollout.scripted import ScriptedSampler
from rollout.subscribe import Subscriber
from rollout.tokenizer import tokenizer_from_json
from rollout.types import Answer, Evidence, Message, Task, Trajectory

_TOKENS_PER_STEP = 2048
"""Tokens that a step computes at most, where more sessions do not need more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSpec:
    """Everything a worker needs; picklable.

    `max_sessions` bounds the episodes that are open together, `kv_memory_bytes` their keys and values (0: no bound),
    which have memory only while episodes run with `gives_memory_back`.
    """

    env: EnvConfig
    model: ModelConfig
    tokenizer_json: str
    chat_format: ChatFormat
    num_threads: int
    max_sessions: int
    max_retries: int
    kernels: KernelChoice = KernelChoice.auto
    kv_memory_bytes: int = 0
    gives_memory_back: bool = False
    lora: LoraConfig = field(default_factory=LoraConfig)


class _MadeAtReset(Env):
    """An environment that is made inside its episode, where a maker that fails is caught as one of it."""

    def __init__(self, factory: EnvFactory, fresh_grading: bool) -> None:
        self._factory = factory
        self._fresh_grading = fresh_grading
        self._made: Env | None = None

    async def reset(self, task: Task) -> tuple[Message, ...]:
        self._made = self._factory.make(fresh_grading=self._fresh_grading)
        return await self._made.reset(task)

    async def step(self, message: Message) -> StepResult:
        return await self._get().step(message)

    async def evidence(self) -> Evidence:
        return await self._get().evidence()

    async def close(self) -> None:
        if self._made is not None:
            await self._made.close()

    def _get(self) -> Env:
        if self._made is None:
            raise EnvError("episode: no environment is made, got a call before reset; call reset first")
        return self._made


class RolloutWorker:
    """Runs batches of episodes under the last received weights."""

    def __init__(self, spec: WorkerSpec):
        torch.set_num_threads(spec.num_threads)
        self._spec = spec
        self._renderer = make_renderer(spec.chat_format, tokenizer_from_json(spec.tokenizer_json))
        kernels = resolve_kernels(spec.kernels)
        self._joining = Joining.CONTINUOUS if kernels.batch_invariant else Joining.LOCKSTEP
        self._engine = Engine(
            spec.model,
            EngineConfig(
                max_batch_size=spec.max_sessions,
                max_seq_len=spec.env.max_context_tokens,
                memory_bytes=spec.kv_memory_bytes,
                max_tokens_per_step=max(_TOKENS_PER_STEP, spec.max_sessions),
                # Where bits depend on the batch, a step may not depend on what else has been computed before.
                share_prefixes=kernels.batch_invariant,
            ),
            kernels=kernels,
            stop_ids=self._renderer.stop_ids,
            lora=spec.lora,
        )
        if spec.gives_memory_back:
            self._engine.sleep()
        self._subscriber = Subscriber(spec.model, self._engine, spec.lora)
        self._envs = build_factory(spec.env)

    def receive(self, snapshot: WeightSnapshot, *, may_go_back: bool = False) -> Mapping[str, str]:
        """Swap new weights in; the digests of what is now in use. See `Subscriber.receive`."""
        return self._subscriber.receive(snapshot, may_go_back=may_go_back)

    def running_views(self) -> Mapping[str, np.ndarray]:
        """See `Engine.running_views`."""
        return self._engine.running_views()

    def run(self, jobs: Sequence[EpisodeJob], *, fresh_grading: bool) -> list[Trajectory]:
        """The trajectories of `jobs`, in their order; a broken episode is retried, then returned as a failure."""
        self._engine.wake()
        try:
            return self._run(jobs, fresh_grading)
        finally:
            if self._spec.gives_memory_back:
                self._engine.sleep()

    def _run(self, jobs: Sequence[EpisodeJob], fresh_grading: bool) -> list[Trajectory]:
        results: dict[int, Trajectory] = {}
        pending = list(jobs)
        for _ in range(self._spec.max_retries + 1):
            for start in range(0, len(pending), self._spec.max_sessions):
                batch = pending[start : start + self._spec.max_sessions]
                sampler = EpisodeSampler(self._engine, [job.session for job in batch], self._joining)
                for job, trajectory in zip(
                    batch, self._gather(batch, [sampler] * len(batch), fresh_grading), strict=True
                ):
                    results[job.session] = trajectory
            pending = [job for job in pending if results[job.session].failure is not None]
            if not pending:
                break
        return [results[job.session] for job in jobs]

    def demonstrate(self, jobs: Sequence[EpisodeJob], answers: Sequence[tuple[Answer, ...]]) -> list[Trajectory]:
        """The trajectories of a scripted solver that says `answers[i]` in the turns of job i."""
        samplers = [ScriptedSampler(self._renderer, script) for script in answers]
        return self._gather(jobs, samplers, fresh_grading=False)

    def close(self) -> None:
        """End the sandboxes. Idempotent."""
        self._envs.close()

    def _gather(
        self, jobs: Sequence[EpisodeJob], samplers: Sequence[EpisodeSampler | ScriptedSampler], fresh_grading: bool
    ) -> list[Trajectory]:
        async def gather() -> list[Trajectory]:
            episodes = (
                run_episode(job, _MadeAtReset(self._envs, fresh_grading), sampler, self._renderer)
                for job, sampler in zip(jobs, samplers, strict=True)
            )
            return await asyncio.gather(*episodes)

        return asyncio.run(gather())

"""Our engine and learner in one process, one step a command: `worker.py` says how it is called.

    first       an update on rows that the other side trained on: the differences of logprobs, and the gradient norm
    step        rollout, parity gate, update, publish; the seconds of its parts
    bare        forward and backward of the last batch by the learner's policy alone, the mean logprob as loss
    bare_torch  the same by the transformer's own torch operations, without a kernel of ours

The parts are those of a run without Ray between them: `rollout.engine`, `rl.learner` (DeepSpeed, one rank) and
`rollout.subscribe`. Nothing of an update is left out: it ends when the new masters are requantized.
"""

from __future__ import annotations

import dataclasses
import socket
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from worker import Channel, Row, Settings, parse

from model.checkpoint import load_model
from model.config import ComputeDtype
from model.kernels.dispatch import resolve_kernels
from model.layers import project_logits
from model.packed_attention import PackedAttention
from model.parallel.groups import Ranks
from model.snapshot import PackedTensor, view
from model.transformer import Transformer
from rl.algorithms.config import AlgorithmConfig
from rl.algorithms.grpo import Grpo
from rl.algorithms.objective import Objective
from rl.algorithms.registry import build_algorithm
from rl.batch import TrainSample, pack
from rl.learner.balance import BalanceSettings
from rl.learner.config import LearnerConfig
from rl.learner.deepspeed import OptimizerSettings, Rendezvous
from rl.learner.learner import Learner, LearnerSpec
from rl.learner.policy import PublishedPolicy
from rl.learner.streams import batch_logprobs
from rl.run_folder import commit
from rollout.config import EngineConfig
from rollout.engine.engine import Engine
from rollout.subscribe import Subscriber
from rollout.types import Generation, SampleRequest, SamplingParams, WeightVersion


class Ours:
    """The parts of a run."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        loaded = load_model(settings.model / "mxfp4")
        self._model = dataclasses.replace(loaded.config, compute_dtype=ComputeDtype.fp32)
        self._micro_batch_tokens = LearnerConfig().micro_batch_tokens
        spec = LearnerSpec(
            model=self._model,
            optimizer=OptimizerSettings(
                beta1=settings.beta1,
                beta2=settings.beta2,
                weight_decay=settings.weight_decay,
                max_grad_norm=settings.max_grad_norm,
                zero_stage=LearnerConfig().zero_stage,
            ),
            start=settings.model / "mxfp4",
            num_threads=settings.threads,
            micro_batch_tokens=self._micro_batch_tokens,
            balance=BalanceSettings(load_balance_coef=0.0),
            router_replay=True,
        )
        self._learner = Learner(spec, Rendezvous(rank=0, world_size=1, address="127.0.0.1", port=_free_port()))
        config = EngineConfig(max_batch_size=settings.batch, max_seq_len=settings.prompt_tokens + settings.new_tokens)
        self.kernels = resolve_kernels(config.kernels)
        self._engine = Engine(self._model, config, kernels=self.kernels)
        self._subscriber = Subscriber(self._model, self._engine)
        algorithm = AlgorithmConfig(clip_low=settings.clip_low, clip_high=settings.clip_high)
        grpo = build_algorithm(algorithm)
        assert isinstance(grpo, Grpo)
        self._algorithm = grpo
        self._loss = Objective(self._algorithm, algorithm)
        self._version = -1
        self._samples: list[TrainSample] = []
        self._bare_policy: PublishedPolicy | None = None
        self._torch_model: Transformer | None = None
        self._requantize_s = 0.0
        self._watch_requantizing()
        self._publish()

    def first(self, rows: Sequence[Row], logprobs: Sequence[Sequence[float]]) -> dict[str, float]:
        """Compare with what the other side computed on these rows, then train on them."""
        start = self._settings.prompt_tokens
        no_routes = np.zeros((0, 0, 0), np.uint8)
        samples = self._rewarded(
            [
                _sample(index, row, start, np.array(said, np.float32), no_routes)
                for index, (row, said) in enumerate(zip(rows, logprobs, strict=True))
            ]
        )
        with torch.no_grad():
            routes_TLK = self._learner._policy(pack(samples)).routes_TLK.numpy().astype(np.uint8)
        cuts = np.cumsum([sample.num_inputs for sample in samples])[:-1]
        samples = [
            dataclasses.replace(sample, routes_TLK=routes)
            for sample, routes in zip(samples, np.split(routes_TLK, cuts), strict=True)
        ]
        report = self._learner.parity(samples)
        samples = [dataclasses.replace(sample, scores=report.scores[sample.key]) for sample in samples]
        updated = self._learner.update([samples], self._loss, self._settings.lr)
        assert updated is not None
        self._publish()
        return {
            "mean_abs_nats": report.mean_abs_nats,
            "max_abs_nats": report.max_abs_nats,
            "grad_norm": updated.grad_norm,
        }

    def step(self, number: int) -> dict[str, float]:
        """A round of a run."""
        times = [time.perf_counter()]
        samples = self._rewarded(self._roll_out(number))
        times.append(time.perf_counter())
        scores = self._learner.parity(samples).scores
        samples = [dataclasses.replace(sample, scores=scores[sample.key]) for sample in samples]
        times.append(time.perf_counter())
        self._learner.update([samples], self._loss, self._settings.lr)
        times.append(time.perf_counter())
        self._publish()
        times.append(time.perf_counter())
        self._samples = samples
        generate_s, parity_s, update_s, publish_s = np.diff(times).tolist()
        return {
            "whole_s": times[-1] - times[0],
            "generate_s": generate_s,
            "parity_s": parity_s,
            "update_s": update_s,
            "requantize_s": self._requantize_s,
            "publish_s": publish_s,
        }

    def bare_s(self) -> float:
        """Seconds of forward and backward by a policy of its own, which DeepSpeed does not know, on the same bytes."""
        if self._bare_policy is None:
            self._bare_policy = PublishedPolicy(
                self._model, self.kernels, Ranks(rank=0, num_ranks=1, expert_group=None)
            )
            self._bare_policy.read(self._learner._policy.packed)
        policy, batch = self._bare_policy, self._packed()
        started = time.perf_counter()
        out = policy(batch)
        batch_logprobs(out, batch, self.kernels).mean().backward()
        seconds = time.perf_counter() - started
        policy.zero_grad()
        return seconds

    def bare_torch_s(self) -> float:
        """Seconds of forward and backward by plain torch."""
        if self._torch_model is None:
            self._torch_model = Transformer(self._model)
            views = {name: view(packed, torch.float32) for name, packed in self._learner._policy.packed.items()}
            self._torch_model.load_state_dict(views)
        model, batch = self._torch_model, self._packed()
        started = time.perf_counter()
        out = model(batch.ids_T, batch.positions_T, PackedAttention(batch.cu_seqlens))
        logits_RV = project_logits(out.hidden_TD[batch.rows_R], model.get_parameter(model.output_name))
        logits_RV.log_softmax(-1).gather(-1, batch.target_ids_R.unsqueeze(-1)).mean().backward()
        seconds = time.perf_counter() - started
        model.zero_grad()
        return seconds

    def _packed(self) -> Any:
        if (num_tokens := sum(sample.num_inputs for sample in self._samples)) > self._micro_batch_tokens:
            raise SystemExit(f"ours: a step must fit one micro-batch of {self._micro_batch_tokens}, got {num_tokens}")
        return pack(self._samples)

    def _roll_out(self, number: int) -> list[TrainSample]:
        settings = self._settings
        prompts = [ids for ids in settings.prompt_ids(number) for _ in range(settings.group)]
        params = SamplingParams(temperature=settings.temperature, max_tokens=settings.new_tokens)
        requests = [
            SampleRequest(session=index, prompt_ids=tuple(ids), params=params, seed=number * len(prompts) + index)
            for index, ids in enumerate(prompts)
        ]
        generations = self._engine.sample(requests)
        for request in requests:
            self._engine.close_session(request.session)
        return [
            self._sample_of(index, ids, said)
            for index, (ids, said) in enumerate(zip(prompts, generations, strict=True))
        ]

    def _sample_of(self, index: int, prompt: Row, said: Generation) -> TrainSample:
        if len(said.ids) != self._settings.new_tokens:
            raise SystemExit(f"ours: a completion must have {self._settings.new_tokens} ids, got {len(said.ids)}")
        return _sample(index, [*prompt, *said.ids], len(prompt), said.logprobs_T, said.routes_TLK)

    def _rewarded(self, samples: Sequence[TrainSample]) -> list[TrainSample]:
        """With the group's advantages; completions of one prompt are a group, wherever they stand."""
        start = self._settings.prompt_tokens
        groups: dict[tuple[int, ...], list[TrainSample]] = {}
        for sample in samples:
            groups.setdefault(tuple(sample.ids_T[:start].tolist()), []).append(sample)
        rewards = [
            np.array([self._settings.reward(one.ids_T[start:].tolist()) for one in group]) for group in groups.values()
        ]
        credited: list[TrainSample] = []
        for group, advantages_G in zip(groups.values(), self._algorithm.advantages(rewards), strict=True):
            for position, one in enumerate(group):
                advantage = 0.0 if advantages_G is None else float(advantages_G[position])
                advantages_R = np.full(len(one.targets_R), advantage, np.float32)
                credited.append(dataclasses.replace(one, advantages_R=advantages_R))
        return credited

    def _publish(self) -> None:
        self._version += 1
        published = self._learner.snapshot(WeightVersion(self._version))
        assert published is not None
        self._subscriber.receive(published[0])

    def _watch_requantizing(self) -> None:
        policy = self._learner._policy
        refresh = policy.refresh

        def timed(num_steps: int = 0, previous: Mapping[str, PackedTensor] | None = None) -> None:
            started = time.perf_counter()
            refresh(num_steps, previous)
            self._requantize_s = time.perf_counter() - started

        policy.refresh = timed


def _sample(index: int, ids: Row, start: int, logprobs: np.ndarray, routes: np.ndarray) -> TrainSample:
    return TrainSample(
        key=f"{index:04d}",
        ids_T=np.array(ids, np.int64),
        targets_R=np.arange(start, len(ids)),
        behavior_logprobs_R=logprobs,
        advantages_R=np.zeros(len(ids) - start, np.float32),
        routes_TLK=routes,
        weight_version=0,
        trained=True,
    )


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def main() -> None:
    """Carry out commands until there are no more."""
    settings, channel = parse(__doc__), Channel()
    torch.set_num_threads(settings.threads)
    ours = Ours(settings)
    head, dirty = commit()
    channel.answer(
        version=head[:9] + ("+" if dirty else ""),
        settings={"kernels": str(ours.kernels.name), "dtype": "float32", "experts": "mxfp4, straight-through"},
    )
    while (command := channel.next_command()) is not None:
        match command["do"]:
            case "first":
                channel.answer(**ours.first(command["rows"], command["logprobs"]))
            case "step":
                channel.answer(**ours.step(command["number"]))
            case "bare":
                channel.answer(bare_s=ours.bare_s())
            case _:
                channel.answer(bare_s=ours.bare_torch_s())


if __name__ == "__main__":
    main()

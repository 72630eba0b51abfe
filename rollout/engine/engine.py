"""The inference engine: requests come at any time, and every step computes the next tokens of all that run.

    add_request -> scheduler (rows, pages, budget) -> runner (one forward on the pages) -> sampling -> Generation

Holds the published view of one weight version and nothing else of the learner. A session keeps its keys and values
between its requests, so the next turn computes its new tokens only. Weights change between steps: what was computed
under other weights is computed again, and a running request goes on.

Shapes: N rows that sample, T packed tokens.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from model.binding import Binder, load_published
from model.config import LoraConfig, ModelConfig
from model.kernels.dispatch import Kernels, resolve_kernels
from model.kernels.sample.reference import Sampled
from model.layers import TORCH_DTYPE
from model.lora import add_adapters
from model.snapshot import PackedTensor, view
from model.transformer import Transformer
from rollout.config import ChatFormat, EngineConfig, chosen
from rollout.engine.active import Active, EngineError
from rollout.engine.kv_cache import KvCache
from rollout.engine.loading import check_config, checked_path, load
from rollout.engine.metrics import Counters, EngineMetrics
from rollout.engine.prefix_cache import PrefixCache
from rollout.engine.runner import Runner, StepOutput
from rollout.engine.sampling import Rows
from rollout.engine.scheduler import Scheduler, Work
from rollout.engine.stop_text import StopText
from rollout.engine.text import (
    Completion,
    Prompt,
    PromptError,
    TextSide,
    check_prompt,
    check_tools,
    is_chat,
    plain_completion,
)
from rollout.renderers.base import Tools
from rollout.types import Generation, SampleRequest, SamplingParams, WeightVersion

_OWN_SESSIONS = 1 << 62
"""Sessions of `generate` count from here; the callers' own are smaller."""


class Engine:
    """Decodes for one model; see the module."""

    def __init__(
        self,
        model: ModelConfig,
        config: EngineConfig,
        *,
        stop_ids: Collection[int] = (),
        text: TextSide | None = None,
        kernels: Kernels | None = None,
        lora: LoraConfig | None = None,
    ):
        """Reserve the cache. `stop_ids` end every request; `text` is needed for stop strings and text prompts.

        `kernels` `None`: those that `config.kernels` names. `lora`: the adapters that the weights have.

        Raises:
            EngineConfigError, CacheError: Settings that cannot be carried out.
        """
        check_config(config)
        with torch.device("meta"):
            self._model = Transformer(model)
        add_adapters(self._model, lora or LoraConfig())
        self._kernels = resolve_kernels(config.kernels) if kernels is None else kernels
        self._binder = None if self._kernels.layers is None else Binder(model, self._kernels.layers)
        self._weights: Mapping[str, PackedTensor] | Mapping[str, torch.Tensor] = {}
        self._config = config
        self._stop_ids = frozenset(stop_ids)
        self._text = text
        self._version: WeightVersion | None = None
        self._counters = Counters()
        self._cache = KvCache(model, config)
        self._prefixes = PrefixCache(self._cache, shared=config.share_prefixes)
        self._scheduler = Scheduler(config, self._cache, self._prefixes, self._counters)
        self._runner = Runner(self._model, self._cache, config, self._kernels.attention)
        self._requests: dict[int, Active] = {}
        self._busy_sessions: dict[int, int] = {}
        self._next_id = 0
        self._rows: tuple[list[int], Rows] = ([], Rows([]))

    @classmethod
    def load(
        cls, path: str | os.PathLike[str], config: EngineConfig | None = None, *, chat_format: str | None = None
    ) -> Engine:
        """An engine that runs a checkpoint folder, ours or a published one; `chat_format` is a `ChatFormat`.

        Raises: as `rollout.engine.loading.load`.
        """
        config = EngineConfig() if config is None else config
        spelled = None if chat_format is None else chosen(ChatFormat, "chat_format", chat_format)
        loaded = load(checked_path(path), config, spelled)
        stop_ids = () if loaded.text is None else loaded.text.stop_ids
        engine = cls(loaded.model, config, stop_ids=stop_ids, text=loaded.text, kernels=loaded.kernels)
        if loaded.published is not None:
            engine.swap_weights(WeightVersion(0), loaded.published)
        else:
            engine.swap_values(WeightVersion(0), loaded.values)
        return engine

    # ---- weights and memory

    @property
    def config(self) -> EngineConfig:
        """The settings."""
        return self._config

    @property
    def weight_version(self) -> WeightVersion:
        """The version of the weights in use. Raises EngineError before the first `swap_weights`."""
        if self._version is None:
            raise EngineError("engine: no weights yet, got a request; publish a snapshot first")
        return self._version

    @property
    def batch_invariant(self) -> bool:
        """Whether what a request gets is the same to the last bit whatever is computed beside it."""
        return self._kernels.batch_invariant

    def swap_weights(self, version: WeightVersion, tensors: Mapping[str, PackedTensor]) -> None:
        """Run these published bytes from the next step on. What old weights computed is dropped; no request is."""
        if self._binder is not None:
            load_published(self._model, tensors, self._binder)
            self._binder.bind_adapters(self._model, tensors)
            self._swapped(version, tensors)
        else:
            dtype = TORCH_DTYPE[self._model.config.compute_dtype]
            views = {name: view(packed, dtype, self._kernels.dequantize) for name, packed in tensors.items()}
            self.swap_values(version, views)

    def swap_adapters(self, version: WeightVersion, tensors: Mapping[str, PackedTensor]) -> None:
        """As `swap_weights`, of adapters alone: the weights beside them stay those of the last `swap_weights`."""
        weights: dict[str, Any] = dict(self._weights)
        if self._binder is not None:
            self._binder.bind_adapters(self._model, tensors)
            self._swapped(version, weights | dict(tensors))
        else:
            dtype = TORCH_DTYPE[self._model.config.compute_dtype]
            self.swap_values(version, weights | {name: view(packed, dtype) for name, packed in tensors.items()})

    def swap_values(self, version: WeightVersion, values: Mapping[str, torch.Tensor]) -> None:
        """As `swap_weights`, of weights in any floating dtype; for layers in plain torch.

        Raises:
            EngineError: The kernels of this engine read published bytes.
        """
        if self._binder is not None:
            raise EngineError(
                f"engine: the kernels {self._kernels.name} read published bytes, got values; choose the torch kernels"
            )
        self._model.load_state_dict(dict(values), strict=True, assign=True)
        self._swapped(version, values)

    def _swapped(
        self, version: WeightVersion, weights: Mapping[str, PackedTensor] | Mapping[str, torch.Tensor]
    ) -> None:
        self._model.eval().requires_grad_(False)
        self._scheduler.restart_all()
        self._version, self._weights = version, weights

    def running_views(self) -> dict[str, np.ndarray]:
        """The weights in use as fp32 arrays, for comparing them with what was published."""
        return {
            name: (view(weight) if isinstance(weight, PackedTensor) else weight).float().numpy()
            for name, weight in self._weights.items()
        }

    def sleep(self) -> None:
        """Give the cache's memory back; requests and sessions stay, and are computed again after `wake`."""
        self._scheduler.restart_all()
        self._cache.drop()

    def wake(self) -> None:
        """Reserve the cache again. Idempotent."""
        if not self._cache.is_allocated:
            self._cache.allocate()

    @property
    def cache_bytes(self) -> int:
        """Bytes that the cache has reserved."""
        return self._cache.num_bytes

    # ---- requests

    @property
    def has_work(self) -> bool:
        """Whether a request is waiting or running."""
        return bool(self._requests)

    def add_request(self, request: SampleRequest) -> int:
        """Queue a request; `step` returns its generation under the id that is returned here.

        Raises:
            EngineError: There are no weights, or the request cannot be carried out.
        """
        self._check(request)
        request_id, self._next_id = self._next_id, self._next_id + 1
        stop_text = None
        if request.params.stop:
            if self._text is None:
                raise EngineError(
                    f"{_who(request)}: stop strings need a tokenizer, got an engine without one; use stop_ids"
                )
            stop_text = StopText(request.params.stop, self._text.decode)
        active = Active(
            request_id=request_id,
            request=request,
            ids=list(request.prompt_ids),
            arrived_s=time.monotonic(),
            stop_ids=self._stop_ids.union(request.params.stop_ids) if request.params.stop_ids else self._stop_ids,
            stop_text=stop_text,
        )
        self._requests[request_id] = active
        self._busy_sessions[request.session] = request_id
        self._scheduler.add(active)
        self._counters.num_requests += 1
        return request_id

    def cancel(self, request_id: int) -> bool:
        """Drop a request and its session; whether it was still waiting or running."""
        active = self._requests.pop(request_id, None)
        if active is None:
            return False
        del self._busy_sessions[active.request.session]
        self._scheduler.remove(active)
        self._counters.num_cancelled += 1
        return True

    def close_session(self, session: int) -> None:
        """Give the session's cache back, and drop its request if it has one. Idempotent."""
        self.cancel(self._busy_sessions.get(session, -1))
        self._scheduler.close_session(session)

    @torch.inference_mode()
    def step(self) -> list[tuple[int, Generation]]:
        """Compute one step; the requests that ended in it, with their ids.

        Raises:
            EngineError: The engine sleeps, or the model computes what is not finite. After any error all requests
                are dropped.
        """
        if not self._requests:
            return []
        if not self._cache.is_allocated:
            raise EngineError("engine: it sleeps, got a step; call wake first")
        began_s, version = time.perf_counter(), self.weight_version
        try:
            plan = self._scheduler.plan(version)
            finished = self._advance(plan, self._runner.run(plan), version)
        except BaseException:
            for request_id in tuple(self._requests):
                self.cancel(request_id)
            raise
        self._counters.num_steps += 1
        self._counters.num_rows += len(plan)
        self._counters.busy_s += time.perf_counter() - began_s
        return finished

    def sample(self, requests: Sequence[SampleRequest]) -> list[Generation]:
        """Continue every request until it stops; results in the order of the requests.

        Raises:
            EngineError: As `add_request` and `step`; then none of them is left. Or requests of others are running.
        """
        if self._requests:
            raise EngineError(
                f"engine: requests that were added one by one are running, got {len(self._requests)}; step until they "
                "end before you call sample"
            )
        ids: list[int] = []
        try:
            for request in requests:
                ids.append(self.add_request(request))  # noqa: PERF401 (those before a refused one are taken back)
        except EngineError:
            for request_id in ids:
                self.cancel(request_id)
            raise
        generations: dict[int, Generation] = {}
        while self._requests:
            generations.update(self.step())
        return [generations[request_id] for request_id in ids]

    def generate(
        self,
        prompts: str | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        tools: Tools = (),
    ) -> list[Completion]:
        """Answer prompts: text, token ids, or conversations, which may use `tools`. A str is one prompt.

        Request i of a call is keyed by (`config.seed`, i), so the same call gives the same answers.

        Raises:
            PromptError, RendererError, EngineError: A prompt that cannot be carried out.
        """
        prompts = [prompts] if isinstance(prompts, str) else prompts
        whole: object = prompts
        if not isinstance(whole, Sequence):
            raise PromptError(f"prompts: must be a list of prompts, got {whole!r}; put a single one into a list")
        for index, prompt in enumerate(prompts):
            check_prompt(index, prompt)
        check_tools(tools)
        each = [params or SamplingParams()] * len(prompts) if not isinstance(params, Sequence) else list(params)
        if len(each) != len(prompts):
            raise PromptError(f"params: one for each of {len(prompts)} prompts, got {len(each)}; give one, or as many")
        for how in each:
            given: object = how
            if not isinstance(given, SamplingParams):
                raise PromptError(
                    f"params: must be SamplingParams, got {given!r}; write SamplingParams(max_tokens=...)"
                )
        all_ids = [self._encode(prompt, tools) for prompt in prompts]
        seeds = np.random.SeedSequence(self._config.seed).generate_state(len(prompts), np.uint64).tolist()
        sessions = [_OWN_SESSIONS + index for index in range(len(prompts))]
        try:
            said = self.sample(
                [
                    SampleRequest(session=session, prompt_ids=ids, params=how, seed=seed)
                    for session, ids, how, seed in zip(sessions, all_ids, each, seeds, strict=True)
                ]
            )
        finally:
            for session in sessions:
                self.close_session(session)
        if self._text is None:
            return [plain_completion(ids, one) for ids, one in zip(all_ids, said, strict=True)]
        return [
            self._text.completion(prompt, ids, one, how)
            for prompt, ids, one, how in zip(prompts, all_ids, said, each, strict=True)
        ]

    def metrics(self) -> EngineMetrics:
        """A reading of what the engine counts."""
        num_pages, scheduler = self._cache.num_pages, self._scheduler
        used = num_pages - self._prefixes.num_available if self._cache.is_allocated else 0
        return self._counters.reading(
            max_batch_size=self._config.max_batch_size,
            kv_used_frac=used / num_pages,
            num_running=len(scheduler.running),
            num_waiting=len(scheduler.waiting),
        )

    # ---- inside a step

    def _advance(self, plan: list[Work], out: StepOutput, version: WeightVersion) -> list[tuple[int, Generation]]:
        """Take over what a step computed: full pages, and one token of each row that samples."""
        for work in plan:
            work.active.num_computed += work.count
            self._counters.num_computed_tokens += work.count
            self._scheduler.publish_full_pages(work.active, version)
        sampling = [plan[n].active for n in out.samples]
        if not sampling:
            return []
        choice = self._choose(sampling, out.logits_NV)
        self._counters.num_sampled_tokens += len(sampling)
        finished: list[tuple[int, Generation]] = []
        for active, token, logprob, model_logprob in zip(
            sampling, choice.ids_N.tolist(), choice.logprobs_N.tolist(), choice.model_logprobs_N.tolist(), strict=True
        ):
            if not math.isfinite(logprob):
                raise EngineError(
                    f"engine: logprobs must be finite, got {logprob} in session {active.request.session} with weights "
                    f"{version} at temperature {active.request.params.temperature}; look for NaN or huge values in the "
                    "published weights"
                )
            active.append(token, logprob, model_logprob, version)
            if active.finish is not None:
                self._scheduler.finish(active)
                del self._requests[active.request_id]
                del self._busy_sessions[active.request.session]
                finished.append((active.request_id, active.generation()))
        self._counters.num_finished += len(finished)
        return finished

    def _choose(self, sampling: list[Active], logits_NV: torch.Tensor) -> Sampled:
        key = [active.request_id for active in sampling]
        if key != self._rows[0]:
            self._rows = key, Rows([active.request for active in sampling])
        choice = self._rows[1].choose(
            self._kernels.sample, logits_NV, np.array([len(active.ids) for active in sampling])
        )
        return choice

    def _encode(self, prompt: Prompt, tools: Tools) -> tuple[int, ...]:
        if self._text is not None:
            return self._text.encode(prompt, tools)
        if isinstance(prompt, str) or is_chat(prompt) or tools:
            raise PromptError("prompt: text needs a tokenizer, got an engine without one; give token ids")
        return tuple(prompt)  # pyright: ignore[reportReturnType] (is_chat left ids only)

    def _check(self, request: SampleRequest) -> None:
        """Whether a request can be carried out to its end."""
        self.weight_version  # noqa: B018 (raises when there is none)
        session, ids = request.session, request.prompt_ids
        if session in self._busy_sessions:
            raise EngineError(f"{_who(request)}: one request at a time, got a second; wait for the first")
        if not ids:
            raise EngineError(f"{_who(request)}: a prompt needs a token, got none; give it at least one")
        num_positions, longest = len(ids) + request.params.max_tokens - 1, self._config.max_seq_len
        if num_positions > longest:
            raise EngineError(
                f"{_who(request)}: at most {longest} positions, got {len(ids)} of the prompt and max_tokens "
                f"{request.params.max_tokens}; shorten one of them, or raise max_seq_len (env.max_context_tokens)"
            )
        past = self._scheduler.sessions.get(session)
        known = 0 if past is None else past.num_reported
        if past is not None and (len(ids) <= known or list(ids[:known]) != past.ids[:known]):
            problem = "must grow" if len(ids) <= known else "must go on with the ids it has"
            raise EngineError(
                f"{_who(request)} {problem}, got a prompt of {len(ids)} tokens with {known} computed; append to the "
                "episode's ids, or close the session first"
            )
        if max(ids) >= self._model.config.vocab_size or min(ids) < 0:
            raise EngineError(
                f"{_who(request)}: ids lie in 0..{self._model.config.vocab_size - 1}, got {max(ids)} and {min(ids)} as "
                "the largest and the smallest; use the tokenizer of the model"
            )


def _who(request: SampleRequest) -> str:
    if request.session >= _OWN_SESSIONS:
        return f"engine: prompt {request.session - _OWN_SESSIONS}"
    return f"engine: session {request.session}"

"""The inference engine: batched decoding of many sessions on one KV cache.

Holds the published view of one weight version and nothing else of the learner. `generate` is deterministic in its
requests and their order; `rollout.engine.scheduler` decides which requests form a batch.

Shapes: N requests, T packed tokens, L layers, K experts a token, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from model.config import ModelConfig
from model.transformer import Transformer
from rollout.engine.kv_cache import KvCache
from rollout.engine.sampling import choose, counter_uniform
from rollout.types import FinishReason, Generation, SampleRequest, WeightVersion

_COMPACT_BELOW = 0.75
"""Rows are moved together when fewer than this share of the batch still decodes."""


class EngineError(RuntimeError):
    """The engine was used before it had weights, or with a request that does not fit its session."""


@dataclass(slots=True)
class _Row:
    """One request while it decodes."""

    request: SampleRequest
    ids: list[int] = field(default_factory=list[int])
    logprobs: list[float] = field(default_factory=list[float])
    routes: list[np.ndarray] = field(default_factory=list[np.ndarray])
    finish: FinishReason | None = None

    def append(self, token: int, logprob: float, stop_ids: Collection[int]) -> None:
        self.ids.append(token)
        self.logprobs.append(logprob)
        if token in stop_ids:
            self.finish = FinishReason.STOP
        elif len(self.ids) == self.request.params.max_tokens:
            self.finish = FinishReason.LENGTH

    def generation(self, version: WeightVersion) -> Generation:
        assert self.finish is not None
        return Generation(
            ids=tuple(self.ids),
            logprobs_T=np.array(self.logprobs, dtype=np.float32),
            routes_TLK=np.concatenate(self.routes),
            finish=self.finish,
            weight_version=version,
        )


class Engine:
    """Decodes for one model. `max_sessions` rows of `max_tokens` positions are reserved at once."""

    def __init__(self, config: ModelConfig, *, max_sessions: int, max_tokens: int, stop_ids: Collection[int]):
        with torch.device("meta"):
            self._model = Transformer(config)
        self._stop_ids = frozenset(stop_ids)
        self._version: WeightVersion | None = None
        self._cache = KvCache.of(config, num_rows=max_sessions, max_tokens=max_tokens)

    @property
    def max_sessions(self) -> int:
        """Sessions that can be open at once."""
        return self._cache.num_rows

    @property
    def weight_version(self) -> WeightVersion:
        """The version of the weights in use. Raises EngineError before the first `swap_weights`."""
        if self._version is None:
            raise EngineError("engine: no weights yet, got a request; publish a snapshot first")
        return self._version

    def swap_weights(self, version: WeightVersion, views: Mapping[str, torch.Tensor]) -> None:
        """Replace every tensor at once and drop all cached keys and values: they belong to the old weights."""
        self._model.load_state_dict(dict(views), strict=True, assign=True)
        self._model.eval().requires_grad_(False)
        self._cache.clear()
        self._version = version

    def close_session(self, session: int) -> None:
        """Give the session's cache back. Idempotent."""
        self._cache.close(session)

    def running_views(self) -> dict[str, np.ndarray]:
        """The weights in use as fp32 arrays, for comparing them with what was published."""
        return {name: tensor.float().numpy() for name, tensor in self._model.state_dict().items()}

    @torch.inference_mode()
    def generate(self, requests: Sequence[SampleRequest]) -> list[Generation]:
        """Continue every request until it stops; results in the order of the requests."""
        version = self.weight_version
        rows = [_Row(request) for request in requests]
        prompts = [self._new_part(request) for request in requests]
        self._cache.arrange([request.session for request in requests])
        self._step(rows, prompts)
        batch = rows
        while live := [row for row in batch if row.finish is None]:
            if len(live) < _COMPACT_BELOW * len(batch):
                self._cache.arrange([row.request.session for row in live])
                batch = live
            self._step(batch, [[row.ids[-1]] for row in batch])
        return [row.generation(version) for row in rows]

    def _new_part(self, request: SampleRequest) -> list[int]:
        """Open the session and return the part of its prompt that is not in the cache yet."""
        self._cache.open(request.session)
        num_cached = self._cache.length(request.session)
        if num_cached >= len(request.prompt_ids):
            raise EngineError(
                f"engine: session {request.session} must grow, got a prompt of {len(request.prompt_ids)} tokens with "
                f"{num_cached} computed; append to the episode's ids, or close the session first"
            )
        return list(request.prompt_ids[num_cached:])

    def _step(self, batch: list[_Row], new_ids: list[list[int]]) -> None:
        """Compute `new_ids` of every row and append one token to each unfinished row.

        Rows that have finished but not been moved out yet are computed too, and ignored.
        """
        attend = self._cache.extend([len(ids) for ids in new_ids], [row.finish is None for row in batch])
        ids_T = torch.tensor([token for ids in new_ids for token in ids])
        out = self._model(ids_T, attend.positions_T, attend)
        ends_N = torch.tensor([len(ids) for ids in new_ids]).cumsum(0)
        logits_NV = self._model.logits(out.hidden_TD[ends_N - 1])
        tokens, logprobs = self._sample(batch, logits_NV)
        routes_TLK = out.routes_TLK.numpy()
        start = 0
        for row, ids, end, token, logprob in zip(batch, new_ids, ends_N.tolist(), tokens, logprobs, strict=True):
            if row.finish is None:
                row.routes.append(routes_TLK[start : start + len(ids)])
                row.append(token, logprob, self._stop_ids)
            start = end

    def _sample(self, batch: list[_Row], logits_NV: torch.Tensor) -> tuple[list[int], list[float]]:
        positions_N = np.array([len(row.request.prompt_ids) + len(row.ids) for row in batch])
        uniforms_N = counter_uniform(np.array([row.request.seed for row in batch], dtype=np.uint64), positions_N)
        temperatures_N = torch.tensor([row.request.params.temperature for row in batch])
        ids_N, logprobs_N = choose(logits_NV, temperatures_N, torch.from_numpy(uniforms_N))
        logprobs = logprobs_N.tolist()
        for row, logprob in zip(batch, logprobs, strict=True):
            if row.finish is None and not math.isfinite(logprob):
                raise EngineError(
                    f"engine: logprobs must be finite, got {logprob} in session {row.request.session} with weights "
                    f"{self._version} at temperature {row.request.params.temperature}; look for NaN or huge values in "
                    "the published weights"
                )
        return ids_N.tolist(), logprobs

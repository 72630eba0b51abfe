"""Rollout settings (Hydra structured config; defaults here only)."""

from __future__ import annotations

from dataclasses import dataclass, fields
from enum import StrEnum
from typing import TypeVar

from model.config import KernelChoice


class ChatFormat(StrEnum):
    """How messages are spelled in tokens; it must be the one that the checkpoint was trained with.

    `native` is that of the tokenizer which the warm start trains. `chatml` is Qwen3's and Hermes's, `qwen2_5` and
    `smollm2` are the same with a system message of their own where a conversation has none; `harmony` is gpt-oss's,
    `kimi` Kimi-K2's, `deepseek` DeepSeek-V3.1's.
    """

    native = "native"
    chatml = "chatml"
    qwen2_5 = "qwen2_5"
    smollm2 = "smollm2"
    harmony = "harmony"
    kimi = "kimi"
    deepseek = "deepseek"


@dataclass(slots=True, kw_only=True)
class RolloutConfig:
    """How episodes are sampled.

    A round asks for `prompts_per_round` tasks, `group_size` episodes each. `num_workers` 0 means one for each usable
    CPU, at most 4; `threads_per_worker` 0 shares the usable CPUs out evenly. `max_retries` bounds how often an episode
    that infrastructure broke is run again before it is masked; below `min_valid_frac` of unmasked episodes the round
    fails by name. `kv_memory_mb` bounds the cache of keys and values of each worker (0: enough for all its episodes at
    their longest); with less, fewer episodes decode at once and none is lost. `chat_format` is the checkpoint's.

    `hold_back_versions` is an experiment's knob: the workers run the weights that the learner had so many updates ago
    (at first the start's), which makes every sample exactly so stale. Held-out evaluation runs the newest ones.
    """

    num_workers: int = 0
    threads_per_worker: int = 0
    prompts_per_round: int = 24
    group_size: int = 8
    temperature: float = 1.0
    max_retries: int = 2
    min_valid_frac: float = 0.5
    round_deadline_s: float = 600.0
    kv_memory_mb: int = 0
    chat_format: ChatFormat = ChatFormat.native
    hold_back_versions: int = 0


class EngineConfigError(ValueError):
    """Engine settings that cannot be carried out."""


_Choice = TypeVar("_Choice", bound=StrEnum)


def chosen(kind: type[_Choice], key: str, value: object) -> _Choice:
    """The member of `kind` that `value` is or spells. Raises EngineConfigError when there is none."""
    if not isinstance(value, str) or value not in {*kind}:
        raise EngineConfigError(f"engine.{key}: no such choice, got {value!r}; choose one of {', '.join(kind)}")
    return kind(value)


class Precision(StrEnum):
    """Which reading of a checkpoint the engine computes with.

    `mxfp4` is what a run publishes: experts in MXFP4, the rest in bf16. `bf16` rounds every tensor to bf16; `fp32`
    keeps the stored values.
    """

    mxfp4 = "mxfp4"
    bf16 = "bf16"
    fp32 = "fp32"


class KvDtype(StrEnum):
    """How keys and values are kept: in the compute dtype (`auto`), in bf16, or in 8 bits with a scale a head."""

    auto = "auto"
    bf16 = "bf16"
    int8 = "int8"
    fp8 = "fp8"


class LoadMode(StrEnum):
    """How a checkpoint's weights come into memory: all of them at once, or expert by expert when they are needed."""

    eager = "eager"
    mmap = "mmap"


@dataclass(slots=True, kw_only=True)
class EngineConfig:
    """How one engine runs.

    At most `max_batch_size` requests decode together, each of at most `max_seq_len` positions; a step computes at most
    `max_tokens_per_step` tokens, so long prompts are computed in chunks beside the decoding ones. `memory_bytes`
    bounds the cache of keys and values (0: enough for a full batch of the longest sequences), `expert_memory_bytes` the
    experts that are held with `load` mmap (0: what the machine has). `share_prefixes` lets requests use the pages of
    others that begin alike. `seed` keys the requests of `Engine.generate`. Choices may be spelled: `load="mmap"`.
    """

    precision: Precision = Precision.mxfp4
    max_batch_size: int = 64
    max_seq_len: int = 4096
    max_tokens_per_step: int = 2048
    kv_dtype: KvDtype = KvDtype.auto
    memory_bytes: int = 0
    page_size: int = 16
    share_prefixes: bool = True
    load: LoadMode = LoadMode.eager
    expert_memory_bytes: int = 0
    kernels: KernelChoice = KernelChoice.auto
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    seed: int = 0

    def __post_init__(self) -> None:
        self.precision = chosen(Precision, "precision", self.precision)
        self.kv_dtype = chosen(KvDtype, "kv_dtype", self.kv_dtype)
        self.load = chosen(LoadMode, "load", self.load)
        self.kernels = chosen(KernelChoice, "kernels", self.kernels)

    def validate(self) -> None:
        """Raise EngineConfigError with one line for the first setting that cannot be carried out."""
        for name in (field.name for field in fields(self) if field.type == "int"):
            value: object = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool):
                raise EngineConfigError(f"engine.{name}: must be a whole number, got {value!r}; give it without quotes")
        for name in ("max_batch_size", "max_seq_len", "page_size"):
            if getattr(self, name) < 1:
                raise EngineConfigError(f"engine.{name}: must be at least 1, got {getattr(self, name)}; raise it")
        for name in ("tensor_parallel_size", "pipeline_parallel_size"):
            if getattr(self, name) != 1:
                raise EngineConfigError(
                    f"engine.{name}: an engine runs on one device, got {getattr(self, name)}; set it to 1 and start "
                    "one engine for each device"
                )
        if self.max_tokens_per_step < self.max_batch_size:
            raise EngineConfigError(
                f"engine.max_tokens_per_step: must hold one token of each of max_batch_size={self.max_batch_size} "
                f"requests, got {self.max_tokens_per_step}; raise it or lower max_batch_size"
            )
        for name in ("memory_bytes", "expert_memory_bytes"):
            if getattr(self, name) < 0:
                raise EngineConfigError(
                    f"engine.{name}: must not be negative, got {getattr(self, name)}; use 0 for no bound"
                )
        if self.seed < 0:
            raise EngineConfigError(f"engine.seed: must not be negative, got {self.seed}; use 0 or more")

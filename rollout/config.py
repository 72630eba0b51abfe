"""Settings of the rollout workers (values in `conf/`, defaults here only)."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


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
    fails by name. `chat_format` is the checkpoint's.
    """

    num_workers: int = 0
    threads_per_worker: int = 0
    prompts_per_round: int = 24
    group_size: int = 8
    temperature: float = 1.0
    max_retries: int = 2
    min_valid_frac: float = 0.5
    round_deadline_s: float = 600.0
    chat_format: ChatFormat = ChatFormat.native

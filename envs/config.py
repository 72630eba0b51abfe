"""Settings of an environment (values in `conf/env/`, defaults here only)."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any


class SandboxKind(StrEnum):
    """How the policy's code is kept apart from this machine."""

    local = "local"
    degraded = "degraded"
    docker = "docker"


@dataclass(slots=True, kw_only=True)
class DatasetConfig:
    """One data set of a mixture (`env.datasets.<name>`).

    `path`, `format`, `split` and `columns` are as `dataset`, `dataset_format`, ... of `EnvConfig`. From training task
    `first_task` of the run to before `last_task` (0: no end), a share of `weight`, relative to the others', comes from
    here: so stages follow one another.
    """

    path: str = ""
    weight: float = 1.0
    format: str = "auto"
    split: str = "train"
    columns: dict[str, str] = field(default_factory=dict[str, str])
    first_task: int = 0
    last_task: int = 0


@dataclass(slots=True, kw_only=True)
class EnvConfig:
    """An environment and the bounds of its episodes.

    `target` names a user's own factory as `module:attribute` (with `name=custom`), `params` are its keyword
    arguments. `dataset` holds the user's own tasks: a JSON-lines or Parquet file, a folder or glob of them, a folder of
    `save_to_disk`, or a hub id (`org/name`, `hf://org/name`), of which `dataset_split` is read. `dataset_format` names
    the convention of its columns (`envs.data.adapters`), `dataset_columns` renames columns (from: to), and no row is
    longer than `dataset_max_row_mb`. `datasets` are several by name, mixed, each with the keys of `DatasetConfig` (an
    open mapping, because OmegaConf adds no dataclass from an override). With `curriculum_column`, a column of numbers,
    the first `curriculum_tasks` training tasks (0: one epoch) go from the lowest number to the highest.

    `bfcl_categories` are those of `name=bfcl`: base, miss_func, miss_param, long_context.

    `sandbox_image` and `sandbox_runtime` (`runsc`; the engine's own by default) are those of docker boxes, and the
    engine is that of DOCKER_HOST.
    """

    name: str = "coding"
    target: str | None = None
    params: dict[str, Any] = field(default_factory=dict[str, Any])
    dataset: str | None = None
    dataset_format: str = "auto"
    dataset_split: str = "train"
    dataset_columns: dict[str, str] = field(default_factory=dict[str, str])
    dataset_max_row_mb: float = 1.0
    datasets: dict[str, Any] = field(default_factory=dict[str, Any])
    curriculum_column: str | None = None
    curriculum_tasks: int = 0
    max_turns: int = 2
    max_tokens_per_turn: int = 48
    max_context_tokens: int = 192
    sandbox: SandboxKind = SandboxKind.local
    sandboxes_per_worker: int = 2
    bfcl_categories: list[str] = field(default_factory=lambda: ["base"])
    num_visible_checks: int = 6
    num_hidden_checks: int = 10
    call_timeout_s: float = 5.0
    sandbox_memory_mb: int = 512
    sandbox_image: str = "moe-agent-rl-sandbox"
    sandbox_runtime: str | None = None

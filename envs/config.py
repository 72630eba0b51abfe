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
class EnvConfig:
    """An environment and the bounds of its episodes.

    `target` names a user's own factory as `module:attribute` (with `name=custom`), `params` are its keyword
    arguments. `dataset` is a JSON-lines file of the user's own tasks in the shape of `envs.dataset`.
    `sandbox_image` and `sandbox_runtime` (`runsc`; the engine's own by default) are those of docker boxes, and the
    engine is that of DOCKER_HOST.
    """

    name: str = "coding"
    target: str | None = None
    params: dict[str, Any] = field(default_factory=dict[str, Any])
    dataset: str | None = None
    max_turns: int = 2
    max_tokens_per_turn: int = 48
    max_context_tokens: int = 192
    sandbox: SandboxKind = SandboxKind.local
    sandboxes_per_worker: int = 2
    num_visible_checks: int = 6
    num_hidden_checks: int = 10
    call_timeout_s: float = 5.0
    sandbox_memory_mb: int = 512
    sandbox_image: str = "moe-agent-rl-sandbox"
    sandbox_runtime: str | None = None

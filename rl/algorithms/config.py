"""Settings of the policy-gradient algorithm (values in `conf/`, defaults here only)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True, kw_only=True)
class AlgorithmConfig:
    """GRPO's knobs; `target` and `params` bring a user's own algorithm (with `name=custom`).

    `lr` falls linearly to `lr_end_frac` of itself over the run. The ratio is clipped to `1 - clip_low .. 1 + clip_high`
    (clip-higher, DAPO). `normalize_advantage` divides by the group's standard deviation (Dr. GRPO: leave it off).
    """

    name: str = "grpo"
    target: str | None = None
    params: dict[str, Any] = field(default_factory=dict[str, Any])
    lr: float = 3e-4
    lr_end_frac: float = 0.05
    num_minibatches: int = 2
    clip_low: float = 0.2
    clip_high: float = 0.28
    normalize_advantage: bool = False
    load_balance_coef: float = 0.01
    router_z_coef: float = 0.0

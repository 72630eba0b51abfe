"""Settings of the learner (values in `conf/`, defaults here only)."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True, kw_only=True)
class LearnerConfig:
    """The DeepSpeed engine and its optimizer.

    `num_threads` 0 means every usable CPU: the learner computes while the rollout workers wait. `zero_stage` must be 1
    or 2: stage 0 has no global gradient norm, and with bf16 it takes a hidden extra step (DeepSpeed 0.19).

    `num_ranks` processes share the samples of a step out. In groups of `expert_parallel` they share the experts of
    every layer out, too: a rank holds 1 / `expert_parallel` of them. `router_replay` trains the experts that the
    sampler used, as its trajectories record them.
    """

    num_ranks: int = 1
    expert_parallel: int = 1
    router_replay: bool = True
    num_threads: int = 0
    zero_stage: int = 1
    micro_batch_tokens: int = 4096
    max_grad_norm: float = 1.0
    beta1: float = 0.9
    beta2: float = 0.95
    weight_decay: float = 0.0
    call_deadline_s: float = 600.0

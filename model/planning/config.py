"""The machine and the load that a plan is made for: keys `plan.*` of `python -m model.plan`.

Invariant: a resolved plan divides evenly wherever `model/planning/memory.py` divides, so that no figure stands for a
layout that cannot be.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from model.config import ModelConfig


class PlanError(ValueError):
    """A plan that cannot be made; one line for each problem."""


@dataclass(slots=True, kw_only=True)
class PlanConfig:
    """Parallel ranks, load, and the machine.

    A model lies on `tp` x `pp` x `dp` GPUs: `tp` share each matrix, `pp` share the layers, and `dp` hold copies that
    work on other tokens. The experts of a layer are divided among `ep` of its `tp` x `dp` GPUs. `dp` 0: as few as `ep`
    needs. The sampler keeps the keys of `batch` sequences of `context` tokens for each copy (`context` 0: the model's
    `max_positions`) and reads prompts in pieces of `micro_batch_tokens`, the size of the learner's micro-batches too.
    `recompute`: the learner's `activation_checkpointing=block`. `changed_frac`: values whose published form a round
    changes. GB are 10^9 bytes.
    """

    tp: int = 1
    pp: int = 1
    ep: int = 1
    dp: int = 0
    zero_stage: int = 1
    recompute: bool = True
    context: int = 0
    batch: int = 1
    micro_batch_tokens: int = 4096
    gpu_memory_gb: float = 80.0
    bandwidth_gb_s: float = 10.0
    changed_frac: float = 0.001


@dataclass(slots=True, kw_only=True)
class PlanRun:
    """What the command line composes."""

    model: ModelConfig = field(default_factory=ModelConfig)
    plan: PlanConfig = field(default_factory=PlanConfig)

    def resolved(self) -> PlanRun:
        """The same with `dp` and `context` filled in.

        Raises:
            ConfigError: The model cannot be built.
            PlanError: The plan does not fit the model; one line a problem.
        """
        self.model.validate()
        if problems := [*_problems(self.model, self.plan)]:
            raise PlanError("\n".join(problems))
        filled = replace(
            self.plan,
            dp=self.plan.dp or self.plan.ep // math.gcd(self.plan.ep, self.plan.tp),
            context=self.plan.context or self.model.max_positions,
        )
        return replace(self, plan=filled)


def _problems(model: ModelConfig, plan: PlanConfig) -> Iterator[str]:
    if model.vocab_size == 0:
        yield "model.vocab_size: a plan needs it, got 0; give the tokenizer's number of tokens"
    wrong = [*_out_of_range(model, plan)]
    yield from wrong
    if not wrong:  # the divisions below need positive numbers
        yield from _uneven(model, plan)


def _out_of_range(model: ModelConfig, plan: PlanConfig) -> Iterator[str]:
    for name in ("tp", "pp", "ep", "batch", "micro_batch_tokens"):
        if (value := getattr(plan, name)) < 1:
            yield f"plan.{name}: must be at least 1, got {value}; give a positive number"
    for name in ("gpu_memory_gb", "bandwidth_gb_s"):
        if not 0.0 < (value := getattr(plan, name)) < math.inf:
            yield f"plan.{name}: must be positive, got {value}; give the machine's figure in 10^9 bytes"
    if plan.dp < 0:
        yield f"plan.dp: must not be negative, got {plan.dp}; 0 takes as few as plan.ep needs"
    if plan.zero_stage not in (1, 2):
        yield (
            f"plan.zero_stage: must be 1 or 2, got {plan.zero_stage}; use 1 (optimizer states sharded) or 2 (gradients "
            "too), as the learner does"
        )
    if not 0.0 <= plan.changed_frac <= 1.0:
        yield f"plan.changed_frac: must be between 0 and 1, got {plan.changed_frac}; it is a share of all values"
    if not 0 <= plan.context <= model.max_positions:
        yield (
            f"plan.context: must be at most model.max_positions={model.max_positions}, got {plan.context}; lower it, "
            "or use 0 for all positions"
        )


def _uneven(model: ModelConfig, plan: PlanConfig) -> Iterator[str]:
    if model.num_heads % plan.tp:
        yield (
            f"plan.tp: must divide model.num_heads={model.num_heads}, got {plan.tp}; "
            f"{_nearest(model.num_heads, plan.tp)}"
        )
    elif model.num_kv_heads % plan.tp and plan.tp % model.num_kv_heads:
        yield (
            f"plan.tp: must divide model.num_kv_heads={model.num_kv_heads} or be a multiple of it, got {plan.tp}; "
            f"{_nearest(model.num_kv_heads, plan.tp)}"
        )
    for name in ("shared_expert_hidden_size", "dense_hidden_size"):
        if (width := getattr(model, name)) % plan.tp:
            yield f"plan.tp: must divide model.{name}={width}, got {plan.tp}; {_nearest(width, plan.tp)}"
    if plan.pp > model.num_layers:
        yield f"plan.pp: must not exceed model.num_layers={model.num_layers}, got {plan.pp}; a stage holds a layer"
    if model.num_experts % plan.ep:
        yield (
            f"plan.ep: must divide model.num_experts={model.num_experts}, got {plan.ep}; "
            f"{_nearest(model.num_experts, plan.ep)}"
        )
    if plan.dp and (plan.tp * plan.dp) % plan.ep:
        yield (
            f"plan.ep: must divide plan.tp x plan.dp = {plan.tp * plan.dp}, the GPUs of a stage, got {plan.ep}; set "
            "plan.dp=0 for as many as it needs"
        )


def _nearest(number: int, given: int) -> str:
    """The remedy: the divisors of `number` next to the given one that is none."""
    divisors = [divisor for divisor in range(1, number + 1) if number % divisor == 0]
    below = max(divisor for divisor in divisors if divisor < given)
    above = next((divisor for divisor in divisors if divisor > given), None)
    return f"use {below}" if above is None else f"use {below} or {above}"

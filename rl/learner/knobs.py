"""Settings of the learner that are fine alone and not together; no import is heavy.

Every problem is one line: `<full.key>: <problem>, got <value>; <remedy>`.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from model.config import LoraConfig
from rl.algorithms.config import AlgorithmConfig
from rl.learner.config import CodeRounding, LearnerConfig, PlacementConfig, PlacementKind, QuantizationConfig
from rollout.config import RolloutConfig


def placement_mistakes(learner: LearnerConfig) -> Iterator[str]:
    """What is wrong in `learner.placement`, on this machine."""
    given, default = learner.placement, PlacementConfig()
    if given.kind is PlacementKind.contiguous:
        for knob in ("ranks_per_node", "traffic_weight", "load_file"):
            if getattr(given, knob) != getattr(default, knob):
                yield (
                    f"learner.placement.{knob}: only read with learner.placement.kind=balanced, got "
                    f"{getattr(given, knob)}; drop it, or add learner.placement.kind=balanced"
                )
        return
    size, on_node = learner.expert_parallel, given.ranks_per_node
    if size % on_node and on_node % size:
        yield (
            f"learner.placement.ranks_per_node: groups of learner.expert_parallel={size} ranks must fill whole nodes, "
            f"or a node whole groups, got {on_node}; use a divisor or a multiple of {size}"
        )
    if given.load_file is not None and not Path(given.load_file).is_file():
        yield (
            f"learner.placement.load_file: no such file, got {given.load_file}; name the expert_load.json of a "
            "checkpoint"
        )


def quantization_mistakes(learner: LearnerConfig) -> Iterator[str]:
    """What is wrong in `learner.quantization`."""
    given, default = learner.quantization, QuantizationConfig()
    for knob in ("straight_through", "rounding", "hysteresis"):
        if not given.enabled and getattr(given, knob) != getattr(default, knob):
            yield (
                f"learner.quantization.{knob}: not read while learner.quantization.enabled is false, got "
                f"{getattr(given, knob)}; drop it, or leave the quantization on"
            )
    if given.hysteresis and given.rounding is CodeRounding.stochastic:
        yield (
            "learner.quantization.hysteresis: keeps codes that learner.quantization.rounding=stochastic draws anew at "
            f"every step, got {given.hysteresis}; set one of them back to its default"
        )


def lora_mistakes(learner: LearnerConfig, algorithm: AlgorithmConfig, rollout: RolloutConfig) -> Iterator[str]:
    """What is wrong in `learner.lora`, and what a frozen base leaves nothing to do for."""
    given, default = learner.lora, LoraConfig()
    if not given.rank:
        for knob in ("alpha", "targets"):
            if getattr(given, knob) != getattr(default, knob):
                yield (
                    f"learner.lora.{knob}: only read with learner.lora.rank above 0, got {getattr(given, knob)}; drop "
                    "it, or add learner.lora.rank=8"
                )
        return
    quantization, usual = learner.quantization, QuantizationConfig()
    for knob in ("enabled", "straight_through", "rounding", "hysteresis"):
        if getattr(quantization, knob) != getattr(usual, knob):
            yield (
                f"learner.quantization.{knob}: with learner.lora.rank={given.rank} the MXFP4 base is frozen and never "
                f"quantized again, got {getattr(quantization, knob)}; drop it, or set learner.lora.rank=0"
            )
    if algorithm.bias_update_speed:
        yield (
            f"algorithm.bias_update_speed: moves the routers, which learner.lora.rank={given.rank} freezes, got "
            f"{algorithm.bias_update_speed}; set it to 0, or learner.lora.rank=0"
        )
    if rollout.hold_back_versions:
        yield (
            f"rollout.hold_back_versions: not supported with learner.lora.rank={given.rank}, whose snapshots are "
            f"adapters to the first one, got {rollout.hold_back_versions}; set it to 0, or learner.lora.rank=0"
        )

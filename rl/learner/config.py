"""Settings of the learner (values in `conf/`, defaults here only)."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum, auto

from model.config import LoraConfig


class StraightThroughKind(StrEnum):
    """Which gradients pass from the published view to the masters.

    identity   all: a master beyond the largest code of its block can come back
    clipped    those of masters within their block's range; 0 beyond it, where the view does not move with the master
    """

    identity = auto()
    clipped = auto()


class CodeRounding(StrEnum):
    """How a master between two codes is rounded: to the nearest one, or at random so that the mean is the master."""

    nearest = auto()
    stochastic = auto()


@dataclass(slots=True, kw_only=True)
class QuantizationConfig:
    """How the learner sees the MXFP4 experts (`rl/learner/requantizer.py`); what it sees is what is published.

    With `enabled=false` the forward reads the masters instead: learner and sampler then differ by the quantization, the
    parity gate compares bytes alone, and `algorithm.importance` is the means against the difference.

    `hysteresis` keeps a code until its master is that many steps past the boundary (0 to 0.5). After
    `warn_still_rounds` rounds with an update and without a changed code a line says so, once (0: never).
    """

    enabled: bool = True
    straight_through: StraightThroughKind = StraightThroughKind.identity
    rounding: CodeRounding = CodeRounding.nearest
    hysteresis: float = 0.0
    warn_still_rounds: int = 5


class PlacementKind(StrEnum):
    """Which experts a rank of an expert-parallel group holds.

    contiguous   its slice of a layer's experts, in their order
    balanced     those that even out the ranks' loads and the nodes' traffic, as counted so far
    """

    contiguous = auto()
    balanced = auto()


@dataclass(slots=True, kw_only=True)
class PlacementConfig:
    """Where the experts are (`rl/learner/placement.py`), planned at the start and when a run resumes.

    `load_file` is the `expert_load.json` of a checkpoint, for the start; without it all experts are taken to be chosen
    alike until the run has a checkpoint of its own. `ranks_per_node` consecutive ranks share a node. `traffic_weight`
    is what the choices of a mean node cost on its links, over what those of a mean rank cost to compute.
    """

    kind: PlacementKind = PlacementKind.contiguous
    ranks_per_node: int = 8
    traffic_weight: float = 1.0
    load_file: str | None = None


class ActivationCheckpointing(StrEnum):
    """What a forward with gradient keeps for its backward.

    none    every activation
    block   the input of each transformer block, whose backward runs it again (`model/recompute.py`): the same bits in
            less memory and more time
    """

    none = auto()
    block = auto()


@dataclass(slots=True, kw_only=True)
class LearnerConfig:
    """The DeepSpeed engine and its optimizer.

    `num_threads` 0 means every usable CPU: the learner computes while the rollout workers wait. `zero_stage` must be 1
    or 2: stage 0 has no global gradient norm, and with bf16 it takes a hidden extra step (DeepSpeed 0.19).

    `num_ranks` processes share the samples of a step out. In groups of `expert_parallel` they share the experts of
    every layer out, too: a rank holds 1 / `expert_parallel` of them. `router_replay` trains the experts that the
    sampler used, as its trajectories record them. `lora` trains adapters on a frozen start (`rl/learner/lora.py`).
    `activation_checkpointing` makes room for more `micro_batch_tokens`.

    With `keep_memory` a rank's process keeps what it frees for the next step (`rl/learner/allocator.py`), at the same
    peak; without, it goes back to the system, and updates are slower. `offload_optimizer` keeps gradients, moments and
    the masters that are stepped in the memory of the CPU, for learners on GPUs.
    """

    num_ranks: int = 1
    expert_parallel: int = 1
    router_replay: bool = True
    num_threads: int = 0
    zero_stage: int = 1
    micro_batch_tokens: int = 4096
    activation_checkpointing: ActivationCheckpointing = ActivationCheckpointing.none
    max_grad_norm: float = 1.0
    beta1: float = 0.9
    beta2: float = 0.95
    weight_decay: float = 0.0
    call_deadline_s: float = 600.0
    keep_memory: bool = True
    offload_optimizer: bool = False
    quantization: QuantizationConfig = field(default_factory=QuantizationConfig)
    placement: PlacementConfig = field(default_factory=PlacementConfig)
    lora: LoraConfig = field(default_factory=LoraConfig)

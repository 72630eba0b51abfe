"""The configuration of a run, composed from the dataclasses that the packages own.

Defaults live in those dataclasses only; the YAML under `conf/` overrides. Importing this module imports nothing
heavy, so that a mistake in the configuration is reported before anything slow starts (`rl.config_check`).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from envs.config import EnvConfig
from model.config import KernelChoice, ModelConfig
from rewards.config import RewardConfig
from rl.algorithms.config import AlgorithmConfig
from rl.learner.config import LearnerConfig
from rollout.config import RolloutConfig


class WandbMode(StrEnum):
    """Where metrics go besides `metrics.jsonl`; `auto` is online with a key and offline without."""

    auto = "auto"
    online = "online"
    offline = "offline"
    disabled = "disabled"


@dataclass(slots=True, kw_only=True)
class RunSection:
    """The run itself.

    `name` is the run's folder below `root`; `seed` keys every random number. `checkpoint_every` and `eval_every` count
    rounds. When a learner rank dies, the run goes on from its last checkpoint by itself, `max_restarts` times in a row
    from the same one. `permute_rewards` shuffles the rewards within each group: the control that must not learn.
    """

    name: str = "run"
    root: str = "runs"
    seed: int = 0
    rounds: int = 30
    eval_every: int = 5
    checkpoint_every: int = 5
    keep_checkpoints: int = 2
    max_restarts: int = 3
    permute_rewards: bool = False


@dataclass(slots=True, kw_only=True)
class EvalSection:
    """Held-out evaluation: the same tasks, seeds and decoding before, during and after."""

    num_tasks: int = 200
    during_num_tasks: int = 100
    num_report_episodes: int = 6


@dataclass(slots=True, kw_only=True)
class WarmStartSection:
    """Supervised fine-tuning on the scripted solver's demonstrations, cached by a hash of what it depends on.

    `checkpoint` starts from a saved model folder instead.
    """

    checkpoint: str | None = None
    cache: str = "runs/.cache/warm_start"
    num_demonstrations: int = 2560
    steps: int = 120
    batch_size: int = 64
    lr: float = 3e-3
    lr_end_frac: float = 0.1
    warmup_steps: int = 20
    beta1: float = 0.9
    beta2: float = 0.98
    weight_decay: float = 0.01
    tokenizer_vocab_size: int = 512
    checkpoint_every: int = 20


@dataclass(slots=True, kw_only=True)
class ParitySection:
    """Bounds of the parity gate: behavior against policy logprobs before the update, in nats.

    `None` takes the bound of the kernels and the compute dtype, with its derivation, from `rl.parity`: 0, or with torch
    something above it.
    """

    mean_abs_nats: float | None = None
    max_abs_nats: float | None = None
    max_flipped_frac: float | None = None


class Placement(StrEnum):
    """Whether sampling and learning have memory of their own, or take turns with the same."""

    separate = "separate"
    colocated = "colocated"


@dataclass(slots=True, kw_only=True)
class ClusterConfig:
    """The Ray cluster: `address` None starts one on this machine and tears it down after the run.

    With `placement=colocated` the rollout workers give the memory of their keys and values back while the learner
    computes, and take it again for the next round.

    `kernels` is what sampler and learner compute with, on every machine of it; `auto` is the best of the machine that
    starts the run, or torch without a compiler.
    """

    address: str | None = None
    kernels: KernelChoice = KernelChoice.auto
    placement: Placement = Placement.separate
    object_store_mb: int = 256
    start_deadline_s: float = 90.0


@dataclass(slots=True, kw_only=True)
class LoggingConfig:
    """W&B and the console."""

    project: str = "moe-agent-rl"
    wandb: WandbMode = WandbMode.auto
    tags: list[str] = field(default_factory=list[str])


@dataclass(slots=True, kw_only=True)
class RunConfig:
    """Everything that `python -m rl.train` reads."""

    run: RunSection = field(default_factory=RunSection)
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    env: EnvConfig = field(default_factory=EnvConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    learner: LearnerConfig = field(default_factory=LearnerConfig)
    evaluation: EvalSection = field(default_factory=EvalSection)
    warm_start: WarmStartSection = field(default_factory=WarmStartSection)
    parity: ParitySection = field(default_factory=ParitySection)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    logging: LoggingConfig = field(default_factory=LoggingConfig)

"""The DeepSpeed engine: the only file that knows its keys.

What it settles (measured on DeepSpeed 0.19): ZeRO stage 1 or 2 where there is more than one rank (0 has no true
gradient norm over ranks), the caller owns the gradient-accumulation boundary (`managed_gradient_accumulation: false`,
`scale_wrt_gas=False`), gradients are summed over ranks because the losses carry their global denominators, and AdamW is
torch's fused one (DeepSpeed's own would be compiled on first use, for no gain here).

One rank has nothing to partition, and ZeRO would copy every gradient three times and every master once on the way to
the same bits: there the engine runs without it, and the norm and the clip, which it has wrong then, are ours.

Experts that are spread over ranks are our own module (`model/parallel/experts.py`) on DeepSpeed's process groups and
its path for gradients: their parameters carry the two marks by which it reduces, partitions, clips and steps them over
the ranks that hold the same experts. DeepSpeed's AutoEP would replace the module by one that knows neither biases,
clamped units, sigmoid routers nor the published view that the forward reads here.
"""

from __future__ import annotations

import math
import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from model.parallel.groups import Ranks


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerSettings:
    """AdamW (Loshchilov and Hutter 2019) and the gradient clip; the learning rate is set before every step."""

    beta1: float
    beta2: float
    weight_decay: float
    max_grad_norm: float
    zero_stage: int
    offload: bool = False
    """Gradients, moments and the masters that the optimizer steps are in the memory of the CPU."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rendezvous:
    """Where the ranks of one learner meet."""

    rank: int
    world_size: int
    address: str
    port: int


MOMENTS = ("exp_avg", "exp_avg_sq")

_EPSILON = 1e-6
"""What DeepSpeed adds to the norm that it clips by."""

_RUN = 4096
"""Squares added up in fp32."""


def join(rendezvous: Rendezvous, *, expert_parallel: int) -> Ranks:
    """Meet the other ranks, and form groups of `expert_parallel` consecutive ones that share the experts out."""
    os.environ.update(
        RANK=str(rendezvous.rank),
        WORLD_SIZE=str(rendezvous.world_size),
        LOCAL_RANK="0",
        MASTER_ADDR=rendezvous.address,
        MASTER_PORT=str(rendezvous.port),
    )
    on_gpu = torch.cuda.is_available()
    if not on_gpu:
        os.environ["DS_ACCELERATOR"] = "cpu"
    # DeepSpeed prints and configures logging when it is imported, so it is imported where it is used.
    import deepspeed
    import deepspeed.ops
    from deepspeed.utils import groups

    # Its shared-memory collective serves inference only, and would be compiled for a minute on first use.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed("nccl" if on_gpu else "gloo", verbose=False)
    expert_group = None
    if expert_parallel > 1:
        if _group_name(expert_parallel) not in groups._get_expert_parallel_group_dict():
            groups._create_expert_and_data_parallel(expert_parallel)
        expert_group = groups._get_expert_parallel_group(_group_name(expert_parallel))
    return Ranks(rank=rendezvous.rank, num_ranks=rendezvous.world_size, expert_group=expert_group)


class DeepSpeedEngine:
    """One rank's engine around `module`, whose parameters are the fp32 `masters`; it calls them by these names.

    `experts` names those that the ranks of an expert-parallel group share out.
    """

    def __init__(
        self,
        module: nn.Module,
        masters: Mapping[str, nn.Parameter],
        settings: OptimizerSettings,
        ranks: Ranks,
        experts: Collection[str],
    ):
        import deepspeed

        if ranks.expert_group is not None and experts:
            _mark_experts(module, ranks.expert_parallel, [masters[name] for name in experts])
        self._settings = settings
        self._engine: Any = deepspeed.initialize(model=module, config=self._config(settings))[0]
        self._masters = masters
        self.trained = {name: master for name, master in masters.items() if master.requires_grad}

    def forward(self, *args: Any) -> Any:
        """The module's forward, with the engine's hooks."""
        return self._engine(*args)

    def backward(self, loss: torch.Tensor) -> None:
        """Accumulate the gradient of `loss`, which is already divided by its global denominator."""
        self._engine.backward(loss, scale_wrt_gas=False)

    def step(self, lr: float) -> float:
        """Clip, update the masters, clear the gradients; the global gradient norm before clipping.

        When the norm is not finite, nothing is updated.
        """
        for group in self._adamw.param_groups:
            group["lr"] = lr
        return self._clip_and_step()

    def optimizer_state(self) -> tuple[dict[str, torch.Tensor], int]:
        """The moments of every trained parameter (`<moment>/<name>`, fp32) and the number of steps taken."""
        num_steps = self._num_steps()
        if num_steps == 0:
            return {}, 0
        self._link_state()
        moments = {
            f"{moment}/{name}": self._moment(parameter, moment).detach().clone()
            for name, parameter in self.trained.items()
            for moment in MOMENTS
        }
        return moments, num_steps

    @torch.no_grad()
    def restore(self, masters: Mapping[str, torch.Tensor], moments: Mapping[str, torch.Tensor], num_steps: int) -> None:
        """Put saved masters and optimizer state back, to the last bit."""
        has_state = num_steps > 0 or self._num_steps() > 0
        if has_state:
            # AdamW creates its state in the first step; here it must exist before, and DeepSpeed must link to it.
            for group in self._adamw.param_groups:
                for tensor in group["params"]:
                    state = self._adamw.state[tensor]
                    for moment in MOMENTS:
                        state.setdefault(moment, torch.zeros_like(tensor))
                    state.setdefault("step", torch.tensor(0.0)).fill_(num_steps)
            self._link_state()
        for name, parameter in self._masters.items():
            parameter.copy_(masters[name])
            if name not in self.trained:
                continue
            self._set_master(parameter, masters[name])
            for moment in MOMENTS if has_state else ():
                value = moments[f"{moment}/{name}"] if num_steps else torch.zeros_like(parameter)
                self._set_moment(parameter, moment, value)

    def close(self) -> None:
        """Leave the process group."""
        self._engine.destroy()
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()

    @staticmethod
    def _config(settings: OptimizerSettings) -> dict[str, Any]:
        return _deepspeed_config(settings)

    @property
    def _adamw(self) -> torch.optim.Optimizer:
        """Torch's, within DeepSpeed's."""
        return self._engine.optimizer.optimizer

    def _num_steps(self) -> int:
        for state in self._adamw.state.values():
            if "step" in state:
                return int(state["step"])
        return 0

    def _clip_and_step(self) -> float:
        self._engine.step()
        return float(self._engine.get_global_grad_norm())

    def _link_state(self) -> None:
        """Let DeepSpeed find the optimizer's state. By itself it looks once, after the step of its first group of
        parameters, when the groups after it (the experts) have none yet.
        """  # noqa: D205
        optimizer = self._engine.optimizer
        optimizer._hp_optimizer_states_linked = False
        optimizer._lazy_init_hp_params_optimizer_state()

    def _moment(self, parameter: nn.Parameter, moment: str) -> torch.Tensor:
        from deepspeed.utils import safe_get_full_optimizer_state

        value = safe_get_full_optimizer_state(parameter, moment)
        assert value is not None
        return value

    def _set_moment(self, parameter: nn.Parameter, moment: str, value: torch.Tensor) -> None:
        from deepspeed.utils import safe_set_full_optimizer_state

        safe_set_full_optimizer_state(parameter, value, moment)

    def _set_master(self, parameter: nn.Parameter, value: torch.Tensor) -> None:
        from deepspeed.utils import safe_set_full_fp32_param

        safe_set_full_fp32_param(parameter, value)


class OneRankEngine(DeepSpeedEngine):
    """The engine of a learner of one rank: without ZeRO, the same bits."""

    def __init__(self, module: nn.Module, masters: Mapping[str, nn.Parameter], settings: OptimizerSettings):
        super().__init__(module, masters, settings, Ranks(), ())
        self._engine.enable_backward_allreduce = False  # it would flatten the gradients before it asks for how many

    @staticmethod
    def _config(settings: OptimizerSettings) -> dict[str, Any]:
        return _deepspeed_config(settings) | {"gradient_clipping": 0.0, "zero_optimization": {"stage": 0}}

    @property
    def _adamw(self) -> torch.optim.Optimizer:
        return self._engine.optimizer

    def _clip_and_step(self) -> float:
        grads: list[torch.Tensor] = []
        for parameter in self.trained.values():
            if parameter.grad is None:  # its moments decay all the same, as in a partition
                parameter.grad = torch.zeros_like(parameter)
            grads.append(parameter.grad)
        norm, limit = global_norm(grads), self._settings.max_grad_norm
        if not math.isfinite(norm):
            self._engine.zero_grad()
            return norm
        if 0 < limit < norm + _EPSILON:
            for grad in grads:
                grad.mul_(limit / (norm + _EPSILON))
        self._engine.step()
        return norm

    def _link_state(self) -> None:
        """There is but one state."""

    def _moment(self, parameter: nn.Parameter, moment: str) -> torch.Tensor:
        return self._adamw.state[parameter][moment]

    def _set_moment(self, parameter: nn.Parameter, moment: str, value: torch.Tensor) -> None:
        self._moment(parameter, moment).copy_(value)

    def _set_master(self, parameter: nn.Parameter, value: torch.Tensor) -> None:
        """It is the parameter."""


def make_engine(
    module: nn.Module,
    masters: Mapping[str, nn.Parameter],
    settings: OptimizerSettings,
    ranks: Ranks,
    experts: Collection[str],
) -> DeepSpeedEngine:
    """The engine of this rank; the arguments are those of `DeepSpeedEngine`."""
    if ranks.num_ranks == 1 and not settings.offload:
        return OneRankEngine(module, masters, settings)
    return DeepSpeedEngine(module, masters, settings, ranks, experts)


def global_norm(grads: Sequence[torch.Tensor]) -> float:
    """The Euclidean norm of all tensors: fp32 sums of a few thousand squares, which are added up in fp64.

    torch's fp32 norm of a large tensor is off by 1e-4 and more of itself; its fp64 norm takes ten times as long.
    """
    squares: list[torch.Tensor] = []
    for grad in grads:
        flat = grad.detach().reshape(-1)
        for part in flat.split(len(flat) - len(flat) % _RUN or _RUN):
            norms = torch.linalg.vector_norm(part.view(-1, min(_RUN, len(part))), dim=-1)
            squares.append(norms.double().square().sum())
    return float(torch.stack(squares).sum().sqrt())


def _group_name(expert_parallel: int) -> str:
    return f"ep_size_{expert_parallel}"  # DeepSpeed's key


def _mark_experts(module: nn.Module, expert_parallel: int, experts: Sequence[nn.Parameter]) -> None:
    """Tell DeepSpeed which parameters are experts, and that there are some: it looks for a module of its own class."""
    from deepspeed.moe.layer import MoE

    class ExpertGroups(MoE):
        def __init__(self) -> None:
            nn.Module.__init__(self)
            self.num_experts = len(experts)

        def set_deepspeed_parallelism(self, use_data_before_expert_parallel_: bool = False) -> None:
            """The groups exist already (`join`)."""

    for parameter in experts:
        parameter.allreduce = False  # pyright: ignore[reportAttributeAccessIssue]
        parameter.group_name = _group_name(expert_parallel)  # pyright: ignore[reportAttributeAccessIssue]
    module.add_module("expert_groups", ExpertGroups())


def _deepspeed_config(settings: OptimizerSettings) -> dict[str, Any]:
    pinned = torch.cuda.is_available()
    offload = {"offload_optimizer": {"device": "cpu", "pin_memory": pinned}} if settings.offload else {}
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "managed_gradient_accumulation": False,
        "gradient_allreduce_op": "sum",
        "gradient_clipping": settings.max_grad_norm,
        "zero_optimization": {"stage": settings.zero_stage} | offload,
        "zero_force_ds_cpu_optimizer": False,
        "optimizer": {
            "type": "AdamW",
            "params": {
                "lr": 0.0,
                "betas": [settings.beta1, settings.beta2],
                "weight_decay": settings.weight_decay,
                "torch_adam": True,
                "fused": True,
            },
        },
        "steps_per_print": 10**9,
        "wall_clock_breakdown": False,
    }

"""This project's engine on the published bytes: `workload.py` has the command line.

mxfp4       fp32 activations, the weights as they are: what a run uses
mxfp4_bf16  bf16 activations
..._avx512, ..._avx2, ..._torch  the same with the kernels of that name; the plain modes take the machine's best
"""

from __future__ import annotations

import dataclasses

import numpy as np
import torch
from workload import Answer, Engine, Prompts, Workload, parse, run

from model.checkpoint import load_model
from model.config import ComputeDtype, KernelChoice
from model.kernels.dispatch import resolve_kernels
from rl.run_folder import commit
from rollout.config import EngineConfig, Precision
from rollout.engine.engine import Engine as OurEngine
from rollout.types import SamplingParams, WeightVersion

_DTYPES = {"mxfp4_bf16": ComputeDtype.bf16, "mxfp4": ComputeDtype.fp32}
_KERNELS = {"": KernelChoice.auto} | {f"_{name}": KernelChoice(name) for name in ("avx512", "avx2", "torch")}


class Ours(Engine):
    """`rollout.engine`, called as a program would."""

    peer = "ours"

    def __init__(self, workload: Workload) -> None:
        head, dirty = commit()
        self.version = head[:9] + ("+" if dirty else "")
        name = next(name for name in _DTYPES if workload.mode.startswith(name))
        loaded = load_model(workload.model / "mxfp4")
        config = EngineConfig(
            precision=Precision.mxfp4,
            max_batch_size=workload.batch,
            max_seq_len=workload.max_tokens,
            kernels=_KERNELS[workload.mode.removeprefix(name)],
        )
        self._engine = OurEngine(
            dataclasses.replace(loaded.config, compute_dtype=_DTYPES[name]),
            config,
            kernels=resolve_kernels(config.kernels),
        )
        self._engine.swap_weights(WeightVersion(0), loaded.packed())

    def generate(self, prompts: Prompts, new_tokens: int) -> Prompts:
        """See `Engine`."""
        return [ids for ids, _ in self.answers(prompts, new_tokens)]

    def answers(self, prompts: Prompts, new_tokens: int) -> list[Answer]:
        """See `Engine`."""
        said = self._engine.generate(prompts, SamplingParams(temperature=0.0, max_tokens=new_tokens))
        return [(list(one.ids), _values(one.model_logprobs_T)) for one in said]


def _values(logprobs_T: np.ndarray | None) -> list[float]:
    if logprobs_T is None:
        raise ValueError("answers: the engine must report the model's own logprobs, got none; ask one with a model")
    return logprobs_T.tolist()


def main() -> None:
    """Measure one mode."""
    workload = parse(__doc__, [dtype + kernels for dtype in _DTYPES for kernels in _KERNELS])
    torch.set_num_threads(workload.threads)
    run(workload, Ours(workload))


if __name__ == "__main__":
    main()

"""From masters to published bytes, once an optimizer step, as `learner.quantization` asks for it.

    nearest                  a function of the masters alone
    nearest, hysteresis      of the masters and of the bytes before: a checkpoint carries those
    stochastic               of the masters and of (run seed, optimizer step, tensor, element): a checkpoint repeats it

Only the MXFP4 experts are treated so; what is published in bf16 or fp32 is rounded to nearest in every case. Stochastic
rounding is unbiased up to the largest code of a block; beyond it, a master saturates as it does with nearest.

Invariant: the bytes of an expert do not depend on how the experts are spread over ranks.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from functools import partial

import numpy as np
import numpy.typing as npt
import torch

from model.mxfp4 import BLOCK, ScaleRule, quantize
from model.mxfp4_rounding import Rounding
from model.requantize import inside_range, requantize
from model.snapshot import Format, PackedTensor, as_tensor, published_view
from rl.learner.config import CodeRounding, QuantizationConfig, StraightThroughKind


class Requantizer:
    """The rule of one rank; `experts` says which of the experts in each expert parameter are this rank's, in order."""

    def __init__(
        self,
        settings: QuantizationConfig,
        *,
        seed: int,
        nearest: Callable[..., tuple[torch.Tensor, torch.Tensor]],
        experts: Mapping[str, npt.NDArray[np.int64]],
    ):
        self._settings = settings
        self._seed = seed
        self._nearest = nearest
        self._experts = experts

    @property
    def reads_masters(self) -> bool:
        """Whether the forward reads the masters themselves."""
        return not self._settings.enabled

    @property
    def is_pure(self) -> bool:
        """Whether the bytes follow from the masters alone."""
        return self._settings.rounding is CodeRounding.nearest and not self._settings.hysteresis

    def __call__(
        self, masters: Mapping[str, torch.Tensor], num_steps: int, previous: Mapping[str, PackedTensor]
    ) -> dict[str, PackedTensor]:
        """The bytes after `num_steps` optimizer steps; `previous` are those before the last, if there are any.

        Raises:
            SnapshotError, MXFP4Error: A master that cannot be published.
        """

        def quantizer(w: torch.Tensor, *, rule: ScaleRule, name: str) -> tuple[torch.Tensor, torch.Tensor]:
            if self._settings.rounding is CodeRounding.stochastic:
                return self._stochastic(w, rule, name, tensor_seed(self._seed, num_steps, name))
            if self._settings.hysteresis and name in previous:
                blocks, scales = (as_tensor(array) for array in (previous[name].payload, previous[name].scales))
                hysteresis = self._settings.hysteresis
                return requantize(
                    w, blocks, scales, hysteresis=hysteresis, rule=rule, name=name, quantizer=self._nearest
                )
            return self._nearest(w, rule=rule, name=name)

        return published_view(masters, quantizer)

    def _stochastic(self, w: torch.Tensor, rule: ScaleRule, name: str, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Runs of consecutive experts at once: the random numbers are counted by an expert's number."""
        draw = partial(quantize, rule=rule, rounding=Rounding.STOCHASTIC, seed=seed, name=name)
        if name not in self._experts:
            return draw(w)
        own, blocks_each = self._experts[name], w[0].numel() // BLOCK
        runs = np.split(np.arange(len(own)), np.flatnonzero(np.diff(own) != 1) + 1)
        parts = [draw(w[run[0] : run[-1] + 1], first_block=int(own[run[0]]) * blocks_each) for run in runs]
        blocks, scales = (list(of_runs) for of_runs in zip(*parts, strict=True))
        return (blocks[0], scales[0]) if len(parts) == 1 else (torch.cat(blocks), torch.cat(scales))

    def inside(
        self, masters: Mapping[str, torch.Tensor], packed: Mapping[str, PackedTensor]
    ) -> dict[str, torch.Tensor]:
        """Where the gradient passes, for every tensor in which it does not pass everywhere."""
        if self._settings.straight_through is StraightThroughKind.identity:
            return {}
        inside = {
            name: inside_range(master, as_tensor(packed[name].scales))
            for name, master in masters.items()
            if packed[name].format is Format.MXFP4
        }
        return {name: mask for name, mask in inside.items() if not mask.all()}


def tensor_seed(seed: int, num_steps: int, name: str) -> int:
    """The seed, in [0, 2^63), of a tensor's random rounding after `num_steps` optimizer steps."""
    digest = hashlib.blake2b(f"{seed}|{num_steps}|{name}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1

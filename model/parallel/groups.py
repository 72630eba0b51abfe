"""The place of this process among the ranks that train one model together.

The experts of a layer are spread over an expert-parallel group of P ranks: its r-th member holds those in the slots
r E / P to (r + 1) E / P - 1 of the layer, where `model/parallel/placement.py` puts them. Everything else is on every
rank, and each rank computes its own samples. With more ranks than P there are several such groups, placed alike, and a
rank's experts are on one rank of each.

Shapes: E experts of the model, e = E / P of a rank.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.distributed as dist

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Ranks:
    """`rank` of `num_ranks`; `expert_group` is this rank's expert-parallel group, `None` where it holds all experts.

    Every method is a collective: all ranks call it, in the same order.
    """

    rank: int = 0
    num_ranks: int = 1
    expert_group: dist.ProcessGroup | None = None

    @property
    def expert_parallel(self) -> int:
        """P."""
        return 1 if self.expert_group is None else dist.get_world_size(self.expert_group)

    @property
    def expert_rank(self) -> int:
        """The place of this rank in its expert-parallel group."""
        return 0 if self.expert_group is None else dist.get_rank(self.expert_group)

    def gather(self, value: T) -> list[T]:
        """Every rank's value (picklable), in rank order, on every rank."""
        if self.num_ranks == 1:
            return [value]
        values: list[T | None] = [None] * self.num_ranks
        dist.all_gather_object(values, value)
        return [value for value in values if value is not None]

    def gather_experts(self, own_e: torch.Tensor) -> torch.Tensor | None:
        """The tensors [e, ...] of the first group's ranks as one [E, ...], by slot, on rank 0; `None` on the others."""
        if self.expert_group is None:
            return own_e if self.rank == 0 else None
        if dist.get_process_group_ranks(self.expert_group)[0] != 0:
            return None
        own_e = own_e.contiguous()
        parts = [torch.empty_like(own_e) for _ in range(self.expert_parallel)] if self.rank == 0 else None
        dist.gather(own_e, parts, dst=0, group=self.expert_group)
        return None if parts is None else torch.cat(parts)

    def total(self, counts: torch.Tensor) -> torch.Tensor:
        """The sum of every rank's tensor, on every rank; int64, or else the order of the sum is the backend's."""
        if self.num_ranks > 1:
            dist.all_reduce(counts)
        return counts

"""Bytes that travel: loading a checkpoint, and publishing a round's weights. Seconds are bytes over a bandwidth.

Loading reads every byte once (one copy of the model, all readers together at the given bandwidth). Publishing sends a
full snapshot, or what changed since the last one. With a share f of the values changed, independently of each other, a
block of 32 MXFP4 values has changed with probability 1 - (1 - f)^32 and is sent as its 17 bytes and a 4-byte index; any
other changed value as its own 2 (or 4) bytes and a 4-byte index. A tensor whose changes would take more bytes than the
tensor is sent whole.
"""

from __future__ import annotations

from dataclasses import dataclass

from model.config import MXFP4_BLOCK
from model.planning.config import PlanConfig
from model.size import ModelSize, Part, published_bits

_INDEX_BYTES = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfer:
    """Bytes of a full copy in either form, and of a delta of published weights."""

    bf16_bytes: int
    published_bytes: int
    delta_bytes: int
    changed_frac: float
    bandwidth_gb_s: float

    @classmethod
    def of(cls, size: ModelSize, plan: PlanConfig) -> Transfer:
        """All transfers of a model."""
        return cls(
            bf16_bytes=size.bf16_bytes,
            published_bytes=size.published_bytes,
            delta_bytes=round(sum(_delta_bytes(part, count, plan.changed_frac) for part, count in size.total.items())),
            changed_frac=plan.changed_frac,
            bandwidth_gb_s=plan.bandwidth_gb_s,
        )

    def saved_frac(self, num_bytes: float) -> float:
        """How much less than 16 bit that is, and so how much shorter its transfer."""
        return 1.0 - num_bytes / self.bf16_bytes

    def seconds(self, num_bytes: float) -> float:
        """Time at the plan's bandwidth."""
        return num_bytes / (self.bandwidth_gb_s * 1e9)


def _delta_bytes(part: Part, count: int, changed_frac: float) -> float:
    values = MXFP4_BLOCK if part is Part.experts else 1
    unit_bytes = values * published_bits(part) / 8
    changed = 1.0 - (1.0 - changed_frac) ** values
    return count / values * min(changed * (unit_bytes + _INDEX_BYTES), unit_bytes)

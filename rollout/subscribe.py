"""The receiving end of publishing: verify a snapshot, swap it in.

Nothing is swapped before everything is verified: every tensor present, of the expected shape and format, its digest
recomputed from the bytes that arrived. After the swap the worker answers with the digests of what it now runs.
"""

from __future__ import annotations

from collections.abc import Mapping

from model.config import ModelConfig
from model.snapshot import WeightSnapshot, verify
from model.transformer import parameter_shapes
from rollout.engine.engine import Engine
from rollout.types import WeightVersion


class StaleSnapshotError(ValueError):
    """A snapshot that is not newer than the weights in use."""


class Subscriber:
    """Feeds one engine from published snapshots."""

    def __init__(self, config: ModelConfig, engine: Engine):
        self._expected = parameter_shapes(config)
        self._engine = engine
        self._version: WeightVersion | None = None

    def receive(self, snapshot: WeightSnapshot, *, may_go_back: bool = False) -> Mapping[str, str]:
        """Swap `snapshot` in and return the digest of every tensor now in use.

        Only a sender that holds versions back goes back to one on purpose (`may_go_back`). Raises SnapshotError naming
        the tensor that did not arrive as sent, StaleSnapshotError for an old version.
        """
        if self._version is not None and not may_go_back and snapshot.version <= self._version:
            raise StaleSnapshotError(
                f"snapshot: versions only grow, got {snapshot.version} after {self._version}; publish the next version"
            )
        verify(snapshot, self._expected)
        self._engine.swap_weights(snapshot.version, snapshot.tensors)
        self._version = snapshot.version
        return snapshot.digests

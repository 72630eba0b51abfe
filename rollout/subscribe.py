"""The receiving end of publishing: verify a snapshot, swap it in.

Nothing is swapped before everything is verified: every tensor present, of the expected shape and format, its digest
recomputed from the bytes that arrived. After the swap the worker answers with the digests of what it now runs.

Of a model with adapters (`model/lora.py`) the base arrives once, in the first snapshot; what follows holds the adapters
alone, and the digests of everything: those of the base must be the ones of the base that is here.
"""

from __future__ import annotations

from collections.abc import Mapping

from model.config import LoraConfig, ModelConfig
from model.lora import adapter_shapes
from model.snapshot import SnapshotError, WeightSnapshot, verify
from model.transformer import parameter_shapes
from rollout.engine.engine import Engine
from rollout.types import WeightVersion


class StaleSnapshotError(ValueError):
    """A snapshot that is not newer than the weights in use."""


class Subscriber:
    """Feeds one engine from published snapshots."""

    def __init__(self, config: ModelConfig, engine: Engine, lora: LoraConfig | None = None):
        self._adapters = adapter_shapes(config, lora or LoraConfig())
        self._expected = parameter_shapes(config) | self._adapters
        self._base_digests: Mapping[str, str] = {}
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
        if snapshot.base_version is None:
            verify(snapshot, self._expected)
            self._engine.swap_weights(snapshot.version, snapshot.tensors)
            self._base_digests = {n: digest for n, digest in snapshot.digests.items() if n not in self._adapters}
        else:
            self._check_base(snapshot)
            verify(snapshot, self._adapters)
            self._engine.swap_adapters(snapshot.version, snapshot.tensors)
        self._version = snapshot.version
        return snapshot.digests

    def _check_base(self, snapshot: WeightSnapshot) -> None:
        """Raises SnapshotError naming a tensor of the base that is not the one which these adapters belong to."""
        belongs = {n: digest for n, digest in snapshot.digests.items() if n not in self._adapters}
        other = sorted(n for n in {*belongs, *self._base_digests} if belongs.get(n) != self._base_digests.get(n))
        if other or not belongs:
            raise SnapshotError(
                f"snapshot {snapshot.version}: its adapters belong to the base of version {snapshot.base_version}, got "
                f"a base with {len(other)} other tensors here, such as {other[:1]}; publish a full snapshot first"
            )

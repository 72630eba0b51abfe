"""Publishing: requantize, one version more, to every worker, verified there; and the gate that proves it each round."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rl.batch import TrainSample
from rl.learner.group import LearnerGroup
from rl.parity import ParityBounds, ParityError, ParityReport
from rollout.pool import RolloutPool
from rollout.types import WeightVersion

_EXPERT_LAYER = re.compile(r"model\.layers\.(\d+)\.mlp\.experts\.(?:gate_up|down)_proj$")


@dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    """What was published. `codes_changed` counts (changed, all) of each tensor since the version before."""

    version: WeightVersion
    num_bytes: int
    codes_changed: Mapping[str, tuple[int, int]]

    @property
    def codes_changed_frac(self) -> float:
        """Changed share of all codes; 0 for the first version."""
        total = sum(count for _, count in self.codes_changed.values())
        return sum(changed for changed, _ in self.codes_changed.values()) / total if total else 0.0

    @property
    def codes_changed_by_layer(self) -> dict[int, float]:
        """Changed share of the expert codes of each layer; empty for the first version."""
        counts: dict[int, tuple[int, int]] = {}
        for name, (changed, total) in self.codes_changed.items():
            if (found := _EXPERT_LAYER.match(name)) is not None:
                before = counts.get(layer := int(found[1]), (0, 0))
                counts[layer] = (before[0] + changed, before[1] + total)
        return {layer: changed / total for layer, (changed, total) in counts.items()}


class Publisher:
    """Carries the learner's weights to the workers. `version` is the version that they run."""

    def __init__(self, learners: LearnerGroup, pool: RolloutPool, bounds: ParityBounds):
        self._learners = learners
        self._pool = pool
        self._bounds = bounds
        self.version = WeightVersion(-1)

    def publish(self, version: WeightVersion) -> Published:
        """Requantize and publish as `version`; every worker has swapped and verified when this returns."""
        snapshot, changed = self._learners.snapshot(version)
        self._pool.publish(snapshot)
        self.version = version
        return Published(
            version=version,
            num_bytes=snapshot.num_bytes,
            codes_changed=changed,
        )

    def check_parity(self, samples: Sequence[TrainSample]) -> ParityReport:
        """The parity gate on just-sampled tokens: equal logprobs within the bounds, and exactly equal weights.

        Raises ParityError that names the worst tensor, or else the layer.
        """
        report = self._learners.parity(samples)
        violation = report.violation(self._bounds) or self._other_weights()
        if violation is not None:
            raise ParityError(
                f"parity gate: behavior and policy logprobs must agree before the update, got {violation}; "
                f"{self._diagnosis(report)}"
            )
        return report

    def _other_weights(self) -> str | None:
        """Whether a worker decodes with other bytes than the learner reads, however small the effect; in words."""
        own = self._learners.digests()
        for worker, running in enumerate(self._pool.digests()):
            names = sorted(name for name in {*own, *running} if own.get(name) != running.get(name))
            if names:
                return f"other bytes in {len(names)} tensors of worker {worker}, such as {names[0]}"
        return None

    def _diagnosis(self, report: ParityReport) -> str:
        """Compare the weights themselves: a tensor that differs is the cause, otherwise the two forwards differ."""
        for worker, running in enumerate(self._pool.running_views()):
            differences = self._learners.view_differences(running)
            if differences:
                worst = max(differences, key=lambda name: differences[name])
                return (
                    f"worker {worker} runs another {worst} than was published (largest difference "
                    f"{differences[worst]:.3g}, {len(differences)} tensors in all): the transfer is at fault, restart"
                )
        return (
            f"the weights are equal, so the two forwards differ, most in layer {report.worst_layer}: "
            "compare the attention and expert kernels of sampler and learner"
        )

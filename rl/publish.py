"""Publishing: requantize, one version more, to every worker, verified there; and the gate that proves it each round.

With held-back versions (`rl.held_back`) what is sent is an older version than the learner's. Its logprobs then differ
from the learner's for a reason, so that the gate compares bytes alone.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from model.snapshot import CodeChanges, Format, WeightSnapshot
from rl.batch import TrainSample
from rl.held_back import HeldBack
from rl.learner.group import LearnerGroup
from rl.parity import NOT_COMPARED, ParityBounds, ParityError, ParityReport
from rollout.pool import RolloutPool
from rollout.types import WeightVersion

_EXPERT_LAYER = re.compile(r"model\.layers\.(\d+)\.mlp\.experts\.(?:gate_up|down)_proj$")


@dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    """What the learner published, and the bytes that were sent to each worker for it (0: what is due runs already).

    `bits_per_expert_param` are those of them that carry experts, over the parameters of all experts. `codes_changed`
    are the changes of each MXFP4 tensor since the version before; nothing for the first version.
    """

    version: WeightVersion
    num_bytes: int
    bits_per_expert_param: float
    codes_changed: Mapping[str, CodeChanges]

    @property
    def codes_changed_frac(self) -> float:
        """Changed share of all 4-bit codes; 0 for the first version."""
        changes = self.codes_changed.values()
        return _frac(sum(each.num_codes_changed for each in changes), sum(each.num_codes for each in changes))

    @property
    def scales_changed_frac(self) -> float:
        """Changed share of all block scales; 0 for the first version."""
        changes = self.codes_changed.values()
        return _frac(sum(each.num_scales_changed for each in changes), sum(each.num_scales for each in changes))

    @property
    def codes_changed_by_layer(self) -> dict[int, float]:
        """Changed share of the 4-bit codes of each layer; empty for the first version."""
        counts: dict[int, tuple[int, int]] = {}
        for name, changes in self.codes_changed.items():
            if (found := _EXPERT_LAYER.match(name)) is not None:
                changed, total = counts.get(layer := int(found[1]), (0, 0))
                counts[layer] = (changed + changes.num_codes_changed, total + changes.num_codes)
        return {layer: changed / total for layer, (changed, total) in counts.items()}


def _frac(part: int, whole: int) -> float:
    return part / whole if whole else 0.0


def _bits_per_expert_param(snapshot: WeightSnapshot) -> float:
    experts = [packed for packed in snapshot.tensors.values() if packed.format is Format.MXFP4]
    return _frac(8 * sum(e.num_bytes for e in experts), sum(math.prod(e.shape) for e in experts))


class Publisher:
    """Carries the learner's weights to the workers. `version` is the learner's; they run it, or an older one."""

    def __init__(self, learners: LearnerGroup, pool: RolloutPool, bounds: ParityBounds, held_back: HeldBack):
        self._learners = learners
        self._pool = pool
        self._bounds = bounds
        self._held_back = held_back
        self.version = self._sent = WeightVersion(-1)
        self._sent_digests: Mapping[str, str] = {}

    def publish(self, version: WeightVersion) -> Published:
        """Requantize and publish as `version`; every worker has swapped and verified when this returns."""
        snapshot, changed = self._learners.snapshot(version)
        due = self._held_back.pass_through(snapshot)
        is_new = due.version != self._sent
        if is_new:
            self._send(due)
        self.version = version
        return Published(
            version=version,
            num_bytes=due.num_bytes if is_new else 0,
            bits_per_expert_param=_bits_per_expert_param(due) if is_new else 0.0,
            codes_changed=changed,
        )

    @contextmanager
    def newest(self) -> Iterator[None]:
        """The workers run the learner's version inside, as held-out evaluation wants it."""
        if self._sent == self.version:
            yield
            return
        due = self._held_back.due
        self._send(self._held_back.newest)
        yield
        self._send(due, may_go_back=True)

    def save(self, folder: Path) -> None:
        """Write what is held back into a checkpoint's folder."""
        self._held_back.save(folder)

    def load(self, folder: Path, version: WeightVersion) -> None:
        """Hold back again what `save` wrote at `version`; publish that version next."""
        self._held_back.load(folder, version)

    def check_parity(self, samples: Sequence[TrainSample]) -> ParityReport:
        """The parity gate on just-sampled tokens: equal logprobs within the bounds, and exactly equal weights.

        While the workers run an older version, its weights must be exactly those that were sent, and the report tells
        how far the two versions are apart. Raises ParityError that names the worst tensor, or else the layer.
        """
        report = self._learners.parity(samples)
        if self._sent != self.version:
            report = report.across_versions(samples)
            problem = report.violation(NOT_COMPARED) or self._other_weights(self._sent_digests)
            if problem is not None:
                raise ParityError(
                    f"parity gate: the workers must run version {self._sent} as it was sent, and give finite logprobs, "
                    f"got {problem}; the transfer or the update before it is at fault, restart"
                )
            return report
        violation = report.violation(self._bounds) or self._other_weights(self._learners.digests())
        if violation is not None:
            raise ParityError(
                f"parity gate: behavior and policy logprobs must agree before the update, got {violation}; "
                f"{self._diagnosis(report)}"
            )
        return report

    def _send(self, snapshot: WeightSnapshot, *, may_go_back: bool = False) -> None:
        self._pool.publish(snapshot, may_go_back=may_go_back)
        self._sent, self._sent_digests = snapshot.version, snapshot.digests

    def _other_weights(self, own: Mapping[str, str]) -> str | None:
        """Whether a worker decodes with other bytes than those of the digests, however small the effect; in words."""
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

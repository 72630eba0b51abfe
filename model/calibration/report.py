"""The report of a calibration: tables to read, and the same figures as JSON (an infinite SQNR is null there)."""

from __future__ import annotations

import dataclasses
import io
import json
import math
from dataclasses import dataclass
from typing import Any

from rich.console import Console, RenderableType
from rich.table import Table

from model.calibration.choice import BF16_BITS, MXFP4_BITS, Choice, extra_bits
from model.calibration.divergence import Divergence
from model.calibration.measure import Measurements
from model.calibration.tokens import CalibrationTokens
from model.config import ComputeDtype
from model.mxfp4 import ScaleRule

MIN_WIDTH = 132
"""Columns of the tables where the terminal has fewer, or there is none."""

RANDOM_WARNING = (
    "WARNING: measured on random token ids, which no text looks like; give --data a text of the kind "
    "that the model will see, ranks and sizes can be quite different there"
)
INFORMATION_ONLY = (
    "The learner and the publisher quantize every expert tensor today: this list is information, nothing reads it."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """Everything that one run measured. `mixture` is the measured damage of `choice`; both are absent together."""

    checkpoint: str
    rule: ScaleRule
    dtype: ComputeDtype
    seed: int
    tokens: CalibrationTokens
    measurements: Measurements
    choice: Choice | None = None
    mixture: Divergence | None = None

    def to_json(self) -> str:
        """One JSON object; tensors are ranked."""
        measured = self.measurements
        tensors = [
            {
                **dataclasses.asdict(tensor),
                "rank": rank,
                "sqnr_db": tensor.weight_error.sqnr_db,
                "worst_expert": tensor.weight_error.worst_expert,
                "extra_bits": extra_bits(tensor, measured.tensors),
            }
            for rank, tensor in enumerate(measured.ranked(), start=1)
        ]
        choice = None
        if self.choice is not None and self.mixture is not None:
            choice = {**dataclasses.asdict(self.choice), "measured": dataclasses.asdict(self.mixture)}
        values = {
            "checkpoint": self.checkpoint,
            "rule": self.rule.value,
            "dtype": self.dtype.value,
            "seed": self.seed,
            "data": {
                "origin": self.tokens.origin,
                "is_random": self.tokens.is_random,
                "num_sequences": len(self.tokens.sequences),
                "num_tokens": self.tokens.num_tokens,
            },
            "tensors": tensors,
            "layers": [dataclasses.asdict(layer) for layer in measured.layers],
            "total": dataclasses.asdict(measured.total),
            "summed_kl": _summed_kl(measured),
            "choice": choice,
        }
        return json.dumps(_finite(values), indent=2, allow_nan=False) + "\n"

    def to_text(self) -> str:
        """Tables and sentences for a terminal."""
        console = Console(file=io.StringIO(), width=max(MIN_WIDTH, Console().width), highlight=False, markup=False)
        for part in self._parts():
            console.print(part)
        return console.file.getvalue()  # pyright: ignore[reportAttributeAccessIssue]

    def _parts(self) -> list[RenderableType]:
        total, tokens = self.measurements.total, self.tokens
        parts: list[RenderableType] = [
            f"{self.checkpoint}: MXFP4 (rule {self.rule}) against the stored weights, computed in {self.dtype}, on "
            f"{len(tokens.sequences)} sequences, {tokens.num_tokens} tokens in all, from {tokens.origin} "
            f"(seed {self.seed})",
        ]
        if tokens.is_random:
            parts.append(RANDOM_WARNING)
        parts += [
            "",
            self._tensor_table(),
            "KL in nats a token, this tensor alone in MXFP4. Errors are relative RMS: of the weights, and of the MoE "
            "layer's output. saturated: beyond the largest code; zeroed: became 0; bits: what keeping the tensor in "
            "bf16 adds to the average over all expert values.",
            "",
            self._layer_table(),
            "",
            f"Everything in MXFP4 ({MXFP4_BITS} bits): KL {_kl(total.kl_mean)} nats a token (largest "
            f"{_kl(total.kl_max)}; the tensors' sum is {_kl(_summed_kl(self.measurements))}), next-token loss "
            f"{_losses(total)}, same most probable token {total.top1_agreement:.2%}",
        ]
        return parts + self._choice_parts()

    def _tensor_table(self) -> Table:
        table = Table(title="Tensors, the most damaging first", title_justify="left")
        table.add_column("", justify="right")
        table.add_column("layer", justify="right", no_wrap=True)
        table.add_column("tensor", no_wrap=True)
        for heading in (
            "KL",
            "largest KL",
            "output",
            "weight",
            "SQNR dB",
            "saturated",
            "zeroed",
            "worst expert",
            "bits",
        ):
            table.add_column(heading, justify="right", no_wrap=True)
        for rank, tensor in enumerate(self.measurements.ranked(), start=1):
            error = tensor.weight_error
            worst = error.worst_expert
            table.add_row(
                str(rank),
                str(tensor.layer),
                tensor.name.rpartition(".")[-1],
                _kl(tensor.kl),
                _kl(tensor.divergence.kl_max),
                f"{tensor.output_error:.2%}",
                f"{error.relative_rms:.2%}",
                f"{error.sqnr_db:.2f}",
                f"{error.saturated_frac:.2%}",
                f"{error.zeroed_frac:.2%}",
                f"{worst}: {error.expert_relative_rms[worst]:.2%}",
                f"+{extra_bits(tensor, self.measurements.tensors):.3f}",
            )
        return table

    def _layer_table(self) -> Table:
        table = Table(title="Layers, all expert tensors of the layer in MXFP4", title_justify="left")
        for heading in ("layer", "KL", "largest KL", "output", "same top token", "experts without a token"):
            table.add_column(heading, justify="right", no_wrap=True)
        for layer in self.measurements.layers:
            table.add_row(
                str(layer.layer),
                _kl(layer.divergence.kl_mean),
                _kl(layer.divergence.kl_max),
                f"{layer.output_error:.2%}",
                f"{layer.divergence.top1_agreement:.2%}",
                f"{layer.num_unused} of {len(layer.tokens_of_expert)}",
            )
        return table

    def _choice_parts(self) -> list[RenderableType]:
        if self.choice is None or self.mixture is None:
            return []
        return [
            "",
            f"Kept in bf16 ({BF16_BITS} bits): {len(self.choice.kept)} of {len(self.measurements.tensors)} tensors, "
            f"{self.choice.bits:.3f} bits a value on average",
            *(f"  {name}" for name in self.choice.kept),
            f"KL of this mixture: {_kl(self.choice.predicted_kl)} predicted (the sum over its quantized tensors), "
            f"{_kl(self.mixture.kl_mean)} measured; next-token loss {_losses(self.mixture)}, "
            f"same most probable token {self.mixture.top1_agreement:.2%}",
            INFORMATION_ONLY,
        ]


def _summed_kl(measured: Measurements) -> float:
    return sum(tensor.kl for tensor in measured.tensors)


def _kl(value: float) -> str:
    return f"{value:.2e}" if value else "0"


def _losses(divergence: Divergence) -> str:
    return f"{divergence.source_loss:.4f} -> {divergence.loss:.4f} nats"


def _finite(value: Any) -> Any:
    """Plain JSON values: infinities, for which JSON has no word, as null."""
    if isinstance(value, dict):
        return {key: _finite(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value

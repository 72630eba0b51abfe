"""A plan as text: three tables of at most 100 columns."""

from __future__ import annotations

from collections.abc import Iterable

from rich.console import Console
from rich.table import Table

from model.config import ModelConfig
from model.planning.config import PlanConfig
from model.planning.memory import (
    BitsOf,
    GpuMemory,
    bf16_bits,
    learner_memory,
    longest_context,
    most_sequences,
    sampler_memory,
)
from model.planning.transfer import Transfer
from model.size import ModelSize, Part, published_bits

WIDTH = 100

_FORMATS = {4.25: "MXFP4", 16.0: "bf16", 32.0: "fp32"}
_HELD = ("weights", "KV cache", "fp32 masters", "published view", "gradients", "optimizer", "activations")


def render(model: ModelConfig, plan: PlanConfig) -> str:
    """All tables of a resolved plan."""
    size = ModelSize.of(model)
    console = Console(width=WIDTH, highlight=False, color_system=None)
    with console.capture() as captured:
        for table in (_parameters(size), _memory(model, plan), _transfers(Transfer.of(size, plan))):
            console.print(table)
            console.print()
    return "".join(f"{line.rstrip()}\n" for line in captured.get().splitlines())


def _table(title: str, *headers: str) -> Table:
    table = Table(title=title, title_justify="left", show_edge=False, pad_edge=False)
    for index, header in enumerate(headers):
        table.add_column(header, justify="right" if index else "left")
    return table


def _parameters(size: ModelSize) -> Table:
    table = _table("Parameters", "", "total", "share", "active", "16 bit", "published", "as")
    by_format: dict[str, list[Part]] = {}
    for part in Part:
        if part in size.total:
            format = _FORMATS[published_bits(part)]
            by_format.setdefault(format, []).append(part)
            _parameter_row(table, size, part.value, [part], format)
    table.add_section()
    for format, parts in by_format.items():
        _parameter_row(table, size, f"all {format}", parts, format)
    table.add_section()
    _parameter_row(table, size, "all", [*size.total], "")
    if size.num_active != size.num_active_with_embedding:
        table.add_row("with the embedding", "", "", number(size.num_active_with_embedding))
    return table


def _parameter_row(table: Table, size: ModelSize, name: str, parts: Iterable[Part], format: str) -> None:
    counts = {part: size.total[part] for part in parts}
    total = sum(counts.values())
    table.add_row(
        name,
        number(total),
        percent(total / size.num_total),
        number(sum(size.active.get(part, 0) for part in counts)),
        amount(2 * total),
        amount(sum(count * published_bits(part) / 8 for part, count in counts.items())),
        format,
    )


def _memory(model: ModelConfig, plan: PlanConfig) -> Table:
    samplers: dict[str, BitsOf] = {"sampler, bf16": bf16_bits, "sampler, MXFP4": published_bits}
    columns = {name: sampler_memory(model, plan, bits_of) for name, bits_of in samplers.items()}
    columns["learner"] = learner_memory(model, plan)
    table = _table(
        f"Memory of the fullest GPU of {plan.tp * plan.pp * plan.dp}: tp {plan.tp} x pp {plan.pp} x dp {plan.dp}, "
        f"ep {plan.ep}, ZeRO {plan.zero_stage}\n{plan.batch} x {plan.context:,} tokens in each copy's cache, "
        f"micro-batches of {plan.micro_batch_tokens:,} tokens",
        "",
        *columns,
    )
    for name in _HELD:
        held = [memory.parts.get(name) for memory in columns.values()]
        table.add_row(name, *("" if each is None else amount(each) for each in held))
    table.add_section()
    gpu_bytes = plan.gpu_memory_gb * 1e9
    table.add_row("all", *(amount(memory.total) for memory in columns.values()))
    table.add_row(f"of {amount(gpu_bytes)}", *(_verdict(memory, gpu_bytes) for memory in columns.values()))
    table.add_section()
    for name, most in (
        (f"most sequences of {plan.context:,} tokens", most_sequences),
        (f"longest context of {plan.batch}", longest_context),
    ):
        table.add_row(name, *(f"{most(model, plan, gpu_bytes, bits_of):,}" for bits_of in samplers.values()))
    return table


def _verdict(memory: GpuMemory, gpu_bytes: float) -> str:
    free = gpu_bytes - memory.total
    return f"fits, {amount(free)} free" if free >= 0 else f"{amount(-free)} short"


def _transfers(transfer: Transfer) -> Table:
    title = f"Loading and publishing at {transfer.bandwidth_gb_s:g} GB/s"
    table = _table(title, "", "bytes", "time", "against 16 bit")
    rows = {
        "load or full snapshot, 16 bit": transfer.bf16_bytes,
        "load or full snapshot, MXFP4": transfer.published_bytes,
        f"delta, {percent(transfer.changed_frac)} of the values changed": transfer.delta_bytes,
    }
    for name, num_bytes in rows.items():
        saved = transfer.saved_frac(num_bytes)
        time = duration(transfer.seconds(num_bytes))
        table.add_row(name, amount(num_bytes), time, f"{percent(saved)} less" if saved else "")
    return table


def number(count: float) -> str:
    """A count in three or four digits and a unit of 10^3 steps."""
    return _scaled(count, ("", " K", " M", " B", " T"))


def amount(num_bytes: float) -> str:
    """Bytes in units of 10^3 steps."""
    return _scaled(num_bytes, (" B", " KB", " MB", " GB", " TB", " PB"))


def _scaled(value: float, units: tuple[str, ...]) -> str:
    if value < 1000:
        return f"{value:.4g}{units[0]}"
    for unit in units[1:-1]:
        value /= 1000
        if value < 999.95:  # beyond, four digits would round up to the next unit
            return f"{value:#.4g}{unit}"
    return f"{value / 1000:#.4g}{units[-1]}"


def percent(share: float) -> str:
    """A share with one digit after the point."""
    return f"{share:.1%}"


def duration(seconds: float) -> str:
    """Seconds in the unit that leaves a small number."""
    if seconds < 120:
        return f"{seconds:.3g} s"
    return f"{seconds / 60:.1f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"

"""Compiling Triton kernels without a GPU, and what their machine code shows: registers, spills, instructions.

The compilers come with Triton; no driver is needed. `deviations` compares what was measured with the specs (`aot`) and
with a committed table. Registers and instructions depend on the compiler's version, so the table's figures count only
for the version that made them; the rules of the specs always count.
"""

from __future__ import annotations

import importlib
import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import triton
import triton.backends.nvidia
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from model.kernels.cpu.build import KernelError
from model.kernels.gpu.aot import FEATURES, AotSpec
from model.kernels.gpu.interpret import INTERPRET
from model.kernels.gpu.launch import FIXED

KERNELS = Path(__file__).parents[1]

SHARED_BYTES: Mapping[str, int] = {"sm_80": 163 << 10, "sm_90": 227 << 10, "sm_100": 227 << 10, "gfx942": 64 << 10}
"""Most shared memory of a program."""

SLACK = 1.1
"""Registers may grow by this factor over the table."""

_NVIDIA_TOOLS = Path(triton.backends.nvidia.__path__[0]) / "bin"


@dataclass(frozen=True, slots=True, kw_only=True)
class Compiled:
    """What one kernel needs on one target.

    Attributes:
        registers: Of a thread; on gfx942 vector registers, accumulators included.
        spills: Instructions that store registers to memory or load them back; on gfx942 spilled registers.
        shared_bytes: Shared memory of a program.
        instructions: Of each feature of the target that was found, its most frequent instruction and all their count.
    """

    registers: int
    spills: int
    shared_bytes: int
    instructions: Mapping[str, str]


def registry() -> dict[str, AotSpec]:
    """All specs, by `operation/name`: the `AOT` lists of the modules `model/kernels/*/triton*.py`.

    Raises:
        KernelError: Two specs of one operation have the same name.
    """
    specs: dict[str, AotSpec] = {}
    for path in sorted(KERNELS.glob("*/triton*.py")):
        module = importlib.import_module(f"model.kernels.{path.parent.name}.{path.stem}")
        for spec in getattr(module, "AOT", ()):
            key = f"{path.parent.name}/{spec.name}"
            if key in specs:
                raise KernelError(f"{key}: two specs have this name, got both in {path.parent.name}; rename one")
            specs[key] = spec
    return specs


def compile_spec(spec: AotSpec, target: str) -> Compiled:
    """Compile one spec for a target of `aot.TARGETS` and read its machine code.

    Raises:
        KernelError: This process runs kernels in the interpreter.
    """
    if INTERPRET:
        raise KernelError("compile_spec: the interpreter has no compiler, got TRITON_INTERPRET=1; unset it")
    names = spec.kernel.arg_names
    aligned = [name for name, kind in spec.signature.items() if kind[0] in "*i" and name not in spec.unaligned]
    source = ASTSource(
        fn=spec.kernel,
        signature={name: "constexpr" if name in spec.constexprs else spec.signature[name] for name in names},
        constexprs={(names.index(name),): value for name, value in spec.constexprs.items()},
        attrs={(names.index(name),): [["tt.divisibility", 16]] for name in aligned},
    )
    is_nvidia = target.startswith("sm_")
    gpu = GPUTarget("cuda", int(target[3:]), 32) if is_nvidia else GPUTarget("hip", target, 64)
    options = {**FIXED, "num_warps": spec.num_warps, "num_stages": spec.num_stages}
    compiled = triton.compile(source, target=gpu, options=options)
    read = _read_nvidia if is_nvidia else _read_amd
    registers, spills, code = read(compiled.asm)
    found: dict[str, str] = {}
    for feature, patterns in FEATURES.items():
        seen = (
            Counter(re.findall(rf"(?<![\w.])(?:{patterns[target]})[\w.]*", code)) if target in patterns else Counter()
        )
        if seen:
            found[feature] = f"{seen.most_common(1)[0][0]} x {seen.total()}"
    return Compiled(registers=registers, spills=spills, shared_bytes=compiled.metadata.shared, instructions=found)


def _read_nvidia(asm: Mapping[str, Any]) -> tuple[int, int, str]:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(asm["cubin"])
        file.flush()
        usage = _run("cuobjdump", "--dump-resource-usage", file.name)
        code = _run("nvdisasm", "-c", file.name)
    registers = max(int(count) for count in re.findall(r"REG:(\d+)", usage))
    return registers, len(re.findall(r"\b(?:LDL|STL)\b", code)), code


def _read_amd(asm: Mapping[str, Any]) -> tuple[int, int, str]:
    code = asm["amdgcn"]
    registers = max(int(count) for count in re.findall(r"\.vgpr_count:\s*(\d+)", code))
    return registers, sum(int(count) for count in re.findall(r"\.vgpr_spill_count:\s*(\d+)", code)), code


def _run(tool: str, *arguments: str) -> str:
    done = subprocess.run([_NVIDIA_TOOLS / tool, *arguments], capture_output=True, text=True, check=True)
    return done.stdout


def table(measured: Mapping[str, Mapping[str, Compiled]]) -> dict[str, Any]:
    """What is committed: the compiler's version and a row for each kernel and target."""
    rows = {key: {target: asdict(row) for target, row in targets.items()} for key, targets in measured.items()}
    return {"triton": triton.__version__, "kernels": rows}


def deviations(
    specs: Mapping[str, AotSpec], measured: Mapping[str, Mapping[str, Compiled]], committed: Mapping[str, Any]
) -> Iterable[str]:
    """One line for each rule that a kernel breaks, and for each difference to the committed table that matters."""
    rows = committed["kernels"]
    for key, targets in measured.items():
        for target, row in targets.items():
            before = rows.get(key, {}).get(target)
            if before is None:
                yield f"{key} on {target}: not in the table, got {row.registers} registers; write the table again"
            elif committed["triton"] != triton.__version__:
                before = None
            yield from (f"{key} on {target}: {problem}" for problem in _problems(specs[key], target, row, before))
    for key in rows.keys() - specs.keys():
        yield f"{key}: in the table but no kernel has this spec, got {len(rows[key])} rows; write the table again"


def _problems(spec: AotSpec, target: str, row: Compiled, before: Mapping[str, Any] | None) -> Iterable[str]:
    bound = spec.max_registers if target.startswith("sm_") else 2 * spec.max_registers
    if row.spills:
        yield f"registers are spilled, got {row.spills} instructions; use a smaller tile or more warps"
    if row.registers > bound:
        yield f"at most {bound} registers, got {row.registers}; use a smaller tile or raise max_registers"
    if row.shared_bytes > SHARED_BYTES[target]:
        yield f"at most {SHARED_BYTES[target]} bytes of shared memory, got {row.shared_bytes}; use fewer stages"
    missing = [name for name in spec.features if target in FEATURES[name] and name not in row.instructions]
    for name in missing:
        wanted = FEATURES[name][target]
        yield f"no instruction of {name} ({wanted}), got {dict(row.instructions)}; see the generated code"
    if before is None:
        return
    if row.registers > SLACK * before["registers"]:
        yield f"registers grew from {before['registers']}, got {row.registers}; write the table again if it is worth it"
    for name in before["instructions"].keys() - row.instructions.keys() - set(missing):
        yield f"lost its {name}, got {dict(row.instructions)}; write the table again if it is worth it"

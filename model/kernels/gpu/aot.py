"""What is compiled without a GPU: each Triton module lists its kernels as `AOT`, for `scripts/kernels_aot.py`.

A spec is one kernel with one set of types, compile-time values and options, as its launcher would use it on that
target. The check fails when a kernel spills, takes more registers than its spec allows, or lacks an instruction that
one of its features promises.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

TARGETS = ("sm_80", "sm_90", "sm_100", "gfx942")
"""A100, H100 / H200, B200, and MI300X."""

FEATURES: Mapping[str, Mapping[str, str]] = {
    "mma": {"sm_80": r"HMMA", "sm_90": r"HG?MMA", "sm_100": r"HMMA|UTC\w*MMA", "gfx942": r"v_mfma\w*"},
    "wide_mma": {"sm_80": r"HMMA", "sm_90": r"HGMMA", "sm_100": r"UTC\w*MMA", "gfx942": r"v_mfma\w*"},
    "async_copy": {"sm_80": r"LDGSTS", "sm_90": r"LDGSTS|UTMALDG", "sm_100": r"LDGSTS|UTMALDG"},
    "wide_load": {
        "sm_80": r"(?:LDG|LDGSTS)\S*\.128",
        "sm_90": r"(?:LDG|LDGSTS)\S*\.128|UTMALDG",
        "sm_100": r"(?:LDG|LDGSTS)\S*\.128|UTMALDG",
        "gfx942": r"(?:global|buffer)_load_dwordx4",
    },
}
"""Regular expression of the instructions that show a feature, by target; nothing is expected where none stands.

`mma` is any matrix instruction, `wide_mma` the widest that the target has (warp groups on sm_90, tensor memory on
sm_100), `async_copy` a copy from global to shared memory that does not pass through registers, and `wide_load` 16 bytes
a thread.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class AotSpec:
    """One kernel as it is compiled.

    Attributes:
        name: Unique within its operation: `grouped_gate_up_m16`.
        kernel: The function decorated with `triton.jit`.
        signature: Type of each argument that is not in `constexprs`: `*bf16`, `*u8`, `i32`, `fp32`.
        constexprs: Values of the compile-time arguments.
        unaligned: Arguments that are not divisible by 16. All other pointers and integers count as divisible: a stride
            or a size that is not makes loads narrow.
        num_warps: Warps of a program.
        num_stages: Stages of the software pipeline.
        max_registers: Most registers a thread may take; 255 is the most that NVIDIA's hardware has.
        features: Keys of `FEATURES` that the code must show.
        targets: Where it is compiled.
    """

    name: str
    kernel: Any
    signature: Mapping[str, str]
    constexprs: Mapping[str, Any] = field(default_factory=dict)
    unaligned: Sequence[str] = ()
    num_warps: int = 4
    num_stages: int = 3
    max_registers: int = 255
    features: Sequence[str] = ()
    targets: Sequence[str] = TARGETS

"""Compiling a Triton kernel without a GPU, and what counts as a deviation from the committed table."""

import dataclasses
import re

import pytest
import triton
import triton.language as tl

from model.kernels.gpu import compile as compile_module
from model.kernels.gpu.aot import FEATURES, TARGETS, AotSpec
from model.kernels.gpu.compile import Compiled, compile_spec, deviations, registry, table


@triton.jit
def _dot_kernel(a_ptr, b_ptr, out_ptr, stride, N: tl.constexpr):
    row, column = tl.arange(0, N)[:, None], tl.arange(0, N)[None, :]
    acc = tl.dot(tl.load(a_ptr + row * stride + column), tl.load(b_ptr + row * stride + column))
    tl.store(out_ptr + row * N + column, acc)


SPEC = AotSpec(
    name="dot",
    kernel=_dot_kernel,
    signature={"a_ptr": "*bf16", "b_ptr": "*bf16", "out_ptr": "*fp32", "stride": "i32"},
    constexprs={"N": 64},
    features=("mma", "wide_load"),
)
ROW = Compiled(
    registers=40, spills=0, shared_bytes=4096, instructions={"mma": "HMMA x 8", "wide_load": "LDG.E.128 x 4"}
)


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))


@pytest.mark.parametrize(("target", "mma"), [("sm_80", r"HMMA\.16816\.F32\.BF16"), ("gfx942", r"v_mfma_f32_\w*_bf16")])
def test_registers_and_instructions_are_read_from_the_machine_code(target, mma):
    row = compile_spec(SPEC, target)
    assert 16 < row.registers < 128
    assert row.spills == 0
    assert row.shared_bytes > 0
    assert re.fullmatch(mma + r" x \d+", row.instructions["mma"])
    assert "wide_load" in row.instructions
    assert "async_copy" not in row.instructions
    assert not list(deviations({"op/dot": SPEC}, {"op/dot": {target: row}}, table({"op/dot": {target: row}})))


def test_a_stride_that_is_not_aligned_makes_loads_narrow():
    row = compile_spec(dataclasses.replace(SPEC, unaligned=("stride",)), "sm_80")
    measured = {"op/dot": {"sm_80": row}}
    (line,) = deviations({"op/dot": SPEC}, measured, table(measured))
    assert line.startswith("op/dot on sm_80: no instruction of wide_load ")


def test_spills_are_counted(monkeypatch):
    """In the words of the two tools: stores to local memory and loads from it."""
    said = {
        "cuobjdump": " Function k:\n  REG:80 STACK:8 SHARED:1024 LOCAL:0\n",
        "nvdisasm": "STL [R1+0x4], R6 ;\nLDG.E.128 R4 ;\nLDL.LU R9, [R1+0x4] ;\nSTLX R1 ;\n",
    }
    monkeypatch.setattr(compile_module, "_run", lambda tool, *_: said[tool])
    assert compile_module._read_nvidia({"cubin": b""}) == (80, 2, said["nvdisasm"])
    amd = "  .vgpr_count:     120\n  .vgpr_spill_count: 3\n"
    assert compile_module._read_amd({"amdgcn": amd}) == (120, 3, amd)


def lines(row, *, spec=SPEC, before=ROW, version=triton.__version__):
    committed = table({} if before is None else {"op/dot": {"sm_80": before}}) | {"triton": version}
    return list(deviations({"op/dot": spec}, {"op/dot": {"sm_80": row}}, committed))


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({}, None),
        ({"registers": 44}, None),
        ({"spills": 2}, "op/dot on sm_80: registers are spilled, got 2 instructions; use a smaller tile or more warps"),
        ({"registers": 45}, "op/dot on sm_80: registers grew from 40, got 45; write the table again if it is worth it"),
        (
            {"shared_bytes": 1 << 20},
            "op/dot on sm_80: at most 166912 bytes of shared memory, got 1048576; use fewer stages",
        ),
        (
            {"instructions": {"wide_load": "LDG.E.128 x 4"}},
            "op/dot on sm_80: no instruction of mma (HMMA), got {'wide_load': 'LDG.E.128 x 4'}; see the generated code",
        ),
    ],
)
def test_deviations(change, line):
    assert lines(dataclasses.replace(ROW, **change)) == ([] if line is None else [line])


def test_bounds_of_a_spec():
    bounded = dataclasses.replace(SPEC, max_registers=39)
    assert lines(ROW, spec=bounded) == [
        "op/dot on sm_80: at most 39 registers, got 40; use a smaller tile or raise max_registers"
    ]


def test_a_feature_that_only_the_table_has():
    before = dataclasses.replace(ROW, instructions={**ROW.instructions, "async_copy": "LDGSTS.E x 4"})
    (line,) = lines(ROW, before=before)
    assert line.startswith("op/dot on sm_80: lost its async_copy, got {")


def test_the_table_of_another_compiler_sets_no_figures():
    assert not lines(dataclasses.replace(ROW, registers=200), version="0.0")
    assert len(lines(dataclasses.replace(ROW, spills=1), version="0.0")) == 1


def test_kernels_and_rows_that_have_no_counterpart():
    assert lines(ROW, before=None) == ["op/dot on sm_80: not in the table, got 40 registers; write the table again"]
    gone = table({"op/gone": {"sm_80": ROW}})
    assert list(deviations({}, {}, gone)) == [
        "op/gone: in the table but no kernel has this spec, got 1 rows; write the table again"
    ]


def test_every_spec_names_the_arguments_of_its_kernel():
    """A spec that is wrong would only show when everything is compiled."""
    specs = registry()
    assert {"route/route", "grouped_experts/down_invariant", "quantize/nearest"} <= specs.keys()
    for key, spec in specs.items():
        assert sorted([*spec.signature, *spec.constexprs]) == sorted(spec.kernel.arg_names), key
        assert spec.signature.keys() >= set(spec.unaligned), key
        assert set(spec.targets) <= set(TARGETS), key
        assert FEATURES.keys() >= set(spec.features), key

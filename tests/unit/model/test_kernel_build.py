import ctypes
import multiprocessing
from pathlib import Path

import pytest

from model.kernels.cpu import build as build_module
from model.kernels.cpu.build import KernelError, build, cache_folder
from model.kernels.cpu.isa import Isa, available_isas, load

SOURCE = 'extern "C" int answer() { return 41 + ONE; }\n'


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    build_module._compiler.cache_clear()
    yield
    build_module._compiler.cache_clear()


@pytest.fixture
def source(tmp_path):
    file = tmp_path / "op" / "cpu.cpp"
    file.parent.mkdir()
    file.write_text(SOURCE)
    return file


def call(library):
    return ctypes.CDLL(str(library)).answer()


def test_a_library_is_built_once_and_again_when_source_or_flags_change(source):
    first = build(source, ("-DONE=1",))
    assert call(first) == 42
    built_at = first.stat().st_mtime_ns
    assert build(source, ("-DONE=1",)) == first
    assert first.stat().st_mtime_ns == built_at
    assert call(build(source, ("-DONE=2",))) == 43
    source.write_text(SOURCE.replace("41", "51"))
    assert call(build(source, ("-DONE=1",))) == 52


def test_a_changed_header_makes_another_library_and_an_unused_one_does_not(source):
    (source.parent / "one.h").write_text('#include "value.h"\n#define ONE VALUE\n')
    (source.parent / "value.h").write_text("#define VALUE 1\n")
    source.write_text('#include "one.h"\n' + SOURCE)
    first = build(source, ())
    assert call(first) == 42
    (source.parent / "other.h").write_text("#define VALUE 7\n")
    assert build(source, ()) == first
    (source.parent / "value.h").write_text("#define VALUE 2\n")
    assert call(build(source, ())) == 43


def test_processes_that_start_together_share_one_build(source):
    with multiprocessing.get_context("spawn").Pool(3) as pool:
        libraries = pool.starmap(build, [(source, ("-DONE=1",))] * 3)
    assert len(set(libraries)) == 1
    assert len(list(cache_folder().glob("*.so"))) == 1


def test_source_that_does_not_compile_is_one_line_and_leaves_nothing(source):
    source.write_text('extern "C" int answer() { return nothing; }\n')
    with pytest.raises(KernelError, match=r"op/cpu.cpp must compile, got '.*nothing.*'; use g\+\+ 11") as error:
        build(source, ())
    assert "\n" not in str(error.value)
    assert not list(cache_folder().glob("*.so"))


def test_without_a_compiler_the_error_says_what_to_install(source, monkeypatch):
    monkeypatch.setenv("PATH", str(Path("/nonexistent")))
    with pytest.raises(
        KernelError, match=r"need g\+\+ to be built, got none; install it, or set cluster.kernels=torch"
    ):
        build(source, ())


def test_an_instruction_set_that_the_machine_lacks_is_refused(source, monkeypatch):
    monkeypatch.setattr("model.kernels.cpu.isa.available_isas", lambda: (Isa.AVX2,))
    with pytest.raises(KernelError, match="this machine cannot run amx, got it by name; choose from"):
        load(source, Isa.AMX)


def test_each_set_contains_the_ones_before_it():
    assert available_isas() == tuple(Isa)[: len(available_isas())]
    assert set(Isa.AVX2.flags) < set(Isa.AVX512.flags) < set(Isa.AMX.flags)

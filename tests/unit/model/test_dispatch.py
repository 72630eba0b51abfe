import logging

import pytest

from model.config import KernelChoice
from model.kernels import dispatch
from model.kernels.cpu.build import KernelError
from model.kernels.cpu.isa import Isa, available_isas, load
from model.kernels.dispatch import grouped_experts, resolve_kernels
from model.kernels.grouped_experts import eager, reference


@pytest.fixture(autouse=True)
def _nothing_resolved_yet():
    resolve_kernels.cache_clear()
    yield
    resolve_kernels.cache_clear()


def no_compiler():
    raise KernelError("cpu kernels: need g++ to be built, got none; install it, or use cluster.kernels=torch")


def test_auto_is_the_best_set_of_the_machine_and_says_so_once(caplog):
    with caplog.at_level(logging.INFO, dispatch.__name__):
        kernels = resolve_kernels(KernelChoice.auto)
        assert resolve_kernels(KernelChoice.auto) is kernels
    assert kernels.name == KernelChoice(available_isas()[-1].value)
    assert kernels.batch_invariant
    assert caplog.messages == [f"kernels: {kernels.name} (auto: the best that this machine has)"]


def test_without_a_compiler_auto_is_torch_and_says_why(caplog, monkeypatch):
    monkeypatch.setattr(dispatch, "machine_isa", no_compiler)
    with caplog.at_level(logging.INFO, dispatch.__name__):
        kernels = resolve_kernels(KernelChoice.auto)
    assert kernels.name is KernelChoice.torch
    assert not kernels.batch_invariant
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert "torch" in record.message
    assert "need g++ to be built" in record.message


def test_a_set_asked_for_by_name_is_that_set_or_an_error(monkeypatch):
    assert resolve_kernels(KernelChoice.avx2).name is KernelChoice.avx2
    resolve_kernels.cache_clear()
    monkeypatch.setattr("model.kernels.cpu.isa.available_isas", lambda: (Isa.AVX2,))
    load.cache_clear()
    with pytest.raises(KernelError, match="this machine cannot run avx512"):
        resolve_kernels(KernelChoice.avx512)


def test_every_choice_but_auto_and_torch_is_an_instruction_set():
    assert {choice.value for choice in KernelChoice} == {"auto", "torch", *map(str, Isa)}


def test_the_plain_versions_of_the_experts():
    assert grouped_experts("reference") is reference.experts_forward
    assert grouped_experts("eager") is eager.experts_forward


def test_an_unknown_version_is_named_with_the_known_ones():
    with pytest.raises(KernelError, match="no version of this name, got 'fast'; choose one of reference, eager"):
        grouped_experts("fast")

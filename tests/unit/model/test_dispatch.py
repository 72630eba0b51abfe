import pytest

from model.kernels.cpu.build import KernelError
from model.kernels.dispatch import grouped_experts
from model.kernels.grouped_experts import eager, reference


def test_the_plain_versions_of_the_experts():
    assert grouped_experts("reference") is reference.experts_forward
    assert grouped_experts("eager") is eager.experts_forward


def test_an_unknown_version_is_named_with_the_known_ones():
    with pytest.raises(KernelError, match="no version of this name, got 'fast'; choose one of reference, eager"):
        grouped_experts("fast")
